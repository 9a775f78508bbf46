// st.shared by 32-bit address; volatile keeps a store between the barriers around it.
#pragma once
#include "common.cuh"

__device__ __forceinline__ void st_shared_b32(u32 address, u32 word) {
  asm volatile("st.shared.b32 [%0], %1;" ::"r"(address), "r"(word) : "memory");
}

__device__ __forceinline__ void st_shared_v2_b32(u32 address, uint2 words) {
  asm volatile("st.shared.v2.b32 [%0], {%1,%2};" ::"r"(address), "r"(words.x), "r"(words.y) : "memory");
}

__device__ __forceinline__ void st_shared_v4_b32(u32 address, uint4 words) {
  asm volatile("st.shared.v4.b32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(words.x), "r"(words.y), "r"(words.z),
               "r"(words.w)
               : "memory");
}
