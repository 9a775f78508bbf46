// Low-rank features edge by edge on tensor cores, for 8 or 4 heads of 10 to 16 columns: the 16 pairs of a row and a head
// in a warp are the rows of A and C fragments.
//
//   lane 4 g + 2 x + half    pair g + 8 x: row 2 (g / kHeads) + x of the warp, head g % kHeads of the group;
//                            dimensions 8 half to 8 half + 7
//
//   u  = W^T q    [pairs x features]    before the first round
//   S += u a^T    [pairs x 8 edges]     for every two rows the four edges of a round of each; a pair uses those of its
//                                       row, of which edges 2 half and 2 half + 1 are in registers of its own lane
//   s += P a      [pairs x features]    P: weight of an edge in the pairs of its row, else 0
//   O += W' s     [pairs x dimensions]  after the last round
//
// A feature that is no finite number reaches all pairs of the warp: P has zeros, and 0 * NaN is NaN.
//
// The first and the last product have other weights for each head: a k-step a head, with zeros in A for the pairs of
// other heads. Fragments have features and dimensions in the order of memory: lane t = lane % 4 has features 4t to 4t + 3
// of both its pairs, and of W' s dimensions 8 half + 4 x to 8 half + 4 x + 3 (pack_features.cu).
#pragma once
#include "common.cuh"
#include "elements.cuh"
#include "ptx/cvt.cuh"
#include "ptx/mma.cuh"
#include "ptx/movmatrix.cuh"
#include "ptx/opaque_pointer.cuh"
#include "two_terms.cuh"
#include "warp.cuh"

// Lanes of a group, in place of neighbouring ones.
template <int kHeads>
struct PairLanes {
  __device__ static __forceinline__ int group(int lane) { return lane / 4 / kHeads * 2 + lane / 2 % 2; }
  __device__ static __forceinline__ int in_group(int lane) { return lane / 4 % kHeads * 2 + lane % 2; }
  __device__ static __forceinline__ int first_lane(int group) { return group / 2 * kHeads * 4 + group % 2 * 2; }
};

template <bool kIsUsed, Element kIn, int kHeads>
struct PairFeatures {
  static_assert(kHeads == 8 || kHeads == 4, "two or four rows of a warp");
  using Lanes = PairLanes<kHeads>;
  static constexpr int kTiles = 8 / kHeads;  // n-tiles of edges: two rows each
  static constexpr int kRoundEdges = 4;      // edges of a row per round
  static constexpr int kRow_bytes = 16 * kElement_bytes<kIn>;
  struct Words {
    u32 word[kTiles][2];  // features 4t to 4t + 3 of edge g % 4 of row 2 tile + g / 4
  };

  int g, tile;              // tile: n-tile of the lane's row
  bool is_second, is_upper;  // x and half
  const char* source[kTiles];
  int count[kTiles];  // edges of row 2 tile + g / 4, without the lane's first
  u32 projected[2][4] = {};
  float unit = 1.0f;       // factor of the products with `projected`
  float sums[2][4] = {};  // s, not divided by the sum of the weights

  __device__ __forceinline__ PairFeatures(const void* features, int lane, int first_edge, int num_edges)
      : g(lane / 4), tile(g / kHeads), is_second(lane & 2), is_upper(lane & 1) {
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int owner = Lanes::first_lane(2 * i + g / kRoundEdges);
      const i64 edge = __shfl_sync(kFullWarp, first_edge, owner) + static_cast<i64>(g % kRoundEdges);
      const char* const row = static_cast<const char*>(features) + edge * kRow_bytes;
      source[i] = opaque_pointer(row + lane % 4 * (kRow_bytes / 4));
      count[i] = __shfl_sync(kFullWarp, num_edges, owner) - g % kRoundEdges;
    }
  }

  // Loads the features of the round that begins with edge `first` of each row; 0 for padding edges.
  __device__ __forceinline__ Words load(int first) {
    Words x;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      load_words<8>(x.word[i], source[i], first < count[i]);
      source[i] = opaque_pointer(source[i] + kRoundEdges * kRow_bytes);
    }
    return x;
  }

  // c += the rows of A of each pair, times the weights of its head. `weights`: of the first head, [..][32] packed.
  __device__ __forceinline__ void multiply_by_head(float (&c)[2][4], const u32 (&a)[4], const uint4* weights,
                                                   i64 head_stride) const {
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const uint4 b = __ldg(weights + head * head_stride);
      const bool is_own = g % kHeads == head;
      const u32 a0 = is_own ? a[0] : 0, a1 = is_own ? a[1] : 0, a2 = is_own ? a[2] : 0, a3 = is_own ? a[3] : 0;
      mma_m16n8k16<kIn>(c[0], a0, a1, a2, a3, b.x, b.y);
      mma_m16n8k16<kIn>(c[1], a0, a1, a2, a3, b.z, b.w);
    }
  }

  // u, times `scale`. `query`: elements 4t to 4t + 3 of both pairs.
  __device__ __forceinline__ void project(const u32 (&query)[2][2], float scale, const uint4* weights,
                                          i64 head_stride) {
    const u32 a[4] = {query[0][0], query[1][0], query[0][1], query[1][1]};
    float u[2][4] = {};
    multiply_by_head(u, a, weights, head_stride);
    float most = 0.0f;
    if constexpr (kIn == Element::kHalf) {
#pragma unroll
      for (int i = 0; i < 8; ++i) most = fmaxf(most, fabsf(u[i / 4][i % 4] * scale));
      most = warp_max(most);
    }
    const int excess = excess_bits<kIn>(most);
    unit = __int_as_float(127 + excess << 23);
    scale *= __int_as_float(127 - excess << 23);
    split_fragment<kIn>(projected, u, scale, scale);
  }

  // Adds <u, a> to the lane's part of the scores of a round.
  __device__ __forceinline__ void add_scores(float (&score)[kRoundEdges], const Words& x) const {
    float own[2];
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      float c[4] = {};
      mma_both_parts<kIn>(c, projected, x.word[i][0], x.word[i][1]);
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const float of_row = is_second ? c[2 + j] : c[j];
        own[j] = i == 0 || tile == i ? of_row : own[j];
      }
    }
#pragma unroll
    for (int i = 0; i < kRoundEdges; ++i) {
      if (is_upper == (i >= 2)) score[i] = fmaf(unit, own[i % 2], score[i]);
    }
  }

  // s *= the factor of each pair, which its lanes have.
  __device__ __forceinline__ void rescale(float factor) {
    const float other = __shfl_xor_sync(kFullWarp, factor, 2);
    const float first = is_second ? other : factor, second = is_second ? factor : other;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      sums[i][0] *= first, sums[i][1] *= first, sums[i][2] *= second, sums[i][3] *= second;
    }
  }

  // s += the features of a round, times the weights of its edges for the lane's pair.
  __device__ __forceinline__ void accumulate(const float (&weight)[kRoundEdges], const Words& x) {
    const u32 pair =
        cvt_rn_x2<kIn>(is_upper ? weight[2] : weight[0], is_upper ? weight[3] : weight[1]);
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const bool is_own = kTiles == 1 || tile == i;
      const u32 a0 = is_own && !is_second ? pair : 0, a1 = is_own && is_second ? pair : 0;
#pragma unroll
      for (int j = 0; j < 2; ++j) mma_m16n8k8<kIn>(sums[j], a0, a1, movmatrix_trans(x.word[i][j]));
    }
  }

  // The elements of the lane's pair in C fragments: first from the lane with x = 0, then from the lane with x = 1.
  __device__ __forceinline__ void to_pair(float (&x)[8], const float (&c)[2][4]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float first = c[i / 2][i % 2], second = c[i / 2][2 + i % 2];
      const float own = is_second ? second : first;
      const float other = __shfl_xor_sync(kFullWarp, is_second ? first : second, 2);
      x[i] = is_second ? other : own, x[4 + i] = is_second ? own : other;
    }
  }
  // The inverse.
  __device__ __forceinline__ void from_pair(float (&c)[2][4], const float (&x)[8]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float own = is_second ? x[4 + i] : x[i];
      const float other = __shfl_xor_sync(kFullWarp, is_second ? x[i] : x[4 + i], 2);
      c[i / 2][i % 2] = is_second ? other : own, c[i / 2][2 + i % 2] = is_second ? own : other;
    }
  }

  // out += W' s, both divided by the sum of the weights: `inverse`, of the lane's pair.
  __device__ __forceinline__ void add_to(float (&out)[8], float inverse, const uint4* weights, i64 head_stride) {
    rescale(inverse);
    u32 a[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) a[i] = cvt_rn_x2<kIn>(sums[i / 2][i % 2 * 2], sums[i / 2][i % 2 * 2 + 1]);
    float product[2][4] = {}, x[8];
    multiply_by_head(product, a, weights, head_stride);
    to_pair(x, product);
#pragma unroll
    for (int i = 0; i < 8; ++i) out[i] += x[i];
  }
};

template <Element kIn, int kHeads>
struct PairFeatures<false, kIn, kHeads> {
  struct Words {};
  __device__ __forceinline__ PairFeatures(const void*, int, int, int) {}
};
