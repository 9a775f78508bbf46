// Dropout in a KV tile, for instances of one head.
#pragma once
#include "common.cuh"
#include "dropout.cuh"
#include "tiles/forward_params.cuh"
#include "ptx/ld_shared.cuh"

struct TileDropout {
  u32 of_row[2];  // rows g and g + 8 of the window
  u32 threshold;

  // row: of A, for rows g and g + 8 of the window.
  __device__ __forceinline__ void start(const Params& p, const int (&row)[2]) {
    const i64 seed = __ldg(p.dropout.seed);
#pragma unroll
    for (int half = 0; half < 2; ++half) of_row[half] = dropout_row(seed, row[half], blockIdx.y);
    threshold = p.dropout.threshold;
  }

  // Sets the weights of dropped edges to 0. prob: 16-bit weights as A fragments.
  __device__ __forceinline__ void apply(u32 (&prob)[4], u32 record, int t) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        const int key = ld_shared_b32(record + sizeof(int) * (kTileN * tile + 2 * t + e));
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          if (!keeps(of_row[half], key, threshold)) prob[2 * tile + half] &= e ? 0x0000ffffu : 0xffff0000u;
        }
      }
    }
  }
  // The same for float32 weights, as C fragments of both n-tiles.
  __device__ __forceinline__ void apply(float (&weight)[2][4], u32 record, int t) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int tile = i / 2, e = i % 2;
      const int key = ld_shared_b32(record + sizeof(int) * (kTileN * tile + 2 * t + e));
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (!keeps(of_row[half], key, threshold)) weight[tile][2 * half + e] = 0.0f;
      }
    }
  }
};
