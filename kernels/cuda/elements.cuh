// Loads and stores of 16-bit and float32 elements in the kernels without tensor cores.
#pragma once
#include "common.cuh"
#include "ptx/cvt.cuh"

// Address of an element of a tensor.
template <Element kElement>
__device__ __forceinline__ const char* element_address(const void* tensor, i64 index) {
  return static_cast<const char*>(tensor) + index * kElement_bytes<kElement>;
}
template <Element kElement>
__device__ __forceinline__ char* element_address(void* tensor, i64 index) {
  return static_cast<char*>(tensor) + index * kElement_bytes<kElement>;
}

template <Element kElement>
__device__ __forceinline__ float load_element(const void* address) {
  if constexpr (kIsWide<kElement>) {
    return __ldg(static_cast<const float*>(address));
  } else {
    return cvt_f32_x2<kElement>(__ldg(static_cast<const u16*>(address))).x;
  }
}

// kBytes from an aligned address; 0 unless `exists`.
template <int kBytes>
__device__ __forceinline__ void load_words(u32* words, const void* address, bool exists) {
  static_assert(kBytes == 16 || kBytes == 8 || kBytes == 4, "one instruction");
  if constexpr (kBytes == 16) {
    const uint4 v = exists ? __ldg(static_cast<const uint4*>(address)) : make_uint4(0, 0, 0, 0);
    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
  } else if constexpr (kBytes == 8) {
    const uint2 v = exists ? __ldg(static_cast<const uint2*>(address)) : make_uint2(0, 0);
    words[0] = v.x, words[1] = v.y;
  } else {
    words[0] = exists ? __ldg(static_cast<const u32*>(address)) : 0;
  }
}

template <Element kElement, int kCount, int kWords>
__device__ __forceinline__ void unpack_words(float (&x)[kCount], const u32 (&words)[kWords]) {
  static_assert(kCount * kElement_bytes<kElement> == 4 * kWords, "all of the words");
#pragma unroll
  for (int i = 0; i < kWords; ++i) {
    if constexpr (kIsWide<kElement>) {
      x[i] = __uint_as_float(words[i]);
    } else {
      const float2 pair = cvt_f32_x2<kElement>(words[i]);
      x[2 * i] = pair.x, x[2 * i + 1] = pair.y;
    }
  }
}

// kCount elements, 1 or an even number, to an address aligned to all of them or to 16 bytes.
template <Element kElement, int kCount>
__device__ __forceinline__ void store_elements(void* address, const float (&x)[kCount]) {
  if constexpr (kCount == 1) {
    if constexpr (kIsWide<kElement>) {
      *static_cast<float*>(address) = x[0];
    } else {
      *static_cast<u16*>(address) = static_cast<u16>(cvt_rn_x2<kElement>(x[0], 0.0f));
    }
  } else {
    constexpr int kWords = kCount * kElement_bytes<kElement> / 4;
    u32 words[kWords];
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      if constexpr (kIsWide<kElement>) {
        words[i] = __float_as_uint(x[i]);
      } else {
        words[i] = cvt_rn_x2<kElement>(x[2 * i], x[2 * i + 1]);
      }
    }
    if constexpr (kWords % 4 == 0) {
#pragma unroll
      for (int i = 0; i < kWords; i += 4) {
        static_cast<uint4*>(address)[i / 4] = make_uint4(words[i], words[i + 1], words[i + 2], words[i + 3]);
      }
    } else if constexpr (kWords == 2) {
      *static_cast<uint2*>(address) = make_uint2(words[0], words[1]);
    } else {
      static_assert(kWords == 1, "1, 2 or a multiple of 4");
      *static_cast<u32*>(address) = words[0];
    }
  }
}
