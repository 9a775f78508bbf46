// Whether a square CSR pattern is symmetric, and the place of the reverse (j, i) of each edge (i, j): the transpose of
// a symmetric pattern (kernels/formats/gpu_reverse.py; the tests compare with formats/transpose.py).
//
// Only edges above the diagonal are looked up, each by binary search in row j. A is symmetric if all of them have a
// reverse and no other edge is below the diagonal. Blocks that start after an edge was missed do nothing: a pattern
// that is not symmetric costs next to nothing.
//
// Grid: at least ceil(num_edges / 1024), a block for 1,024 edges.
#include "common.cuh"
#include "plan_data.cuh"
#include "ptx/relaxed_atomics.cuh"
#include "thread_group.cuh"

struct Params {
  const i64* indptr;    // [num_rows + 1]
  const void* indices;  // [num_edges]  int, or i64; ascending strictly in each row, or kIsSymmetric is 0
  int* reverse;         // [num_edges]  complete if A is symmetric; null: not wanted
  i64* numbers;         // enum PlanNumber of the pattern: kIsSymmetric may become 0, kSurplus counts
  i64 num_edges;        // below 2^31
  int num_rows;
};

template <bool kWideIndices>
__global__ void __launch_bounds__(EdgeBlock::kThreads) plan_reverse(const __grid_constant__ Params p) {
  using Index = typename IndexOf<kWideIndices>::Type;
  const Index* const indices = static_cast<const Index*>(p.indices);
  const EdgeBlock block(blockIdx.x, p.num_edges);
  if (block.first >= p.num_edges || !__any_sync(kFullWarp, p.numbers[kIsSymmetric] != 0)) return;
  const int first_row = row_of(p.indptr, block.first, 0, p.num_rows);
  const int end_row = row_of(p.indptr, block.last, first_row, p.num_rows) + 1;

  int surplus = 0;
  bool missed = false;
  for (int i = 0; i < EdgeBlock::kThreadEdges; ++i) {
    const i64 edge = block.edge(i);
    if (edge > block.last) break;
    const int row = row_of(p.indptr, edge, first_row, end_row);
    const int column = static_cast<int>(__ldg(indices + edge));
    surplus += (row < column) - (column < row);
    if (row == column && p.reverse) p.reverse[edge] = static_cast<int>(edge);
    if (row >= column) continue;
    int low = static_cast<int>(__ldg(p.indptr + column)), high = static_cast<int>(__ldg(p.indptr + column + 1));
    const int end = high;
    while (low < high) {
      const int middle = low + (high - low) / 2;
      if (__ldg(indices + middle) < row) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    const bool found = low < end && __ldg(indices + low) == row;
    missed |= !found;
    if (found && p.reverse) {
      p.reverse[edge] = low;
      p.reverse[low] = static_cast<int>(edge);
    }
  }
  if (missed) p.numbers[kIsSymmetric] = 0;
  const int lane = threadIdx.x % kWarpSize;
  const int sum = __shfl_sync(kFullWarp, warp_inclusive_sum(surplus, lane), kWarpSize - 1);
  if (lane == 0 && sum != 0) red_add_global_u64(p.numbers + kSurplus, sum);
}
