// Stores of gradients from C fragments, and split-KV of the backward pass: partials and their sums.
#pragma once
#include "common.cuh"
#include "tiles/backward_params.cuh"
#include "rows.cuh"
#include "score/score_terms.cuh"
#include "tiles/split_kv.cuh"

// C fragments of two n-tiles: 16 columns of a window.
struct FragmentPair {
  float4 c[2][kWarpSize];  // [n-tile][lane]
};

constexpr int kMostValueSums = 4;  // sums per row or column: one FragmentPair holds them for rows g and g + 8 of a lane

// The partial of a split: dQ, or dK and then dV, of all warps of a team; with kValueSums the sums of the gradients of a
// score term's values, each over the lane's gathered rows.
template <int kDim, bool kColumns, int kDimWarps, int kValueSums>
struct GradientPartial {
  static_assert(kValueSums <= kMostValueSums, "one FragmentPair");
  static constexpr int kSlices = divide_up(kDim, 2 * kTileN * kDimWarps);  // as RowPair
  static constexpr int kWarpPairs = (kColumns ? 2 : 1) * kSlices;          // pairs of one warp
  static constexpr int kGradientPairs = kDimWarps * kWarpPairs;
  static constexpr int kPairs = kGradientPairs + (kValueSums > 0);
  FragmentPair pairs[kPairs];
};

// Stores the sums of the gradients of values: those of row values and then of head values, or those of column values.
// All lanes of a warp call it. sum[half][i]: of row g + 8 * half, over the lane's gathered rows.
template <bool kColumns, int kValueSums>
__device__ __forceinline__ void store_value_sums(const BackwardParams& p, const WindowRows& rows, int window,
                                                 const float (&sum)[2][kMostValueSums], int lane) {
  const int g = lane / 4, t = lane % 4;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = rows.of(window, 8 * half + g);
    const i64 row_head = static_cast<i64>(row) * p.num_heads + blockIdx.y;
    constexpr int kOfRows = kColumns ? kValueSums : ScoreExpression::kRowValues, kOfHeads = kValueSums - kOfRows;
#pragma unroll
    for (int i = 0; i < kValueSums; ++i) {
      float x = sum[half][i];
      x += __shfl_xor_sync(kFullWarp, x, 1);
      x += __shfl_xor_sync(kFullWarp, x, 2);
      const bool of_head = i >= kOfRows;
      float* const target = kColumns ? p.column_value_gradients : of_head ? p.head_value_gradients
                                                                          : p.row_value_gradients;
      if (t != 0 || row >= rows.num_rows || !target) continue;
      target[of_head ? row_head * kOfHeads + i - kOfRows : row_head * kOfRows + i] = x;
    }
  }
}

// Output rows of the gradients of a window.
template <bool kColumns>
struct GradientTarget {
  void* const score_grad;  // dQ or dK, from dS
  void* const value_grad;  // dV, column pass
  const float scale, rescale;
  const WindowRows rows;
  const int row_heads;  // heads from one row to the next

  __device__ __forceinline__ explicit GradientTarget(const BackwardParams& p)
      : score_grad(kColumns ? p.grad_key : p.grad_query),
        value_grad(p.grad_value),
        scale(p.scale),
        rescale(p.rescale),
        rows{p.row_ids, kColumns ? p.num_cols : p.num_rows},
        row_heads(p.gradient_heads) {}

  // Stores 16 columns of a row, from `column` on; `left` and `right` are the lane's C registers of the two n-tiles.
  template <Element kIn, int kDim>
  __device__ __forceinline__ void store(bool of_value, int row, int column, int t, float2 left, float2 right) const {
    const int count = row < rows.num_rows ? kDim - column : 0;
    void* const target =
        row_output<kDim, kIn>(of_value ? value_grad : score_grad, static_cast<i64>(row) * row_heads + blockIdx.y);
    const float factor = of_value ? rescale : scale;
    store_slice<kDim, kTileN, kIn>(target, column, count, count - kTileN, t,
                                   make_float2(left.x * factor, left.y * factor),
                                   make_float2(right.x * factor, right.y * factor));
  }

  // float32: stores columns `column` + 2g and `column` + 2g + 1 of a row.
  template <int kDim>
  __device__ __forceinline__ void store_floats(bool of_value, int row, int column, int g, float2 pair) const {
    if (row >= rows.num_rows || column + 2 * g >= kDim) return;
    const float factor = of_value ? rescale : scale;
    const i64 index = (static_cast<i64>(row) * row_heads + blockIdx.y) * kDim + column + 2 * g;
    store_pair<Element::kFloat>(of_value ? value_grad : score_grad, index, pair.x * factor, pair.y * factor);
  }
};

// Sums `count` partials: the warp sums pairs warp, warp + kWarps, ... Writes a partial if `result` is given, else the
// gradients. `pair_of(i, number)`: pair `number` of partial i.
template <Element kIn, int kDim, bool kColumns, int kDimWarps, int kWarps, int kValueSums, typename PairOf>
__device__ __forceinline__ void sum_partials(const BackwardParams& p, PairOf pair_of, int count,
                                             GradientPartial<kDim, kColumns, kDimWarps, kValueSums>* result,
                                             const GradientTarget<kColumns>& target, int window, int warp, int lane) {
  using Partial = GradientPartial<kDim, kColumns, kDimWarps, kValueSums>;
  for (int number = warp; number < Partial::kPairs; number += kWarps) {
    float sum[2][4] = {};
#pragma unroll 4  // loads of several partials in flight
    for (int i = 0; i < count; ++i) {
      const FragmentPair& next = *pair_of(i, number);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float4 c = next.c[tile][lane];
        sum[tile][0] += c.x, sum[tile][1] += c.y, sum[tile][2] += c.z, sum[tile][3] += c.w;
      }
    }
    if (result) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        result->pairs[number].c[tile][lane] = make_float4(sum[tile][0], sum[tile][1], sum[tile][2], sum[tile][3]);
      }
      continue;
    }
    if constexpr (kValueSums > 0) {
      if (number == Partial::kGradientPairs) {
        store_value_sums<kColumns, kValueSums>(p, target.rows, window, sum, lane);
        continue;
      }
    }
    const int dim_warp = number / Partial::kWarpPairs, rest = number % Partial::kWarpPairs;
    const int column = 2 * kTileN * (dim_warp * Partial::kSlices + rest % Partial::kSlices);
    const int g = lane / 4, t = lane % 4;
    if constexpr (kIsWide<kIn>) {  // window_fragments.cuh
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        target.template store_floats<kDim>(rest / Partial::kSlices, target.rows.of(window, i / 2 * 8 + 2 * t + i % 2),
                                           column, g, make_float2(sum[i / 2][i % 2], sum[i / 2][i % 2 + 2]));
      }
    } else {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        target.template store<kIn, kDim>(rest / Partial::kSlices, target.rows.of(window, 8 * half + g), column, t,
                                         make_float2(sum[0][2 * half], sum[0][2 * half + 1]),
                                         make_float2(sum[1][2 * half], sum[1][2 * half + 1]));
      }
    }
  }
}

// Sums the partials of a block's teams. kBlock: writes the gradients. A split: writes the partial of the split; for
// each warp's pairs, the last block of the window to arrive sums the partials of all splits and writes the gradients.
// Not inlined, for the reason given at combine_block of split_kv.cuh.
//   block_partials  [kTeams][kDimWarps] pairs of a warp, `stride` bytes apart
//   value_sums      [kWarps], of the first warp of each team; with kValueSums
//   split           kBlock, or the split
template <Element kIn, int kDim, bool kColumns, int kDimWarps, int kWarps, int kValueSums>
__device__ __noinline__ void sum_block(const char* block_partials, i64 stride, const FragmentPair* value_sums,
                                       const BackwardParams& p, int split, int first_split, int num_splits, int window,
                                       int warp, int lane) {
  using Partial = GradientPartial<kDim, kColumns, kDimWarps, kValueSums>;
  const GradientTarget<kColumns> target(p);
  const auto of_head = [](int split) { return static_cast<i64>(split) * gridDim.y + blockIdx.y; };
  Partial* const partial = static_cast<Partial*>(p.partial);
  Partial* const result = split == kBlock ? nullptr : partial + of_head(split);
  const auto pair_of_team = [&](int team, int number) {
    if (kValueSums > 0 && number == Partial::kGradientPairs) return value_sums + team * kDimWarps;
    const int dim_warp = number / Partial::kWarpPairs;
    return reinterpret_cast<const FragmentPair*>(block_partials + (team * kDimWarps + dim_warp) * stride) +
           number % Partial::kWarpPairs;
  };
  sum_partials<kIn, kDim, kColumns, kDimWarps, kWarps, kValueSums>(p, pair_of_team, kWarps / kDimWarps, result, target,
                                                                   window, warp, lane);
  if (!result || !arrive_is_last(p.semaphores + of_head(first_split) * kWarps + warp, num_splits, lane)) return;
  const auto pair_of_split = [&](int i, int number) -> const FragmentPair* {
    return &partial[of_head(first_split + i)].pairs[number];
  };
  sum_partials<kIn, kDim, kColumns, kDimWarps, kWarps, kValueSums>(
      p, pair_of_split, num_splits, static_cast<Partial*>(nullptr), target, window, warp, lane);
}
