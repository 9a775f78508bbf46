// Products of float32 fragments on tensor cores, in one or three TF32 terms.
//
//   x = high + low    high: sign, exponent and 10 bits of the fraction, which is what mma reads of x; low: the rest
//   a b = high_a high_b + high_a low_b + low_a high_b    and low_a low_b, below 2^-20 |a b|, which is left out
//
// The low term of an infinity is NaN: with three terms an infinite input acts as a NaN. A product above 2^11 times the
// largest float32 may also be NaN, because the low term may have the opposite sign; smaller ones overflow to infinity.
#pragma once
#include "common.cuh"
#include "ptx/mma_tf32.cuh"

constexpr u32 kTF32Bits = 0xffffe000u;

__device__ __forceinline__ u32 tf32_low(u32 x) {
  return __float_as_uint(__uint_as_float(x) - __uint_as_float(x & kTF32Bits));
}

// x for mma in one term: x * (1 + 2^-11.5). mma truncates the product, which rounds x to a neighbour in TF32, unbiased
// and within 0.7 ulp. TF32 values, NaN and infinity do not change (adding half an ulp to the bits would turn some NaN
// to 0).
constexpr float kToNearestTF32 = 1.00034527f;
__device__ __forceinline__ u32 tf32_nearest(u32 x) { return __float_as_uint(__uint_as_float(x) * kToNearestTF32); }

// Both terms of x, with `high` rounded instead of truncated: a quarter of the error if the other factor is truncated.
__device__ __forceinline__ void tf32_split(u32 x, u32& high, u32& low) {
  high = tf32_nearest(x) & kTF32Bits;
  low = __float_as_uint(__uint_as_float(x) - __uint_as_float(high));
}
