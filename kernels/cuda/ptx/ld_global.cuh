// ld.global and st.global of 16 or 8 bytes with a cache hint or an order that C++ cannot express.
#pragma once
#include "common.cuh"

// Read-only data; volatile keeps a series of loads before the first use.
__device__ __forceinline__ uint4 ld_global_nc_v4_b32(const void* address) {
  uint4 words;
  asm volatile("ld.global.nc.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(address));
  return words;
}

// Data that is read once.
__device__ __forceinline__ uint4 ld_global_no_allocate_v4_b32(const void* address) {
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(address));
  return words;
}

__device__ __forceinline__ uint2 ld_global_no_allocate_v2_b32(const void* address) {
  uint2 words;
  asm volatile("ld.global.L1::no_allocate.v2.b32 {%0,%1}, [%2];" : "=r"(words.x), "=r"(words.y) : "l"(address));
  return words;
}

__device__ __forceinline__ void st_global_v4_b32(void* address, uint4 words) {
  asm volatile("st.global.v4.b32 [%0], {%1,%2,%3,%4};" ::"l"(address), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}

__device__ __forceinline__ void st_global_v2_b32(void* address, uint2 words) {
  asm volatile("st.global.v2.b32 [%0], {%1,%2};" ::"l"(address), "r"(words.x), "r"(words.y) : "memory");
}
