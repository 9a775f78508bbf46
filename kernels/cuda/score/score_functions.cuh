// Functions of score expressions (kernels/terms/score_source.py) that propagate NaN; fmaxf and fminf do not.
#pragma once
__device__ __forceinline__ float maximum(float x, float y) { return x > y || x != x ? x : y; }
__device__ __forceinline__ float minimum(float x, float y) { return x < y || x != x ? x : y; }
__device__ __forceinline__ float clamped(float x, float low, float high) {
  return x < low || low != low ? low : x > high || high != high ? high : x;
}
