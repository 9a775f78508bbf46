// Additive attention, as in GATv2: <a, leaky_relu(q_i + k_j)> in place of <q_i, k_j>. Edge-by-edge kernels.
#pragma once
#include "edges/lane_group.cuh"

__device__ __forceinline__ float leaky_relu(float x, float slope) { return x > 0.0f ? x : slope * x; }

// The part of a lane's dimensions in <a, leaky_relu(q + k)>.
template <int kLaneDims>
__device__ __forceinline__ float additive_product(const float (&a)[kLaneDims], const float (&q)[kLaneDims],
                                                  const float (&k)[kLaneDims], float slope) {
  float sum = 0.0f;
#pragma unroll
  for (int d = 0; d < kLaneDims; ++d) sum = fmaf(a[d], leaky_relu(q[d] + k[d], slope), sum);
  return sum;
}

// sums[d] += weight * a leaky_relu'(q + k), the gradient of q and of k. With kOfWeight sums[kOfWeight + d] += weight *
// leaky_relu(q + k), the gradient of a.
template <int kOfWeight, int kSums, int kLaneDims>
__device__ __forceinline__ void add_additive_gradients(float (&sums)[kSums], float weight, const float (&a)[kLaneDims],
                                                       const float (&q)[kLaneDims], const float (&k)[kLaneDims],
                                                       float slope) {
#pragma unroll
  for (int d = 0; d < kLaneDims; ++d) {
    const float x = q[d] + k[d];
    sums[d] = fmaf(weight, x > 0.0f ? a[d] : a[d] * slope, sums[d]);
    if constexpr (kOfWeight > 0) sums[kOfWeight + d] = fmaf(weight, leaky_relu(x, slope), sums[kOfWeight + d]);
  }
}
