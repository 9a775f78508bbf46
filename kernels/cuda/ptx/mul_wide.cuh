#pragma once
#include "common.cuh"

// x * y as 64 bits. Added to an address that is one instruction; the compiler extends both factors to 64 bits where a
// loop has several such products, and needs four.
__device__ __forceinline__ i64 mul_wide_s32(int x, int y) {
  i64 product;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(x), "r"(y));
  return product;
}
