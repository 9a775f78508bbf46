// ld.shared by 32-bit address; volatile keeps a load after the preceding barrier.
#pragma once
#include "common.cuh"

__device__ __forceinline__ u32 ld_shared_b32(u32 address) {
  u32 word;
  asm volatile("ld.shared.b32 %0, [%1];" : "=r"(word) : "r"(address));
  return word;
}

__device__ __forceinline__ uint2 ld_shared_v2_b32(u32 address) {
  uint2 words;
  asm volatile("ld.shared.v2.b32 {%0,%1}, [%2];" : "=r"(words.x), "=r"(words.y) : "r"(address));
  return words;
}

__device__ __forceinline__ uint4 ld_shared_v4_b32(u32 address) {
  uint4 words;
  asm volatile("ld.shared.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "r"(address));
  return words;
}
