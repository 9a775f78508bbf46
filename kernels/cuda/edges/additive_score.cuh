// Additive attention, as in GATv2: <a, leaky_relu(q_i + k_ij)> in place of <q_i, k_ij>, with k_ij = k_j, or with features
// of edges k_j + W a_ij. Edge-by-edge kernels.
#pragma once
#include "edges/lane_group.cuh"
#include "score/score_terms.cuh"

// Whether W a_ij is added to the keys: W is `key_factor`.
__device__ constexpr bool adds_features(int terms) { return terms & kAdditive && terms & kKeyFactor; }
// Whether lane groups may be packed: with features registers are short.
__device__ constexpr bool may_pack(int terms) { return !(terms & (kKeyFeatures | kValueFeatures)) && !adds_features(terms); }

__device__ __forceinline__ float leaky_relu(float x, float slope) { return x > 0.0f ? x : slope * x; }

// The part of a lane's dimensions in <a, leaky_relu(q + k)>.
template <int kLaneDims>
__device__ __forceinline__ float additive_product(const float (&a)[kLaneDims], const float (&q)[kLaneDims],
                                                  const float (&k)[kLaneDims], float slope) {
  float sum = 0.0f;
#pragma unroll
  for (int d = 0; d < kLaneDims; ++d) sum = fmaf(a[d], leaky_relu(q[d] + k[d], slope), sum);
  return sum;
}

// sums[d] += weight * a leaky_relu'(q + k), the gradient of q and of k. With kOfWeight sums[kOfWeight + d] += weight *
// leaky_relu(q + k), the gradient of a.
template <int kOfWeight, int kSums, int kLaneDims>
__device__ __forceinline__ void add_additive_gradients(float (&sums)[kSums], float weight, const float (&a)[kLaneDims],
                                                       const float (&q)[kLaneDims], const float (&k)[kLaneDims],
                                                       float slope) {
#pragma unroll
  for (int d = 0; d < kLaneDims; ++d) {
    const float x = q[d] + k[d];
    sums[d] = fmaf(weight, x > 0.0f ? a[d] : a[d] * slope, sums[d]);
    if constexpr (kOfWeight > 0) sums[kOfWeight + d] = fmaf(weight, leaky_relu(x, slope), sums[kOfWeight + d]);
  }
}

// Bit d: whether q + k is positive in dimension d of the lane.
template <int kLaneDims>
__device__ __forceinline__ u8 positive_dims(const float (&q)[kLaneDims], const float (&k)[kLaneDims]) {
  static_assert(kLaneDims == 8, "a byte");
  u32 bits = 0;
#pragma unroll
  for (int d = 0; d < kLaneDims; ++d) bits |= q[d] + k[d] > 0.0f ? 1u << d : 0;
  return static_cast<u8>(bits);
}

constexpr int kAddedEdges = 2;  // edges that load W once; more take too many registers

// x[i] += W a of edge[i], for a lane's dimensions of a head from first_dim on; nothing unless exists[i]. Members of `p`:
// key_factor [num_factors][H][kDim], W with its columns first, and features [nnz][num_factors, rounded up to a multiple
// of 16], 0 from num_factors on; both kIn.
template <Element kIn, int kDim, typename Group, typename Params>
__device__ __forceinline__ void add_features(float (&x)[kAddedEdges][Group::kLaneDims], const Params& p,
                                             const i64 (&edge)[kAddedEdges], const bool (&exists)[kAddedEdges],
                                             int head, int first_dim) {
  constexpr int kColumns = 4, kBytes = kColumns * kElement_bytes<kIn>;
  const int row_features = divide_up(p.num_factors, kFeatures) * kFeatures;
#pragma unroll 1
  for (int first = 0; first < p.num_factors; first += kColumns) {
    float feature[kAddedEdges][kColumns];
#pragma unroll
    for (int i = 0; i < kAddedEdges; ++i) {
      u32 words[kBytes / 4];
      load_words<kBytes>(words, element_address<kIn>(p.features, edge[i] * row_features + first), exists[i]);
      unpack_words<kIn>(feature[i], words);
    }
#pragma unroll
    for (int c = 0; c < kColumns; ++c) {
      const int column = min(first + c, p.num_factors - 1);  // the features behind it are 0
      const i64 start = (static_cast<i64>(column) * p.num_heads + head) * kDim + first_dim;
      float weight[Group::kLaneDims];
      Group::unpack(weight, Group::load(element_address<kIn>(p.key_factor, start), first_dim, true), first_dim);
#pragma unroll
      for (int i = 0; i < kAddedEdges; ++i) {
#pragma unroll
        for (int d = 0; d < Group::kLaneDims; ++d) x[i][d] = fmaf(feature[i][c], weight[d], x[i][d]);
      }
    }
  }
}
