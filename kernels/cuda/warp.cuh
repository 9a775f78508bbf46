// Reductions over the lanes of a warp; every lane gets the result.
#include "mma.cuh"
#pragma once

constexpr u32 kFullWarp = 0xffffffffu;

// A value that is the same in all lanes, in a form from which the compiler sees it: a loop bounded by it needs no code
// for lanes that leave at different times.
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

// Adds each x[i] over all lanes; returns to each lane the sum of x[lane * kValues / 32]. Halving the values that a lane
// is responsible for at each step takes kValues - 1 + log2(32 / kValues) shuffles instead of 5 kValues.
template <int kValues>
__device__ __forceinline__ float warp_sums(float (&x)[kValues], int lane) {
  static_assert(kValues == 4 || kValues == 8, "a power of two");
  int distance = kWarpSize / 2;
#pragma unroll
  for (int count = kValues / 2; count > 0; count /= 2, distance /= 2) {
    const bool upper = lane & distance;
#pragma unroll
    for (int i = 0; i < count; ++i) {
      const float kept = upper ? x[count + i] : x[i];
      const float sent = upper ? x[i] : x[count + i];
      x[i] = kept + __shfl_xor_sync(kFullWarp, sent, distance);
    }
  }
#pragma unroll
  for (; distance > 0; distance /= 2) x[0] += __shfl_xor_sync(kFullWarp, x[0], distance);
  return x[0];
}
