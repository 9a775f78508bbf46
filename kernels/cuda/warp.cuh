// Reductions over the lanes of a warp; every lane gets the result, except of warp_sums.
#pragma once
#include "common.cuh"

// x, equal in all lanes, made uniform for the compiler: a loop bounded by x needs no code for divergence.
__device__ __forceinline__ int warp_uniform(int x) { return __shfl_sync(kFullWarp, x, 0); }

__device__ __forceinline__ float warp_max(float x) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
    x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, distance));
  }
  return x;
}

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) x += __shfl_xor_sync(kFullWarp, x, distance);
  return x;
}

// Sums of each x[i] over all lanes; a lane gets the sum of x[lane * kValues / 32]. Each step halves the values per
// lane: kValues - 1 + log2(32 / kValues) shuffles instead of 5 kValues.
template <int kValues>
__device__ __forceinline__ float warp_sums(float (&x)[kValues], int lane) {
  static_assert(kValues == 4 || kValues == 8, "a power of two");
  int distance = kWarpSize / 2;
#pragma unroll
  for (int count = kValues / 2; count > 0; count /= 2, distance /= 2) {
    const bool upper = lane & distance;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float own = upper ? x[count + i] : x[i];
      const float sent = upper ? x[i] : x[count + i];
      x[i] = own + __shfl_xor_sync(kFullWarp, sent, distance);
    }
  }
#pragma unroll
  for (; distance > 0; distance /= 2) x[0] += __shfl_xor_sync(kFullWarp, x[0], distance);
  return x[0];
}
