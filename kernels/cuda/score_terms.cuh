// The score transform of edge data, chosen at compile time; the same for all kernels.
//
//   s_ij = clamp(scale * m_ij * <q_i, k_ij> + b_ij, -c, c)
//
// Scores are kept times log2(e): the exponential is ex2.
#pragma once
#include "common.cuh"
#include "ptx/cvt.cuh"

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

// `score`: scale * log2(e) * <q, k>; `clamp_log2e`: c * log2(e). NaN stays NaN.
template <int kTerms>
__device__ __forceinline__ float transform_score(float score, float bias, float multiplier, float clamp_log2e) {
  if constexpr (kTerms & kMultiplier) score *= multiplier;
  if constexpr (kTerms & kBias) score = fmaf(bias, 1.44269504088896f, score);
  if constexpr (kTerms & kClamp)
    score = score > clamp_log2e ? clamp_log2e : score < -clamp_log2e ? -clamp_log2e : score;
  return score;
}

// Of an edge's values [nnz][heads] that of a head, or the one for all heads.
template <Element kIn>
__device__ __forceinline__ float edge_value(const u16* values, i64 edge, int heads, int head) {
  return cvt_f32_x2<kIn>(__ldg(values + edge * heads + (heads > 1 ? head : 0))).x;
}
