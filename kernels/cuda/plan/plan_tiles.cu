// KV tiles of CSR patterns, A and its transpose, in two launches of one template around `plan_schedule`
// (plan_schedule.cu):
//
//   kWrite = false   tiles[window] = ceil(slots of the window / 16)
//   plan_schedule    tile_offset is their exclusive prefix sum
//   kWrite = true    kv_tiles of each window: the columns of its slots, and the bitmaps of its edges
//
// Slots of a window: its distinct columns, ascending (level 0); then, ascending, the columns that repeat in a row, for
// the second edges of such rows (level 1); and so on. The n-th copy of an edge in a row has level n.
//
// Grid: (at least ceil(num_windows / block_windows), patterns), 8 warps per block. A window is processed in one of
// three ways, by its number of edges:
//
//   up to 512                                       its warp sorts them by column in shared memory
//   more, up to 8192, and num_cols > 2^18           all warps of the block sort them
//   more                                            the block marks the columns in a bitmap in shared memory, 2^18
//                                                   columns at a time. Copies of edges from the second on are sorted
//                                                   if they are up to 8192.
#include "common.cuh"
#include "plan/plan_data.cuh"
#include "ptx/relaxed_atomics.cuh"
#include "plan/thread_group.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlockRows = kWarps * kTileM;  // per block, at most
constexpr int kWarpKeys = 512;          // edges of a window sorted by a warp, at most
constexpr int kBlockKeys = 8192;        // edges of a window sorted by a block, at most
constexpr int kRangeColumns = 1 << 18;  // columns of the bitmap
constexpr int kGroupWords = 4;          // words of the bitmap that share a rank
constexpr int kGroupColumns = 32 * kGroupWords;
constexpr int kRangeGroups = kRangeColumns / kGroupColumns;
constexpr int kBatch = 4;               // loads in flight
constexpr int kRowBits = 4;             // sort key: column << kRowBits | row of the window
constexpr u32 kNoKey = 0xffffffffu;     // greater than all keys, because num_cols <= 2^28
static_assert(kBlockKeys * 32 == kRangeColumns && kWarps * kWarpKeys <= kBlockKeys, "keys and bitmap share memory");

struct Params {
  int* tiles[2];           // kWrite: [num_windows + 1] first KV tile of each window; else [num_windows] KV tiles
  const i64* offsets[2];   // [num_rows + 1]  first edge of each row
  const int* indices[2];   // [num_edges]  columns of each row: ascending first copies, then second copies, ...
  int* kv_tiles[2];        // [most_tiles + 2][24]  kWrite: every word of the KV tiles and of two more is written
  int num_rows[2];
  int num_cols[2];         // at most 2^28
  int block_windows[2];    // windows per block: up to 8; 1 if most windows need all of its warps
};

// Edges of one window.
struct WindowEdges {
  const int* indices;         // columns of the whole matrix
  const i64* smem_row_begin;  // [17], in `indices`
  i64 begin;
  int count;
  int num_cols;

  // Column of an edge, -1 past the last.
  __device__ __forceinline__ int column(int edge) const { return edge < count ? __ldg(indices + begin + edge) : -1; }

  // Row of an edge in the window: the last row that starts at or before the edge.
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
  __device__ __forceinline__ void clear(int num_tiles, const Group& group) const {
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

// Slots of sorted keys, and the bits of their edges; returns the number of slots. Each round consumes one edge of each
// row and column, and keeps the others.
template <bool kWrite, typename Group>
__device__ __forceinline__ int put_keys(const WindowTiles& tiles, u32* keys, int count, int slots, const Group& group) {
  while (count > 0) {
    if (keys[0] == keys[count - 1]) {  // copies of one edge: a slot for each
      if constexpr (kWrite) {
        const int column = keys[0] >> kRowBits, row = keys[0] & (kTileM - 1);
        for (int i = group.rank; i < count; i += Group::kThreads) {
          tiles.put_column(slots + i, column);
          red_or_global_b32(tiles.bitmap_word(slots + i, row), 1u << WindowTiles::bit(slots + i, row));
        }
      }
      return slots + count;
    }
    int left = 0;
    u32 before_chunk = kNoKey;
    for (int first = 0; first < count; first += Group::kThreads) {
      const int i = first + group.rank;
      const bool exists = i < count;
      const u32 key = exists ? keys[i] : 0, before = i == first ? before_chunk : exists ? keys[i - 1] : kNoKey;
      before_chunk = keys[min(first + Group::kThreads, count) - 1];
      const int column = key >> kRowBits, row = key & (kTileM - 1);
      const bool starts = exists && (i == 0 || column != before >> kRowBits);
      const bool repeats = exists && i > 0 && key == before;
      int num_starts, num_repeats;
      const int slot = slots + group.count_below(starts, num_starts) + starts - 1;
      const int place = left + group.count_below(repeats, num_repeats);
      slots += num_starts;
      left += num_repeats;
      if constexpr (kWrite) {
        if (starts) tiles.put_column(slot, column);
        if (exists && !repeats) {
          red_or_global_b32(tiles.bitmap_word(slot, row), 1u << WindowTiles::bit(slot, row));
        }
      }
      group.sync();  // all reads before any overwrite
      if (repeats) keys[place] = key;
    }
    group.sync();
    count = left;
  }
  return slots;
}

// Sorts the edges of a window by column; returns the number of slots. Its barriers precede the first write to `tiles`.
template <bool kWrite, typename Group>
__device__ __forceinline__ int sort_window(const WindowEdges& edges, const WindowTiles& tiles, u32* keys,
                                           const Group& group) {
  const int padded = round_up_to_power_of_two(edges.count);
  for (int i = group.rank; i < padded; i += Group::kThreads) {
    keys[i] = i < edges.count ? static_cast<u32>(edges.column(i)) << kRowBits | edges.row(i) : kNoKey;
  }
  sort_keys(keys, padded, group);
  return put_keys<kWrite>(tiles, keys, edges.count, 0, group);
}

// Finds the slots of a window by bitmaps of ranges of columns; returns their number.
//   smem_words   [kRangeColumns / 32]
//   smem_rank    [kRangeGroups]  slot of the first column of each 128 columns
//   smem_copies  [2][kTileM]     first edge of each row of this level and above; of the next level
template <bool kWrite>
__device__ __forceinline__ int mark_window(const WindowEdges& edges, const WindowTiles& tiles, u32* smem_words,
                                           int* smem_rank, int (*smem_copies)[kTileM],
                                           const BlockGroup<kWarps>& group) {
  int slots = 0;
  if (group.rank < kTileM) smem_copies[0][group.rank] = static_cast<int>(edges.smem_row_begin[group.rank] - edges.begin);
  for (int level = 0;; ++level) {
    // A level ends before the first column that does not ascend.
    int* const smem_own = smem_copies[level % 2];
    int* const smem_next = smem_copies[1 - level % 2];
    if (group.rank < kTileM) {
      smem_next[group.rank] = static_cast<int>(edges.smem_row_begin[group.rank + 1] - edges.begin);
    }
    __syncthreads();
    for (int i = group.rank + 1; i < edges.count; i += kThreads) {
      if (edges.column(i) > edges.column(i - 1)) continue;
      const int row = edges.row(i);
      if (i > smem_own[row] && edges.row(i - 1) == row) red_min_shared_s32(shared_address(smem_next + row), i);
    }
    __syncthreads();
    int num_higher = 0;  // edges of a higher level
    for (int row = 0; row < kTileM; ++row) {
      num_higher += static_cast<int>(edges.smem_row_begin[row + 1] - edges.begin) - smem_next[row];
    }
    const auto has_level = [&](int edge) { return level == 0 || edge >= smem_own[edges.row(edge)]; };
    for (int base = 0; base < edges.num_cols; base += kRangeColumns) {
      const int num_groups = divide_up(min(kRangeColumns, edges.num_cols - base), kGroupColumns);
      for (int i = group.rank; i < kGroupWords * num_groups; i += kThreads) smem_words[i] = 0;
      __syncthreads();
      for (int first = group.rank; first < edges.count; first += kBatch * kThreads) {
        int column[kBatch];
#pragma unroll
        for (int i = 0; i < kBatch; ++i) column[i] = edges.column(first + i * kThreads);
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
          const u32 c = column[i] - base;  // at least 2^31 for no column, or one before the range
          if (c < kRangeColumns && has_level(first + i * kThreads)) {
            red_or_shared_b32(shared_address(smem_words + c / 32), 1u << c % 32);
          }
        }
      }
      __syncthreads();

      for (int first = 0; first < num_groups; first += kThreads) {
        const int i = first + group.rank;
        const uint4 words = i < num_groups ? reinterpret_cast<const uint4*>(smem_words)[i] : make_uint4(0, 0, 0, 0);
        int sum[1] = {popc(words.x) + popc(words.y) + popc(words.z) + popc(words.w)}, total[1];
        group.exclusive_sums(sum, total);
        if constexpr (kWrite) {
          if (i < num_groups) smem_rank[i] = slots + sum[0];
          int slot = slots + sum[0];
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
        slots += total[0];
      }
      __syncthreads();

      if constexpr (kWrite) {
        for (int first = group.rank; first < edges.count; first += kBatch * kThreads) {
          int column[kBatch];
#pragma unroll
          for (int i = 0; i < kBatch; ++i) column[i] = edges.column(first + i * kThreads);
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const u32 c = column[i] - base;
            if (c < kRangeColumns && has_level(first + i * kThreads)) {
              const int group_of = c / kGroupColumns, word = c / 32 % kGroupWords;
              int slot = smem_rank[group_of] + popc(smem_words[c / 32] & lanes_below(c % 32));
#pragma unroll
              for (int below = 0; below < kGroupWords - 1; ++below) {
                if (below < word) slot += popc(smem_words[kGroupWords * group_of + below]);
              }
              const int row = edges.row(first + i * kThreads);
              red_or_global_b32(tiles.bitmap_word(slot, row), 1u << WindowTiles::bit(slot, row));
            }
          }
        }
        __syncthreads();  // the bitmap may be overwritten
      }
    }
    if (num_higher == 0) return slots;
    if (num_higher > kBlockKeys) continue;

    int num_keys = 0;
    for (int first = 0; first < edges.count; first += kThreads) {
      const int i = first + group.rank, column = edges.column(i);
      const bool repeats = i < edges.count && i >= smem_next[edges.row(i)];
      int total;
      const int place = num_keys + group.count_below(repeats, total);
      if (repeats) smem_words[place] = static_cast<u32>(column) << kRowBits | edges.row(i);
      num_keys += total;
    }
    const int padded = round_up_to_power_of_two(num_keys);
    for (int i = num_keys + group.rank; i < padded; i += kThreads) smem_words[i] = kNoKey;
    sort_keys(smem_words, padded, group);
    return put_keys<kWrite>(tiles, smem_words, num_keys, slots, group);
  }
}

// Clears the KV tiles of a window. The group needs a barrier before it writes to them.
template <bool kWrite, typename Group>
__device__ __forceinline__ WindowTiles cleared_tiles(const Params& p, int side, int window, const Group& group) {
  if constexpr (!kWrite) return {};
  const int begin = p.tiles[side][window], end = p.tiles[side][window + 1];
  const WindowTiles tiles = {p.kv_tiles[side] + static_cast<i64>(begin) * kTileWords};
  tiles.clear(end - begin, group);
  return tiles;
}

template <bool kWrite>
__global__ void __launch_bounds__(kThreads) plan_tiles(const __grid_constant__ Params p) {
  __shared__ __align__(16) u32 smem_words[kBlockKeys];  // 512 keys per warp; 8192 keys of the block, or the bitmap
  __shared__ int smem_rank[kRangeGroups];
  __shared__ i64 smem_row_begin[kBlockRows + 1];
  __shared__ int smem_sums[kWarps];
  __shared__ int smem_copies[2][kTileM];
  const int side = blockIdx.y;
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_windows = divide_up(p.num_rows[side], kTileM), block_windows = p.block_windows[side];
  const int first_window = blockIdx.x * block_windows;
  if (kWrite && blockIdx.x == 0 && threadIdx.x < 2 * kTileWords) {  // two KV tiles without keys after the last
    p.kv_tiles[side][static_cast<i64>(p.tiles[side][num_windows]) * kTileWords + threadIdx.x] = kNoColumn;
  }
  if (first_window >= num_windows) return;
  for (int i = threadIdx.x; i <= block_windows * kTileM; i += kThreads) {
    smem_row_begin[i] = __ldg(p.offsets[side] + min(first_window * kTileM + i, p.num_rows[side]));
  }
  __syncthreads();

  const BlockGroup<kWarps> block_group = {static_cast<int>(threadIdx.x), smem_sums};
  const WarpGroup warp_group = {lane};
  const auto edges_of = [&](int place) {
    const i64* const row_begin = smem_row_begin + place * kTileM;
    const int count = static_cast<int>(row_begin[kTileM] - row_begin[0]);
    return WindowEdges{p.indices[side], row_begin, row_begin[0], count, p.num_cols[side]};
  };
  const int window = first_window + warp;
  if (warp < block_windows && window < num_windows) {
    const WindowEdges edges = edges_of(warp);
    if (edges.count <= kWarpKeys) {
      const WindowTiles tiles = cleared_tiles<kWrite>(p, side, window, warp_group);
      const int slots = sort_window<kWrite>(edges, tiles, smem_words + warp * kWarpKeys, warp_group);
      if (!kWrite && lane == 0) p.tiles[side][window] = divide_up(slots, kTileK);
    }
  }
  __syncthreads();

  for (int place = 0; place < block_windows; ++place) {
    const WindowEdges edges = edges_of(place);
    if (edges.count <= kWarpKeys) continue;
    const WindowTiles tiles = cleared_tiles<kWrite>(p, side, first_window + place, block_group);
    const bool sorts = edges.num_cols > kRangeColumns && edges.count <= kBlockKeys;
    const int slots = sorts ? sort_window<kWrite>(edges, tiles, smem_words, block_group)
                            : mark_window<kWrite>(edges, tiles, smem_words, smem_rank, smem_copies, block_group);
    if (!kWrite && threadIdx.x == 0) p.tiles[side][first_window + place] = divide_up(slots, kTileK);
    __syncthreads();  // smem_words may be overwritten
  }
}
