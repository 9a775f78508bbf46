// Items of the rows of a CSR pattern for fused3s_edges.cu (kernels/formats/row_items.py says how, and is what the tests
// compare with).
//
//   plan_parts        one block: the parts of long rows, and a list of the other rows
//   plan_whole_rows   a block for each segment of 256 other rows, which it sorts by length
#include "common.cuh"
#include "thread_group.cuh"

constexpr int kWarps = 32;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kSegmentWarps = 8;
constexpr int kSegment = kSegmentWarps * kWarpSize;  // SORT_SEGMENT

struct Params {
  int4* items;         // [num_items]  row, first edge, edges, part (-1: the whole row)
  int2* parts;         // [num_parts]  first part of the row, parts of the row
  const i64* indptr;   // [num_rows + 1]
  const int* row_ids;  // [num_rows]  row of query and output of each row; null: rows in their own order
  int* whole_rows;     // [num_rows]  scratch
  i64* numbers;        // [2]  num_parts, and the other rows
  int num_rows;
  int part_edges;  // most edges of an item
};

__global__ void __launch_bounds__(kThreads, 1) plan_parts(const __grid_constant__ Params p) {
  __shared__ int smem_sums[2 * kWarps];
  const int lane = threadIdx.x % kWarpSize;
  const BlockGroup<kWarps> group = {static_cast<int>(threadIdx.x), smem_sums};
  int num_parts = 0, num_whole = 0;
  for (int first = 0; first < p.num_rows; first += kThreads) {
    const int row = first + threadIdx.x;
    const bool exists = row < p.num_rows;
    const i64 begin = exists ? p.indptr[row] : 0;
    const int count = exists ? static_cast<int>(p.indptr[row + 1] - begin) : 0;
    const int parts = count > p.part_edges ? divide_up(count, p.part_edges) : 0;
    const bool is_whole = exists && parts == 0;
    int sum[2] = {parts, is_whole}, total[2];
    group.exclusive_sums(sum, total);
    if (is_whole) p.whole_rows[num_whole + sum[1]] = row;
    for (u32 long_rows = vote_ballot(parts > 0); long_rows; long_rows &= long_rows - 1) {
      const int source = bfind(long_rows & -long_rows);  // the lowest
      const int its_row = __shfl_sync(kFullWarp, row, source);
      const int its_count = __shfl_sync(kFullWarp, count, source), its_parts = __shfl_sync(kFullWarp, parts, source);
      const int first_part = __shfl_sync(kFullWarp, num_parts + sum[0], source);
      const int its_begin = __shfl_sync(kFullWarp, static_cast<int>(begin), source);
      const int row_id = p.row_ids ? p.row_ids[its_row] : its_row;
      for (int i = lane; i < its_parts; i += kWarpSize) {
        const int offset = static_cast<int>(static_cast<i64>(its_count) * i / its_parts);
        const int end = static_cast<int>(static_cast<i64>(its_count) * (i + 1) / its_parts);
        p.items[first_part + i] = make_int4(row_id, its_begin + offset, end - offset, first_part + i);
        p.parts[first_part + i] = make_int2(first_part, its_parts);
      }
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
__global__ void __launch_bounds__(kSegment) plan_whole_rows(const __grid_constant__ Params p) {
  __shared__ u32 smem_keys[kSegment];
  __shared__ int smem_sums[kSegmentWarps];
  const int num_parts = p.numbers[0], num_whole = p.numbers[1];
  const int first = blockIdx.x * kSegment, index = first + threadIdx.x;
  if (first >= num_whole) return;
  const BlockGroup<kSegmentWarps> group = {static_cast<int>(threadIdx.x), smem_sums};
  u32 key = 0xffffffffu;  // sorts last
  if (index < num_whole) {
    const int row = p.whole_rows[index];
    key = (p.part_edges - static_cast<int>(p.indptr[row + 1] - p.indptr[row])) * kSegment + threadIdx.x;
  }
  smem_keys[threadIdx.x] = key;
  sort_keys(smem_keys, kSegment, group);
  if (index >= num_whole) return;
  const int row = p.whole_rows[first + static_cast<int>(smem_keys[threadIdx.x] % kSegment)];
  const i64 begin = p.indptr[row];
  p.items[num_parts + index] = make_int4(p.row_ids ? p.row_ids[row] : row, static_cast<int>(begin),
                                         static_cast<int>(p.indptr[row + 1] - begin), -1);
}
