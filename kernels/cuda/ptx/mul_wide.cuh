#pragma once
#include "common.cuh"

// x * y in 64 bits. With the addition to an address this is one instruction (IMAD.WIDE); in a loop with several such
// products the compiler extends both factors to 64 bits and needs four.
__device__ __forceinline__ i64 mul_wide_s32(int x, int y) {
  i64 product;
  asm("mul.wide.s32 %0, %1, %2;" : "=l"(product) : "r"(x), "r"(y));
  return product;
}
