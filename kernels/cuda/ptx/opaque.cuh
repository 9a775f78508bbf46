#pragma once
#include "common.cuh"

// x itself, but the compiler knows nothing about it: it computes nothing from x ahead of this place, so cheap
// expressions are made again instead of occupying registers through a loop.
template <typename T>
__device__ __forceinline__ T opaque(T x) {
  static_assert(sizeof(T) == 4, "one 32-bit register");
  asm volatile("mov.b32 %0, %0;" : "+r"(x));
  return x;
}
