// ldmatrix: 8 x 8 matrices of 16-bit elements from shared memory into fragments.
#pragma once
#include "common.cuh"

// Four matrices. Lanes 8i to 8i + 7 give the addresses of the rows of matrix i; register i of each lane holds elements
// 2 (lane % 4) and the next of its row lane / 4: a B fragment where the rows are columns of B, such as keys in SDDMM.
__device__ __forceinline__ void ldmatrix_x4(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}

// Four matrices, transposed. Lanes 8i to 8i + 7 give the addresses of the rows of matrix i; register i of each lane
// holds it as a B fragment of mma.m16n8k16.
__device__ __forceinline__ void ldmatrix_x4_trans(u32 (&r)[4], u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(address));
}
