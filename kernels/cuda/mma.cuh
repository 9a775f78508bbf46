// The tensor-core instruction m16n8k16 and the 16-bit element types it takes, without any CUDA header.
//
// C[16, 8] (fp32) += A[16, 16] * B[16, 8]. Which element a lane's register holds, with g = lane / 4 and t = lane % 4
// (printed by `python -m kernels.fragments`, which a test compares with these lines):
//
//   A0 = A[g][2t], A[g][2t+1]          B0 = B[2t][g], B[2t+1][g]          C0 = C[g][2t]
//   A1 = A[g+8][2t], A[g+8][2t+1]      B1 = B[2t+8][g], B[2t+9][g]        C1 = C[g][2t+1]
//   A2 = A[g][2t+8], A[g][2t+9]                                           C2 = C[g+8][2t]
//   A3 = A[g+8][2t+8], A[g+8][2t+9]                                       C3 = C[g+8][2t+1]
#pragma once

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef long long i64;

constexpr int kTileM = 16;  // rows of A and C: queries of a row window
constexpr int kTileN = 8;   // columns of B and C: keys of a TCB in SDDMM, output dimensions in SpMM
constexpr int kTileK = 16;  // columns of A, rows of B: dimensions in SDDMM, keys of two TCBs in SpMM
constexpr int kWarpSize = 32;

enum class Element { kHalf, kBFloat16, kFloat };

__device__ __forceinline__ float negative_infinity() { return __int_as_float(0xff800000); }

// 2^x; exactly 0 for -infinity, NaN for NaN.
__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Two floats rounded to nearest-even and packed, `low` in the lower half-word.
template <Element kElement>
__device__ __forceinline__ u32 pack(float low, float high) {
  u32 word;
  if constexpr (kElement == Element::kHalf) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}

// The lower (or upper) half-words of two words as one word: first in the lower half.
__device__ __forceinline__ u32 low_halves(u32 first, u32 second) { return __byte_perm(first, second, 0x5410); }
__device__ __forceinline__ u32 high_halves(u32 first, u32 second) { return __byte_perm(first, second, 0x7632); }

template <Element kElement>
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
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
