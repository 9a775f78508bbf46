// Score terms (score_terms.cuh) of a KV tile, for instances of one head.
//
// Values of edges. The edges of a KV tile are consecutive slots. Each lane loads the values of its slots (lane, lane +
// 32, ...) and stores them to a 16 x 16 matrix in shared memory for each term that has values, from which the lanes
// read them as C fragments. Entries without an edge hold old data; the mask follows later. Edge and place of a slot are
// loaded one KV tile ahead.
//
// Swizzle: rows with bit 1 set swap their halves, so that rows g to g + 3 of a read cover all banks.
#pragma once
#include "common.cuh"
#include "fused3s_params.cuh"
#include "ptx/ld_shared.cuh"
#include "score_terms.cuh"

constexpr int kTileValues = kTileM * kTileKeys;  // of a matrix

// Four floats in place of a matrix that the instance lacks.
template <int kTerms>
struct __align__(16) TileTermsMemory {
  using Terms = ScoreTerms<Element::kHalf, kTerms>;
  float values[kTileValues * Terms::kNumValues + 4 * (Terms::kMostValues - Terms::kNumValues)];
};

template <Element kIn, int kTerms>
struct TileTerms {
  using Terms = ScoreTerms<kIn, kTerms>;
  static constexpr bool kHasValues = Terms::kNumValues > 0;

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
        float* target = memory.values + (place ^ (place >> 5 & 1) << 3);
        Terms terms;
        terms.load_values(p, edge, blockIdx.y, true);
        terms.for_each_value([&](float value) { *target = value, target += kTileValues; });
      }
      first = next, next = after, after = __ldg(++tile_slots);
      load_slot(first + lane, next);
    }
  }

  // Scores of the lane, as C fragments of two n-tiles: from <q, k> to s, times log2(e). Before: __syncwarp since
  // `scatter`.
  //   row      of A, for rows g and g + 8 of the window; num_rows and more for none
  //   record   of the KV tile
  __device__ __forceinline__ void apply(float (&score)[2][4], const int (&row)[2], u32 record, int g, int t) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const int at = (8 * half + g) * kTileKeys + ((kTileN * tile) ^ (g & 2) << 2) + 2 * t;
        Terms terms[2];
        load_pair(terms, memory.values + at);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          ScorePlace place{};
          if constexpr (Terms::kUsesPlace) {
            const int key = ld_shared_b32(record + sizeof(int) * (kTileN * tile + 2 * t + e));
            place = {row[half], key, static_cast<int>(blockIdx.y)};
            terms[e].load_place(p, place);
          }
          float& x = score[tile][2 * half + e];
          x = terms[e].apply(x * p.scale_log2e, place, p);
        }
      }
    }
  }

  // Values of two neighbouring scores.
  __device__ static __forceinline__ void load_pair(Terms (&terms)[2], const float* source) {
    float second[Terms::kMostValues];
    int count = 0;
    terms[0].for_each_value([&](float& value) {
      const float2 pair = *reinterpret_cast<const float2*>(source + kTileValues * count);
      value = pair.x, second[count++] = pair.y;
    });
    count = 0;
    terms[1].for_each_value([&](float& value) { value = second[count++]; });
  }
};
