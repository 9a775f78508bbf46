// mma.sync.aligned.m16n8k8: C[16, 8] (fp32) += A[16, 8] * B[8, 8] in TF32. A register of A or B is a float32 whose
// lower 13 bits are ignored. Elements in the registers of a lane, with g = lane / 4 and t = lane % 4:
//
//   A0 = A[g][t]                       B0 = B[t][g]                       C0 = C[g][2t]
//   A1 = A[g+8][t]                     B1 = B[t+4][g]                     C1 = C[g][2t+1]
//   A2 = A[g][t+4]                                                        C2 = C[g+8][2t]
//   A3 = A[g+8][t+4]                                                      C3 = C[g+8][2t+1]
#pragma once
#include "common.cuh"

__device__ __forceinline__ void mma_m16n8k8_tf32(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}
