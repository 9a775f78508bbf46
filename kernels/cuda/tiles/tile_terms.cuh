// The score term (score_terms.cuh) of a KV tile. Head groups support only terms without edge values, whose row and
// column values are shared by all heads.
//
// Values of edges. The edges of a KV tile are consecutive slots. Each lane loads the values of its slots (lane, lane +
// 32, ...) and stores them to a 16 x 16 matrix in shared memory for each value, from which the lanes read them as C
// fragments. Entries without an edge hold old data, and the mask sets their scores to -infinity afterwards. The first
// slot of each lane is loaded one KV tile ahead; few KV tiles have more than 32 edges.
//
// Swizzle: rows with bit 1 set swap their halves, so that rows g to g + 3 of a read cover all banks.
//
// Values of rows and columns: lane_values.cuh.
#pragma once
#include "common.cuh"
#include "tiles/forward_params.cuh"
#include "tiles/lane_values.cuh"
#include "ptx/ld_shared.cuh"
#include "score/score_terms.cuh"

constexpr int kTileValues = kTileM * kTileKeys;  // values of a matrix

// Four floats in place of a matrix for an instance without values of edges.
template <int kTerms>
struct __align__(16) TileTermsMemory {
  static constexpr int kEdgeValues = ScoreTerm<Element::kHalf, kTerms>::kEdgeValues;
  float values[kEdgeValues > 0 ? kTileValues * kEdgeValues : 4];
};

// Place and values of kCount slots of a lane, 32 slots apart.
template <typename Term, int kCount>
struct EdgeSlots {
  int place[kCount];
  Term term[kCount];

  // Slots from `begin` on, up to `end`.
  __device__ __forceinline__ void load(const Params& p, int begin, int end, int lane) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int slot = begin + j * kWarpSize + lane;
      if (slot < end) place[j] = __ldg(p.slot_places + slot), term[j].load_edge(p, slot, blockIdx.y);
    }
  }
  __device__ __forceinline__ void store(float* values, int begin, int end, int lane) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (begin + j * kWarpSize + lane >= end) continue;
      float* const target = values + (place[j] ^ (place[j] >> 5 & 1) << 3);
#pragma unroll
      for (int i = 0; i < Term::kEdgeValues; ++i) target[kTileValues * i] = term[j].values.edge[i];
    }
  }
};

template <Element kIn, int kTerms>
struct TileTerms {
  using Term = ScoreTerm<kIn, kTerms>;
  static constexpr int kAtOnce = 4;  // slots of a lane past the first

  const Params& p;
  const int lane;
  TileTermsMemory<kTerms>& memory;
  const int* tile_slots;   // first slot of the next KV tile but one
  int first, next, after;  // first slot of the KV tile and of the two behind it
  EdgeSlots<Term, 1> slot;  // first + lane
  LaneValues<Term::kRowValues> of_rows;
  GatheredValues<Term::kColumnValues> of_columns;

  __device__ __forceinline__ TileTerms(const Params& p, int lane, TileTermsMemory<kTerms>& memory)
      : p(p), lane(lane), memory(memory) {}

  //   lane_row   row lane % 16 of the window in A; num_rows and more for none
  //   record     of the first KV tile
  __device__ __forceinline__ void start(int begin, int count, int lane_row, u32 record) {
    of_rows.load({p.row_values, p.row_value_heads}, min(lane_row, p.num_rows - 1));
    of_columns.start({p.column_values, p.column_value_heads}, record, lane, count > 0);
    if constexpr (Term::kEdgeValues > 0) {
      tile_slots = p.tile_slots + begin;
      first = __ldg(tile_slots), next = __ldg(tile_slots + 1), after = __ldg(tile_slots + 2);
      tile_slots += 2;
      slot.load(p, first, count > 0 ? next : first, lane);
    }
  }
  // Loads the values of columns for this iteration, or the next one.
  __device__ __forceinline__ void advance_columns(u32 record, u32 next_record, bool exists) {
    of_columns.advance({p.column_values, p.column_value_heads}, record, next_record, lane, exists);
  }

  // Values of the KV tile's edges to shared memory; loads those of the next KV tile. Before: __syncwarp since `apply`.
  __device__ __forceinline__ void scatter() {
    if constexpr (Term::kEdgeValues > 0) {
      slot.store(memory.values, first, next, lane);
      for (int begin = first + kWarpSize; begin < next; begin += kAtOnce * kWarpSize) {
        EdgeSlots<Term, kAtOnce> others;
        others.load(p, begin, next, lane);
        others.store(memory.values, begin, next, lane);
      }
      first = next, next = after, after = __ldg(++tile_slots);
      slot.load(p, first, next, lane);
    }
  }

  // Scores of the lane and of several heads, as C fragments of two n-tiles: from <q, k> to s. Before: __syncwarp since
  // `scatter`.
  template <int kBatch>
  __device__ __forceinline__ void apply(float (&score)[kBatch][2][4], int g, int t) const {
    Term term;
    term.load_head(p, blockIdx.y);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      of_rows.of(term.values.row, 8 * half + g);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const int at = (8 * half + g) * kTileKeys + ((kTileN * tile) ^ (g & 2) << 2) + 2 * t;
        float2 of_edges[at_least_one(Term::kEdgeValues)];  // edge values of two neighbouring scores
#pragma unroll
        for (int i = 0; i < Term::kEdgeValues; ++i) {
          of_edges[i] = *reinterpret_cast<const float2*>(memory.values + at + kTileValues * i);
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          of_columns.of(term.values.column, kTileN * tile + 2 * t + e);
#pragma unroll
          for (int i = 0; i < Term::kEdgeValues; ++i) term.values.edge[i] = e ? of_edges[i].y : of_edges[i].x;
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            float& x = score[i][tile][2 * half + e];
            x = term.apply(x * p.product_scale, p);
          }
        }
      }
    }
  }
};
