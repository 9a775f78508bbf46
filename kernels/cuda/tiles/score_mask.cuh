// The mask of a KV tile for the eight scores of a lane: C fragments of keys 0 to 7 and 8 to 15.
#pragma once
#include "common.cuh"
#include "tiles/forward_params.cuh"
#include "ptx/ld_shared.cuh"

// +infinity for an edge, -infinity for none: fminf(score, limit) masks, and keeps NaN scores from passing as 0.
__device__ __forceinline__ void load_mask(float (&limit)[2][4], u32 record, int g, int t) {
  const u32 bits = ld_shared_b32(record + kBitmap + sizeof(u32) * g) >> (2 * t);
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int tile = i / 4, half = i / 2 % 2, e = i % 2;
    limit[tile][2 * half + e] = bits >> (16 * half + 8 * tile + e) & 1 ? -negative_infinity() : negative_infinity();
  }
}

// Sets scores without an edge to -infinity. One head: the bits are used once, so no limits are kept.
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
