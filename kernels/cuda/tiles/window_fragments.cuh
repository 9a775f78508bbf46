// SDDMM and SpMM of a window on tensor cores: own rows in registers, gathered rows in a stage. 16 bits: ldmatrix and
// mma.m16n8k16. float32: ld.shared and mma.m16n8k8 in TF32 (tf32.cuh).
//
// Own rows: the rows of the window. Gathered rows: the rows of a KV tile. A lane holds elements of own rows g and g + 8
// (`half` 0 and 1).
#pragma once
#include "common.cuh"
#include "tiles/backward_params.cuh"
#include "tiles/pair_gather.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/opaque.cuh"
#include "ptx/prmt.cuh"
#include "ptx/st_shared.cuh"
#include "tiles/tf32.cuh"

// 16 bits.
template <Element kIn, int kDim, bool kColumns, int kDimWarps, bool = kIsWide<kIn>>
struct WindowFragments {
  using S = RowPair<kElement_bytes<kIn>, kDim, kDimWarps>;
  static constexpr int kSlices = S::kSlices;
  static constexpr int kGrads = kColumns ? 2 : 1;
  static constexpr int kWeights = 4;  // registers of P, and of dS: an A fragment of SpMM

  const int lane, g, t;
  u32 own[2][kSlices][4];                   // A fragments of both own matrices
  float grad[kGrads][2 * kSlices][4] = {};  // dQ; dK and dV. Not yet times the scale

  __device__ __forceinline__ explicit WindowFragments(int lane) : lane(lane), g(lane / 4), t(lane % 4) {}

  __device__ __forceinline__ void load_own(u32 stage) {
    const u32 address = S::tall_address(stage, lane, kTileM - 1);
#pragma unroll
    for (int i = 0; i < 2 * kSlices; ++i)
      ldmatrix_x4(own[i / kSlices][i % kSlices], S::advance(address, i / kSlices, i % kSlices));
  }

  // SDDMM of both pairs of matrices over the warp's columns: C fragments of gathered rows 0-7 and 8-15.
  __device__ __forceinline__ void products(float (&score)[2][4], float (&grad_weight)[2][4], u32 stage,
                                           int last_row) const {
    const u32 address = S::wide_address(stage, lane, last_row);
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

  // Weights of own row g + 8 * half and gathered rows 8 * tile + 2t and 8 * tile + 2t + 1, as A registers of SpMM.
  __device__ static __forceinline__ void pack(u32 (&weight)[kWeights], int tile, int half, const float (&of_rows)[2]) {
    weight[2 * tile + half] = cvt_rn_x2<kIn>(of_rows[0], of_rows[1]);
  }

  // Bits 2t and 2t + 1 of byte 2 * half + tile are the edges of an A register. The shifts move each to the top bit of
  // its byte, which prmt replicates.
  __device__ __forceinline__ void mask(u32 (&weight)[kWeights], u32 (&grad_score)[kWeights], u32 bits) const {
    const u32 first = bits << (7 - 2 * t), second = bits << (6 - 2 * t);
    const u32 edges[4] = {prmt_b32<0xcc88>(first, second), prmt_b32<0xeeaa>(first, second),
                          prmt_b32<0xdd99>(first, second), prmt_b32<0xffbb>(first, second)};  // [2 * tile + half]
#pragma unroll
    for (int i = 0; i < kWeights; ++i) weight[i] &= edges[i], grad_score[i] &= edges[i];
  }

  // SpMM: dQ += dS K; dK += dS^T Q, dV += P^T dO.
  __device__ __forceinline__ void accumulate(const u32 (&weight)[kWeights], const u32 (&grad_score)[kWeights],
                                             u32 stage, int last_row) {
    const u32 address = S::tall_address(stage, lane, last_row);
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

  // The gradients, times `factor` and rounded, to the matrices of a stage.
  __device__ __forceinline__ void round_to(u32 stage, const float (&factor)[2]) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 address = S::chunk_address(stage, 8 * half + g, 0) + sizeof(u32) * t;
#pragma unroll
      for (int i = 0; i < kGrads; ++i) {
#pragma unroll
        for (int tile = 0; tile < 2 * kSlices; ++tile) {
          const float* const pair = grad[i][tile] + 2 * half;
          st_shared_b32(S::advance(address, i, tile / 2) ^ tile % 2 * kChunk_bytes,
                        cvt_rn_x2<kIn>(pair[0] * factor[i], pair[1] * factor[i]));
        }
      }
    }
  }
};

// float32. Own rows are A of SDDMM. SpMM is transposed: A is the gathered rows, and n runs over own rows. Any order of
// the k indices is correct if A and B have the same, and m and n may be permuted. The order is chosen so that a lane's
// elements are neighbours in memory and in registers, and P and dS need no shuffle.
//
//   SDDMM, slice of 16 columns   k = t, t + 4 of k-step 0; of k-step 1    columns 4t, 4t + 1; 4t + 2, 4t + 3
//   SpMM, eight gathered rows    k = t, t + 4                             gathered rows 2t, 2t + 1, as in C of SDDMM
//     and a slice                m = g, g + 8                             columns 2g, 2g + 1
//                                n = 2t, 2t + 1 of n-tile 0; of 1         own rows 2t, 2t + 1; 2t + 8, 2t + 9
//
// The high term of own rows and weights is rounded, that of gathered rows truncated, which is cheaper (tf32.cuh); with
// one term all are rounded. The row pass, whose gradients take half as many registers, keeps both terms of its own
// rows; the column pass splits them again for each KV tile.
//
// The tensor core truncates sums, and the error grows with the number of products in one accumulator. With three terms
// large products are therefore summed in few steps: SDDMM has separate accumulators for the small terms, and the
// products of a slice, and those of a KV tile with the gradients, are added outside of the tensor core. Otherwise dP is
// too small by several ulp of the sum over all columns, which <dO, O> is not: dS is their difference.
template <Element kIn, int kDim, bool kColumns, int kDimWarps>
struct WindowFragments<kIn, kDim, kColumns, kDimWarps, true> {
  using S = RowPair<kElement_bytes<kIn>, kDim, kDimWarps>;
  static constexpr int kSlices = S::kSlices;
  static constexpr int kGrads = kColumns ? 2 : 1;
  static constexpr int kWeights = 8;  // registers of P, and of dS: B of SpMM, [gathered rows 0-7, 8-15][n-tile][2]
  static constexpr bool kHasLow = kIn == Element::kFloat;
  static constexpr u32 kHalf_bytes = S::Layout::start(8);  // eight rows

  static constexpr bool kKeepsLow = kHasLow && !kColumns;

  const int lane, g, t;
  u32 own[2][kSlices][8];  // both own matrices: columns 4t to 4t + 3 of row g, then of row g + 8
  u32 own_low[2][kKeepsLow ? kSlices : 1][8];
  float grad[kGrads][2 * kSlices][4] = {};

  __device__ __forceinline__ explicit WindowFragments(int lane) : lane(lane), g(lane / 4), t(lane % 4) {}

  __device__ __forceinline__ void load_own(u32 stage) {
    const u32 address = S::chunk_address(stage, g, t);
#pragma unroll
    for (int matrix = 0; matrix < 2; ++matrix) {
#pragma unroll
      for (int slice = 0; slice < kSlices; ++slice) {
        load_rows(own[matrix][slice], address, matrix, slice);
#pragma unroll
        for (int i = 0; i < 8; ++i) {
          u32& x = own[matrix][slice][i];
          if constexpr (kKeepsLow) {
            tf32_split(x, x, own_low[matrix][slice][i]);
          } else if constexpr (!kHasLow) {
            x = tf32_nearest(x);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void products(float (&score)[2][4], float (&grad_weight)[2][4], u32 stage,
                                           int /* last_row: rows after it are zeros */) const {
    const u32 address = S::chunk_address(stage, g, t);
    float sum[2][2][4] = {}, small[2][2][4] = {};  // [matrix][tile]
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int matrix = 0; matrix < 2; ++matrix) {
        u32 rows[8];
        load_rows(rows, address, matrix, slice);
        float of_slice[2][4] = {};
#pragma unroll
        for (int step = 0; step < 2; ++step) {
          u32 a[4], a_low[4];
#pragma unroll
          for (int r = 0; r < 4; ++r) {
            const int i = 2 * step + r / 2 + r % 2 * 4;
            a[r] = own[matrix][slice][i];
            if constexpr (kKeepsLow) {
              a_low[r] = own_low[matrix][slice][i];
            } else if constexpr (kHasLow) {
              tf32_split(opaque(a[r]), a[r], a_low[r]);  // opaque: recomputed per iteration, not kept in registers
            }
          }
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            const u32* const b = rows + 4 * tile + 2 * step;
            if constexpr (kHasLow) {
              mma(small[matrix][tile], a_low, b[0], b[1]);
              mma(small[matrix][tile], a, tf32_low(b[0]), tf32_low(b[1]));
              mma(of_slice[tile], a, b[0], b[1]);
            } else {
              mma(sum[matrix][tile], a, tf32_nearest(b[0]), tf32_nearest(b[1]));
            }
          }
        }
        if constexpr (kHasLow) {
#pragma unroll
          for (int e = 0; e < 8; ++e) sum[matrix][e / 4][e % 4] += of_slice[e / 4][e % 4];
        }
      }
    }
#pragma unroll
    for (int e = 0; e < 8; ++e) {
      score[e / 4][e % 4] = sum[0][e / 4][e % 4] + small[0][e / 4][e % 4];
      grad_weight[e / 4][e % 4] = sum[1][e / 4][e % 4] + small[1][e / 4][e % 4];
    }
  }

  __device__ static __forceinline__ void pack(u32 (&weight)[kWeights], int tile, int half, const float (&of_rows)[2]) {
#pragma unroll
    for (int e = 0; e < 2; ++e) weight[4 * tile + 2 * half + e] = __float_as_uint(of_rows[e]);
  }

  // Bit 8 * tile + 2t + e of half-word `half` is the edge of register 4 * tile + 2 * half + e.
  __device__ __forceinline__ void mask(u32 (&weight)[kWeights], u32 (&grad_score)[kWeights], u32 bits) const {
    const u32 shifted = bits >> 2 * t;
#pragma unroll
    for (int i = 0; i < kWeights; ++i) {
      const bool is_edge = shifted & 1u << (8 * (i / 4) + 16 * (i / 2 % 2) + i % 2);
      weight[i] = is_edge ? weight[i] : 0;
      grad_score[i] = is_edge ? grad_score[i] : 0;
    }
  }

  __device__ __forceinline__ void accumulate(const u32 (&weight)[kWeights], const u32 (&grad_score)[kWeights],
                                             u32 stage, int /* last_row: rows after it are zeros */) {
    const u32 even = pair_address(stage, 2 * t), odd = pair_address(stage, 2 * t + 1);
    u32 b[kGrads][kWeights], b_low[kGrads][kWeights];
#pragma unroll
    for (int i = 0; i < kGrads * kWeights; ++i) {
      const u32 x = (i / kWeights ? weight : grad_score)[i % kWeights];
      u32 &high = b[i / kWeights][i % kWeights], &low = b_low[i / kWeights][i % kWeights];
      if constexpr (kHasLow) {
        tf32_split(x, high, low);
      } else {
        high = tf32_nearest(x);
      }
    }
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice) {
#pragma unroll
      for (int i = 0; i < kGrads; ++i) {
        u32 a[2][4];  // [gathered rows 0-7, 8-15]
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const uint2 first = ld_shared_v2_b32(S::advance(even, i, slice) + tile * kHalf_bytes);
          const uint2 second = ld_shared_v2_b32(S::advance(odd, i, slice) + tile * kHalf_bytes);
          a[tile][0] = first.x, a[tile][1] = first.y, a[tile][2] = second.x, a[tile][3] = second.y;
        }
        if constexpr (kHasLow) {
          float sum[2][4] = {};  // [n-tile]
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
            u32 a_low[4];
#pragma unroll
            for (int r = 0; r < 4; ++r) a_low[r] = tf32_low(a[tile][r]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
              const int k = 4 * tile + 2 * n;
              mma(sum[n], a_low, b[i][k], b[i][k + 1]);
              mma(sum[n], a[tile], b_low[i][k], b_low[i][k + 1]);
            }
          }
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int n = 0; n < 2; ++n) mma(sum[n], a[tile], b[i][4 * tile + 2 * n], b[i][4 * tile + 2 * n + 1]);
          }
#pragma unroll
          for (int e = 0; e < 8; ++e) grad[i][2 * slice + e / 4][e % 4] += sum[e / 4][e % 4];
        } else {
#pragma unroll
          for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
            for (int r = 0; r < 4; ++r) a[tile][r] = tf32_nearest(a[tile][r]);
#pragma unroll
            for (int n = 0; n < 2; ++n)
              mma(grad[i][2 * slice + n], a[tile], b[i][4 * tile + 2 * n], b[i][4 * tile + 2 * n + 1]);
          }
        }
      }
    }
  }

  __device__ __forceinline__ void round_to(u32 stage, const float (&factor)[2]) const {
#pragma unroll
    for (int e = 0; e < 2; ++e) {
      const u32 address = pair_address(stage, 2 * t + e);
#pragma unroll
      for (int i = 0; i < kGrads; ++i) {
#pragma unroll
        for (int tile = 0; tile < 2 * kSlices; ++tile) {
          const float* const c = grad[i][tile] + e;
          st_shared_v2_b32(S::advance(address, i, tile / 2) + tile % 2 * kHalf_bytes,
                           make_uint2(__float_as_uint(c[0] * factor[i]), __float_as_uint(c[2] * factor[i])));
        }
      }
    }
  }

 private:
  // Columns 2g and 2g + 1 of the first slice of a row.
  __device__ __forceinline__ u32 pair_address(u32 stage, u32 row) const {
    return S::chunk_address(stage, row, g / 2) + g % 2 * static_cast<u32>(sizeof(uint2));
  }

  // Columns 4t to 4t + 3 of a slice, of row g and then of row g + 8.
  __device__ static __forceinline__ void load_rows(u32 (&words)[8], u32 address, int matrix, int slice) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const uint4 four = ld_shared_v4_b32(S::advance(address, matrix, slice) + half * kHalf_bytes);
      words[4 * half] = four.x, words[4 * half + 1] = four.y;
      words[4 * half + 2] = four.z, words[4 * half + 3] = four.w;
    }
  }

  __device__ static __forceinline__ void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    mma_m16n8k8_tf32(c, a[0], a[1], a[2], a[3], b0, b1);
  }
};
