// Terms of the scores: what an instance does to scale * <q_i, k_ij> before the softmax. The same for all kernels.
//
//   s_ij = clamp(f(scale * m_ij * <q_i, k_ij> + b_ij, values), -c, c)
//
// Each term is a struct, and ScoreTerms at the end of this file is their list, in the order in which they apply. The
// kernels call the list alone. A term has
//
//   kBit         its bit in kTerms
//   kHasValue    whether each edge has a value of it, a tensor [nnz][1 or H] of the type of q: `values`
//   kUsesPlace   whether it reads the row, column or head of the score: ScorePlace
//   apply        the score after the term, from the one before
//   gradient     gradient of the score before the term, from that of the score after it
//   value_gradient, value_gradients   with kHasValue: gradient of the value, and where it is stored
//
// The term f is an expression of the caller (score_expression.cuh) over values by row, column, edge and head.
//
// A new term is a bit of EdgeTerm, a struct here and its name in the list. Numbers that it takes from the host are
// members in score_term_params.cuh, which lies at the end of struct Params of each kernel.
//
// Unit. Scores of 16-bit inputs are kept times log2(e), since the exponential is ex2: a factor of q. Those of float32
// are not, and <q, k> has the same bits in the forward pass and in both backward passes: only the difference of a score
// from the maximum, or from the log-sum-exp, is multiplied. apply and gradient get scores times kScoreUnit; gradients
// are those of the scores without it.
#pragma once
#include "common.cuh"
#include "elements.cuh"
#include "ptx/math.cuh"
#include "score_expression.cuh"

// Bits of kTerms.
enum EdgeTerm {
  kBias = 1,
  kMultiplier = 2,
  kTypes = 4,
  kClamp = 8,
  kKeyFeatures = 16,
  kValueFeatures = 32,
  kDropout = 64,  // dropout.cuh
  kExpression = 128,
  kAdditive = 256,  // additive_score.cuh
};

template <Element kIn>
constexpr float kScoreUnit = kIsWide<kIn> ? 1.0f : kLog2e;

// exp(x / kScoreUnit)
template <Element kIn>
__device__ __forceinline__ float exp_score(float x) {
  return ex2_approx_ftz(kIsWide<kIn> ? x * kLog2e : x);
}

// Row and column of a score in A, and its head in the tensors.
struct ScorePlace {
  int row, column, head;
};

// A value for each edge: [nnz][heads], heads is 1 or H.
struct EdgeValues {
  const void* values;
  int heads;

  template <Element kIn>
  __device__ __forceinline__ float load(i64 edge, int head) const {
    return load_element<kIn>(element_address<kIn>(values, edge * heads + (heads > 1 ? head : 0)));
  }
};

// s = m * s
template <Element kIn>
struct MultiplierTerm {
  static constexpr int kBit = kMultiplier;
  static constexpr bool kHasValue = true, kUsesPlace = false;

  template <typename Params>
  __device__ static __forceinline__ EdgeValues values(const Params& p) {
    return {p.multiplier, p.multiplier_heads};
  }
  template <typename Params>
  __device__ static __forceinline__ float* value_gradients(const Params& p) {
    return p.multiplier_gradient;
  }
  template <typename Params>
  __device__ static __forceinline__ float apply(float score, float value, ScorePlace, const Params&) {
    return score * value;
  }
  template <typename Params>
  __device__ static __forceinline__ float gradient(float gradient, float, float value, ScorePlace, const Params&) {
    return gradient * value;
  }
  __device__ static __forceinline__ float value_gradient(float gradient, float score) {
    return gradient * score * (1.0f / kScoreUnit<kIn>);
  }
};

// s = s + b
template <Element kIn>
struct BiasTerm {
  static constexpr int kBit = kBias;
  static constexpr bool kHasValue = true, kUsesPlace = false;

  template <typename Params>
  __device__ static __forceinline__ EdgeValues values(const Params& p) {
    return {p.bias, p.bias_heads};
  }
  template <typename Params>
  __device__ static __forceinline__ float* value_gradients(const Params& p) {
    return p.bias_gradient;
  }
  template <typename Params>
  __device__ static __forceinline__ float apply(float score, float value, ScorePlace, const Params&) {
    return fmaf(value, kScoreUnit<kIn>, score);
  }
  template <typename Params>
  __device__ static __forceinline__ float gradient(float gradient, float, float, ScorePlace, const Params&) {
    return gradient;
  }
  __device__ static __forceinline__ float value_gradient(float gradient, float) { return gradient; }
};

// s = min(max(s, -c), c). NaN stays NaN. `score_limit(p)`: c * kScoreUnit, beside each struct Params.
template <Element kIn>
struct ClampTerm {
  static constexpr int kBit = kClamp;
  static constexpr bool kHasValue = false, kUsesPlace = false;

  template <typename Params>
  __device__ static __forceinline__ float apply(float score, float, ScorePlace, const Params& p) {
    const float limit = score_limit(p);
    return score > limit ? limit : score < -limit ? -limit : score;
  }
  template <typename Params>
  __device__ static __forceinline__ float gradient(float gradient, float score, float, ScorePlace, const Params& p) {
    return fabsf(score) > score_limit(p) ? 0.0f : gradient;
  }
};

// s = f(s, values): ScoreExpression. A term of its own form, see its ScoreTermList below.
template <Element kIn>
struct ExpressionTerm {
  static constexpr int kBit = kExpression;
};

__device__ constexpr int at_least_one(int count) { return count > 0 ? count : 1; }

// Values of an expression for one score, or their gradients.
struct ScoreValues {
  float row[at_least_one(ScoreExpression::kRowValues)];
  float column[at_least_one(ScoreExpression::kColumnValues)];
  float edge[at_least_one(ScoreExpression::kEdgeValues)];
  float head[at_least_one(ScoreExpression::kHeadValues)];
};

// The terms of one score, those of kTerms in the order of the list. Holds what their gradients need.
template <Element kIn, int kTerms, template <Element> class... Terms>
struct ScoreTermList;

template <Element kIn, int kTerms>
struct ScoreTermList<kIn, kTerms> {
  static constexpr int kBits = 0;        // of the terms of the list that the instance has
  static constexpr int kNumValues = 0;   // of an edge and head
  static constexpr int kMostValues = 0;  // with all terms of the list
  static constexpr bool kUsesPlace = false;
  static constexpr bool kUsesScore = true;
  static constexpr int kRowSums = 0, kColumnSums = 0;  // sums of gradients of values, over a row and over a column

  template <typename Params>
  __device__ __forceinline__ void load_values(const Params&, i64, int, bool) {}
  template <typename Params>
  __device__ __forceinline__ void load_place(const Params&, ScorePlace) {}
  template <int kFirst, int kSums>
  __device__ __forceinline__ void add_row_sums(float (&)[kSums]) const {}
  template <int kFirst, int kSums>
  __device__ __forceinline__ void add_column_sums(float (&)[kSums]) const {}
  template <typename Use>
  __device__ __forceinline__ void for_each_value(Use) {}
  template <typename Params>
  __device__ __forceinline__ float apply(float score, ScorePlace, const Params&) {
    return score;
  }
  template <typename Params>
  __device__ __forceinline__ float gradient(float gradient, ScorePlace, const Params&) {
    return gradient;
  }
  template <typename Params>
  __device__ __forceinline__ void store_value_gradients(const Params&, i64) const {}
};

template <Element kIn, int kTerms, template <Element> class First, template <Element> class... Others>
struct ScoreTermList<kIn, kTerms, First, Others...> {
  using Term = First<kIn>;
  using Rest = ScoreTermList<kIn, kTerms, Others...>;
  static constexpr bool kExists = kTerms & Term::kBit;
  static constexpr int kBits = (kExists ? Term::kBit : 0) | Rest::kBits;
  static constexpr int kNumValues = (kExists && Term::kHasValue) + Rest::kNumValues;
  static constexpr int kMostValues = Term::kHasValue + Rest::kMostValues;
  static constexpr bool kUsesPlace = (kExists && Term::kUsesPlace) || Rest::kUsesPlace;
  static constexpr bool kUsesScore = Rest::kUsesScore;
  static constexpr int kRowSums = Rest::kRowSums, kColumnSums = Rest::kColumnSums;

  float value = 0.0f;
  float score_before, gradient_after;
  Rest rest;

  // Values of an edge; 0 without a call.
  template <typename Params>
  __device__ __forceinline__ void load_values(const Params& p, i64 edge, int head, bool exists) {
    rest.load_values(p, edge, head, exists);
    if constexpr (kExists && Term::kHasValue) value = exists ? Term::values(p).template load<kIn>(edge, head) : 0.0f;
  }

  // Values of a row, a column and a head. Reads a row, a column past the end where the place has none.
  template <typename Params>
  __device__ __forceinline__ void load_place(const Params& p, ScorePlace place) {
    rest.load_place(p, place);
  }

  // After `gradient`: adds the gradients of the values of rows and heads, kRowSums, to sums[kFirst] and on; or those of
  // columns, kColumnSums.
  template <int kFirst, int kSums>
  __device__ __forceinline__ void add_row_sums(float (&sums)[kSums]) const {
    rest.template add_row_sums<kFirst>(sums);
  }
  template <int kFirst, int kSums>
  __device__ __forceinline__ void add_column_sums(float (&sums)[kSums]) const {
    rest.template add_column_sums<kFirst>(sums);
  }

  // use(value), kNumValues times.
  template <typename Use>
  __device__ __forceinline__ void for_each_value(Use use) {
    rest.for_each_value(use);
    if constexpr (kExists && Term::kHasValue) use(value);
  }

  // From scale * <q, k> to s, both times kScoreUnit.
  template <typename Params>
  __device__ __forceinline__ float apply(float score, ScorePlace place, const Params& p) {
    if constexpr (kExists) {
      score_before = score;
      score = Term::apply(score, value, place, p);
    }
    return rest.apply(score, place, p);
  }

  // From ds to the gradient of scale * <q, k>, after `apply`.
  template <typename Params>
  __device__ __forceinline__ float gradient(float gradient, ScorePlace place, const Params& p) {
    gradient = rest.gradient(gradient, place, p);
    if constexpr (kExists) {
      gradient_after = gradient;
      gradient = Term::gradient(gradient, score_before, value, place, p);
    }
    return gradient;
  }

  // Gradients of the values, after `gradient`. `index`: edge * H + head.
  template <typename Params>
  __device__ __forceinline__ void store_value_gradients(const Params& p, i64 index) const {
    rest.store_value_gradients(p, index);
    if constexpr (kExists && Term::kHasValue) {
      float* const gradients = Term::value_gradients(p);
      if (gradients) gradients[index] = Term::value_gradient(gradient_after, score_before);
    }
  }
};

// The expression in front of other terms.
template <Element kIn, int kTerms, template <Element> class... Others>
struct ScoreTermList<kIn, kTerms, ExpressionTerm, Others...> {
  using E = ScoreExpression;
  using Rest = ScoreTermList<kIn, kTerms, Others...>;
  static constexpr bool kExists = kTerms & kExpression;
  static constexpr int kBits = (kExists ? kExpression : 0) | Rest::kBits;
  static constexpr int kNumValues = (kExists ? E::kEdgeValues : 0) + Rest::kNumValues;
  static constexpr int kMostValues = E::kEdgeValues + Rest::kMostValues;
  static constexpr bool kUsesPlace =
      (kExists && E::kRowValues + E::kColumnValues + E::kHeadValues > 0) || Rest::kUsesPlace;
  static constexpr bool kUsesScore = (!kExists || E::kUsesScore) && Rest::kUsesScore;
  static constexpr int kRowSums = kExists ? E::kRowValues + E::kHeadValues : 0;
  static constexpr int kColumnSums = kExists ? E::kColumnValues : 0;
  static constexpr float kUnit = kScoreUnit<kIn>;

  ScoreValues values = {}, gradients;
  float score_before;
  Rest rest;

  template <typename Params>
  __device__ __forceinline__ void load_values(const Params& p, i64 edge, int head, bool exists) {
    rest.load_values(p, edge, head, exists);
    if constexpr (kExists && E::kEdgeValues > 0) {
      const i64 start = (edge * p.edge_value_heads + (p.edge_value_heads > 1 ? head : 0)) * E::kEdgeValues;
#pragma unroll
      for (int i = 0; i < E::kEdgeValues; ++i) {
        values.edge[i] = exists ? load_element<kIn>(element_address<kIn>(p.edge_values, start + i)) : 0.0f;
      }
    }
  }

  // Rows and columns past the ends are clamped: no branches, so that equal loads of several scores become one.
  template <typename Params>
  __device__ __forceinline__ void load_place(const Params& p, ScorePlace place) {
    rest.load_place(p, place);
    if constexpr (kExists) {
      const int row = min(max(place.row, 0), p.num_rows - 1), column = max(place.column, 0);
      load<E::kRowValues>(values.row, p.row_values, row, p.row_value_heads, place.head);
      load<E::kColumnValues>(values.column, p.column_values, column, p.column_value_heads, place.head);
      load<E::kHeadValues>(values.head, p.head_values, 0, p.head_value_heads, place.head);
    }
  }
  template <int kCount>
  __device__ static __forceinline__ void load(float (&x)[at_least_one(kCount)], const float* source, int index,
                                              int heads, int head) {
    const i64 start = (static_cast<i64>(index) * heads + (heads > 1 ? head : 0)) * kCount;
#pragma unroll
    for (int i = 0; i < kCount; ++i) x[i] = __ldg(source + start + i);
  }

  template <typename Use>
  __device__ __forceinline__ void for_each_value(Use use) {
    rest.for_each_value(use);
    if constexpr (kExists) {
#pragma unroll
      for (int i = 0; i < E::kEdgeValues; ++i) use(values.edge[i]);
    }
  }

  template <typename Params>
  __device__ __forceinline__ float apply(float score, ScorePlace place, const Params& p) {
    if constexpr (kExists) {
      score_before = score * (1.0f / kUnit);
      score = E::apply(score_before, values, p.score_number) * kUnit;
    }
    return rest.apply(score, place, p);
  }

  // A gradient of 0 passes none on, whatever the derivatives: those of a score without weight may be infinite.
  template <typename Params>
  __device__ __forceinline__ float gradient(float gradient, ScorePlace place, const Params& p) {
    gradient = rest.gradient(gradient, place, p);
    if constexpr (kExists) {
      const bool passes = gradient != 0.0f;
      gradients = {};
      gradient = E::gradient(gradient, score_before, values, p.score_number, gradients);
      if (!passes) gradient = 0.0f, gradients = {};
    }
    return gradient;
  }

  template <typename Params>
  __device__ __forceinline__ void store_value_gradients(const Params& p, i64 index) const {
    rest.store_value_gradients(p, index);
    if constexpr (kExists && E::kEdgeValues > 0) {
      if (!p.edge_value_gradients) return;
#pragma unroll
      for (int i = 0; i < E::kEdgeValues; ++i) {
        p.edge_value_gradients[index * E::kEdgeValues + i] = gradients.edge[i];
      }
    }
  }

  template <int kFirst, int kSums>
  __device__ __forceinline__ void add_row_sums(float (&sums)[kSums]) const {
    if constexpr (kExists) {
#pragma unroll
      for (int i = 0; i < E::kRowValues; ++i) sums[kFirst + i] += gradients.row[i];
#pragma unroll
      for (int i = 0; i < E::kHeadValues; ++i) sums[kFirst + E::kRowValues + i] += gradients.head[i];
    }
  }
  template <int kFirst, int kSums>
  __device__ __forceinline__ void add_column_sums(float (&sums)[kSums]) const {
    if constexpr (kExists) {
#pragma unroll
      for (int i = 0; i < E::kColumnValues; ++i) sums[kFirst + i] += gradients.column[i];
    }
  }
};

// The list.
template <Element kIn, int kTerms>
using ScoreTerms = ScoreTermList<kIn, kTerms, MultiplierTerm, BiasTerm, ExpressionTerm, ClampTerm>;

// Bits of all terms in it.
constexpr int kScoreTerms = ScoreTerms<Element::kHalf, ~0>::kBits;
