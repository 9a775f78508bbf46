// The gradients of a row window, or of a window of columns, in a warp's registers.
#pragma once
#include "common.cuh"
#include "dropout.cuh"
#include "tiles/backward_params.cuh"
#include "tiles/lane_values.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/math.cuh"
#include "score/score_terms.cuh"
#include "tiles/sum_splits.cuh"
#include "tiles/tile_edges.cuh"
#include "tiles/window_fragments.cuh"

template <Element kIn, int kDim, bool kColumns, int kDimWarps, int kTerms>
struct GradientWindow : WindowFragments<kIn, kDim, kColumns, kDimWarps> {
  using Fragments = WindowFragments<kIn, kDim, kColumns, kDimWarps>;
  using S = typename Fragments::S;
  using Term = ScoreTerm<kIn, kTerms>;
  static constexpr bool kTransforms = kTerms & kExpression;
  static constexpr int kEdgeValues = Term::kEdgeValues;
  static constexpr int kValueSums = kColumns ? Term::kColumnSums : Term::kRowSums;
  using Partial = GradientPartial<kDim, kColumns, kDimWarps, kValueSums>;
  using Fragments::g, Fragments::t, Fragments::lane, Fragments::kGrads, Fragments::kWeights;
  static constexpr bool kDrops = kTerms & kDropout;

  const BackwardParams& p;
  TileEdges<kIn, kEdgeValues, 1, kDim <= 64 ? 3 : 2, kDim <= 64, BackwardParams> of_edges;
  float negative_lse[2], delta[2];  // row pass
  LaneValues<kColumns ? Term::kColumnValues : Term::kRowValues> own_values;  // score term
  GatheredValues<kColumns ? Term::kRowValues : Term::kColumnValues> gathered_values;
  float value_sums[2][kMostValueSums] = {};
  i64 seed = 0;
  u32 own_hash[2];  // row pass: `dropout_row`; column pass: the column

  // matrices: shared memory of the warp for kEdgeValues.
  __device__ __forceinline__ GradientWindow(const BackwardParams& p, int lane, float* matrices)
      : Fragments(lane), p(p), of_edges(p, lane, matrices) {}

  // lane_row: own row lane % 16.
  __device__ __forceinline__ void start_dropout(int lane_row) {
    seed = __ldg(p.seed);
    const u32 hash = kColumns ? lane_row : dropout_row(seed, lane_row, blockIdx.y);
#pragma unroll
    for (int half = 0; half < 2; ++half) own_hash[half] = __shfl_sync(kFullWarp, hash, 8 * half + g);
  }

  // lane_row: own row lane % 16, num_rows and more for none; record: of the first of `count` KV tiles, `begin`.
  __device__ __forceinline__ void start_term(int lane_row, u32 record, int begin, int count) {
    own_values.load(kColumns ? of_columns() : of_rows(), min(lane_row, (kColumns ? p.num_cols : p.num_rows) - 1));
    gathered_values.start(kColumns ? of_rows() : of_columns(), record, lane, count > 0);
    if constexpr (kEdgeValues > 0) of_edges.start(begin, count);
  }

  // Loads the values of gathered rows for this iteration, or the next one.
  __device__ __forceinline__ void advance_values(u32 record, u32 next_record, bool exists) {
    gathered_values.advance(kColumns ? of_rows() : of_columns(), record, next_record, lane, exists);
  }
  // Loads values of the KV tile's edges, before its copies are complete.
  __device__ __forceinline__ void load_edges() {
    if constexpr (kEdgeValues > 0) of_edges.load_others();
  }
  __device__ __forceinline__ ValueSource of_rows() const { return {p.row_values, p.row_value_heads}; }
  __device__ __forceinline__ ValueSource of_columns() const { return {p.column_values, p.column_value_heads}; }

  // The score term of own row g + 8 * half and gathered row i.
  __device__ __forceinline__ Term term_of(int half, int i) const {
    Term term;
    if constexpr (kColumns) {
      own_values.of(term.values.column, 8 * half + g), gathered_values.of(term.values.row, i);
    } else {
      own_values.of(term.values.row, 8 * half + g), gathered_values.of(term.values.column, i);
    }
    term.load_head(p, blockIdx.y);
    return term;
  }

  // Row pass. stats: statistics of own row lane % 16.
  __device__ __forceinline__ void set_stats(RowStats stats) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      negative_lse[half] = __shfl_sync(kFullWarp, stats.negative_lse, 8 * half + g);
      delta[half] = __shfl_sync(kFullWarp, stats.delta, 8 * half + g);
    }
  }

  // P and dS as A fragments of SpMM. Entries without an edge are masked to 0, not multiplied: old data may be NaN.
  __device__ __forceinline__ void weights(u32 (&weight)[kWeights], u32 (&grad_score)[kWeights],
                                          const float (&score)[2][4], const float (&grad_weight)[2][4], u32 record,
                                          u32 stage) {
    const u32 bits = ld_shared_b32(record + kBitmap + sizeof(u32) * g);
    u32 gathered_hash = 0;
    if constexpr (kDrops) {
      const u32 key = ld_shared_b32(record + sizeof(int) * (lane % kTileKeys));
      gathered_hash = kColumns ? dropout_row(seed, key, blockIdx.y) : key;
    }
    if constexpr (kEdgeValues > 0) {
      of_edges.scatter();
      __syncwarp();  // the other lanes' values
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      uint4 stats;  // RowStats of gathered rows 8 * tile + 2t and 8 * tile + 2t + 1
      if constexpr (kColumns) stats = ld_shared_v4_b32(stage + S::kStats + sizeof(RowStats) * (kTileN * tile + 2 * t));
      float prob[2][2], grad[2][2];
      float2 pairs[2][at_least_one(kEdgeValues)], pair_gradients[2][at_least_one(kEdgeValues)];  // of edge values
      if constexpr (kEdgeValues > 0) {
#pragma unroll
        for (int i = 0; i < 2 * kEdgeValues; ++i) {
          pairs[i % 2][i / 2] = of_edges.pair(i / 2, 0, pair_place(i % 2, tile, g, t));
        }
      }
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        u32 hash = 0;
        if constexpr (kDrops) hash = __shfl_sync(kFullWarp, gathered_hash, kTileN * tile + 2 * t + e);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float lse = kColumns ? __uint_as_float(e ? stats.z : stats.x) : negative_lse[half];
          const float subtracted = kColumns ? __uint_as_float(e ? stats.w : stats.y) : delta[half];
          float x;
          Term term;
          if constexpr (kTransforms) {
            term = term_of(half, kTileN * tile + 2 * t + e);
#pragma unroll
            for (int i = 0; i < kEdgeValues; ++i) term.values.edge[i] = e ? pairs[half][i].y : pairs[half][i].x;
            x = ex2_approx_ftz(fmaf(term.apply(score[tile][2 * half + e] * p.scale, p), kLog2e, lse));
          } else {
            x = ex2_approx_ftz(fmaf(score[tile][2 * half + e], p.scale_log2e, lse));
          }
          float kept = x, of_weight = grad_weight[tile][2 * half + e];
          if constexpr (kDrops) {
            const bool keep =
                kColumns ? keeps(hash, own_hash[half], p.threshold) : keeps(own_hash[half], hash, p.threshold);
            kept = keep ? x : 0.0f;
            of_weight = keep ? of_weight * p.rescale : 0.0f;
          }
          prob[half][e] = kept;
          grad[half][e] = x * (of_weight - subtracted);
          if constexpr (kTransforms) {
            const bool is_edge = bits >> (16 * half + 8 * tile + 2 * t + e) & 1;  // old data may be NaN
            grad[half][e] = term.gradient(is_edge ? grad[half][e] : 0.0f, p);
            if constexpr (kColumns) {
              term.template add_column_sums<0>(value_sums[half]);
            } else {
              term.template add_row_sums<0>(value_sums[half]);
#pragma unroll
              for (int i = 0; i < kEdgeValues; ++i) {
                (e ? pair_gradients[half][i].y : pair_gradients[half][i].x) = term.gradients.edge[i];
              }
            }
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        Fragments::pack(weight, tile, half, prob[half]);
        Fragments::pack(grad_score, tile, half, grad[half]);
        if constexpr (kEdgeValues > 0 && !kColumns) {
#pragma unroll
          for (int i = 0; i < kEdgeValues; ++i) {
            of_edges.set_gradients(i, pair_place(half, tile, g, t), pair_gradients[half][i]);
          }
        }
      }
    }
    Fragments::mask(weight, grad_score, bits);
  }

  // Ends a KV tile; `stores`: whether the warp stores the gradients of its edges.
  __device__ __forceinline__ void advance_edges(bool stores) {
    if constexpr (kEdgeValues > 0) {
      if (!kColumns && stores && p.edge_value_gradients) {
        __syncwarp();  // the other lanes' gradients
        of_edges.store_gradients();
      }
      of_edges.advance();
    }
  }

  // Epilogue of kWarp: gradients to the matrices of a stage.
  __device__ __forceinline__ void round_to(u32 stage) const {
    const float factor[2] = {p.scale, p.rescale};
    Fragments::round_to(stage, factor);
  }

  // Epilogues, with score terms that have values.
  __device__ __forceinline__ void store_values(const WindowRows& rows, int window) const {
    store_value_sums<kColumns, kValueSums>(p, rows, window, value_sums, lane);
  }
  __device__ __forceinline__ void store_partial_values(FragmentPair& partial) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float (&x)[kMostValueSums] = value_sums[half];
      partial.c[half][lane] = make_float4(x[0], x[1], x[2], x[3]);
    }
  }

  // Epilogue of kBlock and of a split.
  __device__ __forceinline__ void store_partial(FragmentPair* partial) const {
#pragma unroll
    for (int i = 0; i < kGrads * 2 * S::kSlices; ++i) {
      const float* const c = this->grad[i / (2 * S::kSlices)][i % (2 * S::kSlices)];
      partial[i / 2].c[i % 2][lane] = make_float4(c[0], c[1], c[2], c[3]);
    }
  }
};
