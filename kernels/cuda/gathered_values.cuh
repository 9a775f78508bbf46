// Values of a score term that belong to the gathered rows of a KV tile: columns of A, or rows in the backward pass over
// columns. Lanes `key` and `key` + 16 hold those of a key, loaded one KV tile ahead, so that no score waits for them.
#pragma once
#include "common.cuh"
#include "fused3s_params.cuh"
#include "ptx/ld_shared.cuh"
#include "score_terms.cuh"

template <int kCount>
struct GatheredValues {
  float current[at_least_one(kCount)], next[at_least_one(kCount)];

  // Loads the values of a KV tile, of tensor `values` [..][heads][kCount]; `record`: of the KV tile, if it exists.
  __device__ __forceinline__ void prefetch(const float* values, int heads, u32 record, int lane, bool exists) {
    if constexpr (kCount > 0) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) current[i] = next[i];
      if (!exists) return;
      const int key = ld_shared_b32(record + sizeof(int) * (lane % kTileKeys));
      load_values<kCount>(next, values, max(key, 0), heads, blockIdx.y);
    }
  }

  // The values of key `key` of the current KV tile. All lanes of a warp call it.
  __device__ __forceinline__ void of_key(float (&x)[at_least_one(kCount)], int key) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = __shfl_sync(kFullWarp, current[i], key);
  }
};

template <int kCount>
__device__ __forceinline__ void copy(float (&to)[kCount], const float (&from)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) to[i] = from[i];
}
