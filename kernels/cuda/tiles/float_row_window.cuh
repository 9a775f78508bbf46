// A row window of float32 inputs in a warp's registers: Q, the online softmax and O of all heads of the group; in a
// team the warp's columns of them.
//
// Fragments of TF32 (ptx/mma_tf32.cuh). Any order of the rows of B is correct if A has the same, and any order of its
// columns if C has the same:
//
//   SDDMM   k-steps 2s and 2s + 1: columns 16s to 16s + 15; lane t holds 4t and 4t + 1 in the first, 4t + 2 and 4t + 3
//           in the second: ld.shared.v4. With heads that share slices a k-step is a head; lane t holds 2t and 2t + 1.
//   SpMM    k-step i: keys 8i to 8i + 7, lane t holds 8i + 2t and 8i + 2t + 1, as C of SDDMM: E stays in its registers.
//           V is read by single words: two columns at once would need a move each, because a B fragment is two rows.
//
// kFloat, three terms: mma truncates a sum at the last place of its largest term. The product of a KV tile therefore
// starts at 0 and is added to O by an FMA; SDDMM of one head, which has many k-steps, sums the products of the low
// terms in accumulators of their own.
#pragma once
#include "common.cuh"
#include "tiles/forward_params.cuh"
#include "tiles/gather.cuh"
#include "tiles/head_group.cuh"
#include "ptx/bar_sync.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/math.cuh"
#include "ptx/mma_tf32.cuh"
#include "ptx/opaque.cuh"
#include "ptx/st_shared.cuh"
#include "tiles/split_kv.cuh"
#include "tiles/tf32.cuh"

// Partial scores of a KV tile over the columns of one warp, as C fragments, for the other warps of its team.
struct PartialScores {
  float4 fragment[2][kWarpSize];
};

template <Element kIn, int kDim, int kHeads, int kTeamWarps>
struct FloatRowWindow {
  static constexpr int kDimWarps = kTeamWarps;
  static constexpr bool kThreeTerms = kIn == Element::kFloat;
  static constexpr int kWidth = columns_of_warp<kDim, kDimWarps>();
  using S = Stage<kWidth, kHeads, sizeof(float)>;
  using Group = HeadGroup<kWidth, kHeads>;
  static constexpr bool kFolded = Group::kFolded;
  static constexpr bool kSharesSlices = Group::kSliceHeads > 1;
  static constexpr int kBatch = 1, kBatches = kHeads;         // heads are computed one after the other
  static constexpr int kHeadTiles = Group::kHeadDim / kTileN;  // k-steps of SDDMM and n-tiles of SpMM of a head
  static constexpr bool kKeepsLow = kThreeTerms && kWidth <= 64 && !kFolded;  // low terms of Q; else recomputed
  static constexpr int kTilesAtOnce = kHeadTiles > 1 ? 2 : 1;  // n-tiles of SpMM
  static constexpr u32 kTile_bytes = kTileN * sizeof(float);
  static constexpr int kChains = kFolded ? 1 : 2;  // accumulators of the large products: hide the latency of mma

  const int lane, g, t, dim_warp;
  const float scale_log2e;
  u32 query[2 * S::kSlices][4];  // A fragments; kKeepsLow: the high terms
  u32 query_low[kKeepsLow ? 2 * S::kSlices : 1][4];
  float out[2 * S::kSlices][4] = {};
  float max[kHeads][2];       // maxima of the scores, not scaled
  float sum[kHeads][2] = {};  // sums over the lane's keys

  __device__ __forceinline__ FloatRowWindow(int lane, float scale_log2e)
      : lane(lane), g(lane / 4), t(lane % 4), dim_warp(threadIdx.x / kWarpSize % kDimWarps), scale_log2e(scale_log2e) {
#pragma unroll
    for (int i = 0; i < 2 * kHeads; ++i) max[i / 2][i % 2] = negative_infinity();
  }

  __device__ __forceinline__ void load_query(const Params& p, const int (&row)[2], bool has_keys) {
    const char* const of_group = reinterpret_cast<const char*>(
        static_cast<const float*>(p.query) + static_cast<i64>(blockIdx.y) * kHeads * p.query_head_stride);
    const int heads = heads_of_group<kHeads>(p);
#pragma unroll
    for (int slice = 0; slice < S::kSlices; ++slice) {
      uint4 words[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const char* const of_row = of_group + static_cast<i64>(row[half]) * p.query_row_bytes;
        const bool exists = has_keys && row[half] < p.num_rows;
        const int head = Group::head_of(slice);
        const auto of_head = [&](int head) {
          return of_row + head * p.query_head_stride * static_cast<i64>(sizeof(float));
        };
        if constexpr (kSharesSlices) {
          const uint2 even = load_pair(of_head(head), 2 * t, exists && head < heads);
          const uint2 odd = load_pair(of_head(head + 1), 2 * t, exists && head + 1 < heads);
          words[half] = make_uint4(even.x, even.y, odd.x, odd.y);
        } else {
          words[half] = load_four(of_head(head), kWidth * dim_warp + Group::dim_of(slice) + 4 * t,
                                  exists && (!kFolded || head < heads));
        }
      }
      const uint4 top = words[0], bottom = words[1];
      const u32 fragments[2][4] = {{top.x, bottom.x, top.y, bottom.y}, {top.z, bottom.z, top.w, bottom.w}};
#pragma unroll
      for (int i = 0; i < 8; ++i) {
        const u32 x = fragments[i / 4][i % 4] ^ p.sign_bits;
        u32& high = query[2 * slice + i / 4][i % 4];
        if constexpr (kKeepsLow) {
          tf32_split(x, high, query_low[2 * slice + i / 4][i % 4]);
        } else {
          high = kThreeTerms ? x : tf32_nearest(x);
        }
      }
    }
  }

  // Two (four) elements of a row, from `dim` on; zero past kDim.
  __device__ static __forceinline__ uint2 load_pair(const char* row, int dim, bool exists) {
    return exists && dim < kDim ? __ldg(reinterpret_cast<const uint2*>(row) + dim / 2) : make_uint2(0, 0);
  }
  __device__ static __forceinline__ uint4 load_four(const char* row, int dim, bool exists) {
    if constexpr (kDim % 4 == 0) {
      return exists && dim < kDim ? __ldg(reinterpret_cast<const uint4*>(row) + dim / 4) : make_uint4(0, 0, 0, 0);
    } else {
      const uint2 low = load_pair(row, dim, exists), high = load_pair(row, dim + 2, exists);
      return make_uint4(low.x, low.y, high.x, high.y);
    }
  }

  // Keys g (`half` 0) and g + 8: B fragments of k-steps `tile` and tile + 1; with heads that share slices, of k-step
  // `tile` alone.
  __device__ __forceinline__ uint4 load_key(u32 stage, int tile, int half) const {
    const u32 row = stage + g * S::kKeyRow_bytes, swizzle = S::key_swizzle(g);
    const u32 offset = half * kTileN * S::kKeyRow_bytes;
    if constexpr (kSharesSlices) {
      const u32 place = row + (2 * sizeof(float) * t ^ swizzle);
      const uint2 words = ld_shared_v2_b32(S::advance(place, kTile_bytes * tile) + offset);
      return make_uint4(words.x, words.y, 0, 0);
    } else {
      const u32 place = row + kChunk_bytes * t;  // 32 * tile ^ swizzle
      return ld_shared_v4_b32((tile % 4 ? place - swizzle : place + swizzle) + kTile_bytes * tile + offset);
    }
  }

  // SDDMM of a head: C fragments of keys 0 to 7 and 8 to 15. Rows of K past the last key hold old data; the mask has no
  // bit for them.
  __device__ __forceinline__ void scores(float (&score)[1][2][4], int head, u32 stage) const {
    float large[kChains][2][4] = {}, small[2][4] = {};
#pragma unroll
    for (int pair = 0; pair < divide_up(kHeadTiles, 2); ++pair) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const uint4 words = load_key(stage, kHeadTiles * head + 2 * pair, half);
#pragma unroll
        for (int i = 0; i < (kHeadTiles > 1 ? 2 : 1); ++i) {
          const int step = kHeadTiles * head + 2 * pair + i;
          const u32 key[2] = {i ? words.z : words.x, i ? words.w : words.y};
          const u32(&a)[4] = query[step];
          float (&c)[4] = large[i % kChains][half];
          if constexpr (kThreeTerms) {
            u32 a_low[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) {
              if constexpr (kKeepsLow) {
                a_low[r] = query_low[step][r];
              } else {
                a_low[r] = tf32_low(opaque(a[r]));
              }
            }
            float (&c_small)[4] = kFolded ? c : small[half];
            mma_tf32(c_small, a_low, key[0], key[1]);
            mma_tf32(c_small, a, tf32_low(key[0]), tf32_low(key[1]));
            mma_tf32(c, a, key[0], key[1]);
          } else {
            mma_tf32(c, a, tf32_nearest(key[0]), tf32_nearest(key[1]));
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      float& x = score[0][i / 4][i % 4];
      x = large[0][i / 4][i % 4];
      if constexpr (kChains > 1) x += large[1][i / 4][i % 4];
      if constexpr (kThreeTerms && !kFolded) x += small[i / 4][i % 4];
    }
  }

  // Adds up the partial scores of the team, in the same order in every warp. The caller alternates between two buffers:
  // a warp may write the next one while another still reads this one.
  //   buffer   [kDimWarps] PartialScores in shared memory
  __device__ __forceinline__ void sum_over_team(float (&score)[2][4], u32 buffer, int barrier) const {
    const u32 offset = sizeof(float4) * lane;
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float (&c)[4] = score[tile];
      st_shared_v4_b32(
          buffer + dim_warp * sizeof(PartialScores) + tile * sizeof(PartialScores::fragment[0]) + offset,
          make_uint4(__float_as_uint(c[0]), __float_as_uint(c[1]), __float_as_uint(c[2]), __float_as_uint(c[3])));
    }
    bar_sync<kDimWarps * kWarpSize>(barrier);
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      float (&c)[4] = score[tile];
#pragma unroll
      for (int other = 0; other < kDimWarps; ++other) {
        const uint4 words = ld_shared_v4_b32(buffer + other * sizeof(PartialScores) +
                                            tile * sizeof(PartialScores::fragment[0]) + offset);
        const float x[4] = {__uint_as_float(words.x), __uint_as_float(words.y), __uint_as_float(words.z),
                            __uint_as_float(words.w)};
#pragma unroll
        for (int e = 0; e < 4; ++e) c[e] = other ? c[e] + x[e] : x[e];
      }
    }
  }

  // E = exp(scale * (score - max)) in place of the scores; `rescale`: factor of O and of the sums so far. One term: E
  // is truncated as mma reads it, so that E adds up to the sum. forward.cu [3]
  __device__ __forceinline__ void online_softmax(float (&score)[2][4], float (&rescale)[2], int head) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float new_max = max[head][half];
#pragma unroll
      for (int e = 0; e < 4; ++e) new_max = fmaxf(new_max, score[e / 2][2 * half + e % 2]);
      new_max = fmaxf(new_max, __shfl_xor_sync(kFullWarp, new_max, 1));
      new_max = fmaxf(new_max, __shfl_xor_sync(kFullWarp, new_max, 2));
      // Rounded before it is subtracted, here and in `rescale`: all keys of a row get the same factor, whatever the
      // maxima of earlier KV tiles were.
      const float shift = new_max == negative_infinity() ? 0.0f : __fmul_rn(new_max, scale_log2e);
      rescale[half] = ex2_approx_ftz(__fmul_rn(max[head][half], scale_log2e) - shift);
      max[head][half] = new_max;
      const float log2_nearest = kThreeTerms ? 0.0f : 4.98033e-4f;  // log2 of kToNearestTF32
      float total = 0.0f;
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float& x = score[e / 2][2 * half + e % 2];
        x = ex2_approx_ftz(fmaf(x, scale_log2e, log2_nearest - shift));
        if constexpr (!kThreeTerms) x = __uint_as_float(__float_as_uint(x) & kTF32Bits);
        total += x;
      }
      sum[head][half] = fmaf(sum[head][half], rescale[half], total);
    }
  }

  // SpMM of a head: O = rescale * O + E V.
  __device__ __forceinline__ void accumulate(const float (&weight)[2][4], const float (&rescale)[2], int head,
                                             u32 stage) {
    u32 a[2][4], a_low[2][4];  // A fragments of both k-steps
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int step = i / 4, r = i % 4;
      const u32 x = __float_as_uint(weight[step][r % 2 * 2 + r / 2]);
      if constexpr (kThreeTerms) {
        tf32_split(x, a[step][r], a_low[step][r]);
      } else {
        a[step][r] = x;
      }
    }
    // Rows 2t; keys 8i + 2t + e have the swizzle of row 2t.
    const u32 place =
        stage + sizeof(S::key) + 2 * t * S::kValueRow_bytes + (sizeof(float) * g ^ S::value_swizzle(2 * t));
#pragma unroll
    for (int first = 0; first < kHeadTiles; first += kTilesAtOnce) {
      u32 b[kTilesAtOnce][2][2];  // B fragments of both k-steps
      float c[kTilesAtOnce][4] = {};
#pragma unroll
      for (int i = 0; i < 4 * kTilesAtOnce; ++i) {
        const int j = i / 4, key = kTileN * (i / 2 % 2) + i % 2;
        const u32 column = S::advance(place, kTile_bytes * (kHeadTiles * head + first + j));
        b[j][i / 2 % 2][i % 2] = ld_shared_b32(column + key * S::kValueRow_bytes);
      }
      // Alternating n-tiles hide the latency of mma.
#pragma unroll
      for (int term = kThreeTerms ? 0 : 2; term < 3; ++term) {
#pragma unroll
        for (int step = 0; step < 2; ++step) {
#pragma unroll
          for (int j = 0; j < kTilesAtOnce; ++j) {
            const u32(&x)[2] = b[j][step];
            if constexpr (!kThreeTerms) {
              mma_tf32(c[j], a[step], tf32_nearest(x[0]), tf32_nearest(x[1]));
            } else if (term == 0) {
              mma_tf32(c[j], a_low[step], x[0], x[1]);
            } else if (term == 1) {
              mma_tf32(c[j], a[step], tf32_low(x[0]), tf32_low(x[1]));
            } else {
              mma_tf32(c[j], a[step], x[0], x[1]);
            }
          }
        }
      }
#pragma unroll
      for (int i = 0; i < 4 * kTilesAtOnce; ++i) {
        float& x = out[kHeadTiles * head + first + i / 4][i % 4];
        x = fmaf(x, rescale[i % 4 / 2], c[i / 4][i % 4]);
      }
    }
  }

  __device__ static __forceinline__ void mma_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_m16n8k8_tf32(c, a[0], a[1], a[2], a[3], b0, b1);
  }

  __device__ __forceinline__ float row_sum(int head, int half) const {
    float total = sum[head][half];
    total += __shfl_xor_sync(kFullWarp, total, 1);
    return total + __shfl_xor_sync(kFullWarp, total, 2);
  }
  __device__ __forceinline__ float log2_max(int head, int half) const {
    return __fmul_rn(max[head][half], scale_log2e);
  }
};
