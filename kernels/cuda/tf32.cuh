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

constexpr u32 kTF32Bits = 0xffffe000u;

__device__ __forceinline__ u32 tf32_low(u32 x) {
  return __float_as_uint(__uint_as_float(x) - __uint_as_float(x & kTF32Bits));
}

// x for mma in one term: times 1 + 2^-11.5, so that the bits that mma drops round x to a neighbour in TF32, without a
// bias and within 0.7 of a unit in its last place. Values of TF32 stay what they are, NaN and infinity too (half a unit
// added to the bits would make 0 of some NaN).
constexpr float kToNearestTF32 = 1.00034527f;
__device__ __forceinline__ u32 tf32_nearest(u32 x) { return __float_as_uint(__uint_as_float(x) * kToNearestTF32); }

// Both terms of x with `high` rounded, not cut off: a fourth of the error where the other factor's is cut off.
__device__ __forceinline__ void tf32_split(u32 x, u32& high, u32& low) {
  high = tf32_nearest(x) & kTF32Bits;
  low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
}
