// O = softmax(scale * Q K^T masked by A) V in float32 on CUDA cores, A in CSR and COO: DF-GNN's "hyper" method.
// Pointers and shapes: struct Params.
//
// Grid (ceil(num_rows / 8), H), 8 warps per block: one block per eight rows and head.
//
//   scores   edge-parallel: the edges of the block, contiguous in CSR, in eight equal runs, one per warp, that ignore
//            the ends of rows; dimensions over the lanes, added with shuffles
//   softmax  node-parallel: warp = row, over the scores of the row in shared memory
//   output   node-parallel: lanes = dimensions, one edge of the row after the other
//
// Shared memory: score [edges of the block] x 4 B, dynamic, sized by the host for the block with most edges. One
// barrier, after all scores are written; from there on a warp uses only scores of its own row.
//
// A lane holds dimensions kVec * (lane + 32 c) to kVec * (lane + 32 c) + kVec - 1 for c < kChunks. kVec is 4 where 128
// divides dim (16-byte loads), 2 where 64 does, else 1. kUnroll edges are in flight in both phases.
#include "common.cuh"
#include "ptx/math.cuh"
#include "warp.cuh"

constexpr int kRows = 8;  // rows and warps of a block
constexpr int kUnroll = 4;

struct Params {
  const i64* row_offset;  // [num_rows + 1]  first edge of each row
  const int* edge_row;    // [nnz]  row of each edge (COO); the edges of a row are neighbours
  const int* column;      // [nnz]  key of each edge
  const float* query;     // [num_rows][H][dim]  float32, any row and head stride, rows aligned to 4 * kVec bytes
  const float* key;       // [num_cols][H][dim]  as query
  const float* value;     // [num_cols][H][dim]  as query
  float* output;          // [num_rows][H][dim]  contiguous; every element is written
  i64 query_row_stride;   // elements
  i64 query_head_stride;
  i64 key_row_stride;
  i64 key_head_stride;
  i64 value_row_stride;
  i64 value_head_stride;
  int num_rows;
  int dim;
  float scale_log2e;  // scale * log2(e)
};

template <int kVec>
struct __align__(4 * kVec) Vector {
  float element[kVec];
};

// Dimensions d to d + kVec - 1 of a row, zero unless valid.
template <int kVec>
__device__ __forceinline__ Vector<kVec> load(const float* row, int d, bool valid) {
  if (!valid) return {};
  if constexpr (kVec == 4) {
    const float4 x = __ldg(reinterpret_cast<const float4*>(row + d));
    return {x.x, x.y, x.z, x.w};
  } else if constexpr (kVec == 2) {
    const float2 x = __ldg(reinterpret_cast<const float2*>(row + d));
    return {x.x, x.y};
  } else {
    return {__ldg(row + d)};
  }
}

template <int kVec, int kChunks>
__global__ void __launch_bounds__(kRows* kWarpSize, kChunks < 6 ? 0 : 2)  // 0: the compiler decides
    dfgnn_hyper(const __grid_constant__ Params p) {
  extern __shared__ float smem_score[];

  const int warp = warp_uniform(threadIdx.x / kWarpSize);
  const int lane = threadIdx.x % kWarpSize;
  const i64 first_row = static_cast<i64>(blockIdx.x) * kRows;
  const i64 first_edge = p.row_offset[first_row];
  const i64 end_row = min(first_row + kRows, static_cast<i64>(p.num_rows));
  const int num_edges = warp_uniform(static_cast<int>(p.row_offset[end_row] - first_edge));
  const float* const __restrict__ query = p.query + blockIdx.y * p.query_head_stride;
  const float* const __restrict__ key = p.key + blockIdx.y * p.key_head_stride;
  const float* const __restrict__ value = p.value + blockIdx.y * p.value_head_stride;
  const int* const __restrict__ edge_row = p.edge_row + first_edge;
  const int* const __restrict__ column = p.column + first_edge;
  const int dim = p.dim;
  const i64 query_row_stride = p.query_row_stride, key_row_stride = p.key_row_stride;
  const i64 value_row_stride = p.value_row_stride;

  // Scores, in units of log 2.
  const int run = (num_edges + kRows - 1) / kRows;
  const int run_end = min((warp + 1) * run, num_edges);
  for (int e0 = warp * run; e0 < run_end; e0 += kUnroll) {
    // All indices before the first row, so that their latencies overlap. Without __ldg on one of the two arrays ptxas
    // moves some of them behind loads of Q and K; with it on both, dfgnn_hyper<4, 1> takes 48 registers, not 40.
    int row_index[kUnroll], key_index[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const bool is_edge = e0 + i < run_end;
      row_index[i] = is_edge ? edge_row[e0 + i] : 0;
      key_index[i] = is_edge ? __ldg(column + e0 + i) : 0;
    }
    Vector<kVec> frag_query[kUnroll][kChunks], frag_key[kUnroll][kChunks];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const bool is_edge = e0 + i < run_end;
      const float* query_row = query + row_index[i] * query_row_stride;
      const float* key_row = key + key_index[i] * key_row_stride;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int d = kVec * (lane + kWarpSize * c);
        frag_query[i][c] = load<kVec>(query_row, d, is_edge && d < dim);
        frag_key[i][c] = load<kVec>(key_row, d, is_edge && d < dim);
      }
    }
    float dot[kUnroll] = {};
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
#pragma unroll
      for (int x = 0; x < kChunks * kVec; ++x) {
        dot[i] += frag_query[i][x / kVec].element[x % kVec] * frag_key[i][x / kVec].element[x % kVec];
      }
    }
    const float score = warp_sums(dot, lane) * p.scale_log2e;
    const int e = e0 + lane * kUnroll / kWarpSize;
    if (lane % (kWarpSize / kUnroll) == 0 && e < run_end) smem_score[e] = score;
  }
  __syncthreads();

  const i64 row = first_row + warp;
  if (row >= p.num_rows) return;
  const int begin = warp_uniform(static_cast<int>(p.row_offset[row] - first_edge));
  const int end = warp_uniform(static_cast<int>(p.row_offset[row + 1] - first_edge));

  // Softmax: the weights replace the scores.
  float row_max = negative_infinity();
  for (int e = begin + lane; e < end; e += kWarpSize) row_max = fmaxf(row_max, smem_score[e]);
  row_max = warp_max(row_max);
  if (row_max == negative_infinity()) row_max = 0.0f;  // no edge, or scores of -infinity only
  float sum = 0.0f;
  for (int e = begin + lane; e < end; e += kWarpSize) {
    const float weight = ex2_approx_ftz(smem_score[e] - row_max);
    smem_score[e] = weight;
    sum += weight;
  }
  sum = warp_sum(sum);
  __syncwarp();

  // Output.
  Vector<kVec> out[kChunks] = {};
#pragma unroll 1
  for (int e0 = begin; e0 < end; e0 += kUnroll) {
    Vector<kVec> frag_value[kUnroll][kChunks];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const bool is_edge = e0 + i < end;
      const float* value_row = value + (is_edge ? column[e0 + i] : 0) * value_row_stride;
#pragma unroll
      for (int c = 0; c < kChunks; ++c) {
        const int d = kVec * (lane + kWarpSize * c);
        frag_value[i][c] = load<kVec>(value_row, d, is_edge && d < dim);
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const float weight = e0 + i < end ? smem_score[e0 + i] : 0.0f;
#pragma unroll
      for (int x = 0; x < kChunks * kVec; ++x) {
        out[x / kVec].element[x % kVec] += weight * frag_value[i][x / kVec].element[x % kVec];
      }
    }
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
  float* const output = p.output + (row * gridDim.y + blockIdx.y) * dim;
#pragma unroll
  for (int c = 0; c < kChunks; ++c) {
    const int d = kVec * (lane + kWarpSize * c);
#pragma unroll
    for (int x = 0; x < kVec; ++x) out[c].element[x] *= inverse;
    if (d < dim) *reinterpret_cast<Vector<kVec>*>(output + d) = out[c];
  }
}
