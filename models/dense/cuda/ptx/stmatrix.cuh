#pragma once
#include "common.cuh"

// Four 8 x 8 matrices of 16-bit elements to shared memory. Lanes 8i to 8i + 7 give the addresses of the rows of matrix
// i; register i of each lane holds it as an accumulator fragment of mma.m16n8k16 (row g, columns 2t and 2t + 1).
__device__ __forceinline__ void stmatrix_x4(u32 address, const u32 (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(r[0]), "r"(r[1]),
               "r"(r[2]), "r"(r[3])
               : "memory");
}
