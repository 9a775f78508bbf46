#pragma once
#include "common.cuh"

// Returns the pointer, hidden from the optimizer: an offset is added in one instruction; else the compiler adds it to
// one term of the pointer, and then adds the other term.
template <typename T>
__device__ __forceinline__ const T* opaque_pointer(const T* pointer) {
  asm volatile("mov.b64 %0, %0;" : "+l"(pointer));
  return pointer;
}
