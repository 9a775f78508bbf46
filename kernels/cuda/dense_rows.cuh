// 64 rows of the dense block (dense_block.cu) in the registers of a warpgroup: load, store, LayerNorm.
#pragma once
#include "common.cuh"
#include "dense_tiles.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ld_global.cuh"

// Dimensions that are permuted among themselves: groups of 32, and 16 that may be left at the end.
//
//                  column of a product   stands for dimension   of lane t
//   group s        32s + 8w + 2t + b     32s + 8t + 2w + b      32s + 8t to 32s + 8t + 7: 16 bytes   w = 0 .. 3
//   16 at the end  32s + 8w + 2t + b     32s + 4t + 2w + b      32s + 4t to 32s + 4t + 3:  8 bytes   w = 0, 1
constexpr int kPermuteGroup = 32;

// A lane's part of [64][kColumns], n-tile j, row g + 8r of the warp, column 8j + 2t + b: fp32 acc[4j + 2r + b]; 16-bit
// frag[2j + r], b = 0 in the lower half-word.
template <int kColumns>
using Acc = float[kColumns / 2];
template <int kColumns>
using Frag = u32[kColumns / 4];

// The words of a fragment in the order in which they are loaded, row g, then row g + 8 of each group of dimensions: a
// load of 16 bytes fills neighbouring registers. To bring them into a fragment's order is to wait for the load.
template <int kColumns>
using Loaded = Frag<kColumns>;
// Where word i of a fragment is.
template <int kCount>
__device__ constexpr int loaded_word(int i) {
  const int s = i / 8, w = i % 8 / 2, r = i % 2;
  return 8 * s + (s < kCount / 8 ? 4 : 2) * r + w;
}

// The two rows of a lane: `first` and first + 8.
struct Rows {
  i64 first;
  bool in_range[2];
  __device__ __forceinline__ Rows(int row_tile, int lane_row, int num_rows) {
    first = static_cast<i64>(row_tile) * kWarpgroupM + lane_row;
    in_range[0] = first < num_rows;
    in_range[1] = first + 8 < num_rows;
  }
  // Row that is loaded, row 0 in place of one out of range: with a choice between loaded words and zeros the warp would
  // wait for the words.
  __device__ __forceinline__ i64 loaded(int r) const { return in_range[r] ? first + 8 * r : 0; }
};

// From element 8t, where a lane begins, to its element 4t of the 16 dimensions at the end.
__device__ __forceinline__ int half_group_offset(int groups) {
  return kPermuteGroup * groups - 4 * static_cast<int>(threadIdx.x % 4);
}

// Columns of a matrix of `pitch` elements a row; lane_start: the lane's first element, 8t, in row 0.
template <int kCount>
__device__ __forceinline__ void load_rows(u32 (&loaded)[kCount], const u16* lane_start, int pitch, const Rows& rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const u16* const row = lane_start + rows.loaded(r) * pitch;
#pragma unroll
    for (int s = 0; s < kCount / 8; ++s) {
      const uint4 four = ld_global_no_allocate_v4_b32(row + kPermuteGroup * s);
      loaded[8 * s + 4 * r] = four.x;
      loaded[8 * s + 4 * r + 1] = four.y;
      loaded[8 * s + 4 * r + 2] = four.z;
      loaded[8 * s + 4 * r + 3] = four.w;
    }
    if constexpr (kCount % 8 != 0) {
      constexpr int s = kCount / 8;
      const uint2 two = ld_global_no_allocate_v2_b32(row + half_group_offset(s));
      loaded[8 * s + 2 * r] = two.x;
      loaded[8 * s + 2 * r + 1] = two.y;
    }
  }
}

// Loaded words as a fragment.
template <int kCount>
__device__ __forceinline__ void to_frag(u32 (&frag)[kCount], const u32 (&loaded)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) frag[i] = loaded[loaded_word<kCount>(i)];
}

template <int kCount>
__device__ __forceinline__ void store_rows(u16* lane_start, const u32 (&frag)[kCount], int pitch, const Rows& rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    if (!rows.in_range[r]) continue;
    u16* const row = lane_start + (rows.first + 8 * r) * pitch;
#pragma unroll
    for (int s = 0; s < kCount / 8; ++s) {
      st_global_v4_b32(row + kPermuteGroup * s,
                       make_uint4(frag[8 * s + r], frag[8 * s + 2 + r], frag[8 * s + 4 + r], frag[8 * s + 6 + r]));
    }
    if constexpr (kCount % 8 != 0) {
      constexpr int s = kCount / 8;
      st_global_v2_b32(row + half_group_offset(s), make_uint2(frag[8 * s + r], frag[8 * s + 2 + r]));
    }
  }
}

// acc[...] = op(acc[...], vector[dimension]); lane_vector: vector + 8t.
template <int kCount, typename Op>
__device__ __forceinline__ void apply_vector(float (&acc)[kCount], const float* lane_vector, Op op) {
#pragma unroll
  for (int s = 0; s < kCount / 16; ++s) {
    const float4 low = *reinterpret_cast<const float4*>(lane_vector + kPermuteGroup * s);
    const float4 high = *reinterpret_cast<const float4*>(lane_vector + kPermuteGroup * s + 4);
    const float eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // 4w + 2r + b
      const int w = i / 4, b = i % 2;
      acc[16 * s + i] = op(acc[16 * s + i], eight[2 * w + b]);
    }
  }
  if constexpr (kCount % 16 != 0) {
    constexpr int s = kCount / 16;
    const float4 last = *reinterpret_cast<const float4*>(lane_vector + half_group_offset(s));
    const float four[4] = {last.x, last.y, last.z, last.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int w = i / 4, b = i % 2;
      acc[16 * s + i] = op(acc[16 * s + i], four[2 * w + b]);
    }
  }
}

template <int kCount>
__device__ __forceinline__ void add_vector(float (&acc)[kCount], const float* lane_vector) {
  apply_vector(acc, lane_vector, [](float x, float element) { return x + element; });
}

template <int kCount>
__device__ __forceinline__ void set_vector(float (&acc)[kCount], const float* lane_vector) {
  apply_vector(acc, lane_vector, [](float, float element) { return element; });
}

template <Element kElement, int kCount>
__device__ __forceinline__ void unpack_loaded(float (&acc)[2 * kCount], const u32 (&loaded)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float2 two = cvt_f32_x2<kElement>(loaded[loaded_word<kCount>(i)]);
    acc[2 * i] = two.x;
    acc[2 * i + 1] = two.y;
  }
}

template <Element kElement, int kCount>
__device__ __forceinline__ void unpack(float (&acc)[2 * kCount], const u32 (&frag)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    const float2 two = cvt_f32_x2<kElement>(frag[i]);
    acc[2 * i] = two.x;
    acc[2 * i + 1] = two.y;
  }
}

template <Element kElement, int kCount>
__device__ __forceinline__ void pack(u32 (&frag)[kCount], const float (&acc)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) frag[i] = cvt_rn_x2<kElement>(acc[2 * i], acc[2 * i + 1]);
}

template <Element kElement, int kCount>
__device__ __forceinline__ void pack_relu(u32 (&frag)[kCount], const float (&acc)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) frag[i] = cvt_rn_relu_x2<kElement>(acc[2 * i], acc[2 * i + 1]);
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(kFullWarp, x, 1);
  return x + __shfl_xor_sync(kFullWarp, x, 2);
}

// Sums of op(x) over a lane's two rows, the whole row in every lane of the quad; four chains of additions.
template <int kCount, typename Op>
__device__ __forceinline__ float2 row_sums(const float (&acc)[kCount], Op op) {
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i % 4] += op(acc[i]);
  return make_float2(quad_sum(sums[0] + sums[1]), quad_sum(sums[2] + sums[3]));
}

// Of the two rows of a lane.
struct RowStatistics {
  float mean[2];
  float scale[2];  // 1 / standard deviation
};

template <int kDim>
__device__ __forceinline__ RowStatistics layer_norm(Acc<kDim>& acc, const float* lane_weight, const float* lane_bias,
                                                    float eps) {
  const float2 sums = row_sums(acc, [](float x) { return x; });
  RowStatistics of_rows = {{sums.x / kDim, sums.y / kDim}};
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) acc[i] -= of_rows.mean[i / 2 % 2];
  const float2 squares = row_sums(acc, [](float x) { return x * x; });
  of_rows.scale[0] = rsqrtf(squares.x / kDim + eps);
  of_rows.scale[1] = rsqrtf(squares.y / kDim + eps);
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) acc[i] *= of_rows.scale[i / 2 % 2];
  apply_vector(acc, lane_weight, [](float x, float weight) { return x * weight; });
  add_vector(acc, lane_bias);
  return of_rows;
}
