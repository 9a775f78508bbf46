#pragma once
#include "common.cuh"

// Number of the SM that this thread runs on.
__device__ __forceinline__ int smid() {
  int number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}
