#pragma once
#include "common.cuh"

// Selects four of the eight bytes of `low` (0 to 3) and `high` (4 to 7) by the nibbles of kSelector, the lowest first.
// Bit 3 of a nibble replicates the top bit of the byte.
template <u32 kSelector>
__device__ __forceinline__ u32 prmt_b32(u32 low, u32 high) {
  u32 bytes;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(bytes) : "r"(low), "r"(high), "n"(kSelector));
  return bytes;
}
