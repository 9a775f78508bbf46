// Terms of the scores: what an instance does to scale * <q_i, k_ij> before the softmax. The same for all kernels.
//
//   s_ij = clamp(scale * m_ij * <q_i, k_ij> + b_ij, -c, c)
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

// Bits of kTerms.
enum EdgeTerm {
  kBias = 1,
  kMultiplier = 2,
  kTypes = 4,
  kClamp = 8,
  kKeyFeatures = 16,
  kValueFeatures = 32,
  kDropout = 64,  // dropout.cuh
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

// The terms of one score, those of kTerms in the order of the list. Holds what their gradients need.
template <Element kIn, int kTerms, template <Element> class... Terms>
struct ScoreTermList;

template <Element kIn, int kTerms>
struct ScoreTermList<kIn, kTerms> {
  static constexpr int kBits = 0;        // of the terms of the list that the instance has
  static constexpr int kNumValues = 0;   // of an edge and head
  static constexpr int kMostValues = 0;  // with all terms of the list
  static constexpr bool kUsesPlace = false;

  template <typename Params>
  __device__ __forceinline__ void load_values(const Params&, i64, int, bool) {}
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

  float value = 0.0f;
  float score_before, gradient_after;
  Rest rest;

  // Values of an edge; 0 without a call.
  template <typename Params>
  __device__ __forceinline__ void load_values(const Params& p, i64 edge, int head, bool exists) {
    rest.load_values(p, edge, head, exists);
    if constexpr (kExists && Term::kHasValue) value = exists ? Term::values(p).template load<kIn>(edge, head) : 0.0f;
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

// The list.
template <Element kIn, int kTerms>
using ScoreTerms = ScoreTermList<kIn, kTerms, MultiplierTerm, BiasTerm, ClampTerm>;

// Bits of all terms in it.
constexpr int kScoreTerms = ScoreTerms<Element::kHalf, ~0>::kBits;
