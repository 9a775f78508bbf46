// The score term (score_terms.cuh) of a KV tile. Head groups support only terms of at most one value, of an edge or
// shared by all heads. Values of edges: tile_edges.cuh; of rows and columns: lane_values.cuh.
#pragma once
#include "common.cuh"
#include "tiles/forward_params.cuh"
#include "tiles/lane_values.cuh"
#include "tiles/tile_edges.cuh"
#include "score/score_terms.cuh"

// Four floats in place of a matrix for an instance without values of edges.
template <int kTerms, int kHeads = 1>
struct __align__(16) TileTermsMemory {
  static constexpr int kEdgeValues = ScoreTerm<Element::kHalf, kTerms>::kEdgeValues;
  float values[kEdgeValues > 0 ? kTileValues * kEdgeValues * kHeads : 4];
};

template <Element kIn, int kTerms, int kDim, int kHeads>
struct TileTerms {
  using Term = ScoreTerm<kIn, kTerms>;

  static constexpr bool kAhead = kHeads > 1 && kHeads <= 4;
  static constexpr bool kTight = kDim > 192 && Term::kEdgeValues > 1;
  static constexpr int kAtOnce = kHeads > 4 ? 1 : kTight ? 2 : kAhead || kDim > 192 ? 3 : 4;  // as registers permit

  const Params& p;
  const int lane;
  TileEdges<kIn, Term::kEdgeValues, kHeads, kAtOnce, kAhead, Params> of_edges;
  LaneValues<Term::kRowValues> of_rows;
  GatheredValues<Term::kColumnValues> of_columns;

  __device__ __forceinline__ TileTerms(const Params& p, int lane, TileTermsMemory<kTerms, kHeads>& memory)
      : p(p), lane(lane), of_edges(p, lane, memory.values) {}

  //   lane_row   row lane % 16 of the window in A; num_rows and more for none
  //   record     of the first KV tile
  __device__ __forceinline__ void start(int begin, int count, int lane_row, u32 record) {
    of_rows.load({p.row_values, p.row_value_heads}, min(lane_row, p.num_rows - 1));
    of_columns.start({p.column_values, p.column_value_heads}, record, lane, count > 0);
    if constexpr (Term::kEdgeValues > 0) of_edges.start(begin, count);
  }
  // Begins a KV tile, before its copies are complete.
  __device__ __forceinline__ void load_edges() {
    if constexpr (Term::kEdgeValues > 0) of_edges.load_others();
  }
  // Loads the values of columns for this iteration, or the next one.
  __device__ __forceinline__ void advance_columns(u32 record, u32 next_record, bool exists) {
    of_columns.advance({p.column_values, p.column_value_heads}, record, next_record, lane, exists);
  }
  // Once a KV tile, after __syncwarp since the last `apply`.
  __device__ __forceinline__ void scatter_edges() {
    if constexpr (Term::kEdgeValues > 0) {
      of_edges.scatter();
      of_edges.advance();
    }
  }

  // Scores of the lane and of the heads of a batch, as C fragments of two n-tiles: from <q, k> to s. Before: __syncwarp
  // since `scatter_edges`.
  template <int kBatch>
  __device__ __forceinline__ void apply(float (&score)[kBatch][2][4], int batch, int g, int t) const {
    Term term;
    term.load_head(p, blockIdx.y);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      of_rows.of(term.values.row, 8 * half + g);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        float2 pairs[kBatch][at_least_one(Term::kEdgeValues)];  // edge values of two neighbouring scores
        if constexpr (Term::kEdgeValues > 0) {
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
            const int head = min(batch * kBatch + i, kHeads - 1);
#pragma unroll
            for (int n = 0; n < Term::kEdgeValues; ++n) {
              pairs[i][n] = of_edges.pair(n, head, pair_place(half, tile, g, t));
            }
          }
        }
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          of_columns.of(term.values.column, kTileN * tile + 2 * t + e);
#pragma unroll
          for (int i = 0; i < kBatch; ++i) {
#pragma unroll
            for (int n = 0; n < Term::kEdgeValues; ++n) term.values.edge[n] = e ? pairs[i][n].y : pairs[i][n].x;
            float& x = score[i][tile][2 * half + e];
            x = term.apply(x * p.product_scale, p);
          }
        }
      }
    }
  }
};
