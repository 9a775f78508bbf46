// Atomics that order no other memory access; the operations commute, so the result does not depend on their order.
#pragma once
#include "common.cuh"

__device__ __forceinline__ void red_or_shared_b32(u32 address, u32 bits) {
  asm volatile("red.relaxed.cta.shared.or.b32 [%0], %1;" ::"r"(address), "r"(bits) : "memory");
}

__device__ __forceinline__ void red_min_shared_s32(u32 address, int x) {
  asm volatile("red.relaxed.cta.shared.min.s32 [%0], %1;" ::"r"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void red_or_global_b32(int* address, u32 bits) {
  asm volatile("red.relaxed.gpu.global.or.b32 [%0], %1;" ::"l"(address), "r"(bits) : "memory");
}

// Returns the old value, which depends on the order of arrival.
__device__ __forceinline__ int atom_add_global_s32(int* address, int x) {
  int old;
  asm volatile("atom.relaxed.gpu.global.add.s32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(x) : "memory");
  return old;
}

__device__ __forceinline__ void red_add_global_s32(int* address, int x) {
  asm volatile("red.relaxed.gpu.global.add.s32 [%0], %1;" ::"l"(address), "r"(x) : "memory");
}

__device__ __forceinline__ void red_max_global_u64(i64* address, i64 x) {
  asm volatile("red.relaxed.gpu.global.max.u64 [%0], %1;" ::"l"(address), "l"(x) : "memory");
}
