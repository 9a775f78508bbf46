#pragma once
#include "common.cuh"

// Returns x, hidden from the optimizer: nothing is computed from it before this point, so cheap expressions are
// recomputed instead of occupying registers throughout a loop.
template <typename T>
__device__ __forceinline__ T opaque(T x) {
  static_assert(sizeof(T) == 4, "one 32-bit register");
  asm volatile("mov.b32 %0, %0;" : "+r"(x));
  return x;
}
