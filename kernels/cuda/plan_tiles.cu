// KV tiles of a CSR pattern, in two launches of one template around `plan_schedule` (plan_schedule.cu):
//
//   kWrite = false   tiles[window] = ceil(distinct columns of the window / 16), kDamaged, or with kNotDistinct
//   plan_schedule    tile_offset is their exclusive prefix sum
//   kWrite = true    kv_tiles of each window: its distinct columns, ascending, and the bitmaps of its edges
//
// Rows may be unsorted and columns repeated: nothing here depends on the order of the edges.
//
// Grid: at least ceil(num_windows / block_windows), 8 warps per block. A window goes one of three ways, by its edges:
//
//   up to 512                                       its warp sorts them by column in shared memory
//   more, up to 8192, and num_cols > 2^18           all warps of the block sort them
//   more                                            the block marks the columns in a bitmap in shared memory, which is
//                                                   sorted by itself, 2^18 columns at a time
#include "common.cuh"
#include "plan_data.cuh"
#include "ptx/relaxed_atomics.cuh"
#include "thread_group.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlockRows = kWarps * kTileM;  // most rows of a block
constexpr int kWarpKeys = 512;          // most edges of a window that a warp sorts
constexpr int kBlockKeys = 8192;        // most edges of a window that a block sorts
constexpr int kRangeColumns = 1 << 18;  // columns of the bitmap
constexpr int kGroupWords = 4;          // words of the bitmap that share a rank
constexpr int kGroupColumns = 32 * kGroupWords;
constexpr int kRangeGroups = kRangeColumns / kGroupColumns;
constexpr i64 kMostEdges = 1 << 30;     // of a window: loop counters are ints
constexpr int kBatch = 4;               // loads in flight
constexpr int kRowBits = 4;             // of a sort key: column << kRowBits | row of the window
constexpr u32 kNoKey = 0xffffffffu;     // sorts behind all keys, since num_cols <= 2^28
static_assert(kBlockKeys * 32 == kRangeColumns && kWarps * kWarpKeys <= kBlockKeys, "keys and bitmap share memory");

struct Params {
  int* tiles;           // kWrite: [num_windows + 1] first KV tile of each window; else [num_windows] KV tiles, written
  const i64* indptr;    // [num_rows + 1]
  const void* indices;  // [num_edges]  int, or i64
  int* kv_tiles;        // [num_tiles + 2][24]  kWrite: every word is written
  i64* numbers;         // enum PlanNumber  kWrite: kDamage is read, kDuplicates counts
  i64 num_edges;
  int num_rows;
  int num_cols;       // at most 2^28
  int block_windows;  // windows of a block: up to 8; 1 where most windows need all of its warps
};

// Edges of one window.
template <typename Index>
struct WindowEdges {
  const Index* indices;      // of the whole matrix
  const i64* smem_row_begin;  // [17], in `indices`
  i64 begin;
  int count;
  int num_cols;

  // Column of an edge, -1 past the last; sets `damaged` where it is none of the matrix.
  __device__ __forceinline__ int column(int edge, bool& damaged) const {
    if (edge >= count) return -1;
    const Index column = __ldg(indices + begin + edge);
    const bool exists = column >= 0 && column < num_cols;
    damaged |= !exists;
    return exists ? static_cast<int>(column) : -1;
  }

  // Row of the window that an edge is in: the last row that starts at the edge or before it.
  __device__ __forceinline__ int row(int edge) const {
    int row = 0;
#pragma unroll
    for (int step = kTileM / 2; step > 0; step /= 2) {
      if (smem_row_begin[row + step] <= begin + edge) row += step;
    }
    return row;
  }
};

// KV tiles of one window.
struct WindowTiles {
  int* words;

  template <typename Group>
  __device__ __forceinline__ void clear(int num_tiles, Group group) const {
    for (int i = group.rank; i < num_tiles * kTileWords; i += Group::kThreads) {
      words[i] = i % kTileWords < kTileK ? kNoColumn : 0;
    }
  }

  __device__ __forceinline__ void put_column(int slot, int column) const {
    words[slot / kTileK * kTileWords + slot % kTileK] = column;
  }

  __device__ __forceinline__ int* bitmap_word(int slot, int row) const {
    return words + (slot / kTileK * kTileWords + kTileK + row % 8);
  }
  __device__ static __forceinline__ int bit(int slot, int row) { return row / 8 * kTileK + slot % kTileK; }
};

// What the threads of a group find out about a window.
struct Findings {
  bool damaged = false;  // by this thread
  bool ascends = true;   // columns of each row, strictly; as far as this thread saw, and only without kWrite
  int slots = 0;         // distinct columns
  int duplicates = 0;    // repeated edges that this thread saw; only with kWrite
};

// Sorts the edges of a window by column. Its barriers come before the first write to `tiles`.
template <bool kWrite, typename Index, typename Group>
__device__ __forceinline__ Findings sort_window(const WindowEdges<Index>& edges, const WindowTiles& tiles, u32* keys,
                                                Group group) {
  Findings found;
  const int padded = round_up_to_power_of_two(edges.count);
  for (int i = group.rank; i < padded; i += Group::kThreads) {
    const int column = edges.column(i, found.damaged);
    keys[i] = i < edges.count ? static_cast<u32>(column) << kRowBits | edges.row(i) : kNoKey;
  }
  if constexpr (!kWrite) {
    group.sync();
    for (int i = group.rank + 1; i < edges.count; i += Group::kThreads) {
      const u32 key = keys[i], before = keys[i - 1];
      const bool same_row = (key & (kTileM - 1)) == (before & (kTileM - 1));
      found.ascends &= !same_row || key > before;
    }
  }
  sort_keys(keys, padded, group);

  for (int first = 0; first < edges.count; first += Group::kThreads) {
    const int i = first + group.rank;
    const bool exists = i < edges.count;
    const u32 key = exists ? keys[i] : 0, before = exists && i > 0 ? keys[i - 1] : kNoKey;
    const int column = key >> kRowBits, row = key & (kTileM - 1);
    const bool starts = exists && (i == 0 || column != before >> kRowBits);
    int total;
    const int slot = found.slots + group.count_below(starts, total) + starts - 1;
    found.slots += total;
    if constexpr (kWrite) {
      if (starts) tiles.put_column(slot, column);
      if (exists) {
        red_or_global_b32(tiles.bitmap_word(slot, row), 1u << WindowTiles::bit(slot, row));
        found.duplicates += i > 0 && key == before;
      }
    }
  }
  return found;
}

// The same by bitmaps of ranges of columns, in smem_bits [kRangeColumns / 32]. `smem_rank` [kRangeGroups]: slot of the
// first column of each 128 columns.
template <bool kWrite, typename Index>
__device__ __forceinline__ Findings mark_window(const WindowEdges<Index>& edges, const WindowTiles& tiles,
                                                u32* smem_bits, int* smem_rank, const BlockGroup<kWarps>& group) {
  Findings found;
  for (int base = 0; base < edges.num_cols; base += kRangeColumns) {
    const int num_groups = divide_up(min(kRangeColumns, edges.num_cols - base), kGroupColumns);
    for (int i = group.rank; i < kGroupWords * num_groups; i += kThreads) smem_bits[i] = 0;
    __syncthreads();
    for (int first = group.rank; first < edges.count; first += kBatch * kThreads) {
      int column[kBatch];
#pragma unroll
      for (int i = 0; i < kBatch; ++i) column[i] = edges.column(first + i * kThreads, found.damaged) - base;
#pragma unroll
      for (int i = 0; i < kBatch; ++i) {
        const u32 c = column[i];  // no column, or one in front of the range: at least 2^31
        if (c < kRangeColumns) red_or_shared_b32(shared_address(smem_bits + c / 32), 1u << c % 32);
      }
      if constexpr (!kWrite) {
        if (base > 0) continue;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const int edge = first + i * kThreads;
          if (edge == 0 || edge >= edges.count || edges.column(edge - 1, found.damaged) < column[i]) continue;
          found.ascends &= edges.row(edge - 1) != edges.row(edge);
        }
      }
    }
    __syncthreads();

    for (int first = 0; first < num_groups; first += kThreads) {
      const int i = first + group.rank;
      const uint4 words = i < num_groups ? reinterpret_cast<const uint4*>(smem_bits)[i] : make_uint4(0, 0, 0, 0);
      int sum[1] = {popc(words.x) + popc(words.y) + popc(words.z) + popc(words.w)}, total[1];
      group.exclusive_sums(sum, total);
      if constexpr (kWrite) {
        if (i < num_groups) smem_rank[i] = found.slots + sum[0];
        int slot = found.slots + sum[0];
        const u32 each[kGroupWords] = {words.x, words.y, words.z, words.w};
#pragma unroll
        for (int word = 0; word < kGroupWords; ++word) {
          for (u32 bits = each[word]; bits; ++slot) {
            const int bit = bfind(bits & -bits);  // the lowest
            bits &= bits - 1;
            tiles.put_column(slot, base + i * kGroupColumns + 32 * word + bit);
          }
        }
      }
      found.slots += total[0];
    }
    __syncthreads();

    if constexpr (kWrite) {
      for (int first = group.rank; first < edges.count; first += kBatch * kThreads) {
        int column[kBatch];
        u32 bit[kBatch], old[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) column[i] = edges.column(first + i * kThreads, found.damaged) - base;
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const u32 c = column[i];
          bit[i] = old[i] = 0;
          if (c < kRangeColumns) {
            const int group_of = c / kGroupColumns, word = c / 32 % kGroupWords;
            int slot = smem_rank[group_of] + popc(smem_bits[c / 32] & lanes_below(c % 32));
#pragma unroll
            for (int below = 0; below < kGroupWords - 1; ++below) {
              if (below < word) slot += popc(smem_bits[kGroupWords * group_of + below]);
            }
            const int row = edges.row(first + i * kThreads);
            bit[i] = 1u << WindowTiles::bit(slot, row);
            old[i] = atom_or_global_b32(tiles.bitmap_word(slot, row), bit[i]);
          }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i) found.duplicates += (old[i] & bit[i]) != 0;
      }
      __syncthreads();  // the bitmap is read no more
    }
  }
  return found;
}

// KV tiles of a window, without columns and edges. The group needs a barrier before it writes to them.
template <typename Group>
__device__ __forceinline__ WindowTiles cleared_tiles(const Params& p, int window, const Group& group) {
  const int begin = p.tiles[window], end = p.tiles[window + 1];
  const WindowTiles tiles = {p.kv_tiles + static_cast<i64>(begin) * kTileWords};
  tiles.clear(end - begin, group);
  return tiles;
}

template <typename Group>
__device__ __forceinline__ void put_count(const Params& p, int window, const Findings& found, const Group& group) {
  int num_damaged, num_descending;
  group.count_below(found.damaged, num_damaged);
  group.count_below(!found.ascends, num_descending);
  const int num_tiles = divide_up(found.slots, kTileK) + (num_descending > 0 ? kNotDistinct : 0);
  if (group.rank == 0) p.tiles[window] = num_damaged > 0 ? kDamaged : num_tiles;
}

template <bool kWideIndices, bool kWrite>
__global__ void __launch_bounds__(kThreads) plan_tiles(const __grid_constant__ Params p) {
  using Index = typename IndexOf<kWideIndices>::Type;
  __shared__ __align__(16) u32 smem_words[kBlockKeys];  // of each warp 512 keys; of the block 8192 keys, or the bitmap
  __shared__ int smem_rank[kRangeGroups];
  __shared__ i64 smem_row_begin[kBlockRows + 1];
  __shared__ int smem_sums[kWarps];
  __shared__ int smem_count[kWarps];  // edges of each window; kDamaged
  if (kWrite && p.numbers[kDamage]) return;

  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_windows = divide_up(p.num_rows, kTileM);
  const int first_window = blockIdx.x * p.block_windows;
  for (int i = threadIdx.x; i <= p.block_windows * kTileM; i += kThreads) {
    smem_row_begin[i] = __ldg(p.indptr + min(first_window * kTileM + i, p.num_rows));
  }
  __syncthreads();

  const BlockGroup<kWarps> block_group = {static_cast<int>(threadIdx.x), smem_sums};
  const WarpGroup warp_group = {lane};
  const auto edges_of = [&](int place, int count) {
    const i64* const row_begin = smem_row_begin + place * kTileM;
    return WindowEdges<Index>{static_cast<const Index*>(p.indices), row_begin, row_begin[0], count, p.num_cols};
  };
  int duplicates = 0;

  const int window = first_window + warp;
  if (warp < p.block_windows && window < num_windows) {
    const i64* const row_begin = smem_row_begin + warp * kTileM;
    const int row = lane % kTileM;
    bool damaged = row_begin[row] < 0 || row_begin[row] > row_begin[row + 1] || row_begin[row + 1] > p.num_edges ||
                   row_begin[kTileM] - row_begin[0] > kMostEdges;
    if (window == 0) damaged |= row_begin[0] != 0;
    if (window == num_windows - 1) damaged |= row_begin[kTileM] != p.num_edges;
    const bool any_damaged = __any_sync(kFullWarp, damaged);
    const int count = any_damaged ? kDamaged : static_cast<int>(row_begin[kTileM] - row_begin[0]);
    if (lane == 0) smem_count[warp] = count;
    if (any_damaged) {
      if (!kWrite && lane == 0) p.tiles[window] = kDamaged;
    } else if (count <= kWarpKeys) {
      u32* const keys = smem_words + warp * kWarpKeys;
      WindowTiles tiles = {};
      if constexpr (kWrite) tiles = cleared_tiles(p, window, warp_group);
      const Findings found = sort_window<kWrite>(edges_of(warp, count), tiles, keys, warp_group);
      if constexpr (!kWrite) put_count(p, window, found, warp_group);
      duplicates += found.duplicates;
    }
  } else if (lane == 0) {
    smem_count[warp] = 0;
  }
  __syncthreads();

  for (int place = 0; place < p.block_windows; ++place) {
    const int count = smem_count[place];
    if (count <= kWarpKeys) continue;
    const WindowEdges<Index> edges = edges_of(place, count);
    WindowTiles tiles = {};
    if constexpr (kWrite) tiles = cleared_tiles(p, first_window + place, block_group);
    const bool sorts = p.num_cols > kRangeColumns && count <= kBlockKeys;
    const Findings found = sorts ? sort_window<kWrite>(edges, tiles, smem_words, block_group)
                                 : mark_window<kWrite>(edges, tiles, smem_words, smem_rank, block_group);
    if constexpr (!kWrite) put_count(p, first_window + place, found, block_group);
    duplicates += found.duplicates;
    __syncthreads();  // smem_words is free again
  }

  if constexpr (kWrite) {
    if (blockIdx.x == 0 && threadIdx.x < 2 * kTileWords) {  // two KV tiles without keys, behind the last
      p.kv_tiles[static_cast<i64>(p.tiles[num_windows]) * kTileWords + threadIdx.x] = kNoColumn;
    }
    const int all = __shfl_sync(kFullWarp, warp_inclusive_sum(duplicates, lane), kWarpSize - 1);
    if (lane == 0 && all > 0) red_add_global_u64(p.numbers + kDuplicates, all);
  }
}
