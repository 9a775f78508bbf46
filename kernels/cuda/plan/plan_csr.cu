// CSR of a matrix, and of its transpose, from an edge list or another CSR (fused/planning/gpu_csr.py).
//
//   plan_count    checks all ids and counts the edges of each row and column
//   plan_offsets  their prefix sums
//   plan_place    places each edge of an edge list in its row, in any order
//   plan_sort     sorts the edges of each row; kColumns: of each column. The sort of a row places its edges in columns.
//
// Order in a row: ascending columns of first copies, then of second copies, and so on; copies of an edge in the order
// given. Order in a column of the transpose: the same by rows, as `row_ids` names them.
//
// Atomics place edges in any order within a row; the sort keys are distinct, so the result has one order. Edges of a
// list with an id out of range are skipped here and in all later kernels; a damaged CSR counts as empty.
//
// A window is 16 rows, or columns. Up to 512 edges are sorted by a warp, up to 4,096 by a block in shared memory; more
// in runs of 4,096, which the block then merges in global memory.
#include "common.cuh"
#include "plan/plan_data.cuh"
#include "ptx/relaxed_atomics.cuh"
#include "plan/thread_group.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kBlockRows = kWarps * kTileM;
constexpr int kWarpKeys = 512;
constexpr int kBlockKeys = 4096;
constexpr int kMergeKeys = 16;  // per thread at a time
constexpr int kScanWarps = 32;
constexpr int kScanThreads = kScanWarps * kWarpSize;
constexpr int kScanChunk = 4 * kScanThreads;
constexpr int kScanLoads = 16;  // in flight

// Sort keys, from the highest bit: row of the window 4, column 28, edge 31; column of the window 4, row 28, place 31.
constexpr int kEdgeBits = 31, kIdBits = 28, kWindowShift = kEdgeBits + kIdBits;
constexpr u64 kNoKey = ~0ull;

struct Params {
  const void* columns;     // [num_edges]  int or i64; the rows of an edge list start `row_stride` elements later
  const i64* row_offsets;  // [num_rows + 1]  of a CSR; null: an edge list
  i64* numbers;            // [kCounts] PlanNumbers, then [num_rows + num_cols] int counts; all 0 before plan_count
  i64* offsets;            // [num_rows + 1], then [num_cols + 1]  first edge of each row, of each column
  u64* keys;               // [num_edges]  scratch; of a CSR at least [edges in windows of more than 4,096]
  u64* column_keys;        // [num_edges]  scratch; null without a transpose
  u64* spare_keys;         // as `keys`; with a transpose [num_edges]
  int* indices;            // [num_edges]  column of each edge; 0 after the last
  int* edges;              // [num_edges]  index of the edge in the given list or CSR; may be null
  int* column_indices;     // [num_edges]  row of each edge of the transpose; null with column_keys
  int* column_edges;       // [num_edges]  index in the CSR of each edge of the transpose; null with column_keys
  const int* row_ids;      // [num_rows]  row that the transpose names for each row; null: the row itself
  i64 num_edges;           // below 2^31
  i64 row_stride;
  int num_rows;            // up to 2^28
  int num_cols;            // up to 2^28
  int block_windows;       // windows per block of plan_sort: 8; 1 if most windows need all of its warps
  int has_padding;         // pairs of -1 in a list are padding, and a CSR may end before `num_edges`
};

__device__ __forceinline__ int* counts_of(const Params& p) { return reinterpret_cast<int*>(p.numbers + kCounts); }

// Row and column of an edge of a list.
struct Edge {
  i64 row, column;

  template <typename Index>
  __device__ static __forceinline__ Edge of(const Params& p, i64 edge) {
    const Index* const columns = static_cast<const Index*>(p.columns);
    return {__ldg(columns + p.row_stride + edge), __ldg(columns + edge)};
  }
  __device__ __forceinline__ bool is_padding() const { return row == -1 && column == -1; }
  __device__ __forceinline__ bool exists(const Params& p) const {
    return row >= 0 && row < p.num_rows && column >= 0 && column < p.num_cols;
  }
};

// Grid: at least ceil(num_edges / 1024), and ceil(num_rows / 1024) for a CSR.
template <bool kWideIndices, bool kIsCsr>
__global__ void __launch_bounds__(EdgeBlock::kThreads) plan_count(const __grid_constant__ Params p) {
  using Index = typename IndexOf<kWideIndices>::Type;
  int* const counts = counts_of(p);
  const i64 num_edges = kIsCsr && p.has_padding ? __ldg(p.row_offsets + p.num_rows) : p.num_edges;
  const EdgeBlock block(blockIdx.x, p.num_edges);
#pragma unroll
  for (int i = 0; i < EdgeBlock::kThreadEdges; ++i) {
    const i64 edge = block.edge(i);
    if constexpr (kIsCsr) {
      const i64 row = edge;
      if (row <= p.num_rows) {
        const i64 begin = __ldg(p.row_offsets + row), end = row < p.num_rows ? __ldg(p.row_offsets + row + 1) : begin;
        const bool is_last_right = row < p.num_rows || (p.has_padding ? begin <= p.num_edges : begin == p.num_edges);
        const bool is_right = begin >= 0 && begin <= end && end <= p.num_edges && (row > 0 || begin == 0);
        if (!is_right || !is_last_right) red_max_global_u64(p.numbers + kBadOffset, p.num_rows + 1 - row);
      }
    }
    if (edge > block.last || edge >= num_edges) continue;
    if constexpr (kIsCsr) {
      const i64 column = __ldg(static_cast<const Index*>(p.columns) + edge);
      if (column < 0 || column >= p.num_cols) {
        red_max_global_u64(p.numbers + kBadEdge, p.num_edges - edge);
      } else if (p.column_keys) {
        red_add_global_s32(counts + p.num_rows + column, 1);
      }
    } else {
      const Edge ids = Edge::of<Index>(p, edge);
      if (ids.exists(p)) {
        red_add_global_s32(counts + ids.row, 1);
        if (p.column_keys) red_add_global_s32(counts + p.num_rows + ids.column, 1);
      } else if (!(p.has_padding && ids.is_padding())) {
        red_max_global_u64(p.numbers + kBadEdge, p.num_edges - edge);
      }
    }
  }
}

// Grid: (blocks, 1 or 2), for rows and columns. A block sums all counts before its own: up to a few hundred blocks this
// is cheaper than a launch for block sums.
template <bool kIsCsr>
__global__ void __launch_bounds__(kScanThreads) plan_offsets(const __grid_constant__ Params p) {
  __shared__ int smem_sums[kScanWarps];
  const BlockGroup<kScanWarps> group = {static_cast<int>(threadIdx.x), smem_sums};
  const bool is_columns = blockIdx.y > 0;
  const int count = is_columns ? p.num_cols : p.num_rows;
  const int* const counts = counts_of(p) + (is_columns ? p.num_rows : 0);
  i64* const offsets = p.offsets + (is_columns ? p.num_rows + 1 : 0);
  const bool is_damaged = kIsCsr && (p.numbers[kBadOffset] || p.numbers[kBadEdge]);
  const int per_block = divide_up(divide_up(count + 1, kScanChunk), gridDim.x) * kScanChunk;
  const i64 first = static_cast<i64>(blockIdx.x) * per_block, end = min(first + per_block, count + 1ll);
  if (first >= end) return;
  if (is_damaged || (kIsCsr && !is_columns)) {
    for (i64 i = first + threadIdx.x; i < end; i += kScanThreads) offsets[i] = is_damaged ? 0 : p.row_offsets[i];
    return;
  }
  int before[1] = {0}, total[1];
  for (i64 i = threadIdx.x; i < first; i += kScanLoads * kScanThreads) {
    int each[kScanLoads];
#pragma unroll
    for (int j = 0; j < kScanLoads; ++j) each[j] = i + j * kScanThreads < first ? counts[i + j * kScanThreads] : 0;
#pragma unroll
    for (int j = 0; j < kScanLoads; ++j) before[0] += each[j];
  }
  group.exclusive_sums(before, total);
  int sum = total[0];
  for (i64 start = first; start < end; start += kScanChunk) {
    const i64 own = start + 4 * threadIdx.x;
    int each[4], sums[1] = {0};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      each[i] = own + i < count ? counts[own + i] : 0;
      sums[0] += each[i];
    }
    group.exclusive_sums(sums, total);
    int offset = sum + sums[0];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (own + i <= count) offsets[own + i] = offset;
      offset += each[i];
    }
    sum += total[0];
  }
}

// Reserves a place among the edges from `offset` on; `count`: number of free places.
__device__ __forceinline__ i64 take_place(const i64* offset, int* count) {
  return *offset + atom_add_global_s32(count, -1) - 1;
}

// Grid: at least ceil(num_edges / 1024). For edge lists.
template <bool kWideIndices>
__global__ void __launch_bounds__(EdgeBlock::kThreads) plan_place(const __grid_constant__ Params p) {
  using Index = typename IndexOf<kWideIndices>::Type;
  const EdgeBlock block(blockIdx.x, p.num_edges);
#pragma unroll
  for (int i = 0; i < EdgeBlock::kThreadEdges; ++i) {
    const i64 edge = block.edge(i);
    if (edge > block.last) break;
    const Edge ids = Edge::of<Index>(p, edge);
    if (!ids.exists(p)) continue;
    const u64 key = static_cast<u64>(ids.row % kTileM) << kWindowShift | static_cast<u64>(ids.column) << kEdgeBits | edge;
    p.keys[take_place(p.offsets + ids.row, counts_of(p) + ids.row)] = key;
  }
}

// The windows of rows, or of columns.
template <bool kWideIndices, bool kIsCsr, bool kColumns>
struct Side {
  static constexpr bool kLoadsSource = kIsCsr && !kColumns;  // else keys, each in its row or column
  const Params& p;
  i64* offsets;
  int count;  // rows, or columns

  __device__ __forceinline__ explicit Side(const Params& p)
      : p(p), offsets(p.offsets + (kColumns ? p.num_rows + 1 : 0)), count(kColumns ? p.num_cols : p.num_rows) {}

  __device__ __forceinline__ u64* keys() const { return kColumns ? p.column_keys : p.keys; }

  // Key of an edge. smem_begin: [17], first edge of each row of the window.
  __device__ __forceinline__ u64 load(const i64* smem_begin, int edge) const {
    const i64 place = smem_begin[0] + edge;
    if constexpr (kLoadsSource) {
      using Index = typename IndexOf<kWideIndices>::Type;
      const u64 column = static_cast<u64>(__ldg(static_cast<const Index*>(p.columns) + place));
      return static_cast<u64>(window_row(smem_begin, place)) << kWindowShift | column << kEdgeBits | place;
    } else {
      return keys()[place];
    }
  }

  __device__ static __forceinline__ int window_row(const i64* smem_begin, i64 place) {
    int row = 0;
#pragma unroll
    for (int step = kTileM / 2; step > 0; step /= 2) {
      if (smem_begin[row + step] <= place) row += step;
    }
    return row;
  }

  // Writes an edge to its place.
  __device__ __forceinline__ void store(i64 place, int window, u64 key) const {
    const int edge = static_cast<int>(key & ((1u << kEdgeBits) - 1));
    const int id = static_cast<int>(key >> kEdgeBits & ((1u << kIdBits) - 1));
    if constexpr (kColumns) {
      p.column_indices[place] = id;
      p.column_edges[place] = edge;
    } else {
      p.indices[place] = id;
      if (p.edges) p.edges[place] = edge;
      if (!p.column_keys) return;
      const int row = window * kTileM + static_cast<int>(key >> kWindowShift);
      const u64 row_id = p.row_ids ? __ldg(p.row_ids + row) : row;
      const i64 target = take_place(p.offsets + p.num_rows + 1 + id, counts_of(p) + p.num_rows + id);
      p.column_keys[target] = static_cast<u64>(id % kTileM) << kWindowShift | row_id << kEdgeBits | place;
    }
  }

  // Whether two keys of a row, or column, are the same edge of the matrix.
  __device__ static __forceinline__ bool repeats(u64 key, u64 before) {
    return key >> kEdgeBits == before >> kEdgeBits;
  }
};

// Index behind the last copy of the edge of row_keys[first].
template <typename Sides>
__device__ __forceinline__ int end_of_copies(const Sides& side, const u64* row_keys, int first, int count) {
  int low = first + 1, high = count;
  while (low < high) {
    const int middle = low + (high - low) / 2;
    if (side.repeats(row_keys[middle], row_keys[first])) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

// Stores sorted keys with copies of edges, row by row. Each round stores the first copies of all edges that are left, as
// many of each as the edge with the fewest has, and keeps the others.
// Not inlined: it is rare, and would take registers from the common path.
template <typename Sides, typename Group>
__device__ __noinline__ void store_copies(const Sides& side, int window, const i64* smem_begin, u64* keys,
                                             const Group& group) {
  for (int row = 0; row < kTileM; ++row) {
    i64 place = smem_begin[row];
    u64* const row_keys = keys + (place - smem_begin[0]);
    int count = static_cast<int>(smem_begin[row + 1] - place);
    while (count > 0) {
      int edges = 0, fewest = count;
      for (int first = 0; first < count; first += Group::kThreads) {
        const int i = first + group.rank;
        const bool begins = i < count && (i == 0 || !side.repeats(row_keys[i], row_keys[i - 1]));
        int num_begun;
        group.count_below(begins, num_begun);
        edges += num_begun;
        if (begins) fewest = min(fewest, end_of_copies(side, row_keys, i, count) - i);
      }
      fewest = group.least(fewest);

      int begun = 0, left = 0;
      for (int first = 0; first < count; first += Group::kThreads) {
        const int i = first + group.rank;
        const bool exists = i < count;
        const u64 key = exists ? row_keys[i] : 0;
        // Keys before this one that matter are not overwritten yet: each edge so far has left out `fewest` keys.
        const bool begins = exists && (i == 0 || !side.repeats(key, row_keys[i - 1]));
        const bool stays = exists && i >= fewest && side.repeats(key, row_keys[i - fewest]);
        int num_begun, num_left;
        const int edge = begun + group.count_below(begins, num_begun) + begins - 1;
        const int own_left = left + group.count_below(stays, num_left);
        const int copy = i - edge * fewest - own_left;  // of a key that does not stay
        if (exists && !stays) side.store(place + static_cast<i64>(copy) * edges + edge, window, key);
        begun += num_begun, left += num_left;
        group.sync();  // all reads before any overwrite
        if (stays) row_keys[own_left] = key;
        group.sync();
      }
      place += static_cast<i64>(fewest) * edges;
      count = left;
    }
  }
}

// Stores sorted keys.
template <typename Sides, typename Group>
__device__ __forceinline__ void store_window(const Sides& side, int window, const i64* smem_begin, int count, u64* keys,
                                             const Group& group) {
  bool repeats = false;
  for (int i = group.rank + 1; i < count; i += Group::kThreads) {
    repeats |= side.repeats(keys[i], keys[i - 1]);
  }
  int num_repeats;
  group.count_below(repeats, num_repeats);
  if (num_repeats) {
    store_copies(side, window, smem_begin, keys, group);
  } else {
    for (int i = group.rank; i < count; i += Group::kThreads) side.store(smem_begin[0] + i, window, keys[i]);
  }
}

// Sorts `count` keys of shared memory, `padded` with kNoKey, unless they ascend.
template <typename Group>
__device__ __forceinline__ void sort_unless_ascending(u64* smem_keys, int count, int padded, const Group& group) {
  group.sync();
  bool ascends = true;
  for (int i = group.rank + 1; i < count; i += Group::kThreads) ascends &= smem_keys[i - 1] < smem_keys[i];
  int num_descents;
  group.count_below(!ascends, num_descents);
  if (num_descents) sort_keys(smem_keys, padded, group);
}

template <typename Sides, typename Group>
__device__ __forceinline__ void sort_window(const Sides& side, int window, const i64* smem_begin, int count,
                                            u64* smem_keys, const Group& group) {
  const int padded = round_up_to_power_of_two(count);
  for (int i = group.rank; i < padded; i += Group::kThreads) {
    smem_keys[i] = i < count ? side.load(smem_begin, i) : kNoKey;
  }
  sort_unless_ascending(smem_keys, count, padded, group);
  store_window(side, window, smem_begin, count, smem_keys, group);
}

// Merges sorted runs of `run` keys in pairs.
__device__ __forceinline__ void merge_runs(const u64* source, u64* target, int count, int run, int rank) {
  for (int first = rank * kMergeKeys; first < count; first += kThreads * kMergeKeys) {
    const int pair = static_cast<int>(first / (2ll * run) * (2ll * run)), diagonal = first - pair;
    const u64* const left = source + pair;
    const int num_left = min(run, count - pair), num_right = max(0, min(run, count - pair - run));
    const u64* const right = left + num_left;
    int low = max(0, diagonal - num_right), high = min(diagonal, num_left);  // keys taken from the left run
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (left[middle] < right[diagonal - 1 - middle]) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    int l = low, r = diagonal - low;
    for (int i = 0; i < kMergeKeys && first + i < count; ++i) {
      const bool takes_left = r >= num_right || (l < num_left && left[l] < right[r]);
      target[first + i] = takes_left ? left[l++] : right[r++];
    }
  }
}

// sort_window for more keys than shared memory holds.
template <typename Sides>
__device__ __forceinline__ void sort_large_window(const Sides& side, int window, const i64* smem_begin, int count,
                                                  u64* smem_keys, const BlockGroup<kWarps>& group) {
  i64 place = smem_begin[0];
  if constexpr (Sides::kLoadsSource) {
    int* const smem_place = group.smem_sums;
    if (group.rank == 0) *smem_place = atom_add_global_s32(reinterpret_cast<int*>(side.p.numbers + kKeysTaken), count);
    __syncthreads();
    place = *smem_place;
    __syncthreads();  // smem_sums may be overwritten
  }
  u64* source = side.keys() + place;
  u64* target = side.p.spare_keys + place;
  for (int first = 0; first < count; first += kBlockKeys) {
    const int size = min(kBlockKeys, count - first), padded = round_up_to_power_of_two(size);
    for (int i = group.rank; i < padded; i += kThreads) {
      smem_keys[i] = i < size ? side.load(smem_begin, first + i) : kNoKey;
    }
    sort_unless_ascending(smem_keys, size, padded, group);
    for (int i = group.rank; i < size; i += kThreads) source[first + i] = smem_keys[i];
    __syncthreads();
  }
  for (i64 run = kBlockKeys; run < count; run *= 2) {
    merge_runs(source, target, count, static_cast<int>(run), group.rank);
    __syncthreads();
    u64* const merged = target;
    target = source, source = merged;
  }
  store_window(side, window, smem_begin, count, source, group);
}

// Grid: at least ceil(windows / block_windows).
template <bool kWideIndices, bool kIsCsr, bool kColumns>
__global__ void __launch_bounds__(kThreads) plan_sort(const __grid_constant__ Params p) {
  __shared__ u64 smem_keys[kWarps * kWarpKeys];  // 512 keys per warp; 4096 of the block
  static_assert(kWarps * kWarpKeys == kBlockKeys, "keys of warps and block share memory");
  __shared__ i64 smem_begin[kBlockRows + 1];
  __shared__ int smem_sums[kWarps];
  const Side<kWideIndices, kIsCsr, kColumns> side(p);
  const int lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize;
  const int num_windows = divide_up(side.count, kTileM), first_window = blockIdx.x * p.block_windows;
  for (int i = threadIdx.x; i <= p.block_windows * kTileM; i += kThreads) {
    smem_begin[i] = side.offsets[min(first_window * kTileM + i, side.count)];
  }
  // Behind the last edge, for arrays with room and lists with edges that do not exist.
  for (i64 i = side.offsets[side.count] + blockIdx.x * kThreads + threadIdx.x; i < p.num_edges;
       i += static_cast<i64>(gridDim.x) * kThreads) {
    (kColumns ? p.column_indices : p.indices)[i] = 0;
    if (kColumns || p.edges) (kColumns ? p.column_edges : p.edges)[i] = 0;
  }
  __syncthreads();
  const WarpGroup warp_group = {lane};
  const BlockGroup<kWarps> block_group = {static_cast<int>(threadIdx.x), smem_sums};
  const auto count_of = [&](int place) {
    return static_cast<int>(smem_begin[(place + 1) * kTileM] - smem_begin[place * kTileM]);
  };
  const int window = first_window + warp;
  if (warp < p.block_windows && window < num_windows) {
    const int count = count_of(warp);
    if (count <= kWarpKeys) {
      u64* const keys = smem_keys + warp * kWarpKeys;
      sort_window(side, window, smem_begin + warp * kTileM, count, keys, warp_group);
    }
  }
  __syncthreads();
  for (int place = 0; place < p.block_windows; ++place) {
    const int count = count_of(place);
    if (count <= kWarpKeys) continue;
    const i64* const begin = smem_begin + place * kTileM;
    if (count <= kBlockKeys) {
      sort_window(side, first_window + place, begin, count, smem_keys, block_group);
    } else {
      sort_large_window(side, first_window + place, begin, count, smem_keys, block_group);
    }
    __syncthreads();  // smem_keys may be overwritten
  }
}
