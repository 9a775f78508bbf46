// movmatrix: an 8 x 8 matrix of 16-bit elements, a register in each lane, transposed.
#pragma once
#include "common.cuh"

// In: lane i holds elements 2 (i % 4) and 2 (i % 4) + 1 of row i / 4. Out: the same elements of the transposed matrix.
__device__ __forceinline__ u32 movmatrix_trans(u32 word) {
  u32 transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}
