// The score term (score_terms.cuh) of a KV tile, for instances of one head.
//
// Values of edges. The edges of a KV tile are consecutive slots. Each lane loads the values of its slots (lane, lane +
// 32, ...) and stores them to a 16 x 16 matrix in shared memory for each value, from which the lanes read them as C
// fragments. Entries without an edge hold old data; the mask follows later. Edge and place of a slot are loaded one KV
// tile ahead.
//
// Swizzle: rows with bit 1 set swap their halves, so that rows g to g + 3 of a read cover all banks.
//
// Values of columns. Lane `key` and lane `key` + 16 load those of a key one KV tile ahead (GatheredValues).
#pragma once
#include "common.cuh"
#include "fused3s_params.cuh"
#include "gathered_values.cuh"
#include "ptx/ld_shared.cuh"
#include "score_terms.cuh"

constexpr int kTileValues = kTileM * kTileKeys;  // of a matrix

// Four floats in place of a matrix for an instance without values of edges.
template <int kTerms>
struct __align__(16) TileTermsMemory {
  static constexpr int kEdgeValues = ScoreTerm<Element::kHalf, kTerms>::kEdgeValues;
  float values[kEdgeValues > 0 ? kTileValues * kEdgeValues : 4];
};

template <Element kIn, int kTerms>
struct TileTerms {
  using Term = ScoreTerm<kIn, kTerms>;

  const Params& p;
  const int lane;
  TileTermsMemory<kTerms>& memory;
  const int* tile_slots;   // first slot of the next KV tile but one
  int first, next, after;  // first slot of the KV tile and of the two behind it
  int edge, place;         // of slot first + lane
  Term of_row[2];          // values of rows g and g + 8 of the window, and of the head
  GatheredValues<Term::kColumnValues> of_columns;

  __device__ __forceinline__ TileTerms(const Params& p, int lane, TileTermsMemory<kTerms>& memory)
      : p(p), lane(lane), memory(memory) {}

  //   row      of A, for rows g and g + 8 of the window; num_rows and more for none
  //   record   of the first KV tile
  __device__ __forceinline__ void start(int begin, int count, const int (&row)[2], u32 record) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      of_row[half].load_row(p, row[half], blockIdx.y);
      of_row[half].load_head(p, blockIdx.y);
    }
    prefetch_columns(record, count > 0);
    if constexpr (Term::kEdgeValues > 0) {
      tile_slots = p.tile_slots + begin;
      first = __ldg(tile_slots), next = __ldg(tile_slots + 1), after = __ldg(tile_slots + 2);
      tile_slots += 2;
      load_slot(first + lane, count > 0 ? next : first);
    }
  }
  __device__ __forceinline__ void load_slot(int slot, int end) {
    if (slot < end) edge = __ldg(p.slot_edges + slot), place = __ldg(p.slot_places + slot);
  }

  // Loads the values of the columns of the KV tile in `record`, which `advance` makes current.
  __device__ __forceinline__ void prefetch_columns(u32 record, bool exists) {
    of_columns.prefetch(p.column_values, p.column_value_heads, record, lane, exists);
  }

  // Values of the KV tile's edges to shared memory; loads the next KV tile's slots. Before: __syncwarp since `apply`.
  __device__ __forceinline__ void scatter() {
    if constexpr (Term::kEdgeValues > 0) {
      for (int slot = first + lane; slot < next; slot += kWarpSize) {
        if (slot != first + lane) load_slot(slot, next);
        float* const target = memory.values + (place ^ (place >> 5 & 1) << 3);
        Term term;
        term.load_edge(p, edge, blockIdx.y);
#pragma unroll
        for (int i = 0; i < Term::kEdgeValues; ++i) target[kTileValues * i] = term.values.edge[i];
      }
      first = next, next = after, after = __ldg(++tile_slots);
      load_slot(first + lane, next);
    }
  }

  // Scores of the lane, as C fragments of two n-tiles: from <q, k> to s, times log2(e). Before: __syncwarp since
  // `scatter`.
  __device__ __forceinline__ void apply(float (&score)[2][4], int g, int t) const {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      Term of_key[2];
#pragma unroll
      for (int e = 0; e < 2; ++e) of_columns.of_key(of_key[e].values.column, kTileN * tile + 2 * t + e);
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int at = (8 * half + g) * kTileKeys + ((kTileN * tile) ^ (g & 2) << 2) + 2 * t;
        if constexpr (Term::kEdgeValues > 0) load_pair(of_key, memory.values + at);
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          Term term = of_row[half];
          copy(term.values.column, of_key[e].values.column);
          copy(term.values.edge, of_key[e].values.edge);
          float& x = score[tile][2 * half + e];
          x = term.apply(x * p.product_scale, p);
        }
      }
    }
  }

  // Values of edges of two neighbouring scores.
  __device__ static __forceinline__ void load_pair(Term (&terms)[2], const float* source) {
#pragma unroll
    for (int i = 0; i < Term::kEdgeValues; ++i) {
      const float2 pair = *reinterpret_cast<const float2*>(source + kTileValues * i);
      terms[0].values.edge[i] = pair.x, terms[1].values.edge[i] = pair.y;
    }
  }
};
