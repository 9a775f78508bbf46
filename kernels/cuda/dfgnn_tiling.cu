// O = softmax(scale * Q K^T masked by A) V in float32 on CUDA cores, A in CSR: DF-GNN's node-parallel "tiling" method.
//
//   row_offset        [num_rows + 1]   first edge of each row
//   column            [nnz]            key of each edge
//   query, key, value [N][H][dim]      float32, any row and head stride, dim contiguous
//   output            [num_rows][H][dim]   contiguous; every element is written
//
// Grid (num_rows, H), block kWarps = ceil(dim / 32) warps: one block a row and head, a thread owns one dimension of the
// output. The block walks over its row's edges 32 at a time with an online softmax:
//
//   scores   edge e of the tile belongs to warp e % kWarps, whose lanes share out the dimensions and add with shuffles
//   softmax  every warp does all 32 scores of the tile, one a lane: maximum, sum, weight
//   output   a thread adds up weight * V of its dimension over the tile's edges
//
// Shared memory: score [2][32] x 4 B, 256 bytes. Barrier: one a tile, after its scores are written; tiles alternate
// between the two halves, so the next tile's scores meet nobody who still reads these.
//
// Up to eight edges of a warp are in flight together. Keys and weights travel between lanes by shuffles, so that an
// exponential is taken once a warp and edge instead of once a thread.
#include "warp.cuh"

constexpr int kTileEdges = kWarpSize;

template <int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    dfgnn_tiling(const i64* __restrict__ row_offset, const int* __restrict__ column, const float* __restrict__ query,
                 const float* __restrict__ key, const float* __restrict__ value, float* __restrict__ output,
                 i64 query_row_stride, i64 query_head_stride, i64 key_row_stride, i64 key_head_stride,
                 i64 value_row_stride, i64 value_head_stride, int dim, float scale_log2e) {
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

  // The same in every thread, except `out`, which is one dimension.
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
    const float rescale = exp2_approx(running_max - shift);
    const float weight = exp2_approx(score - shift);
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
