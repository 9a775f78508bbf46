// Rows of Q, K and O in global memory.
#pragma once
#include "common.cuh"
#include "ptx/cvt.cuh"

// Words of a 16-bit row for k-steps 2s and 2s + 1 of SDDMM: dimensions 32s + 8t to 32s + 8t + 7 in one 16-byte load,
// zero past kDim. Any order of the dimensions gives the same sum if Q and K have the same.
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

// 4, 8 or 16 bytes of a row, aligned to their size.
template <int kCount>
__device__ __forceinline__ void load_words(u32 (&words)[kCount], const void* address) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "one load");
  if constexpr (kCount == 4) {
    const uint4 all = __ldg(static_cast<const uint4*>(address));
    words[0] = all.x, words[1] = all.y, words[2] = all.z, words[3] = all.w;
  } else if constexpr (kCount == 2) {
    const uint2 both = __ldg(static_cast<const uint2*>(address));
    words[0] = both.x, words[1] = both.y;
  } else {
    words[0] = __ldg(static_cast<const u32*>(address));
  }
}

template <int kCount>
__device__ __forceinline__ void store_words(void* address, const u32 (&words)[kCount]) {
  static_assert(kCount == 1 || kCount == 2 || kCount == 4, "one store");
  if constexpr (kCount == 4) {
    *static_cast<uint4*>(address) = make_uint4(words[0], words[1], words[2], words[3]);
  } else if constexpr (kCount == 2) {
    *static_cast<uint2*>(address) = make_uint2(words[0], words[1]);
  } else {
    *static_cast<u32*>(address) = words[0];
  }
}
