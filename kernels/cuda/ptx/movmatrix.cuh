// movmatrix: an 8 x 8 matrix of 16-bit elements, a register in each lane, transposed.
#pragma once
#include "common.cuh"

// Lane i gives elements 2 (i % 4) and the next of row i / 4, and gets those of the transposed matrix.
__device__ __forceinline__ u32 movmatrix_trans(u32 word) {
  u32 transposed;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}
