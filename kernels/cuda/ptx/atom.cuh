// Atomics on global memory with an order on the memory accesses around them.
#pragma once
#include "common.cuh"

// Returns the old value. The new value is 0 if the old one was `limit`, else old + 1.
__device__ __forceinline__ int atom_inc_acq_rel_gpu(int* address, int limit) {
  int old;
  asm volatile("atom.inc.acq_rel.gpu.u32 %0, [%1], %2;" : "=r"(old) : "l"(address), "r"(limit) : "memory");
  return old;
}
