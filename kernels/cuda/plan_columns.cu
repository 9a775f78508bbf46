// The transpose of a CSR pattern for `plan_tiles`, which takes the edges of a row in any order: a counting sort by
// column, whose atomics give the edges of a column in no certain order (kernels/formats/gpu_columns.py).
//
//   kCount = true    edges of each column, at its place plus 1 of `counts`, whose prefix sum is the offsets
//   kCount = false   the row of each edge, at the next free place of its column
//
// Grid: at least ceil(num_edges / 1024), a block for 1,024 edges.
#include "common.cuh"
#include "plan_data.cuh"
#include "ptx/relaxed_atomics.cuh"

struct Params {
  int* counts;          // kCount: [num_cols + 1], zero before; else [num_cols] next free place of each column
  const i64* indptr;    // [num_rows + 1]
  const void* indices;  // [num_edges]  int, or i64
  const int* row_ids;   // [num_rows]  row of A of each row of the pattern; null: rows in their own order
  int* rows;            // [num_edges]  written; null with kCount
  i64 num_edges;        // below 2^31
  int num_rows;
};

template <bool kWideIndices, bool kCount>
__global__ void __launch_bounds__(EdgeBlock::kThreads) plan_columns(const __grid_constant__ Params p) {
  using Index = typename IndexOf<kWideIndices>::Type;
  const EdgeBlock block(blockIdx.x, p.num_edges);
  if (block.first >= p.num_edges) return;
  const int first_row = kCount ? 0 : row_of(p.indptr, block.first, 0, p.num_rows);
  const int end_row = kCount ? 0 : row_of(p.indptr, block.last, first_row, p.num_rows) + 1;
#pragma unroll
  for (int i = 0; i < EdgeBlock::kThreadEdges; ++i) {
    const i64 edge = block.edge(i);
    if (edge > block.last) break;
    const i64 column = __ldg(static_cast<const Index*>(p.indices) + edge);
    if constexpr (kCount) {
      atom_add_global_s32(p.counts + column + 1, 1);
    } else {
      const int row = row_of(p.indptr, edge, first_row, end_row);
      p.rows[atom_add_global_s32(p.counts + column, 1)] = p.row_ids ? p.row_ids[row] : row;
    }
  }
}
