// The products of feature_products.cu for float32, on CUDA cores, which round as the scores do; bound by memory.
//
//   project_query    u[h, n, c]  = sum_d q[n, h, d] W[h, d, c]     each lane its chunks of q; then the features are
//                                                                  distributed over the lanes of a head
//   add_features     O[n, h, d] += sum_c W'[h, d, c] s[h, n, c]    each lane its chunks of O
//   weight_gradient  dW[h, d, c] = sum_n q[n, h, d] t[h, n, c]     each lane chunks of q times four features
//
// Shared memory of project_query and add_features: W or W', 16 features for each of a lane's four dimensions; zero past
// kDim, past the last feature and past the last head.
#include "common.cuh"
#include "features/feature_rows.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_shared.cuh"
#include "features/weight_gradient.cuh"

constexpr int kMinBlocks = 2;  // per SM, in the grid too, without spills
constexpr int kDims = kChunkWords;  // dimensions of a chunk
constexpr int kQuarters = kFeatures / 4;

__device__ __forceinline__ void to_floats(float (&x)[4], uint4 words) {
  x[0] = __uint_as_float(words.x), x[1] = __uint_as_float(words.y);
  x[2] = __uint_as_float(words.z), x[3] = __uint_as_float(words.w);
}

template <int kDim>
struct FloatRow : HeadRow<kDim, sizeof(float)> {
  using Base = HeadRow<kDim, sizeof(float)>;
  static constexpr int kWeights = Base::kQuads * kQuadLanes * kDims * kQuarters;  // float4 in shared memory

  // Weights of the block's heads to shared memory; all threads of the block.
  template <typename Params>
  __device__ static __forceinline__ void load_weights(float4 (&smem_weight)[kWeights], const Params& p) {
    for (int i = threadIdx.x; i < kWeights; i += kThreads) {
      const int quarter = i % kQuarters, of_chunk = i / kQuarters % kDims;
      const int t = i / (kQuarters * kDims) % kQuadLanes, quad = i / (kQuarters * kDims * kQuadLanes);
      const int head = blockIdx.x * Base::kHeads + Base::head_of(t), d = kDims * Base::chunk_of(quad, t) + of_chunk;
      float x[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int feature = 4 * quarter + j;
        const bool exists = head < p.num_heads && d < kDim && feature < p.num_features;
        const i64 index = (static_cast<i64>(head) * kDim + d) * p.num_features + feature;
        x[j] = exists ? __ldg(static_cast<const float*>(p.weight) + index) : 0.0f;
      }
      smem_weight[i] = make_float4(x[0], x[1], x[2], x[3]);
    }
    __syncthreads();
  }

  // Features 4 * quarter to 4 * quarter + 3 of a dimension of a lane's chunk; `lane_weight`: of chunk t in the first
  // quad.
  __device__ static __forceinline__ void weight(float (&x)[4], u32 lane_weight, int quad, int of_chunk, int quarter) {
    const u32 index = (quad * kQuadLanes * kDims + of_chunk) * kQuarters + quarter;
    to_floats(x, ld_shared_v4_b32(lane_weight + static_cast<u32>(sizeof(float4)) * index));
  }
};

template <int kDim>
__device__ KernelSizes project_query_float_sizes = {0, 0, kMinBlocks, FloatRow<kDim>::kHeads};

template <int kDim>
__global__ void __launch_bounds__(kThreads, kMinBlocks) project_query_float(const __grid_constant__ ProjectParams p) {
  using Row = FloatRow<kDim>;
  constexpr int kLaneFeatures = kFeatures / Row::kHeadLanes;  // features whose sums a lane stores
  __shared__ float4 smem_weight[Row::kWeights];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  Row::load_weights(smem_weight, p);

  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const int head = blockIdx.x * Row::kHeads + Row::head_of(t);
  const float* const query = static_cast<const float*>(p.query) + head * p.query_head_stride;
  const u32 lane_weight = shared_address(smem_weight + t * kDims * kQuarters);
  const int num_tiles = divide_up(p.num_rows, kTileM);
  for (int tile = blockIdx.y * kWarps + threadIdx.x / kWarpSize; tile < num_tiles; tile += gridDim.y * kWarps) {
    const int row[2] = {kTileM * tile + g, kTileM * tile + g + 8};
    float sum[2][kFeatures] = {};
#pragma unroll 1
    for (int first_quad = 0; first_quad < Row::kQuads; first_quad += Row::kBatch) {
      uint4 chunks[Row::kBatch][2];
#pragma unroll
      for (int i = 0; i < Row::kBatch; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const char* const source =
              reinterpret_cast<const char*>(query) + static_cast<i64>(row[half]) * p.query_row_bytes;
          chunks[i][half] = Row::load(source, Row::chunk_of(first_quad + i, t),
                                      head < p.num_heads && row[half] < p.num_rows);
        }
      }
#pragma unroll
      for (int i = 0; i < Row::kBatch; ++i) {
        float top[kDims], bottom[kDims];
        to_floats(top, chunks[i][0]), to_floats(bottom, chunks[i][1]);
#pragma unroll
        for (int d = 0; d < kDims; ++d) {
#pragma unroll
          for (int quarter = 0; quarter < kQuarters; ++quarter) {
            float weight[4];
            Row::weight(weight, lane_weight, first_quad + i, d, quarter);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              sum[0][4 * quarter + j] = fmaf(top[d], weight[j], sum[0][4 * quarter + j]);
              sum[1][4 * quarter + j] = fmaf(bottom[d], weight[j], sum[1][4 * quarter + j]);
            }
          }
        }
      }
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // Each step halves the features per lane; the upper lane keeps the upper half.
#pragma unroll
      for (int distance = Row::kHeadLanes / 2, count = kFeatures / 2; distance > 0; distance /= 2, count /= 2) {
        const bool is_upper = t & distance;
#pragma unroll
        for (int c = 0; c < count; ++c) {
          const float lower = sum[half][c], upper = sum[half][count + c];
          sum[half][c] =
              (is_upper ? upper : lower) + __shfl_xor_sync(kFullWarp, is_upper ? lower : upper, distance);
        }
      }
      if (head >= p.num_heads || row[half] >= p.num_rows) continue;
      const int first_feature = t % Row::kHeadLanes * kLaneFeatures;
      float* const target =
          p.projected + (static_cast<i64>(head) * p.num_rows + row[half]) * kFeatures + first_feature;
#pragma unroll
      for (int c = 0; c < kLaneFeatures; c += 4) {
        reinterpret_cast<float4*>(target)[c / 4] =
            make_float4(sum[half][c], sum[half][c + 1], sum[half][c + 2], sum[half][c + 3]);
      }
    }
  }
}

template <int kDim>
__device__ KernelSizes add_features_float_sizes = {0, 0, kMinBlocks, FloatRow<kDim>::kHeads};

template <int kDim>
__global__ void __launch_bounds__(kThreads, kMinBlocks) add_features_float(const __grid_constant__ AddParams p) {
  using Row = FloatRow<kDim>;
  __shared__ float4 smem_weight[Row::kWeights];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  Row::load_weights(smem_weight, p);

  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const int head = blockIdx.x * Row::kHeads + Row::head_of(t);
  const u32 lane_weight = shared_address(smem_weight + t * kDims * kQuarters);
  const int num_tiles = divide_up(p.num_rows, kTileM);
  for (int tile = blockIdx.y * kWarps + threadIdx.x / kWarpSize; tile < num_tiles; tile += gridDim.y * kWarps) {
    float features[2][kFeatures];
    float* output[2];
    bool exists[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = kTileM * tile + g + 8 * half;
      exists[half] = head < p.num_heads && row < p.num_rows;
      output[half] = static_cast<float*>(p.output) + (static_cast<i64>(row) * p.num_heads + head) * kDim;
      const float4* const source = reinterpret_cast<const float4*>(
          static_cast<const float*>(p.feature_sums) + (static_cast<i64>(head) * p.num_rows + row) * kFeatures);
#pragma unroll
      for (int quarter = 0; quarter < kQuarters; ++quarter) {
        const float4 v = exists[half] ? __ldg(source + quarter) : float4{};
        features[half][4 * quarter] = v.x, features[half][4 * quarter + 1] = v.y;
        features[half][4 * quarter + 2] = v.z, features[half][4 * quarter + 3] = v.w;
      }
    }
#pragma unroll 1
    for (int first_quad = 0; first_quad < Row::kQuads; first_quad += Row::kBatch) {
      uint4 chunks[Row::kBatch][2];
#pragma unroll
      for (int i = 0; i < Row::kBatch; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          chunks[i][half] = Row::load(output[half], Row::chunk_of(first_quad + i, t), exists[half]);
        }
      }
#pragma unroll
      for (int i = 0; i < Row::kBatch; ++i) {
        float top[kDims] = {}, bottom[kDims] = {};
#pragma unroll
        for (int d = 0; d < kDims; ++d) {
#pragma unroll
          for (int quarter = 0; quarter < kQuarters; ++quarter) {
            float weight[4];
            Row::weight(weight, lane_weight, first_quad + i, d, quarter);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
              top[d] = fmaf(features[0][4 * quarter + j], weight[j], top[d]);
              bottom[d] = fmaf(features[1][4 * quarter + j], weight[j], bottom[d]);
            }
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          float sum[kDims];
          to_floats(sum, chunks[i][half]);
          u32 words[kChunkWords];
#pragma unroll
          for (int d = 0; d < kDims; ++d) words[d] = __float_as_uint(sum[d] + (half == 0 ? top[d] : bottom[d]));
          Row::store(output[half], Row::chunk_of(first_quad + i, t), exists[half], words);
        }
      }
    }
  }
}

// A lane sums four features, quarter lane % 4, of kChunks chunks over every kWarpRows-th row.
template <int kDim>
struct FloatGradientTile : GradientSlice<kDim, sizeof(float)> {
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
  const i64 head_start = Tile::head() * p.head_stride[blockIdx.z];
  const char* const rows = element_address<Element::kFloat>(p.rows[blockIdx.z], head_start);
  const char* const feature_sums = element_address<Element::kFloat>(
      p.feature_sums[blockIdx.z], static_cast<i64>(Tile::head()) * p.num_rows * kFeatures);
  const int row_bytes = p.row_bytes[blockIdx.z];
  const int first_byte = Tile::first_dim() * static_cast<int>(sizeof(float));
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
        const i64 source = static_cast<i64>(row) * kFeatures + 4 * (lane % kQuarters);
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
  store_weight_gradient<Element::kFloat, Tile>(sum, p);
}
