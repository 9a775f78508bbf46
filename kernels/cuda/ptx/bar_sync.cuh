#pragma once
#include "common.cuh"

// Named barrier 1 to 15 of the block for kThreads threads; barrier 0 is __syncthreads.
template <int kThreads>
__device__ __forceinline__ void bar_sync(int barrier) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "n"(kThreads) : "memory");
}
