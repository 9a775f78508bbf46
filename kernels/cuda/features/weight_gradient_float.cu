// weight_gradient of feature_products.cu for float32, on CUDA cores: dW[h, d, c] = sum_n q[n, h, d] t[h, n, c]. A lane
// computes chunks of q times four features.
#include "common.cuh"
#include "features/feature_rows.cuh"
#include "ptx/griddepcontrol.cuh"
#include "features/weight_gradient.cuh"

constexpr int kMinBlocks = 2;  // per SM, in the grid too, without spills
constexpr int kDims = kChunkWords;  // dimensions of a chunk
constexpr int kQuarters = kFeatures / 4;

// A lane sums four features, quarter lane % 4, of kChunks chunks over every kWarpRows-th row.
template <int kDim>
struct FloatGradientTile : GradientSlice<kDim, sizeof(float)> {
  using GradientSlice<kDim, sizeof(float)>::GradientSlice;
  static constexpr int kSliceChunks = GradientSlice<kDim, sizeof(float)>::kDims / kDims;
  static constexpr int kChunkLanes = kSliceChunks < 8 ? kSliceChunks : 8;
  static constexpr int kChunks = kSliceChunks / kChunkLanes;
  static constexpr int kQuads = kChunks * kDims;  // four features of dimension quad % 4 of chunk quad / 4
  static constexpr int kLanes = kQuarters * kChunkLanes;
  static constexpr int kWarpRows = kWarpSize / kLanes;
  static constexpr int kBatch = kChunks == 1 ? 8 : 4;  // rows of a lane whose loads are in flight together

  __device__ static __forceinline__ int chunk(int i, int lane) {
    return lane / kQuarters % kChunkLanes + kChunkLanes * i;
  }
  __device__ static __forceinline__ int dim(int quad, int lane, int) {
    return kDims * chunk(quad / kDims, lane) + quad % kDims;
  }
  __device__ static __forceinline__ int feature(int, int lane, int i) { return 4 * (lane % kQuarters) + i; }
};

template <int kDim>
__device__ KernelSizes weight_gradient_float_sizes = {0, 4 * FloatGradientTile<kDim>::kPartial, kMinBlocks, FloatGradientTile<kDim>::kDims};

template <int kDim>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    weight_gradient_float(const __grid_constant__ WeightGradientParams p) {
  using Tile = FloatGradientTile<kDim>;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const int lane = threadIdx.x % kWarpSize;
  const Tile block(p.sum_columns / kFeatures);
  const i64 head_start = block.head * p.head_stride[blockIdx.z];
  const char* const rows = element_address<Element::kFloat>(p.rows[blockIdx.z], head_start);
  const char* const feature_sums = block.template first_sum<Element::kFloat>(p);
  const int row_bytes = p.row_bytes[blockIdx.z];
  const int first_byte = block.first_dim * static_cast<int>(sizeof(float));
  const int num_tiles = divide_up(p.num_rows, kTileM);
  float4 sum[Tile::kQuads] = {};
  for (int tile = blockIdx.y * kWarps + threadIdx.x / kWarpSize; tile < num_tiles; tile += gridDim.y * kWarps) {
#pragma unroll 1
    for (int first = 0; first < kTileM; first += Tile::kBatch * Tile::kWarpRows) {
      u32 words[Tile::kBatch][Tile::kChunks][kDims], features[Tile::kBatch][4];
#pragma unroll
      for (int i = 0; i < Tile::kBatch; ++i) {
        const int row = kTileM * tile + first + i * Tile::kWarpRows + lane / Tile::kLanes;
        const bool exists = row < p.num_rows;
#pragma unroll
        for (int chunk = 0; chunk < Tile::kChunks; ++chunk) {
          const int chunk_byte = first_byte + 4 * kDims * Tile::chunk(chunk, lane);
          Tile::template load<16>(words[i][chunk], rows + static_cast<i64>(row) * row_bytes, chunk_byte, exists);
        }
        const i64 source = static_cast<i64>(row) * p.sum_columns + 4 * (lane % kQuarters);
        load_words<16>(features[i], element_address<Element::kFloat>(feature_sums, source), exists);
      }
#pragma unroll
      for (int i = 0; i < Tile::kBatch; ++i) {
        float x[4];
        unpack_words<Element::kFloat>(x, features[i]);
#pragma unroll
        for (int quad = 0; quad < Tile::kQuads; ++quad) {
          const float of_row = __uint_as_float(words[i][quad / kDims][quad % kDims]);
          sum[quad].x = fmaf(of_row, x[0], sum[quad].x), sum[quad].y = fmaf(of_row, x[1], sum[quad].y);
          sum[quad].z = fmaf(of_row, x[2], sum[quad].z), sum[quad].w = fmaf(of_row, x[3], sum[quad].w);
        }
      }
    }
  }
#pragma unroll
  for (int distance = Tile::kLanes; distance < kWarpSize; distance *= 2) {
#pragma unroll
    for (float4& each : sum) {
      each.x += __shfl_xor_sync(kFullWarp, each.x, distance), each.y += __shfl_xor_sync(kFullWarp, each.y, distance);
      each.z += __shfl_xor_sync(kFullWarp, each.z, distance), each.w += __shfl_xor_sync(kFullWarp, each.w, distance);
    }
  }
  store_weight_gradient<Element::kFloat>(sum, block, p);
}
