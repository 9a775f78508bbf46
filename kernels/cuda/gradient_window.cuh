// The gradients of a row window, or of a window of columns, in a warp's registers.
#pragma once
#include "common.cuh"
#include "dropout.cuh"
#include "fused3s_backward_params.cuh"
#include "pair_gather.cuh"
#include "ptx/bar_sync.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/prmt.cuh"
#include "ptx/st_shared.cuh"
#include "score_terms.cuh"
#include "split_kv.cuh"
#include "sum_splits.cuh"

// A warp's parts of S and dP, as C fragments of four n-tiles, for the other warp of the team.
struct Exchange {
  float4 fragment[4][kWarpSize];
};

// "Own" rows are those of the window, "gathered" rows those of a KV tile. A lane has elements of own rows g and g + 8
// (`half` 0 and 1).
template <Element kIn, int kDim, bool kColumns, int kDimWarps, int kTerms>
struct GradientWindow {
  using S = RowPair<kDim, kDimWarps>;
  using Partial = GradientPartial<kDim, kColumns, kDimWarps>;
  static constexpr int kSlices = S::kSlices;
  static constexpr int kGrads = kColumns ? 2 : 1;
  static constexpr bool kDrops = kTerms & kDropout;

  const BackwardParams& p;
  const int lane, g, t;
  u32 own[2][kSlices][4];                   // A fragments of both own matrices
  float grad[kGrads][2 * kSlices][4] = {};  // dQ; dK and dV. Not yet times the scale
  float negative_lse[2], delta[2];          // row pass
  i64 seed = 0;
  u32 own_hash[2];  // row pass: `dropout_row`; column pass: the column

  __device__ __forceinline__ GradientWindow(const BackwardParams& p, int lane)
      : p(p), lane(lane), g(lane / 4), t(lane % 4) {}

  __device__ __forceinline__ void load_own(u32 stage) {
    const u32 address = S::tall_address(stage, lane, kTileM - 1);
#pragma unroll
    for (int i = 0; i < 2 * kSlices; ++i)
      ldmatrix_x4(own[i / kSlices][i % kSlices], S::advance(address, i / kSlices, i % kSlices));
  }

  // Lanes i and i + 16 bring own row i.
  __device__ __forceinline__ void start_dropout(int lane_row) {
    seed = __ldg(p.seed);
    const u32 hash = kColumns ? lane_row : dropout_row(seed, lane_row, blockIdx.y);
#pragma unroll
    for (int half = 0; half < 2; ++half) own_hash[half] = __shfl_sync(kFullWarp, hash, 8 * half + g);
  }

  // Row pass: lanes i and i + 16 bring those of row i.
  __device__ __forceinline__ void set_stats(RowStats stats) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      negative_lse[half] = __shfl_sync(kFullWarp, stats.negative_lse, 8 * half + g);
      delta[half] = __shfl_sync(kFullWarp, stats.delta, 8 * half + g);
    }
  }

  // SDDMM of both pairs of matrices over the warp's columns: C fragments of gathered rows 0-7 and 8-15.
  __device__ __forceinline__ void products(float (&score)[2][4], float (&grad_weight)[2][4], u32 address) const {
#pragma unroll
    for (int e = 0; e < 8; ++e) score[e / 4][e % 4] = 0.0f, grad_weight[e / 4][e % 4] = 0.0f;
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int matrix = 0; matrix < 2; ++matrix) {
        const u32(&a)[4] = own[matrix][slice];
        u32 b[4];
        ldmatrix_x4(b, S::advance(address, matrix, slice));
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          mma_m16n8k16<kIn>(matrix ? grad_weight[tile] : score[tile], a[0], a[1], a[2], a[3], b[2 * tile],
                            b[2 * tile + 1]);
        }
      }
    }
  }

  // Adds the other warp's parts. `own_part` and `other_part`: struct Exchange, in two places by turns: one barrier a KV
  // tile is enough, since a warp writes to a place again only after the barrier that follows the other's reads. [11]
  __device__ __forceinline__ void add_parts(float (&score)[2][4], float (&grad_weight)[2][4], u32 own_part,
                                            u32 other_part, int barrier) const {
    constexpr u32 kFragment_bytes = sizeof(Exchange::fragment[0]);
    const u32 offset = sizeof(float4) * lane;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float (&c)[4] = i < 2 ? score[i] : grad_weight[i - 2];
      st_shared_v4_b32(
          own_part + i * kFragment_bytes + offset,
          make_uint4(__float_as_uint(c[0]), __float_as_uint(c[1]), __float_as_uint(c[2]), __float_as_uint(c[3])));
    }
    bar_sync<2 * kWarpSize>(barrier);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float (&c)[4] = i < 2 ? score[i] : grad_weight[i - 2];
      const uint4 other = ld_shared_v4_b32(other_part + i * kFragment_bytes + offset);
      c[0] += __uint_as_float(other.x), c[1] += __uint_as_float(other.y);
      c[2] += __uint_as_float(other.z), c[3] += __uint_as_float(other.w);
    }
  }

  // The same of one number a lane.
  __device__ __forceinline__ float add_part(float x, u32 own_part, u32 other_part, int barrier) const {
    const u32 offset = sizeof(float) * lane;
    st_shared_b32(own_part + offset, __float_as_uint(x));
    bar_sync<2 * kWarpSize>(barrier);
    return x + __uint_as_float(ld_shared_b32(other_part + offset));
  }

  // P and dS as A fragments of SpMM. Where there is no edge both are masked to 0, never multiplied: old data may be
  // anything.
  __device__ __forceinline__ void weights(u32 (&weight)[4], u32 (&grad_score)[4], const float (&score)[2][4],
                                          const float (&grad_weight)[2][4], u32 record, u32 stage) const {
    u32 gathered_hash = 0;
    if constexpr (kDrops) {
      const u32 key = ld_shared_b32(record + sizeof(int) * (lane % kTileKeys));
      gathered_hash = kColumns ? dropout_row(seed, key, blockIdx.y) : key;
    }
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      uint4 stats;  // of gathered rows 8 * tile + 2t and the next
      if constexpr (kColumns) stats = ld_shared_v4_b32(stage + S::kStats + sizeof(RowStats) * (kTileN * tile + 2 * t));
      float prob[2][2], grad[2][2];
#pragma unroll
      for (int e = 0; e < 2; ++e) {
        u32 hash = 0;
        if constexpr (kDrops) hash = __shfl_sync(kFullWarp, gathered_hash, kTileN * tile + 2 * t + e);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float lse = kColumns ? __uint_as_float(e ? stats.z : stats.x) : negative_lse[half];
          const float subtracted = kColumns ? __uint_as_float(e ? stats.w : stats.y) : delta[half];
          const float x = ex2_approx_ftz(fmaf(score[tile][2 * half + e], p.scale_log2e, lse));
          float kept = x, of_weight = grad_weight[tile][2 * half + e];
          if constexpr (kDrops) {
            const bool keep =
                kColumns ? keeps(hash, own_hash[half], p.threshold) : keeps(own_hash[half], hash, p.threshold);
            kept = keep ? x : 0.0f;
            of_weight = keep ? of_weight * p.rescale : 0.0f;
          }
          prob[half][e] = kept;
          grad[half][e] = x * (of_weight - subtracted);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        weight[2 * tile + half] = cvt_rn_x2<kIn>(prob[half][0], prob[half][1]);
        grad_score[2 * tile + half] = cvt_rn_x2<kIn>(grad[half][0], grad[half][1]);
      }
    }
    mask(weight, grad_score, record);
  }

  // Bits 2t and 2t + 1 of byte 2 * half + tile are the edges of an A register; shifted, each is the top bit of the
  // byte.
  __device__ __forceinline__ void mask(u32 (&weight)[4], u32 (&grad_score)[4], u32 record) const {
    const u32 bits = ld_shared_b32(record + kBitmap + sizeof(u32) * g);
    const u32 first = bits << (7 - 2 * t), second = bits << (6 - 2 * t);
    const u32 edges[4] = {prmt_b32<0xcc88>(first, second), prmt_b32<0xeeaa>(first, second),
                          prmt_b32<0xdd99>(first, second), prmt_b32<0xffbb>(first, second)};  // [2 * tile + half]
#pragma unroll
    for (int i = 0; i < 4; ++i) weight[i] &= edges[i], grad_score[i] &= edges[i];
  }

  // SpMM: dQ += dS K; dK += dS^T Q, dV += P^T dO.
  __device__ __forceinline__ void accumulate(const u32 (&weight)[4], const u32 (&grad_score)[4], u32 address) {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int i = 0; i < kGrads; ++i) {
        const u32(&a)[4] = i ? weight : grad_score;
        u32 b[4];
        ldmatrix_x4_trans(b, S::advance(address, i, slice));
        mma_m16n8k16<kIn>(grad[i][2 * slice], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma_m16n8k16<kIn>(grad[i][2 * slice + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
  }

  // Epilogue of kWarp: the gradients, rounded, to the matrices of a stage.
  __device__ __forceinline__ void round_to(u32 stage) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 address = S::chunk_address(stage, 8 * half + g, 0) + sizeof(u32) * t;
#pragma unroll
      for (int i = 0; i < kGrads; ++i) {
        const float factor = i ? p.rescale : p.scale;
#pragma unroll
        for (int tile = 0; tile < 2 * kSlices; ++tile) {
          const float* const pair = grad[i][tile] + 2 * half;
          st_shared_b32(S::advance(address, i, tile / 2) ^ tile % 2 * kChunk_bytes,
                        cvt_rn_x2<kIn>(pair[0] * factor, pair[1] * factor));
        }
      }
    }
  }

  // Epilogue of kBlock and of a split.
  __device__ __forceinline__ void store_partial(FragmentPair* partial) const {
#pragma unroll
    for (int i = 0; i < kGrads * 2 * kSlices; ++i) {
      const float* const c = grad[i / (2 * kSlices)][i % (2 * kSlices)];
      partial[i / 2].c[i % 2][lane] = make_float4(c[0], c[1], c[2], c[3]);
    }
  }
};
