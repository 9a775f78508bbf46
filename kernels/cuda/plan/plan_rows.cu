// Items of the rows of CSR patterns, A and its transpose, for edges/forward.cu (rules: fused/planning/gpu_row_items.py).
//
//   plan_parts        the parts of long rows, and a list of the whole rows
//   plan_whole_rows   one block per segment of 256 whole rows, sorted by length; then items without work
#include "common.cuh"
#include "plan/plan_data.cuh"
#include "plan/thread_group.cuh"

constexpr int kWarps = 32;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kThreadRows = 4;  // rows per thread at a time
constexpr int kChunk = kThreads * kThreadRows;
constexpr int kLoads = 8;  // in flight
constexpr int kSortWarps = 8;
constexpr int kSortRows = kSortWarps * kWarpSize;  // SORT_SEGMENT

struct Params {
  int4* items[2];         // [most_items]  row, first edge, edges, part (-1: the whole row); every element is written
  int2* parts[2];         // [most_parts]  first part of the row, parts of the row
  const i64* offsets[2];  // [num_rows + 1]
  const int* row_ids;     // [num_rows]  row of query and output of each row of A; null: rows in order
  int* whole_rows[2];     // [num_rows]  scratch
  i64* numbers;           // [kCounts] PlanNumbers: for each pattern the numbers of parts and of whole rows
  int num_rows[2];
  int most_items[2];
  int part_edges;  // most edges of an item
};

// Grid: (blocks, patterns). A block counts the parts of all rows before its own: up to a few hundred blocks this is
// cheaper than a launch for block sums.
__global__ void __launch_bounds__(kThreads, 1) plan_parts(const __grid_constant__ Params p) {
  __shared__ int smem_sums[2 * kWarps];
  const int side = blockIdx.y, lane = threadIdx.x % kWarpSize;
  const BlockGroup<kWarps> group = {static_cast<int>(threadIdx.x), smem_sums};
  const i64* const offsets = p.offsets[side];
  const int num_rows = p.num_rows[side];
  const int* const row_ids = side == 0 ? p.row_ids : nullptr;
  const int per_block = divide_up(divide_up(num_rows, kChunk), gridDim.x) * kChunk;
  const i64 begin_row = static_cast<i64>(blockIdx.x) * per_block;
  const int end_row = static_cast<int>(min(begin_row + per_block, static_cast<i64>(num_rows)));
  if (begin_row >= num_rows) return;
  int before[2] = {0, 0}, in_front[2];
  for (i64 first = threadIdx.x; first < begin_row; first += kLoads * kThreads) {
    int count[kLoads];
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const i64 row = first + i * kThreads;
      count[i] = row < begin_row ? static_cast<int>(offsets[row + 1] - offsets[row]) : -1;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      before[0] += count[i] > p.part_edges ? divide_up(count[i], p.part_edges) : 0;
      before[1] += count[i] >= 0 && count[i] <= p.part_edges;
    }
  }
  group.exclusive_sums(before, in_front);
  int num_parts = in_front[0], num_whole = in_front[1];
  for (int first = static_cast<int>(begin_row); first < end_row; first += kChunk) {
    const int first_row = first + kThreadRows * threadIdx.x;
    int begin[kThreadRows + 1], parts[kThreadRows], sum[2] = {0, 0}, total[2];
#pragma unroll
    for (int i = 0; i <= kThreadRows; ++i) begin[i] = static_cast<int>(offsets[min(first_row + i, num_rows)]);
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int count = begin[i + 1] - begin[i];
      parts[i] = count > p.part_edges ? divide_up(count, p.part_edges) : 0;
      sum[0] += parts[i];
      sum[1] += first_row + i < num_rows && parts[i] == 0;
    }
    group.exclusive_sums(sum, total);
    int part = num_parts + sum[0], whole = num_whole + sum[1];
#pragma unroll
    for (int i = 0; i < kThreadRows; ++i) {
      const int row = first_row + i, count = begin[i + 1] - begin[i];
      if (row < num_rows && parts[i] == 0) p.whole_rows[side][whole++] = row;
      for (u32 long_rows = vote_ballot(parts[i] > 0); long_rows; long_rows &= long_rows - 1) {
        const int source = bfind(long_rows & -long_rows);  // the lowest
        const int its_row = __shfl_sync(kFullWarp, row, source), its_begin = __shfl_sync(kFullWarp, begin[i], source);
        const int its_count = __shfl_sync(kFullWarp, count, source);
        const int its_parts = __shfl_sync(kFullWarp, parts[i], source);
        const int first_part = __shfl_sync(kFullWarp, part, source);
        const int row_id = row_ids ? row_ids[its_row] : its_row;
        for (int j = lane; j < its_parts; j += kWarpSize) {
          const int offset = static_cast<int>(static_cast<i64>(its_count) * j / its_parts);
          const int end = static_cast<int>(static_cast<i64>(its_count) * (j + 1) / its_parts);
          p.items[side][first_part + j] = make_int4(row_id, its_begin + offset, end - offset, first_part + j);
          p.parts[side][first_part + j] = make_int2(first_part, its_parts);
        }
      }
      part += parts[i];
    }
    num_parts += total[0];
    num_whole += total[1];
  }
  if (threadIdx.x == 0 && end_row == num_rows) {
    p.numbers[kRowItems + 2 * side] = num_parts;
    p.numbers[kRowItems + 2 * side + 1] = num_whole;
  }
}

// Grid: (at least ceil(most_items / 256), patterns).
__global__ void __launch_bounds__(kSortRows) plan_whole_rows(const __grid_constant__ Params p) {
  __shared__ u32 smem_keys[kSortRows];
  __shared__ int smem_sums[kSortWarps];
  const int side = blockIdx.y;
  const i64* const offsets = p.offsets[side];
  const int* const row_ids = side == 0 ? p.row_ids : nullptr;
  const int num_parts = p.numbers[kRowItems + 2 * side], num_whole = p.numbers[kRowItems + 2 * side + 1];
  const int first = blockIdx.x * kSortRows, index = first + threadIdx.x;
  const bool has_place = num_parts + index < p.most_items[side];
  int4* const item = p.items[side] + num_parts + index;
  if (first >= num_whole) {
    if (has_place) *item = make_int4(-1, 0, 0, -1);
    return;
  }
  const BlockGroup<kSortWarps> group = {static_cast<int>(threadIdx.x), smem_sums};
  u32 key = 0xffffffffu;  // sorts last
  if (index < num_whole) {
    const int row = p.whole_rows[side][index];
    key = (p.part_edges - static_cast<int>(offsets[row + 1] - offsets[row])) * kSortRows + threadIdx.x;
  }
  smem_keys[threadIdx.x] = key;
  sort_keys(smem_keys, kSortRows, group);
  if (index >= num_whole) {
    if (has_place) *item = make_int4(-1, 0, 0, -1);
    return;
  }
  const int row = p.whole_rows[side][first + static_cast<int>(smem_keys[threadIdx.x] % kSortRows)];
  const i64 begin = offsets[row];
  *item = make_int4(row_ids ? row_ids[row] : row, static_cast<int>(begin),
                    static_cast<int>(offsets[row + 1] - begin), -1);
}
