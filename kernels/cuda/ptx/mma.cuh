// mma.sync.aligned.m16n8k16: C[16, 8] (fp32) += A[16, 16] * B[16, 8], A and B in fp16 or bf16. m16n8k8: the first eight
// columns of A and rows of B, in A0, A1 and B0.
//
// Elements in each lane's registers, with g = lane / 4 and t = lane % 4
// (a test compares these lines with bench/fragments.py):
//
//   A0 = A[g][2t], A[g][2t+1]          B0 = B[2t][g], B[2t+1][g]          C0 = C[g][2t]
//   A1 = A[g+8][2t], A[g+8][2t+1]      B1 = B[2t+8][g], B[2t+9][g]        C1 = C[g][2t+1]
//   A2 = A[g][2t+8], A[g][2t+9]                                           C2 = C[g+8][2t]
//   A3 = A[g+8][2t+8], A[g+8][2t+9]                                       C3 = C[g+8][2t+1]
#pragma once
#include "common.cuh"

template <Element kElement>
__device__ __forceinline__ void mma_m16n8k16(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
  if constexpr (kElement == Element::kHalf) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  } else {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  }
}

template <Element kElement>
__device__ __forceinline__ void mma_m16n8k8(float (&c)[4], u32 a0, u32 a1, u32 b0) {
  if constexpr (kElement == Element::kHalf) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
  } else {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(b0));
  }
}
