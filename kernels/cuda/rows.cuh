// Rows of Q, K and O in global memory.
#pragma once
#include "common.cuh"
#include "ptx/cvt.cuh"

// Words of a 16-bit row for k-steps 2s and 2s + 1 of SDDMM: dimensions 32s + 8t to 32s + 8t + 7 in one 16-byte load,
// zero past kDim. Any order of the dimensions gives the same sum, as long as Q and K share it.
template <int kDim>
__device__ __forceinline__ uint4 load_row_words(const u16* row, int s, int t) {
  const int d = 32 * s + 8 * t;
  return d < kDim ? __ldg(reinterpret_cast<const uint4*>(row + d)) : make_uint4(0, 0, 0, 0);
}

// Two neighbouring output elements, converted to the output type.
template <Element kOut>
__device__ __forceinline__ void store_pair(void* output, i64 index, float first, float second) {
  if constexpr (kOut == Element::kFloat) {
    *reinterpret_cast<float2*>(static_cast<float*>(output) + index) = make_float2(first, second);
  } else {
    *reinterpret_cast<u32*>(static_cast<u16*>(output) + index) = cvt_rn_x2<kOut>(first, second);
  }
}
