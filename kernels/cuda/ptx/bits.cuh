// Bits of a word.
#pragma once
#include "common.cuh"

// Number of bits that are 1.
__device__ __forceinline__ int popc(u32 word) {
  int count;
  asm("popc.b32 %0, %1;" : "=r"(count) : "r"(word));
  return count;
}

// Place of the highest bit that is 1; -1 for 0.
__device__ __forceinline__ int bfind(u32 word) {
  int place;
  asm("bfind.u32 %0, %1;" : "=r"(place) : "r"(word));
  return place;
}
