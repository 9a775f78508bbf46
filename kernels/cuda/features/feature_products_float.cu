// Products of float32 rows with the weights of up to 16 edge features, on CUDA cores: both are bound by memory.
//
//   project_query_float   u[h, n, c]    = sum_d W[h, d, c] q[n, h, d]
//   add_features_float    out[n, h, d] += sum_c W[h, d, c] s[h, n, c]
//
// An item is a head of a row. A block has the weights of its heads in shared memory, and items whose heads lie side by
// side in memory. A thread computes four features of an item, or kVector dimensions of it. The 16 words behind the
// weights of a head put those of its neighbours into other banks.
//
// Grid (blocks of kPasses passes over items, head groups of block_heads).
#include "common.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int kThreads = 256;
constexpr int kFeatures = 16;
constexpr int kPasses = 8;

struct Params {
  float* rows;             // [N][H][dim], any strides: q, or the output
  float* products;         // [H][N][kFeatures]  u, or s
  const float* weight;     // [H][dim][num_features]  W
  i64 row_stride;          // elements
  i64 head_stride;
  int num_rows;            // N
  int num_heads;           // H
  int dim;
  int num_features;
  int block_heads;
  int block_items;         // of a pass
};

template <int kVector>
struct VectorOf;
template <>
struct VectorOf<4> {
  using Type = float4;
};
template <>
struct VectorOf<1> {
  using Type = float;
};

template <int kVector>
__device__ __forceinline__ void load_vector(float (&x)[kVector], const float* address) {
  *reinterpret_cast<typename VectorOf<kVector>::Type*>(x) =
      *reinterpret_cast<const typename VectorOf<kVector>::Type*>(address);
}

// The heads of a block, and the item of a thread in each pass.
struct Block {
  const int first_head, num_heads;
  const i64 num_items;

  __device__ __forceinline__ explicit Block(const Params& p)
      : first_head(blockIdx.y * p.block_heads),
        num_heads(min(p.block_heads, p.num_heads - first_head)),
        num_items(static_cast<i64>(p.num_rows) * num_heads) {}

  __device__ __forceinline__ i64 item(const Params& p, int pass, int of_pass) const {
    return (static_cast<i64>(blockIdx.x) * kPasses + pass) * p.block_items + of_pass;
  }
};

__device__ __forceinline__ int head_words(const Params& p) { return (p.dim + 1) * kFeatures; }

template <int kVector>
__global__ void __launch_bounds__(kThreads) project_query_float(const __grid_constant__ Params p) {
  constexpr int kLanes = kFeatures / 4;
  extern __shared__ __align__(16) float weights[];  // [block_heads][dim][kFeatures], 0 past the last feature
  const Block block(p);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  for (int i = threadIdx.x; i < block.num_heads * p.dim * kFeatures; i += kThreads) {
    const int feature = i % kFeatures, row = i / kFeatures;  // of all heads
    const float* const source = p.weight + (static_cast<i64>(block.first_head) * p.dim + row) * p.num_features + feature;
    weights[i + row / p.dim * kFeatures] = feature < p.num_features ? __ldg(source) : 0.0f;
  }
  __syncthreads();
  const int lane = threadIdx.x % kLanes;
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    const i64 item = block.item(p, pass, threadIdx.x / kLanes);
    if (item >= block.num_items) break;
    const i64 row = item / block.num_heads;
    const int local = static_cast<int>(item - row * block.num_heads), head = block.first_head + local;
    const float* const query = p.rows + row * p.row_stride + head * p.head_stride;
    const float* const of_head = weights + local * head_words(p) + 4 * lane;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 4
    for (int d = 0; d < p.dim; d += kVector) {
      float q[kVector];
      load_vector<kVector>(q, query + d);
#pragma unroll
      for (int i = 0; i < kVector; ++i) {
        const float4 w = *reinterpret_cast<const float4*>(of_head + (d + i) * kFeatures);
        sum.x = fmaf(q[i], w.x, sum.x), sum.y = fmaf(q[i], w.y, sum.y);
        sum.z = fmaf(q[i], w.z, sum.z), sum.w = fmaf(q[i], w.w, sum.w);
      }
    }
    *reinterpret_cast<float4*>(p.products + (static_cast<i64>(head) * p.num_rows + row) * kFeatures + 4 * lane) = sum;
  }
}

template <int kVector>
__global__ void __launch_bounds__(kThreads) add_features_float(const __grid_constant__ Params p) {
  extern __shared__ __align__(16) float weights[];  // [block_heads][num_features][dim]
  const Block block(p);
  const int lanes = p.dim / kVector;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  for (int i = threadIdx.x; i < block.num_heads * p.dim * p.num_features; i += kThreads) {
    const int feature = i % p.num_features, row = i / p.num_features, local = row / p.dim;
    const i64 source = static_cast<i64>(block.first_head) * p.dim * p.num_features + i;
    weights[local * head_words(p) + feature * p.dim + row % p.dim] = __ldg(p.weight + source);
  }
  __syncthreads();
  const int of_pass = threadIdx.x / lanes, first_dim = threadIdx.x % lanes * kVector;
  if (of_pass >= p.block_items) return;
#pragma unroll 1
  for (int pass = 0; pass < kPasses; ++pass) {
    const i64 item = block.item(p, pass, of_pass);
    if (item >= block.num_items) break;
    const i64 row = item / block.num_heads;
    const int local = static_cast<int>(item - row * block.num_heads), head = block.first_head + local;
    const float* const sums = p.products + (static_cast<i64>(head) * p.num_rows + row) * kFeatures;
    const float* const of_head = weights + local * head_words(p) + first_dim;
    float* const target = p.rows + row * p.row_stride + head * p.head_stride + first_dim;
    float out[kVector], sum[kVector] = {};
    load_vector<kVector>(out, target);
#pragma unroll
    for (int first = 0; first < kFeatures; first += 4) {
      if (first >= p.num_features) break;
      float s[4];
      load_vector<4>(s, sums + first);
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        if (first + j >= p.num_features) break;  // what lies behind the last feature counts for nothing
        float w[kVector];
        load_vector<kVector>(w, of_head + (first + j) * p.dim);
#pragma unroll
        for (int i = 0; i < kVector; ++i) sum[i] = fmaf(s[j], w[i], sum[i]);
      }
    }
#pragma unroll
    for (int i = 0; i < kVector; ++i) out[i] += sum[i];
    *reinterpret_cast<typename VectorOf<kVector>::Type*>(target) =
        *reinterpret_cast<const typename VectorOf<kVector>::Type*>(out);
  }
}
