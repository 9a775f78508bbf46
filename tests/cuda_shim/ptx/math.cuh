// Exact functions in place of the approximations, with their flush of subnormals to zero.
#pragma once
#include "common.cuh"

namespace shim {
inline float flushed(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0.0f, x) : x; }
}  // namespace shim

inline float ex2_approx_ftz(float x) { return shim::flushed(exp2f(shim::flushed(x))); }
inline float rcp_approx_ftz(float x) { return shim::flushed(1.0f / shim::flushed(x)); }
