// 64 rows of the dense block (dense_block.cu) in the registers of a warpgroup: load, store, LayerNorm.
#pragma once
#include "common.cuh"
#include "dense_tiles.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ld_global.cuh"

// Dimensions are permuted within groups of 32, and within the 16 that may remain at the end.
//
//                  column of a product   stands for dimension   of lane t
//   group s        32s + 8w + 2t + b     32s + 8t + 2w + b      32s + 8t to 32s + 8t + 7: 16 bytes   w = 0 .. 3
//   16 at the end  32s + 8w + 2t + b     32s + 4t + 2w + b      32s + 4t to 32s + 4t + 3:  8 bytes   w = 0, 1
constexpr int kPermuteGroup = 32;

// Elements of a lane in [64][kColumns], n-tile j, row g + 8r of the warp, column 8j + 2t + b: fp32 acc[4j + 2r + b];
// 16-bit frag[2j + r], b = 0 in the lower half-word.
template <int kColumns>
using Acc = float[kColumns / 2];
template <int kColumns>
using Frag = u32[kColumns / 4];

// The words of a fragment in load order, row g, then row g + 8 of each group of dimensions: a load of 16 bytes fills
// neighbouring registers. Reordering them to a fragment waits for the load.
template <int kColumns>
using Loaded = Frag<kColumns>;
// Index of word i of a fragment in load order.
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
};

// Offset from element 8t, the first of a lane, to its element 4t of the 16 remaining dimensions.
__device__ __forceinline__ int half_group_offset(int groups) {
  return kPermuteGroup * groups - 4 * static_cast<int>(threadIdx.x % 4);
}

template <int kCount>
__device__ __forceinline__ void put_four(u32 (&words)[kCount], int first, uint4 four) {
  words[first] = four.x;
  words[first + 1] = four.y;
  words[first + 2] = four.z;
  words[first + 3] = four.w;
}

// lane_start: element 8t of row rows.first; pitch: elements of a row. Rows out of range are 0.
template <int kCount>
__device__ __forceinline__ void load_rows(u32 (&loaded)[kCount], const u16* lane_start, int pitch, const Rows& rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    // Offsets in units of uint4 become immediates; in units of u16 each address is computed.
    const uint4* const source = reinterpret_cast<const uint4*>(lane_start + 8 * r * pitch);
#pragma unroll
    for (int s = 0; s < kCount / 8; ++s) {
      put_four(loaded, 8 * s + 4 * r,
               rows.in_range[r] ? ld_global_no_allocate_v4_b32(source + 4 * s) : make_uint4(0, 0, 0, 0));
    }
    if constexpr (kCount % 8 != 0) {
      constexpr int s = kCount / 8;
      const u16* const half = lane_start + 8 * r * pitch + half_group_offset(s);
      const uint2 two = rows.in_range[r] ? ld_global_no_allocate_v2_b32(half) : make_uint2(0, 0);
      loaded[8 * s + 2 * r] = two.x;
      loaded[8 * s + 2 * r + 1] = two.y;
    }
  }
}

// Loads whole groups, with row 0 in place of rows out of range: a selection between loaded words and zeros would wait
// for the words. matrix: the lane's first element, 8t, of row 0.
template <int kCount>
__device__ __forceinline__ void load_valid_rows(u32 (&loaded)[kCount], const u16* matrix, int pitch, const Rows& rows) {
  static_assert(kCount % 8 == 0, "whole groups");
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const i64 row = rows.in_range[r] ? rows.first + 8 * r : 0;
    const uint4* const source = reinterpret_cast<const uint4*>(matrix + row * pitch);
#pragma unroll
    for (int s = 0; s < kCount / 8; ++s) {
      put_four(loaded, 8 * s + 4 * r, ld_global_no_allocate_v4_b32(source + 4 * s));
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
    uint4* const target = reinterpret_cast<uint4*>(lane_start + 8 * r * pitch);
#pragma unroll
    for (int s = 0; s < kCount / 8; ++s) {
      if (rows.in_range[r]) {
        st_global_v4_b32(target + 4 * s,
                         make_uint4(frag[8 * s + r], frag[8 * s + 2 + r], frag[8 * s + 4 + r], frag[8 * s + 6 + r]));
      }
    }
    if constexpr (kCount % 8 != 0) {
      constexpr int s = kCount / 8;
      if (rows.in_range[r]) {
        st_global_v2_b32(lane_start + 8 * r * pitch + half_group_offset(s),
                         make_uint2(frag[8 * s + r], frag[8 * s + 2 + r]));
      }
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

// op(i, d, r, x) for all loaded elements x of group s: at index i of an Acc, dimension 32s + 8t + d of row g + 8r.
template <Element kElement, int kCount, typename Op>
__device__ __forceinline__ void visit_group(const u32 (&loaded)[kCount], int s, Op op) {
#pragma unroll
  for (int w = 0; w < 4; ++w) {
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 two = cvt_f32_x2<kElement>(loaded[8 * s + 4 * r + w]);
      op(16 * s + 4 * w + 2 * r, 2 * w, r, two.x);
      op(16 * s + 4 * w + 2 * r + 1, 2 * w + 1, r, two.y);
    }
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

// Sums of op(x) over a lane's two rows, complete in every lane of the quad; four chains of additions.
template <int kCount, typename Op>
__device__ __forceinline__ float2 row_sums(const float (&acc)[kCount], Op op) {
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i % 4] += op(acc[i]);
  return make_float2(quad_sum(sums[0] + sums[1]), quad_sum(sums[2] + sums[3]));
}

// Statistics of the two rows of a lane.
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
