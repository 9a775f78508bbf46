// The schedule of a plan: the KV tiles of each warp (rules: fused/planning/schedule.py).
//
//   plan_schedule   one block per schedule: first KV tile of each window, Heuristic, order of the blocks
//   plan_items      one warp per work item of a schedule, and per item without work after them
//
// All orders are stable sorts by small numbers: independent of the order in which threads run.
#include "common.cuh"
#include "plan/plan_data.cuh"
#include "plan/thread_group.cuh"

constexpr int kWarps = 32;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kThreadWindows = 4;  // windows per thread at a time
constexpr int kChunk = kThreads * kThreadWindows;
constexpr int kBins = 32;          // one lane per bin
constexpr int kBinBits = 5;
constexpr int kItemWarps = 8;

constexpr int kMostSchedules = 3;

// Inputs of a schedule besides the graph.
struct ScheduleInputs {
  int side;            // pattern: 0: A, 1: its transpose
  int is_first;        // 1: the first schedule of its pattern, which writes the offsets
  int num_groups;      // head groups
  int warps;           // per block
  int resident_warps;  // on the whole GPU
  int most_items;      // capacity of work_items
};

struct Params {
  const int* tiles[2];              // [num_windows]  KV tiles of each window
  int* tile_offset[2];              // [num_windows + 1]  first KV tile of each window; written by plan_schedule
  const int* kv_tiles[2];           // [most_tiles + 2][24]  read by plan_items
  int* work_items[kMostSchedules];  // [most_items][56]  plan_items writes every element
  i64* numbers;                     // [kCounts] PlanNumbers
  int* scratch;                     // [schedules] ScheduleScratch
  int most_blocks;
  int most_windows;
  int num_windows[2];  // at least 1
  int many_blocks;     // MANY_BLOCKS, at most kSortKeys
  ScheduleInputs inputs[kMostSchedules];
};

// Sizes, in KV tiles, that decide who processes a window: the rule of fused/planning/schedule.py. `segment`: 0 where all
// windows of one warp are sorted and dealt to the blocks in snake order.
struct Heuristic {
  int warps, warp_tiles, split_tiles, segment;
};

// histogram: [kBins]; the last bin also counts all larger windows.
__device__ inline Heuristic heuristic_of(const ScheduleInputs& inputs, i64 num_windows, i64 total, int most,
                                         const int* histogram) {
  const i64 num_groups = inputs.num_groups;
  const double head_share = static_cast<double>(total) / inputs.resident_warps;
  const double share = num_groups * head_share;
  int warp_tiles = 3;
  if (share >= 2) {
    const i64 rank = (num_windows * 7 + 7) / 8;
    int quantile = 0;
    for (i64 count = histogram[0]; count < rank; count += histogram[quantile]) ++quantile;
    const double waves = static_cast<double>(num_groups * num_windows) / inputs.resident_warps;
    const double part = waves <= 1 ? 1.4 : waves <= 1.4 ? 0.9 : 0.7;
    const int limit = static_cast<int>(fmax(7.0, fmin(part * share, 22.0)));
    warp_tiles = max(2, min(static_cast<int>(rint(1.3 * quantile)), limit));
  }
  i64 by_warp = 0;
  for (int i = 0; i <= warp_tiles; ++i) by_warp += histogram[i];
  const bool at_once = most <= warp_tiles * inputs.warps && num_groups * by_warp <= inputs.resident_warps;
  const int split_tiles = static_cast<int>(fmax(32.0, fmin(1.5 * head_share * inputs.warps, 256.0)));
  return {inputs.warps, warp_tiles, split_tiles, at_once && share < 8 ? 0 : kSortSegment};
}

// Lane b: number of lanes whose number, below kBins, is b.
__device__ __forceinline__ int histogram_of_lanes(int value, bool exists, int lane) {
  u32 equal = vote_ballot(exists);
#pragma unroll
  for (int bit = 0; bit < kBinBits; ++bit) {
    const u32 ones = vote_ballot(value >> bit & 1);
    equal &= lane >> bit & 1 ? ones : ~ones;
  }
  return popc(equal);
}

// Number of lanes with a larger number; `equal`: with the same number. Numbers are below kBins.
__device__ __forceinline__ u32 lanes_above(int value, bool exists, u32& equal) {
  u32 above = 0;
  equal = vote_ballot(exists);
#pragma unroll
  for (int bit = kBinBits - 1; bit >= 0; --bit) {
    const u32 ones = vote_ballot(value >> bit & 1);
    const bool is_one = value >> bit & 1;
    above |= is_one ? 0 : equal & ones;
    equal &= is_one ? ones : ~ones;
  }
  return above;
}

// Sums the warps' histograms, one bin per lane, to smem_histogram[0]. Starts with a barrier: the last histogram may
// still be read.
__device__ __forceinline__ void sum_histograms(int count, int (*smem_histogram)[kBins], int warp, int lane) {
  __syncthreads();
  smem_histogram[warp][lane] = count;
  __syncthreads();
  if (warp == 0) {
    for (int other = 1; other < kWarps; ++other) count += smem_histogram[other][lane];
    smem_histogram[0][lane] = count;
  }
  __syncthreads();
}

// Stable sort of the numbers 0 to count - 1 by bin_of, descending; calls place(i, n) for the i-th number n. Up to
// kSortKeys numbers are sorted in shared memory, more of them chunk by chunk, with bins below kBins.
//   smem_keys       [kSortKeys]
//   smem_base       [kBins]  output index of the next number of each bin, minus its index in the chunk
template <int kSortKeys, typename BinOf, typename Place>
__device__ __forceinline__ void sort_descending(int count, BinOf bin_of, Place place, u32* smem_keys, int* smem_base,
                                                int (*smem_histogram)[kBins], const BlockGroup<kWarps>& group) {
  constexpr int kMostBin = 512;
  const int lane = group.rank % kWarpSize, warp = group.rank / kWarpSize;
  const bool is_chunked = count > kSortKeys;
  int next = 0;  // warp 0: output index of the next number of bin `lane`
  if (is_chunked) {
    int bin_count = 0;
    for (int first = 0; first < count; first += kThreads) {
      const int i = first + group.rank;
      const bool exists = i < count;
      bin_count += histogram_of_lanes(exists ? bin_of(i) : 0, exists, lane);
    }
    sum_histograms(bin_count, smem_histogram, warp, lane);
    const int own = smem_histogram[0][lane];
    const int up_to = warp_inclusive_sum(own, lane), all = __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
    next = all - up_to;
  }
  for (int first = 0; first < count; first += kSortKeys) {
    const int size = min(kSortKeys, count - first), padded = round_up_to_power_of_two(size);
    int bin_count = 0;
    for (int start = 0; start < padded; start += kThreads) {
      const int i = start + group.rank;
      const bool exists = i < size;
      const int bin = exists ? bin_of(first + i) : 0;
      if (is_chunked) bin_count += histogram_of_lanes(bin, exists, lane);
      if (i < padded) smem_keys[i] = exists ? static_cast<u32>(kMostBin - bin) * kSortKeys + i : 0xffffffffu;
    }
    sort_keys(smem_keys, padded, group);
    if (is_chunked) {
      sum_histograms(bin_count, smem_histogram, warp, lane);
      if (warp == 0) {
        const int own = smem_histogram[0][lane], up_to = warp_inclusive_sum(own, lane);
        smem_base[lane] = next - (size - up_to);
        next += own;
      }
      __syncthreads();
    }
    for (int i = group.rank; i < size; i += kThreads) {
      const u32 key = smem_keys[i];
      const int bin = kMostBin - static_cast<int>(key / kSortKeys);
      place(is_chunked ? smem_base[bin] + i : i, first + static_cast<int>(key % kSortKeys));
    }
    __syncthreads();  // smem_keys and smem_base may be overwritten
  }
}

// Number of KV tiles of a shared block.
__device__ __forceinline__ int block_tiles(const int4& block, const int* tile_offset) {
  const int count = tile_offset[block.x + 1] - tile_offset[block.x];
  return part_begin(count, block.y + 1, block.z) - part_begin(count, block.y, block.z);
}

// Grid: the schedules.
template <int kSortKeys>
__global__ void __launch_bounds__(kThreads, 1) plan_schedule(const __grid_constant__ Params p) {
  static_assert((kSortKeys & (kSortKeys - 1)) == 0 && kSortKeys <= 4096, "sorted by powers of two, keys of 32 bits");
  __shared__ u32 smem_keys[kSortKeys];
  __shared__ int smem_histogram[kWarps][kBins];
  __shared__ int smem_base[kBins];
  __shared__ int smem_sums[3 * kWarps];
  __shared__ Heuristic smem_heuristic[1];
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const BlockGroup<kWarps> group = {static_cast<int>(threadIdx.x), smem_sums};
  const ScheduleInputs& inputs = p.inputs[blockIdx.x];
  const int num_windows = p.num_windows[inputs.side];
  const ScheduleScratch scratch(p.scratch, p.most_blocks, p.most_windows, blockIdx.x);
  i64* const numbers = p.numbers + kSchedules + blockIdx.x * kScheduleNumbers;
  const int* const tiles = p.tiles[inputs.side];
  int* const tile_offset = inputs.is_first ? p.tile_offset[inputs.side] : scratch.tile_offset;  // one per block

  // First KV tile of each window, and a histogram of KV tiles per window.
  int num_tiles = 0, most = 0, bin_count = 0;
  for (int first = 0; first < num_windows; first += kChunk) {
    const int window = first + kThreadWindows * threadIdx.x;
    int count[kThreadWindows], sum[1] = {0}, total[1];
#pragma unroll
    for (int i = 0; i < kThreadWindows; ++i) {
      count[i] = window + i < num_windows ? tiles[window + i] : 0;
      most = max(most, count[i]);
      bin_count += histogram_of_lanes(min(count[i], kBins - 1), window + i < num_windows, lane);
      sum[0] += count[i];
    }
    group.exclusive_sums(sum, total);
    int begin = num_tiles + sum[0];
#pragma unroll
    for (int i = 0; i < kThreadWindows; ++i) {
      if (window + i < num_windows) tile_offset[window + i] = begin;
      begin += count[i];
    }
    num_tiles += total[0];
  }
  if (threadIdx.x == 0) tile_offset[num_windows] = num_tiles;
  sum_histograms(bin_count, smem_histogram, warp, lane);
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    most = max(most, __shfl_xor_sync(kFullWarp, most, distance));
  }
  if (lane == 0) smem_sums[warp] = most;
  __syncthreads();
  for (int other = 0; other < kWarps; ++other) most = max(most, smem_sums[other]);
  if (threadIdx.x == 0) smem_heuristic[0] = heuristic_of(inputs, num_windows, num_tiles, most, smem_histogram[0]);
  __syncthreads();  // also for tile_offset
  const Heuristic heuristic = smem_heuristic[0];

  // Windows processed by one warp, and shared blocks.
  enum { kByWarp, kBlocks, kSplits };
  int before[3] = {}, split_windows = 0, leading = 0;
  for (int first = 0; first < num_windows; first += kThreads) {
    const int window = first + threadIdx.x;
    int count = 0, splits = 0;
    bool by_warp = false;
    if (window < num_windows) {
      count = tile_offset[window + 1] - tile_offset[window];
      by_warp = count <= heuristic.warp_tiles;
      splits = by_warp ? 0 : divide_up(count, heuristic.split_tiles);
    }
    int sum[3] = {by_warp, splits, splits > 1 ? splits : 0}, total[3];
    group.exclusive_sums(sum, total);
    if (by_warp) scratch.warp_windows[before[kByWarp] + sum[kByWarp]] = window;
    for (int index = 0; index < splits; ++index) {
      const int4 block = make_int4(window, index, splits, before[kSplits] + sum[kSplits]);
      scratch.blocks[before[kBlocks] + sum[kBlocks] + index] = block;
      leading += block_tiles(block, tile_offset) > heuristic.warp_tiles * heuristic.warps;
    }
    split_windows += splits > 1;
#pragma unroll
    for (int i = 0; i < 3; ++i) before[i] += total[i];
  }
  int sum[2] = {split_windows, leading}, total[2];
  group.exclusive_sums(sum, total);  // its barriers are also for `scratch`

  const int num_shared = before[kBlocks], num_by_warp = before[kByWarp];
  const bool is_many = num_shared > p.many_blocks;
  sort_descending<kSortKeys>(
      num_shared,
      [&](int i) {
        const int size = block_tiles(scratch.blocks[i], tile_offset);
        return is_many ? (size > heuristic.warp_tiles * heuristic.warps ? kBins / 2 : 0) + bfind(size) : size;
      },
      [&](int i, int n) { scratch.block_order[i] = n; }, smem_keys, smem_base, smem_histogram, group);
  if (!heuristic.segment) {
    sort_descending<kSortKeys>(
        num_by_warp,
        [&](int i) {
          const int window = scratch.warp_windows[i];
          return tile_offset[window + 1] - tile_offset[window];
        },
        [&](int i, int n) { scratch.dealt_windows[i] = scratch.warp_windows[n]; }, smem_keys, smem_base, smem_histogram,
        group);
  }

  if (threadIdx.x == 0) {
    numbers[kNumTiles] = num_tiles;
    numbers[kNumBlocks] = num_shared + divide_up(num_by_warp, heuristic.warps);
    numbers[kNumSplits] = before[kSplits];
    numbers[kWarpWindows] = num_by_warp;
    numbers[kSplitWindows] = total[0];
    numbers[kWarpTiles] = heuristic.warp_tiles;
    numbers[kSplitTiles] = heuristic.split_tiles;
    numbers[kSegment] = heuristic.segment;
    numbers[kLeadingBlocks] = total[1];
    numbers[kSharedBlocks] = num_shared;
  }
}

// Work items in grid order: leading shared blocks, windows of one warp, other shared blocks, items without work.
// Grid: (at least ceil(most_items / 8), schedules).
__global__ void __launch_bounds__(kItemWarps* kWarpSize) plan_items(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const ScheduleInputs& inputs = p.inputs[blockIdx.y];
  const i64* const numbers = p.numbers + kSchedules + blockIdx.y * kScheduleNumbers;
  const int* const tile_offset = p.tile_offset[inputs.side];
  const int* const kv_tiles = p.kv_tiles[inputs.side];
  const int warps = inputs.warps;
  const i64 item = static_cast<i64>(blockIdx.x) * kItemWarps + warp;
  if (item >= inputs.most_items) return;
  const ScheduleScratch scratch(p.scratch, p.most_blocks, p.most_windows, blockIdx.y);
  const int num_tiles = numbers[kNumTiles], num_leading = numbers[kLeadingBlocks];
  const int num_by_warp = numbers[kWarpWindows], num_warp_blocks = divide_up(num_by_warp, warps);
  const int block = item / warps, place = item % warps;

  int begin = num_tiles, count = 0, window = -1, split = kWarpItem, first_split = 0, num_splits = 0;
  if (block >= numbers[kNumBlocks]) {
    // no work
  } else if (block >= num_leading && block < num_leading + num_warp_blocks) {
    if (numbers[kSegment]) {  // sorted within the segment, most KV tiles first
      const int index = (block - num_leading) * warps + place, own = index / kSortSegment * kSortSegment + lane;
      const bool exists = own < num_by_warp;
      const int own_window = exists ? scratch.warp_windows[own] : -1;
      const int own_count = exists ? tile_offset[own_window + 1] - tile_offset[own_window] : 0;
      u32 equal;
      const u32 above = lanes_above(own_count, exists, equal);
      const int rank = popc(above) + popc(equal & lanes_below(lane));
      const u32 holder = vote_ballot(exists && rank == index % kSortSegment);
      const int held = __shfl_sync(kFullWarp, own_window, max(bfind(holder), 0));
      window = holder ? held : -1;
    } else {  // dealt to the blocks in snake order
      const int round_block = block - num_leading;
      const bool is_back = place % 2 == 0 && place != warps - 1;
      const int index = place * num_warp_blocks + (is_back ? num_warp_blocks - 1 - round_block : round_block);
      if (index < num_by_warp) window = scratch.dealt_windows[index];
    }
    if (window >= 0) {
      begin = tile_offset[window];
      count = tile_offset[window + 1] - begin;
    }
  } else {
    const int4 shared = scratch.blocks[scratch.block_order[block < num_leading ? block : block - num_warp_blocks]];
    window = shared.x;
    const int window_begin = tile_offset[window], window_count = tile_offset[window + 1] - window_begin;
    const int block_begin = window_begin + part_begin(window_count, shared.y, shared.z);
    const int size = block_tiles(shared, tile_offset);
    begin = block_begin + divide_up(size * place, warps);
    count = block_begin + divide_up(size * (place + 1), warps) - begin;
    split = kBlockItem;
    if (shared.z > 1) {
      split = shared.w + shared.y;
      first_split = shared.w;
      num_splits = shared.z;
    }
  }

  // num_keys of an item without KV tiles is never read; it has the value of the oracle in the tests.
  const int last = begin + count - 1;
  const bool has_key = lane < kTileK && last >= 0 && kv_tiles[static_cast<i64>(last) * kTileWords + lane] >= 0;
  const int num_keys = popc(vote_ballot(has_key));
  const int words[8] = {begin, count, window, num_keys, split, first_split, num_splits, 0};
  int* const target = p.work_items[blockIdx.y] + item * kItemWords;
  const int* const first = kv_tiles + static_cast<i64>(begin) * kTileWords;
  int head = lane < kTileWords ? first[lane] : 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) head = lane == kTileWords + i ? words[i] : head;
  target[lane] = head;
  if (lane < kTileWords) target[kWarpSize + lane] = first[kTileWords + lane];
}
