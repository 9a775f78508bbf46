// The score transform of edge data, chosen at compile time; the same for all kernels.
//
//   s_ij = clamp(scale * m_ij * <q_i, k_ij> + b_ij, -c, c)
//
// Scores of 16-bit inputs are kept times log2(e), since the exponential is ex2: a factor of q. Those of float32 are not,
// and <q, k> has the same bits in the forward pass and in both backward passes: only the difference of a score from the
// maximum, or from the log-sum-exp, is multiplied.
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

constexpr float kLog2e = 1.44269504088896f, kLn2 = 0.693147180559945f;
template <Element kIn>
constexpr float kScoreUnit = kIsWide<kIn> ? 1.0f : kLog2e;

// exp(x / kScoreUnit)
template <Element kIn>
__device__ __forceinline__ float exp_score(float x) {
  return ex2_approx_ftz(kIsWide<kIn> ? x * kLog2e : x);
}

// `score`: scale * unit * <q, k>; `clamp`: c * unit. NaN stays NaN.
template <int kTerms>
__device__ __forceinline__ float transform_score(float score, float bias, float multiplier, float clamp,
                                                 float unit = kLog2e) {
  if constexpr (kTerms & kMultiplier) score *= multiplier;
  if constexpr (kTerms & kBias) score = fmaf(bias, unit, score);
  if constexpr (kTerms & kClamp) score = score > clamp ? clamp : score < -clamp ? -clamp : score;
  return score;
}

// Of an edge's values [nnz][heads] that of a head, or the one for all heads.
template <Element kIn>
__device__ __forceinline__ float edge_value(const void* values, i64 edge, int heads, int head) {
  return load_element<kIn>(element_address<kIn>(values, edge * heads + (heads > 1 ? head : 0)));
}
