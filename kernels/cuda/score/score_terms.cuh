// The score term: an instance with kExpression applies it to s = scale * <q_i, k_ij> before the softmax. All kernels
// share this file.
//
// The expression of the caller is compiled as struct ScoreExpression (score_expression.cuh), over s and values of row,
// column, edge and head. Its numbers are members in score_term_params.cuh, at the end of each struct Params.
//
// Unit. 16-bit kernels fold log2(e) into q, so that exp becomes ex2. With a score term the factor is applied after the
// term. float32 kernels multiply only the difference of a score from the maximum or the log-sum-exp, so that <q, k> has
// the same bits in the forward pass and in both backward passes. Gradients are those of scores without the factor.
#pragma once
#include "common.cuh"
#include "elements.cuh"
#include "ptx/math.cuh"
#include "score/score_expression.cuh"

// Bits of kTerms.
enum EdgeTerm {
  kTypes = 1,
  kKeyFeatures = 2,
  kValueFeatures = 4,
  kDropout = 8,  // dropout.cuh
  kExpression = 16,
  kAdditive = 32,   // additive_score.cuh
  kKeyFactor = 64,  // key_factor.cuh; with kAdditive: additive_score.cuh
  kWideKeys = 128,     // in place of kKeyFeatures with more than 16 columns: features/wide_features.cu
  kWideValues = 256,   // in place of kValueFeatures
  kWideFactors = 512,  // beside kKeyFactor
  kGivenWeights = 1024,  // edges/backward.cu over columns: the pass over rows wrote the weights of edges
};

template <Element kIn>
constexpr float kScoreUnit = kIsWide<kIn> ? 1.0f : kLog2e;

// Factor in scale * <q, k> before the term, and the factor that is applied after the term.
template <Element kIn, int kTerms>
constexpr float kProductUnit = kTerms & kExpression ? 1.0f : kScoreUnit<kIn>;
template <Element kIn, int kTerms>
constexpr float kLackingUnit = kTerms & kExpression ? kScoreUnit<kIn> : 1.0f;

// exp(x / kScoreUnit)
template <Element kIn>
__device__ __forceinline__ float exp_score(float x) {
  return ex2_approx_ftz(kIsWide<kIn> ? x * kLog2e : x);
}

__device__ constexpr int at_least_one(int count) { return count > 0 ? count : 1; }

// Values of an expression for one score, or their gradients.
struct ScoreValues {
  float row[at_least_one(ScoreExpression::kRowValues)];
  float column[at_least_one(ScoreExpression::kColumnValues)];
  float edge[at_least_one(ScoreExpression::kEdgeValues)];
  float head[at_least_one(ScoreExpression::kHeadValues)];
};

// x: the values of row, column or head `index`, of a tensor [..][heads][kCount]; heads is 1 or H.
template <int kCount>
__device__ __forceinline__ void load_values(float (&x)[at_least_one(kCount)], const float* values, int index, int heads,
                                            int head) {
  const i64 start = (static_cast<i64>(index) * heads + (heads > 1 ? head : 0)) * kCount;
#pragma unroll
  for (int i = 0; i < kCount; ++i) x[i] = __ldg(values + start + i);
}

// The term of one score, with its values and what their gradients need; nothing without kExpression.
template <Element kIn, int kTerms>
struct ScoreTerm {
  using E = ScoreExpression;
  static constexpr bool kExists = kTerms & kExpression;
  static constexpr int kRowValues = kExists ? E::kRowValues : 0, kColumnValues = kExists ? E::kColumnValues : 0;
  static constexpr int kEdgeValues = kExists ? E::kEdgeValues : 0, kHeadValues = kExists ? E::kHeadValues : 0;
  static constexpr bool kUsesScore = !kExists || E::kUsesScore;
  // Sums of gradients of values, over a row and over a column.
  static constexpr int kRowSums = kRowValues + kHeadValues, kColumnSums = kColumnValues;

  ScoreValues values = {}, gradients;
  float score_before;

  template <typename Params>
  __device__ __forceinline__ void load_edge(const Params& p, i64 edge, int head) {
    if constexpr (kEdgeValues > 0) {
      const i64 start = (edge * p.edge_value_heads + (p.edge_value_heads > 1 ? head : 0)) * kEdgeValues;
#pragma unroll
      for (int i = 0; i < kEdgeValues; ++i) {
        values.edge[i] = load_element<kIn>(element_address<kIn>(p.edge_values, start + i));
      }
    }
  }

  // Rows and columns past the ends are clamped: no branches, so that equal loads of several scores become one.
  template <typename Params>
  __device__ __forceinline__ void load_row(const Params& p, int row, int head) {
    if constexpr (kRowValues > 0) {
      load_values<kRowValues>(values.row, p.row_values, min(max(row, 0), p.num_rows - 1), p.row_value_heads, head);
    }
  }
  template <typename Params>
  __device__ __forceinline__ void load_column(const Params& p, int column, int head) {
    if constexpr (kColumnValues > 0) {
      load_values<kColumnValues>(values.column, p.column_values, max(column, 0), p.column_value_heads, head);
    }
  }
  template <typename Params>
  __device__ __forceinline__ void load_head(const Params& p, int head) {
    if constexpr (kHeadValues > 0) load_values<kHeadValues>(values.head, p.head_values, 0, p.head_value_heads, head);
  }

  // scale * <q, k> to the score, both times kProductUnit.
  template <typename Params>
  __device__ __forceinline__ float apply(float score, const Params& p) {
    if constexpr (kExists) {
      score_before = score;
      score = E::apply(score, values, p.score_number);
    }
    return score;
  }

  // The gradient of scale * <q, k> from ds; call it after `apply`. A ds of 0 gives 0: the derivative of a score without
  // weight may be infinite, and 0 * inf is NaN.
  template <typename Params>
  __device__ __forceinline__ float gradient(float gradient, const Params& p) {
    if constexpr (kExists) {
      const bool passes = gradient != 0.0f;
      gradients = {};
      gradient = E::gradient(gradient, score_before, values, p.score_number, gradients);
      if (!passes) gradient = 0.0f, gradients = {};
    }
    return gradient;
  }

  // After `gradient`: stores the gradients of the values of an edge; `index`: edge * H + head.
  template <typename Params>
  __device__ __forceinline__ void store_edge_gradients(const Params& p, i64 index) const {
    if constexpr (kEdgeValues > 0) {
      if (!p.edge_value_gradients) return;
#pragma unroll
      for (int i = 0; i < kEdgeValues; ++i) p.edge_value_gradients[index * kEdgeValues + i] = gradients.edge[i];
    }
  }

  // After `gradient`: adds the gradients of the values of rows and heads, kRowSums, to sums[kFirst] and on; or those of
  // columns, kColumnSums.
  template <int kFirst, int kSums>
  __device__ __forceinline__ void add_row_sums(float (&sums)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kRowValues; ++i) sums[kFirst + i] += gradients.row[i];
#pragma unroll
    for (int i = 0; i < kHeadValues; ++i) sums[kFirst + kRowValues + i] += gradients.head[i];
  }
  template <int kFirst, int kSums>
  __device__ __forceinline__ void add_column_sums(float (&sums)[kSums]) const {
#pragma unroll
    for (int i = 0; i < kColumnValues; ++i) sums[kFirst + i] += gradients.column[i];
  }
};
