// Products of float32 fragments on tensor cores, in one or three TF32 terms.
//
//   x = high + low    high: sign, exponent and 10 bits of the fraction, which is what mma reads of x; low: the rest
//   a b = high_a high_b + high_a low_b + low_a high_b    and low_a low_b, below 2^-20 |a b|, which is left out
//
// low of an infinity is NaN, and so is any product with it: with three terms an infinity in an input acts as a NaN. So may
// a product above 2^11 times the largest float32, since low may have the other sign; smaller ones become infinities.
#pragma once
#include "common.cuh"
#include "ptx/mma_tf32.cuh"

__device__ __forceinline__ u32 tf32_low(u32 x) {
  return __float_as_uint(__uint_as_float(x) - __uint_as_float(x & 0xffffe000u));
}

// C[16, 8] += A[16, 8] * B[8, 8]; fragments as in ptx/mma_tf32.cuh. The small terms come first. kFloat: `a_low`, `b_low` are
// tf32_low of `a` and `b`; kTF32 ignores both.
template <Element kElement>
__device__ __forceinline__ void mma_float(float (&c)[4], const u32 (&a)[4], const u32 (&a_low)[4], const u32 (&b)[2],
                                          const u32 (&b_low)[2]) {
  static_assert(kIsWide<kElement>, "16-bit elements have mma_m16n8k16");
  if constexpr (kElement == Element::kFloat) {
    mma_m16n8k8_tf32(c, a_low[0], a_low[1], a_low[2], a_low[3], b[0], b[1]);
    mma_m16n8k8_tf32(c, a[0], a[1], a[2], a[3], b_low[0], b_low[1]);
  }
  mma_m16n8k8_tf32(c, a[0], a[1], a[2], a[3], b[0], b[1]);
}

// x for mma in one term: times 1 + 2^-11.5, so that the bits that mma drops round x to a neighbour in TF32, without a
// bias and within 0.7 of a unit in its last place. Values of TF32 stay what they are, NaN and infinity too (half a unit
// added to the bits would make 0 of some NaN).
constexpr float kToNearestTF32 = 1.00034527f;
constexpr u32 kTF32Bits = 0xffffe000u;
__device__ __forceinline__ u32 tf32_nearest(u32 x) { return __float_as_uint(__uint_as_float(x) * kToNearestTF32); }

// Both terms of x with `high` rounded, not cut off: a fourth of the error where the other factor's is cut off.
__device__ __forceinline__ void tf32_split(u32 x, u32& high, u32& low) {
  high = tf32_nearest(x) & kTF32Bits;
  low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
}
