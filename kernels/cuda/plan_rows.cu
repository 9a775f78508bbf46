// Items of the rows of a CSR pattern for fused3s_edges.cu (kernels/formats/row_items.py says how, and is what the tests
// compare with).
//
//   plan_parts        one block: the parts of long rows, and a list of the other rows
//   plan_whole_rows   a block for each segment of 256 other rows, which it sorts by length
#include "common.cuh"
#include "plan_data.cuh"
#include "thread_group.cuh"

constexpr int kWarps = 32;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kThreadRows = 4;  // rows of a thread at a time
constexpr int kSortWarps = 8;
constexpr int kSortRows = kSortWarps * kWarpSize;  // SORT_SEGMENT

struct Params {
  int4* items;         // [num_items]  row, first edge, edges, part (-1: the whole row)
  int2* parts;         // [num_parts]  first part of the row, parts of the row
  const i64* indptr;   // [num_rows + 1]
  const int* row_ids;  // [num_rows]  row of query and output of each row; null: rows in their own order
  int* whole_rows;     // [num_rows]  scratch
  i64* numbers;        // [2]  num_parts, and the other rows
  const i64* plan;     // enum PlanNumber of the same arrays: there are no items if they are no distinct CSR; or null
  int num_rows;
  int part_edges;  // most edges of an item
};

__global__ void __launch_bounds__(kThreads, 1) plan_parts(const __grid_constant__ Params p) {
  __shared__ int smem_sums[2 * kWarps];
  const int lane = threadIdx.x % kWarpSize;
  const BlockGroup<kWarps> group = {static_cast<int>(threadIdx.x), smem_sums};
  const int num_rows = p.plan && !(p.plan[kIsDistinct] && !p.plan[kDamage]) ? 0 : p.num_rows;
  int num_parts = 0, num_whole = 0;
  for (int first = 0; first < num_rows; first += kThreads * kThreadRows) {
    const int first_row = first + kThreadRows * threadIdx.x;
    int begin[kThreadRows + 1], parts[kThreadRows], sum[2] = {0, 0}, total[2];
#pragma unroll
    for (int i = 0; i <= kThreadRows; ++i) begin[i] = static_cast<int>(p.indptr[min(first_row + i, num_rows)]);
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
      if (row < num_rows && parts[i] == 0) p.whole_rows[whole++] = row;
      for (u32 long_rows = vote_ballot(parts[i] > 0); long_rows; long_rows &= long_rows - 1) {
        const int source = bfind(long_rows & -long_rows);  // the lowest
        const int its_row = __shfl_sync(kFullWarp, row, source), its_begin = __shfl_sync(kFullWarp, begin[i], source);
        const int its_count = __shfl_sync(kFullWarp, count, source);
        const int its_parts = __shfl_sync(kFullWarp, parts[i], source);
        const int first_part = __shfl_sync(kFullWarp, part, source);
        const int row_id = p.row_ids ? p.row_ids[its_row] : its_row;
        for (int j = lane; j < its_parts; j += kWarpSize) {
          const int offset = static_cast<int>(static_cast<i64>(its_count) * j / its_parts);
          const int end = static_cast<int>(static_cast<i64>(its_count) * (j + 1) / its_parts);
          p.items[first_part + j] = make_int4(row_id, its_begin + offset, end - offset, first_part + j);
          p.parts[first_part + j] = make_int2(first_part, its_parts);
        }
      }
      part += parts[i];
    }
    num_parts += total[0];
    num_whole += total[1];
  }
  if (threadIdx.x == 0) {
    p.numbers[0] = num_parts;
    p.numbers[1] = num_whole;
  }
}

// Grid: at least ceil(other rows / 256).
__global__ void __launch_bounds__(kSortRows) plan_whole_rows(const __grid_constant__ Params p) {
  __shared__ u32 smem_keys[kSortRows];
  __shared__ int smem_sums[kSortWarps];
  const int num_parts = p.numbers[0], num_whole = p.numbers[1];
  const int first = blockIdx.x * kSortRows, index = first + threadIdx.x;
  if (first >= num_whole) return;
  const BlockGroup<kSortWarps> group = {static_cast<int>(threadIdx.x), smem_sums};
  u32 key = 0xffffffffu;  // sorts last
  if (index < num_whole) {
    const int row = p.whole_rows[index];
    key = (p.part_edges - static_cast<int>(p.indptr[row + 1] - p.indptr[row])) * kSortRows + threadIdx.x;
  }
  smem_keys[threadIdx.x] = key;
  sort_keys(smem_keys, kSortRows, group);
  if (index >= num_whole) return;
  const int row = p.whole_rows[first + static_cast<int>(smem_keys[threadIdx.x] % kSortRows)];
  const i64 begin = p.indptr[row];
  p.items[num_parts + index] = make_int4(p.row_ids ? p.row_ids[row] : row, static_cast<int>(begin),
                                         static_cast<int>(p.indptr[row + 1] - begin), -1);
}
