// 16-bit elements; mma.m16n8k16 and its fragments (PTX ISA manual, "Matrix fragments for mma.m16n8k16"); ldmatrix.
#pragma once
#include "cuda.h"

typedef unsigned short u16;  // as in common.cuh
typedef unsigned int u32;
typedef unsigned long long u64;

namespace shim {

inline float half_to_float(u16 h) {
  const u32 sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
  if (rest >= 0x7c00) return __uint_as_float(sign | 0x7f800000 | (rest & 0x3ff) << 13);
  return __uint_as_float(sign | __float_as_uint(__uint_as_float(rest << 13) * 0x1p112f));
}
inline u16 float_to_half(float x) {
  const u32 bits = __float_as_uint(x), sign = bits >> 16 & 0x8000, rest = bits & 0x7fffffff;
  if (rest > 0x7f800000) return 0x7fff;
  if (rest >= 0x477ff000) return sign | 0x7c00;  // 65520 and more
  if (rest < 0x38800000) {                       // subnormal: the addition rounds to multiples of 2^-24
    return sign | (__float_as_uint(__uint_as_float(rest) + 0.5f) - __float_as_uint(0.5f));
  }
  return sign | (rest - 0x38000000 + 0xfff + (rest >> 13 & 1)) >> 13;
}
inline float bfloat_to_float(u16 b) { return __uint_as_float(static_cast<u32>(b) << 16); }
inline u16 float_to_bfloat(float x) {
  const u32 bits = __float_as_uint(x);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}

// Element i of the lane's fragment: where it lies in the matrix.
inline int mma_a_row(int lane, int i) { return (i < 2 || (i >= 4 && i < 6)) ? lane >> 2 : (lane >> 2) + 8; }
inline int mma_a_column(int lane, int i) { return i < 4 ? (lane % 4) * 2 + (i & 1) : (lane % 4) * 2 + (i & 1) + 8; }
inline int mma_b_row(int lane, int i) { return i < 2 ? (lane % 4) * 2 + (i & 1) : (lane % 4) * 2 + (i & 1) + 8; }
inline int mma_b_column(int lane, int) { return lane >> 2; }
inline int mma_c_row(int lane, int i) { return i < 2 ? lane >> 2 : (lane >> 2) + 8; }
inline int mma_c_column(int lane, int i) { return (lane % 4) * 2 + (i & 1); }

typedef float Eight __attribute__((vector_size(32)));

// What a lane brings to mma.m16n8k16; both kinds of 16-bit elements are collectives of their own.
struct MmaOperands {
  float* c;
  u32 a[4], b[2];
};
void mma_m16n8k16(bool is_half, MmaOperands own, Site site);
// TF32: the lower 13 bits of A and B are ignored.
void mma_m16n8k8_tf32(MmaOperands own, Site site);

// ldmatrix.x4, also with .trans.
void load_matrices(bool is_transposed, u32* r, u32 address, Site site);

// movmatrix.m8n8.trans.
u32 transpose_matrix(u32 word, Site site);

}  // namespace shim
