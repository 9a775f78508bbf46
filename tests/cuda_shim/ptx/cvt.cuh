// cvt between float32 and packed 16-bit elements: round to nearest even, overflow to infinity, one NaN.
#pragma once
#include "common.cuh"

namespace shim {

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
