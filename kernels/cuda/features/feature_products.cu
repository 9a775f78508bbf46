// Products with the weights of edge features, before and after edges/forward.cu, for 16-bit tensors; bound by memory. float32: weight_gradient_float.cu, and GEMMs of cuBLAS.
//
//   project_query    u[h, n, c]  = sum_d q[n, h, d] W[h, d, c]     C[16 rows, 16 features] = q[16, kDim] W[kDim, 16]
//   add_features     O[n, h, d] += sum_c W'[h, d, c] s[h, n, c]    C[16 rows, kDim] = s[16, 16] W'^T[16, kDim]
//   weight_gradient  dW[h, d, c] = sum_n q[n, h, d] t[h, n, c]     C[kDim, 16 features] = q^T[kDim, 16] t[16 rows, 16]
//
// Grid of project_query and add_features: (head groups, row blocks). Each warp strides over tiles of 16 rows. The
// weights of the block's heads are in shared memory as B fragments, zero past kDim, past the last feature and past the
// last head. project_query has a block for each 16 features. Grid of weight_gradient: weight_gradient.cuh.
//
// Dimensions and features are permuted in the fragments so that a lane's elements are neighbours in memory; A and B, or
// B and C, have the same order. With g = lane / 4:
//
//   project_query    k-steps 2 * quad and 2 * quad + 1      A0, A2 of both: the four words of q's chunk of lane t
//                    column 2t + e of tile n of C           feature 4t + 2n + e
//   add_features     A0, A2                                 features 4t to 4t + 3
//                    column 2t + e of tile n of C           element 2n + e of O's chunk of lane t
//   weight_gradient  rows g and g + 8 of m-tile w of C      both elements of word kLaneWords * g + w of a row of q
//                    column j of n-tile n of C              feature 2j + n
//                    columns 2t, 2t+1, 2t+8, 2t+9 of A      rows t, t + 4, t + 8, t + 12 of a tile of q and t
//
// weight_gradient transposes q and t in registers: a word in memory holds two elements of one row, a register of a
// fragment holds one element of two rows.
#include "common.cuh"
#include "elements.cuh"
#include "features/feature_rows.cuh"
#include "ptx/cvt.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_global.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/mma.cuh"
#include "ptx/mul_wide.cuh"
#include "features/weight_gradient.cuh"

constexpr int kMinBlocks = 3;  // per SM, in the grid too; leaves registers for the loads in flight

// Element [head][d][feature] of the weights [H][kDim][columns], 0 outside of them and from feature num_features on.
template <int kDim, typename Params>
__device__ __forceinline__ u32 load_weight(const Params& p, int columns, int head, int d, int feature) {
  const bool exists = head < p.num_heads && d < kDim && feature < p.num_features;
  const u16* const weight = static_cast<const u16*>(p.weight);
  return exists ? __ldg(weight + (static_cast<i64>(head) * kDim + d) * columns + feature) : 0;
}

template <Element kIn, int kDim>
__device__ KernelSizes project_query_sizes = {0, 0, kMinBlocks, HeadRow<kDim, sizeof(u16)>::kHeads};

template <Element kIn, int kDim>
__global__ void __launch_bounds__(kThreads, kMinBlocks) project_query(const __grid_constant__ ProjectParams p) {
  using Row = HeadRow<kDim, sizeof(u16)>;
  constexpr int kTiles = kFeatures / kTileN;
  __shared__ uint4 smem_weight[Row::kQuads * kTiles * kWarpSize];  // B0, B1 of both k-steps of a quad
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const int first_head = blockIdx.x * Row::kHeads, first_feature = blockIdx.z * kFeatures;
  for (int i = threadIdx.x; i < Row::kQuads * kTiles * kWarpSize; i += kThreads) {
    const int quad = i / (kTiles * kWarpSize), n = i / kWarpSize % kTiles, g = i % kWarpSize / 4, t = i % 4;
    const int head = first_head + Row::head_of(t), feature = first_feature + g / 2 * 4 + 2 * n + g % 2;
    u32 words[kChunkWords];
#pragma unroll
    for (int word = 0; word < kChunkWords; ++word) {
      const int d = 2 * (kChunkWords * Row::chunk_of(quad, t) + word);
      words[word] = load_weight<kDim>(p, p.weight_columns, head, d, feature) |
                    load_weight<kDim>(p, p.weight_columns, head, d + 1, feature) << 16;
    }
    smem_weight[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  __syncthreads();

  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const int head = first_head + Row::head_of(t);
  const char* const query = element_address<kIn>(p.query, head * p.query_head_stride);
  const u32 lane_weight = shared_address(smem_weight + lane);
  const int num_tiles = divide_up(p.num_rows, kTileM);
  for (int tile = blockIdx.y * kWarps + threadIdx.x / kWarpSize; tile < num_tiles; tile += gridDim.y * kWarps) {
    const int row[2] = {kTileM * tile + g, kTileM * tile + g + 8};
    float sum[Row::kHeads][kTiles][4] = {};
#pragma unroll 1
    for (int first_quad = 0; first_quad < Row::kQuads; first_quad += Row::kBatch) {
      uint4 chunks[Row::kBatch][2];
#pragma unroll
      for (int i = 0; i < Row::kBatch; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          chunks[i][half] = Row::load(query + static_cast<i64>(row[half]) * p.query_row_bytes,
                                      Row::chunk_of(first_quad + i, t), head < p.num_heads && row[half] < p.num_rows);
        }
      }
#pragma unroll
      for (int i = 0; i < Row::kBatch; ++i) {
        const uint4 top = chunks[i][0], bottom = chunks[i][1];
        uint4 b[kTiles];
#pragma unroll
        for (int n = 0; n < kTiles; ++n) {
          b[n] = ld_shared_v4_b32(lane_weight + sizeof(uint4) * kWarpSize * ((first_quad + i) * kTiles + n));
        }
#pragma unroll
        for (int j = 0; j < Row::kHeads; ++j) {
          const u32 mask = Row::head_of(t) == j ? 0xffffffffu : 0;  // zeros the other heads of the quad
#pragma unroll
          for (int n = 0; n < kTiles; ++n) {
            mma_m16n8k16<kIn>(sum[j][n], top.x & mask, bottom.x & mask, top.y & mask, bottom.y & mask, b[n].x, b[n].y);
            mma_m16n8k16<kIn>(sum[j][n], top.z & mask, bottom.z & mask, top.w & mask, bottom.w & mask, b[n].z, b[n].w);
          }
        }
      }
    }
#pragma unroll
    for (int j = 0; j < Row::kHeads; ++j) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (first_head + j >= p.num_heads || row[half] >= p.num_rows) continue;
        const i64 start = (static_cast<i64>(first_head + j) * p.num_rows + row[half]) * p.columns;
        float* const target = p.projected + start + first_feature;
        reinterpret_cast<float4*>(target)[t] = make_float4(sum[j][0][2 * half], sum[j][0][2 * half + 1],
                                                           sum[j][1][2 * half], sum[j][1][2 * half + 1]);
      }
    }
  }
}

// fp32(O) + product, rounded once, for a chunk of row g or g + 8.
template <Element kOut, int kTiles>
__device__ __forceinline__ void add_product(u32 (&words)[kChunkWords], const float (&product)[kTiles][4], int half) {
#pragma unroll
  for (int i = 0; i < kChunkWords; ++i) {
    if constexpr (kOut == Element::kFloat) {
      words[i] = __float_as_uint(__uint_as_float(words[i]) + product[i / 2][2 * half + i % 2]);
    } else {
      const float2 pair = cvt_f32_x2<kOut>(words[i]);
      words[i] = cvt_rn_x2<kOut>(pair.x + product[i][2 * half], pair.y + product[i][2 * half + 1]);
    }
  }
}

template <Element kIn, Element kOut, int kDim>
__device__ KernelSizes add_features_sizes = {0, 0, kMinBlocks, HeadRow<kDim, kElement_bytes<kOut>>::kHeads};

template <Element kIn, Element kOut, int kDim>
__global__ void __launch_bounds__(kThreads, kMinBlocks) add_features(const __grid_constant__ AddParams p) {
  using Row = HeadRow<kDim, kElement_bytes<kOut>>;
  constexpr int kChunkDims = kChunkWords * 4 / kElement_bytes<kOut>;
  constexpr int kTiles = kChunkDims / 2;                              // n-tiles of C per quad
  __shared__ uint4 smem_weight[Row::kQuads * kTiles / 2 * kWarpSize];  // B0, B1 of two tiles
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const int first_head = blockIdx.x * Row::kHeads;
  for (int i = threadIdx.x; i < Row::kQuads * kTiles / 2 * kWarpSize; i += kThreads) {
    const int quad = i / (kTiles / 2 * kWarpSize), first = i / kWarpSize % (kTiles / 2) * 2;
    const int g = i % kWarpSize / 4, t = i % 4;  // column g of B becomes column 2 * (g / 2) + g % 2 of C
    const int head = first_head + Row::head_of(g / 2);
    u32 words[kChunkWords];
#pragma unroll
    for (int word = 0; word < kChunkWords; ++word) {
      const int d = kChunkDims * Row::chunk_of(quad, g / 2) + 2 * (first + word / 2) + g % 2;
      const int feature = 4 * t + word % 2 * 2;
      words[word] = load_weight<kDim>(p, p.num_features, head, d, feature) |
                    load_weight<kDim>(p, p.num_features, head, d, feature + 1) << 16;
    }
    smem_weight[i] = make_uint4(words[0], words[1], words[2], words[3]);
  }
  __syncthreads();

  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const int head = first_head + Row::head_of(t);
  const u32 lane_weight = shared_address(smem_weight + lane);
  const int num_tiles = divide_up(p.num_rows, kTileM);
  for (int tile = blockIdx.y * kWarps + threadIdx.x / kWarpSize; tile < num_tiles; tile += gridDim.y * kWarps) {
    const int row[2] = {kTileM * tile + g, kTileM * tile + g + 8};
    uint2 feature_sums[Row::kHeads][2];
    char* output[2];
    bool exists[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int j = 0; j < Row::kHeads; ++j) {
        const i64 start = (static_cast<i64>(first_head + j) * p.num_rows + row[half]) * kFeatures + 4 * t;
        const char* const source = element_address<kIn>(p.feature_sums, start);
        const bool has_sums = first_head + j < p.num_heads && row[half] < p.num_rows;
        feature_sums[j][half] = has_sums ? ld_global_no_allocate_v2_b32(source) : make_uint2(0, 0);
      }
      output[half] = element_address<kOut>(p.output, (static_cast<i64>(row[half]) * p.num_heads + head) * kDim);
      exists[half] = head < p.num_heads && row[half] < p.num_rows;
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
        float product[kTiles][4];  // products of the lane's head
#pragma unroll
        for (int n = 0; n < kTiles; n += 2) {
          const u32 offset = sizeof(uint4) * kWarpSize * (((first_quad + i) * kTiles + n) / 2);
          const uint4 b = ld_shared_v4_b32(lane_weight + offset);
#pragma unroll
          for (int j = 0; j < Row::kHeads; ++j) {
            const uint2 top = feature_sums[j][0], bottom = feature_sums[j][1];
            float of_head[2][4] = {};
            mma_m16n8k16<kIn>(of_head[0], top.x, bottom.x, top.y, bottom.y, b.x, b.y);
            mma_m16n8k16<kIn>(of_head[1], top.x, bottom.x, top.y, bottom.y, b.z, b.w);
#pragma unroll
            for (int e = 0; e < 8; ++e) {
              float& x = product[n + e / 4][e % 4];
              x = j == 0 || Row::head_of(t) == j ? of_head[e / 4][e % 4] : x;
            }
          }
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const uint4 chunk = chunks[i][half];
          u32 words[kChunkWords] = {chunk.x, chunk.y, chunk.z, chunk.w};
          add_product<kOut>(words, product, half);
          Row::store(output[half], Row::chunk_of(first_quad + i, t), exists[half], words);
        }
      }
    }
  }
}

// A lane loads kLaneWords neighbouring words of a row of q (8 * kLaneWords in the slice), and one word of t.
template <int kDim>
struct GradientTile : GradientSlice<kDim, sizeof(u16)> {
  using GradientSlice<kDim, sizeof(u16)>::GradientSlice;
  static constexpr int kLaneWords = GradientSlice<kDim, sizeof(u16)>::kDims / kTileM;
  static constexpr int kNTiles = kFeatures / kTileN;
  static constexpr int kQuads = kLaneWords * kNTiles;  // C0 to C3 of n-tile quad % 2 of m-tile quad / 2
  static constexpr int kLanes = kWarpSize;
  static constexpr int kTileLoads = kTileM / 4;          // rows of a lane
  static constexpr int kBatch = kLaneWords < 4 ? 2 : 1;  // tiles whose loads are in flight together

  __device__ static __forceinline__ int dim(int quad, int lane, int i) {
    return 2 * (kLaneWords * (lane / 4) + quad / kNTiles) + i / 2;
  }
  __device__ static __forceinline__ int feature(int quad, int lane, int i) {
    return 2 * (2 * (lane % 4) + i % 2) + quad % kNTiles;
  }
};

template <Element kIn, int kDim>
__device__ KernelSizes weight_gradient_sizes = {0, 4 * GradientTile<kDim>::kPartial, kMinBlocks, GradientTile<kDim>::kDims};

template <Element kIn, int kDim>
__global__ void __launch_bounds__(kThreads, kMinBlocks)
    weight_gradient(const __grid_constant__ WeightGradientParams p) {
  using Tile = GradientTile<kDim>;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const int lane = threadIdx.x % kWarpSize, g = lane / 4, t = lane % 4;
  const Tile block(p.sum_columns / kFeatures);
  const char* const rows = element_address<kIn>(p.rows[blockIdx.z], block.head * p.head_stride[blockIdx.z]);
  const char* const feature_sums = block.template first_sum<kIn>(p);
  const int row_bytes = p.row_bytes[blockIdx.z];
  const int first_byte = block.first_dim * static_cast<int>(sizeof(u16)) + 4 * Tile::kLaneWords * g;
  const int num_tiles = divide_up(p.num_rows, kTileM), stride = gridDim.y * kWarps;
  float sum[Tile::kQuads][4] = {};
  for (int tile = blockIdx.y * kWarps + threadIdx.x / kWarpSize; tile < num_tiles; tile += Tile::kBatch * stride) {
    u32 words[Tile::kBatch][Tile::kTileLoads][Tile::kLaneWords], features[Tile::kBatch][Tile::kTileLoads];
#pragma unroll
    for (int batch = 0; batch < Tile::kBatch; ++batch) {
#pragma unroll
      for (int i = 0; i < Tile::kTileLoads; ++i) {
        const u32 row = kTileM * (static_cast<u32>(tile) + batch * stride) + 4 * i + t;  // may pass 2^31
        const bool exists = row < static_cast<u32>(p.num_rows);
        const char* const source = rows + mul_wide_s32(static_cast<int>(row), row_bytes);
        Tile::template load<4 * Tile::kLaneWords>(words[batch][i], source, first_byte, exists);
        const i64 feature = static_cast<i64>(row) * p.sum_columns + 2 * g;
        load_words<4>(&features[batch][i], element_address<kIn>(feature_sums, feature), exists);
      }
    }
#pragma unroll
    for (int batch = 0; batch < Tile::kBatch; ++batch) {
      const u32(&b)[Tile::kTileLoads] = features[batch];
#pragma unroll
      for (int word = 0; word < Tile::kLaneWords; ++word) {
        u32 a[Tile::kTileLoads];
#pragma unroll
        for (int i = 0; i < Tile::kTileLoads; ++i) a[i] = words[batch][i][word];
        const u32 a0 = low_halves(a[0], a[1]), a1 = high_halves(a[0], a[1]);
        const u32 a2 = low_halves(a[2], a[3]), a3 = high_halves(a[2], a[3]);
        mma_m16n8k16<kIn>(sum[2 * word], a0, a1, a2, a3, low_halves(b[0], b[1]), low_halves(b[2], b[3]));
        mma_m16n8k16<kIn>(sum[2 * word + 1], a0, a1, a2, a3, high_halves(b[0], b[1]), high_halves(b[2], b[3]));
      }
    }
  }
  float4 quads[Tile::kQuads];
#pragma unroll
  for (int i = 0; i < Tile::kQuads; ++i) quads[i] = make_float4(sum[i][0], sum[i][1], sum[i][2], sum[i][3]);
  store_weight_gradient<kIn>(quads, block, p);
}
