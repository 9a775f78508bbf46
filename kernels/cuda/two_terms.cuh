// Operands of tensor-core products as sums of two 16-bit terms, which keep nearly float32 accuracy.
#pragma once
#include "common.cuh"
#include "ptx/cvt.cuh"
#include "ptx/mma.cuh"

// Splits two floats into sums of two 16-bit terms.
template <Element kIn>
__device__ __forceinline__ void split_x2(float x, float y, u32& high, u32& low) {
  high = cvt_rn_x2<kIn>(x, y);
  const float2 rounded = cvt_f32_x2<kIn>(high);
  low = cvt_rn_x2<kIn>(x - rounded.x, y - rounded.y);
}

// C fragments of two n-tiles, times the factor of each half, as A fragments: high and low terms.
template <Element kIn>
__device__ __forceinline__ void split_fragment(u32 (&parts)[2][4], const float (&c)[2][4], float top, float bottom) {
#pragma unroll
  for (int tile = 0; tile < 2; ++tile) {
    split_x2<kIn>(c[tile][0] * top, c[tile][1] * top, parts[0][2 * tile], parts[1][2 * tile]);
    split_x2<kIn>(c[tile][2] * bottom, c[tile][3] * bottom, parts[0][2 * tile + 1], parts[1][2 * tile + 1]);
  }
}

template <Element kIn>
__device__ __forceinline__ void mma_both_parts(float (&c)[4], const u32 (&parts)[2][4], u32 b0, u32 b1) {
#pragma unroll
  for (const u32(&a)[4] : parts) mma_m16n8k16<kIn>(c, a[0], a[1], a[2], a[3], b0, b1);
}

// Bits of the exponent by which `most`, the largest magnitude, exceeds 2^15, so that fp16 takes numbers divided by as
// many powers of two.
template <Element kIn>
__device__ __forceinline__ int excess_bits(float most) {
  return kIn == Element::kHalf ? max((__float_as_int(most) >> 23) - (127 + 14), 0) : 0;
}
