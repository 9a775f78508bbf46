// Gradients of the weights of edge features: dW[h, d, c] = sum_n q[n, h, d] t[h, n, c], and dW' from dO and s.
//
// Grid (H * kSlices * steps of 16 features, row blocks, weights). A block computes up to 64 dimensions of a head by 16
// features; its warps stride over tiles of 16 rows, with the sums in registers. Blocks of neighbouring features and heads
// run at the same time, so that a DRAM burst that two of them share is read once.
//
// Partials: each block sums its warps in order and writes a partial. The last block of a slice to arrive (semaphore)
// sums the partials in a fixed order: the same bits on every run.
#pragma once
#include "common.cuh"
#include "elements.cuh"
#include "features/feature_rows.cuh"
#include "ptx/atom.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/st_shared.cuh"

struct WeightGradientParams {
  const void* rows[2];          // [num_rows][H][kDim]  q or dO of each weight, any row and head stride, rows of a head
                                // aligned to 16 bytes, or to the largest power of two that divides their size
  const void* feature_sums[2];  // [H][num_rows][sum_columns]  t or s
  void* gradient[2];            // [H][kDim][num_features]  dW or dW', contiguous
  float4* partial;              // [weights][blocks of x][row blocks][kPartial]; null with one row block
  int* semaphores;              // [weights][blocks of x]  0 before and after; null with one row block
  i64 head_stride[2];           // elements
  int row_bytes[2];
  int num_rows;
  int sum_columns;   // a multiple of 16
  int num_features;  // sum_columns - 15 to sum_columns
};

// The dimensions of a head, and the features, that a block computes.
template <int kDim, int kElement_bytes>
struct GradientSlice {
  static_assert(kDim % 2 == 0 && kDim <= 256, "pairs of elements; odd head dimensions are padded by the caller");
  static constexpr int kHeadDims = kDim;
  static constexpr int kDims = kDim <= 16 ? 16 : kDim <= 32 ? 32 : 64;
  static constexpr int kSlices = divide_up(kDim, kDims);
  static constexpr int kPartial = kDims * kFeatures / 4;  // float4
  static constexpr int kRow_bytes = kDim * kElement_bytes;
  static constexpr int kAligned_bytes = kRow_bytes % 16 == 0 ? 16 : kRow_bytes % 8 == 0 ? 8 : 4;

  const int head, first_dim, first_feature;
  __device__ __forceinline__ explicit GradientSlice(int steps)
      : head(blockIdx.x / steps / kSlices),
        first_dim(blockIdx.x / steps % kSlices * kDims),
        first_feature(blockIdx.x % steps * kFeatures) {}

  // The block's features of the first row, in the sums of a weight.
  template <Element kIn>
  __device__ __forceinline__ const char* first_sum(const WeightGradientParams& p) const {
    const i64 start = static_cast<i64>(head) * p.num_rows * p.sum_columns + first_feature;
    return element_address<kIn>(p.feature_sums[blockIdx.z], start);
  }

  // Loads kBytes of a row, from byte `first` of the head on; 0 past kDim, and unless `exists`.
  template <int kBytes>
  __device__ static __forceinline__ void load(u32 (&words)[kBytes / 4], const char* row, int first, bool exists) {
    constexpr int kLoad_bytes = kBytes < kAligned_bytes ? kBytes : kAligned_bytes;
#pragma unroll
    for (int i = 0; i < kBytes; i += kLoad_bytes) {
      load_words<kLoad_bytes>(words + i / 4, row + first + i, exists && first + i < kRow_bytes);
    }
  }
};

// Sums over all warps and row blocks, and stores the gradient; all threads of the block call it. `sum`: the sums of a
// warp, in its first Tile::kLanes lanes. Tile::dim(quad, lane, i) and Tile::feature(quad, lane, i): position of element
// i of sum[quad].
template <Element kOut, typename Tile>
__device__ __forceinline__ void store_weight_gradient(float4 (&sum)[Tile::kQuads], const Tile& tile,
                                                      const WeightGradientParams& p) {
  constexpr int kPartial = Tile::kPartial, kLanes = Tile::kLanes;
  static_assert(kPartial == Tile::kQuads * kLanes, "every sum of a slice has one lane");
  __shared__ float4 smem_sum[kWarps][kPartial];
  __shared__ int smem_before[1];
  const int warp = threadIdx.x / kWarpSize, lane = threadIdx.x % kWarpSize;
  const u32 sum_address = shared_address(smem_sum);

  const auto gather = [&] {
    if (lane < kLanes) {
#pragma unroll
      for (int quad = 0; quad < Tile::kQuads; ++quad) {
        const float4 x = sum[quad];
        st_shared_v4_b32(
            sum_address + static_cast<u32>(sizeof(float4)) * (warp * kPartial + quad * kLanes + lane),
            make_uint4(__float_as_uint(x.x), __float_as_uint(x.y), __float_as_uint(x.z), __float_as_uint(x.w)));
      }
    }
    __syncthreads();
  };
  const auto sum_of_warps = [&](int index) {
    float4 total = {};
#pragma unroll
    for (int i = 0; i < kWarps; ++i) {
      const uint4 x = ld_shared_v4_b32(sum_address + static_cast<u32>(sizeof(float4)) * (i * kPartial + index));
      total.x += __uint_as_float(x.x), total.y += __uint_as_float(x.y);
      total.z += __uint_as_float(x.z), total.w += __uint_as_float(x.w);
    }
    return total;
  };

  gather();
  const int num_partials = gridDim.y;
  if (num_partials > 1) {
    const int slice = blockIdx.z * gridDim.x + blockIdx.x;
    float4* const partials = p.partial + static_cast<i64>(slice) * num_partials * kPartial;
    for (int i = threadIdx.x; i < kPartial; i += kThreads) {
      partials[static_cast<i64>(blockIdx.y) * kPartial + i] = sum_of_warps(i);
    }
    __syncthreads();  // orders the other threads' writes before the release
    if (threadIdx.x == 0) {
      st_shared_b32(shared_address(smem_before), atom_inc_acq_rel_gpu(p.semaphores + slice, num_partials - 1));
    }
    __syncthreads();  // orders the reads of the partials after the acquire
    if (ld_shared_b32(shared_address(smem_before)) != num_partials - 1) return;
#pragma unroll
    for (int quad = 0; quad < Tile::kQuads; ++quad) sum[quad] = {};
    constexpr int kUnroll = 8 / Tile::kQuads;  // loads of several partials in flight
#pragma unroll kUnroll
    for (int i = warp; i < num_partials; i += kWarps) {
#pragma unroll
      for (int quad = 0; quad < Tile::kQuads; ++quad) {
        const float4 x = partials[static_cast<i64>(i) * kPartial + quad * kLanes + lane % kLanes];
        sum[quad].x += x.x, sum[quad].y += x.y, sum[quad].z += x.z, sum[quad].w += x.w;
      }
    }
    gather();
  }
  for (int index = threadIdx.x; index < kPartial; index += kThreads) {
    const int quad = index / kLanes, of_lane = index % kLanes;
    const float4 total = sum_of_warps(index);
    const float values[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int d = tile.first_dim + Tile::dim(quad, of_lane, i);
      const int feature = tile.first_feature + Tile::feature(quad, of_lane, i);
      if (d >= Tile::kHeadDims || feature >= p.num_features) continue;
      const i64 place = (static_cast<i64>(tile.head) * Tile::kHeadDims + d) * p.num_features + feature;
      const float value[1] = {values[i]};
      store_elements<kOut>(element_address<kOut>(p.gradient[blockIdx.z], place), value);
    }
  }
}
