// cvt between float32 and two packed 16-bit elements.
#pragma once
#include "common.cuh"

// Rounded to nearest even; `low` in the lower half-word.
template <Element kElement>
__device__ __forceinline__ u32 cvt_rn_x2(float low, float high) {
  u32 word;
  if constexpr (kElement == Element::kHalf) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}

// max(low, 0) and max(high, 0), rounded to nearest even.
template <Element kElement>
__device__ __forceinline__ u32 cvt_rn_relu_x2(float low, float high) {
  u32 word;
  if constexpr (kElement == Element::kHalf) {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}

// Both elements in float32; x is the lower half-word.
template <Element kElement>
__device__ __forceinline__ float2 cvt_f32_x2(u32 word) {
  if constexpr (kElement == Element::kHalf) {
    float2 values;
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(values.x), "=f"(values.y)
        : "r"(word));
    return values;
  } else {
    return make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000));
  }
}
