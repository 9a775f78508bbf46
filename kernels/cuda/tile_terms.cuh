// Edge data in the scores of a KV tile, for instances of one head.
//
// Edges of a KV tile are consecutive slots; a lane brings the values of its slots (lane, lane + 32, ...) to a 16 x 16
// matrix in shared memory, from which the lanes read them as C fragments. Places without an edge hold old data, and the
// mask comes later. The slot's edge and place are loaded one KV tile ahead.
//
// Swizzle: in rows with bit 1 set the two halves are exchanged, so that rows g to g + 3 of a read cover all banks.
#pragma once
#include "common.cuh"
#include "fused3s_params.cuh"
#include "score_terms.cuh"

template <int kTerms>
struct __align__(16) TileTermsMemory {
  float bias[kTerms & kBias ? kTileM * kTileKeys : 4];
  float multiplier[kTerms & kMultiplier ? kTileM * kTileKeys : 4];
};

template <Element kIn, int kTerms>
struct TileTerms {
  static constexpr bool kHasValues = kTerms & (kBias | kMultiplier);

  const Params& p;
  const int lane;
  TileTermsMemory<kTerms>& memory;
  const int* tile_slots;   // first slot of the next KV tile but one
  int first, next, after;  // first slot of the KV tile and of the two behind it
  int edge, place;         // of slot first + lane

  __device__ __forceinline__ TileTerms(const Params& p, int lane, TileTermsMemory<kTerms>& memory)
      : p(p), lane(lane), memory(memory) {}

  __device__ __forceinline__ void start(int begin, int count) {
    if constexpr (kHasValues) {
      tile_slots = p.tile_slots + begin;
      first = __ldg(tile_slots), next = __ldg(tile_slots + 1), after = __ldg(tile_slots + 2);
      tile_slots += 2;
      load_slot(first + lane, count > 0 ? next : first);
    }
  }
  __device__ __forceinline__ void load_slot(int slot, int end) {
    if (slot < end) edge = __ldg(p.slot_edges + slot), place = __ldg(p.slot_places + slot);
  }

  // Values of the KV tile's edges to shared memory; loads the next KV tile's slots. Before: __syncwarp since `apply`.
  __device__ __forceinline__ void scatter() {
    if constexpr (kHasValues) {
      for (int slot = first + lane; slot < next; slot += kWarpSize) {
        if (slot != first + lane) load_slot(slot, next);
        const int at = place ^ (place >> 5 & 1) << 3;
        const int head = blockIdx.y;
        if constexpr (kTerms & kBias) memory.bias[at] = edge_value<kIn>(p.bias, edge, p.bias_heads, head);
        if constexpr (kTerms & kMultiplier) {
          memory.multiplier[at] = edge_value<kIn>(p.multiplier, edge, p.multiplier_heads, head);
        }
      }
      first = next, next = after, after = __ldg(++tile_slots);
      load_slot(first + lane, next);
    }
  }

  // Scores of the lane, as C fragments of two n-tiles: from <q, k> to s, times log2(e). Before: __syncwarp since
  // `scatter`.
  __device__ __forceinline__ void apply(float (&score)[2][4], int g, int t, float scale_log2e) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const int at = (8 * half + g) * kTileKeys + ((kTileN * tile) ^ (g & 2) << 2) + 2 * t;
        float2 bias = {}, multiplier = {};
        if constexpr (kTerms & kBias) bias = *reinterpret_cast<const float2*>(memory.bias + at);
        if constexpr (kTerms & kMultiplier) multiplier = *reinterpret_cast<const float2*>(memory.multiplier + at);
        float& low = score[tile][2 * half];
        float& high = score[tile][2 * half + 1];
        low = transform_score<kTerms>(low * scale_log2e, bias.x, multiplier.x, p.clamp_log2e);
        high = transform_score<kTerms>(high * scale_log2e, bias.y, multiplier.y, p.clamp_log2e);
      }
    }
  }
};
