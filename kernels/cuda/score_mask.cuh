// The mask of a KV tile: edges of a lane's eight scores, C fragments of keys 0 to 7 and 8 to 15.
#pragma once
#include "common.cuh"
#include "fused3s_params.cuh"
#include "ptx/ld_shared.cuh"

// +infinity where there is an edge, else -infinity.
__device__ __forceinline__ void load_mask(float (&limit)[2][4], u32 record, int g, int t) {
  const u32 bits = ld_shared_b32(record + kBitmap + sizeof(u32) * g) >> (2 * t);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int tile = i / 4, half = i / 2 % 2, e = i % 2;
    limit[tile][2 * half + e] = bits >> (16 * half + 8 * tile + e) & 1 ? -negative_infinity() : negative_infinity();
  }
}

// Scores without an edge become -infinity. For one head: the bits are tested in place.
__device__ __forceinline__ void mask_scores(float (&score)[2][4], u32 record, int g, int t) {
  const u32 bits = ld_shared_b32(record + kBitmap + sizeof(u32) * g) >> (2 * t);
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        float& x = score[tile][2 * half + e];
        x = bits >> (16 * half + 8 * tile + e) & 1 ? x : negative_infinity();
      }
    }
  }
}
