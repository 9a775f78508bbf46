// O = softmax(scale * Q K^T masked by A) V in float32 on CUDA cores, A in CSR: DF-GNN's node-parallel "tiling" method.
// Pointers and shapes: struct Params.
//
// Grid (num_rows, H), kWarps = ceil(dim / 32) warps per block: one block per row and head, one output dimension per
// thread. The block takes the edges of its row 32 at a time (a tile), with an online softmax:
//
//   scores   edge e of the tile: warp e % kWarps, dimensions over its lanes, added with shuffles
//   softmax  every warp: all 32 scores, one per lane: maximum, sum, weight
//   output   a thread adds weight * V of its dimension over the edges of the tile
//
// Shared memory: score [2][32] x 4 B. One barrier per tile, after its scores are written; tiles alternate between the
// two halves, so the scores of the next tile overwrite nothing that is still read.
//
// Up to eight edges of a warp are in flight. Keys and weights go from lane to lane by shuffles: one exponential per
// warp and edge instead of one per thread.
#include "common.cuh"
#include "ptx/math.cuh"
#include "warp.cuh"

constexpr int kTileEdges = kWarpSize;

struct Params {
  const i64* row_offset;  // [num_rows + 1]  first edge of each row
  const int* column;      // [nnz]  key of each edge
  const float* query;     // [num_rows][H][dim]  float32, any row and head stride
  const float* key;       // [num_cols][H][dim]  as query
  const float* value;     // [num_cols][H][dim]  as query
  float* output;          // [num_rows][H][dim]  contiguous; every element is written
  i64 query_row_stride;   // elements
  i64 query_head_stride;
  i64 key_row_stride;
  i64 key_head_stride;
  i64 value_row_stride;
  i64 value_head_stride;
  int dim;
  float scale_log2e;  // scale * log2(e)
};

// The kernel copies its parameters into locals first: __restrict__ has no effect on members of a struct, and reads of
// scalar members further down change the registers and the address code.
template <int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    dfgnn_tiling(const __grid_constant__ Params p) {
  const i64* __restrict__ row_offset = p.row_offset;
  const int* __restrict__ column = p.column;
  const float* __restrict__ query = p.query;
  const float* __restrict__ key = p.key;
  const float* __restrict__ value = p.value;
  float* __restrict__ output = p.output;
  const i64 query_row_stride = p.query_row_stride, query_head_stride = p.query_head_stride;
  const i64 key_row_stride = p.key_row_stride, key_head_stride = p.key_head_stride;
  const i64 value_row_stride = p.value_row_stride, value_head_stride = p.value_head_stride;
  const int dim = p.dim;
  const float scale_log2e = p.scale_log2e;

  constexpr int kGroup = kWarps > 4 ? 4 : 8;  // edges of a warp that are in flight together
  __shared__ float smem_score[2][kTileEdges];

  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int own_dim = threadIdx.x;
  const i64 row = blockIdx.x;
  const i64 first_edge = row_offset[row];
  const int degree = warp_uniform(static_cast<int>(row_offset[row + 1] - first_edge));
  column += first_edge;
  query += row * query_row_stride + blockIdx.y * query_head_stride;
  key += blockIdx.y * key_head_stride;
  value += blockIdx.y * value_head_stride;

  float frag_query[kWarps];  // dimensions lane + 32 j; scores are in units of log 2
#pragma unroll
  for (int j = 0; j < kWarps; ++j) {
    const int d = lane + kWarpSize * j;
    frag_query[j] = d < dim ? query[d] * scale_log2e : 0.0f;
  }

  // Equal in all threads, except `out`: one dimension each.
  float running_max = negative_infinity();
  float running_sum = 0.0f;
  float out = 0.0f;
  int half = 0;

  for (int tile = 0; tile < degree; tile += kTileEdges, half ^= 1) {
    const int num_edges = min(kTileEdges, degree - tile);
    const int lane_column = lane < num_edges ? column[tile + lane] : 0;

    // Scores.
#pragma unroll 1
    for (int first = 0; first < num_edges; first += kGroup * kWarps) {
      float frag_key[kGroup][kWarps];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const int e = first + warp + i * kWarps;
        const float* key_row = key + __shfl_sync(kFullWarp, lane_column, e % kTileEdges) * key_row_stride + lane;
#pragma unroll
        for (int j = 0; j < kWarps; ++j) {
          frag_key[i][j] = e < num_edges && lane + kWarpSize * j < dim ? __ldg(key_row + kWarpSize * j) : 0.0f;
        }
      }
      float dot[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        dot[i] = 0.0f;
#pragma unroll
        for (int j = 0; j < kWarps; ++j) dot[i] += frag_query[j] * frag_key[i][j];
      }
      const float score = warp_sums(dot, lane);
      const int e = first + warp + lane * kGroup / kWarpSize * kWarps;
      if (lane % (kWarpSize / kGroup) == 0 && e < num_edges) smem_score[half][e] = score;
    }
    __syncthreads();

    // Softmax of the tile, lane = edge.
    const float score = lane < num_edges ? smem_score[half][lane] : negative_infinity();
    const float new_max = fmaxf(running_max, warp_max(score));
    // A row with scores of -infinity only keeps that maximum; subtracting it would give NaN.
    const float shift = new_max == negative_infinity() ? 0.0f : new_max;
    const float rescale = ex2_approx_ftz(running_max - shift);
    const float weight = ex2_approx_ftz(score - shift);
    running_max = new_max;
    running_sum = running_sum * rescale + warp_sum(weight);

    // Output.
    out *= rescale;
#pragma unroll 1
    for (int first = 0; first < num_edges; first += kGroup) {
      float frag_value[kGroup];
#pragma unroll
      for (int i = 0; i < kGroup; ++i) {
        const float* value_row = value + __shfl_sync(kFullWarp, lane_column, first + i) * value_row_stride;
        frag_value[i] = first + i < num_edges && own_dim < dim ? __ldg(value_row + own_dim) : 0.0f;
      }
#pragma unroll
      for (int i = 0; i < kGroup; ++i) out += __shfl_sync(kFullWarp, weight, first + i) * frag_value[i];
    }
  }

  if (own_dim < dim) {
    output[(row * gridDim.y + blockIdx.y) * dim + own_dim] = running_sum == 0.0f ? 0.0f : out / running_sum;
  }
}
