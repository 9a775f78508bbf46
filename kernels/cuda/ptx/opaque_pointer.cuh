#pragma once
#include "common.cuh"

// The pointer itself, but the compiler knows nothing about it: offsets are added to it in one instruction, where they
// would be added to one of its terms first, and the other term after that.
template <typename T>
__device__ __forceinline__ const T* opaque_pointer(const T* pointer) {
  asm volatile("mov.b64 %0, %0;" : "+l"(pointer));
  return pointer;
}
