// cvt between float32 and packed 16-bit elements: round to nearest even, overflow to infinity, one NaN.
#pragma once
#include "common.cuh"

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
template <Element kElement>
inline float to_float(u16 element) {
  return kElement == Element::kHalf ? half_to_float(element) : bfloat_to_float(element);
}
template <Element kElement>
inline u16 from_float(float x) {
  return kElement == Element::kHalf ? float_to_half(x) : float_to_bfloat(x);
}

}  // namespace shim

template <Element kElement>
inline u32 cvt_rn_x2(float low, float high) {
  return static_cast<u32>(shim::from_float<kElement>(high)) << 16 | shim::from_float<kElement>(low);
}
template <Element kElement>
inline u32 cvt_rn_relu_x2(float low, float high) {
  return cvt_rn_x2<kElement>(low < 0 ? 0.0f : low, high < 0 ? 0.0f : high);
}
template <Element kElement>
inline float2 cvt_f32_x2(u32 word) {
  return {shim::to_float<kElement>(word & 0xffff), shim::to_float<kElement>(word >> 16)};
}
