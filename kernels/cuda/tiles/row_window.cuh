// A row window in a warp's registers: Q, the online softmax and O of all heads of the group. 16-bit elements.
#pragma once
#include "common.cuh"
#include "tiles/forward_params.cuh"
#include "tiles/gather.cuh"
#include "tiles/head_group.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "tiles/split_kv.cuh"

// A lane holds elements of rows g and g + 8 (`half` 0 and 1). Heads are computed kBatch at a time: with two, the
// instructions of one head hide the latency of the other. One head: the last kMoreTiles n-tiles of `out` are rescaled
// with O (sums of edge features).
template <Element kIn, int kDim, int kHeads, int kMoreTiles = 0>
struct RowWindow {
  using S = Stage<kDim, kHeads>;
  using Group = HeadGroup<kDim, kHeads>;
  static constexpr bool kFolded = Group::kFolded;
  static constexpr int kDimWarps = 1, dim_warp = 0;
  static constexpr int kBatch = Group::kSliceHeads > 1 || (kFolded && kHeads % 2 == 0 && kDim <= 32) ? 2 : 1;
  static constexpr int kBatches = divide_up(kHeads, kBatch);
  static constexpr int kHeadTiles = Group::kHeadDim / kTileN;                   // n-tiles of O of a head
  static constexpr int kBatchSlices = kBatch * Group::kHeadDim / (2 * kTileN);  // slices of O; also k-steps, if folded
  static constexpr bool kShortSteps = Group::kSliceHeads > 1;                   // m16n8k8
  static constexpr int kSteps = kShortSteps ? kBatch * kBatches : kFolded ? S::kSlices : 2 * S::kPairs;
  static constexpr int kSumHeads = kFolded ? kTileN : 1;  // heads whose sums share a C fragment, one column each

  const int lane, g, t;
  const float scale_log2e;
  u32 frag_query[kSteps][kShortSteps ? 2 : 4];  // A fragments
  float out[2 * kBatches * kBatchSlices + kMoreTiles][4] = {};
  float max[kBatch * kBatches][2];  // maxima of the scores, not scaled
  float sum[divide_up(kHeads, kSumHeads)][4] = {};

  __device__ __forceinline__ RowWindow(int lane, float scale_log2e)
      : lane(lane), g(lane / 4), t(lane % 4), scale_log2e(scale_log2e) {
#pragma unroll
    for (int i = 0; i < 2 * kBatch * kBatches; ++i) max[i / 2][i % 2] = negative_infinity();
  }

  __device__ __forceinline__ void load_query(const Params& p, const int (&row)[2], bool has_keys) {
    const char* const query = reinterpret_cast<const char*>(
        static_cast<const u16*>(p.query) + static_cast<i64>(blockIdx.y) * kHeads * p.query_head_stride);
    if constexpr (kFolded) {
      load_folded_query(p, query, row, has_keys);
    } else {
      load_one_query(p, query, row, has_keys);
    }
  }

  // One head: chunk 4 * pair + t of a row feeds both k-steps of a pair; K has the same order of dimensions (register
  // remapping). A load fills four registers with one row; an A fragment has two rows.
  __device__ __forceinline__ void load_one_query(const Params& p, const char* query, const int (&row)[2],
                                                 bool has_keys) {
    uint4 chunks[S::kPairs][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int pair = 0; pair < S::kPairs; ++pair) {
        const int chunk = 4 * pair + t;
        const char* const address = query + static_cast<i64>(row[half]) * p.query_row_bytes;
        chunks[pair][half] = load_chunk(address, chunk, has_keys && row[half] < p.num_rows);
      }
    }
#pragma unroll
    for (int pair = 0; pair < S::kPairs; ++pair) {
      const uint4 top = chunks[pair][0], bottom = chunks[pair][1];
      const u32 words[2][4] = {{top.x, bottom.x, top.y, bottom.y}, {top.z, bottom.z, top.w, bottom.w}};
#pragma unroll
      for (int r = 0; r < 8; ++r) {
        frag_query[2 * pair + r / 4][r % 4] = words[r / 4][r % 4] ^ p.sign_bits;  // forward.cu [6]
      }
    }
  }

  // Eight dimensions of a row, zero past kDim.
  __device__ static __forceinline__ uint4 load_chunk(const char* row, int chunk, bool exists) {
    if constexpr (kDim % 8 == 0) {
      return exists && chunk < kDim / 8 ? __ldg(reinterpret_cast<const uint4*>(row) + chunk) : make_uint4(0, 0, 0, 0);
    } else {
      u32 words[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = load_pair(row, 4 * chunk + i, exists);
      return make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  // Dimensions 2 * pair and the next of a row, zero past kDim.
  __device__ static __forceinline__ u32 load_pair(const char* row, int pair, bool exists) {
    return exists && pair < kDim / 2 ? __ldg(reinterpret_cast<const u32*>(row) + pair) : 0;
  }

  // Several heads: a k-step lies in one head, in the order of the A fragment, because ldmatrix reads K.
  __device__ __forceinline__ void load_folded_query(const Params& p, const char* query, const int (&row)[2],
                                                    bool has_keys) {
    const int heads = heads_of_group<kHeads>(p);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      const int head = kShortSteps ? step : Group::head_of(step);
      const int pair = (kShortSteps ? 0 : Group::dim_of(step) / 2) + t;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const bool exists = has_keys && row[half] < p.num_rows && head < heads;
        const char* const address = query + static_cast<i64>(row[half]) * p.query_row_bytes +
                                    head * p.query_head_stride * static_cast<i64>(sizeof(u16));
        frag_query[step][half] = load_pair(address, pair, exists) ^ p.sign_bits;  // forward.cu [6]
        if constexpr (!kShortSteps) frag_query[step][2 + half] = load_pair(address, pair + 4, exists) ^ p.sign_bits;
      }
    }
  }

  // SDDMM of the heads of a batch: C fragments of keys 0 to 7 and 8 to 15. Rows of K past the last key hold old data;
  // the mask has no bit for them.
  __device__ __forceinline__ void scores(float (&score)[kBatch][2][4], int batch, u32 stage) const {
    if constexpr (kFolded) {
      folded_scores(score, batch, stage);
    } else {
      one_score(score[0], stage);
    }
  }

  // One head: four independent chains of mma.
  __device__ __forceinline__ void one_score(float (&score)[2][4], u32 stage) const {
    const u32 row = g * S::kKeyRow_bytes + kChunk_bytes * t, swizzle = S::key_swizzle(g);
    const u32 lane_key[2] = {row + swizzle, row - swizzle};  // even and odd pairs: (64 * pair) ^ swizzle
    float odd_score[2][4] = {};
#pragma unroll
    for (int e = 0; e < 8; ++e) score[e / 4][e % 4] = 0.0f;
#pragma unroll
    for (int pair = 0; pair < S::kPairs; ++pair) {
      const u32(&even)[4] = frag_query[2 * pair];
      const u32(&odd)[4] = frag_query[2 * pair + 1];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 b = ld_shared_v4_b32(stage + lane_key[pair % 2] + tile * kTileN * S::kKeyRow_bytes + 64 * pair);
        mma_m16n8k16<kIn>(score[tile], even[0], even[1], even[2], even[3], b.x, b.y);
        mma_m16n8k16<kIn>(odd_score[tile], odd[0], odd[1], odd[2], odd[3], b.z, b.w);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) score[0][e] += odd_score[0][e], score[1][e] += odd_score[1][e];
  }

  // ldmatrix: matrices (keys 0-7, 8-15) x (low, high chunk of a slice).
  __device__ __forceinline__ void folded_scores(float (&score)[kBatch][2][4], int batch, u32 stage) const {
    const u32 row = lane % 16;
    const u32 lane_key = stage + row * S::kKeyRow_bytes + (lane / 16 * kChunk_bytes ^ S::key_swizzle(row));
#pragma unroll
    for (int e = 0; e < 8 * kBatch; ++e) score[e / 8][e / 4 % 2][e % 4] = 0.0f;
#pragma unroll
    for (int i = 0; i < kBatchSlices; ++i) {
      const int slice = batch * kBatchSlices + i;
      u32 b[4];
      ldmatrix_x4(b, S::advance(lane_key, 32 * slice));
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        if constexpr (kShortSteps) {
          mma_m16n8k8<kIn>(score[0][tile], frag_query[2 * slice][0], frag_query[2 * slice][1], b[tile]);
          mma_m16n8k8<kIn>(score[1][tile], frag_query[2 * slice + 1][0], frag_query[2 * slice + 1][1], b[2 + tile]);
        } else {
          const u32(&a)[4] = frag_query[slice];
          mma_m16n8k16<kIn>(score[2 * kTileN * i / Group::kHeadDim][tile], a[0], a[1], a[2], a[3], b[tile],
                            b[2 + tile]);
        }
      }
    }
  }

  // E = exp(scale * (score - max)) as A fragments of SpMM; rescales O and the sums where a maximum grows.
  __device__ __forceinline__ void online_softmax(u32 (&prob)[kBatch][4], const float (&score)[kBatch][2][4],
                                                 int batch) {
    float new_max[kBatch][2];
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& x = new_max[i][half];
        x = max[batch * kBatch + i][half];
#pragma unroll
        for (int e = 0; e < 4; ++e) x = fmaxf(x, score[i][e / 2][2 * half + e % 2]);
        x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 1));
        x = fmaxf(x, __shfl_xor_sync(kFullWarp, x, 2));
      }
    }
    rescale(new_max, batch);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float& row_max = max[batch * kBatch + i][half];
        row_max = new_max[i][half];
        const float shift = row_max == negative_infinity() ? 0.0f : row_max * scale_log2e;  // forward.cu [3]
#pragma unroll
        for (int tile = 0; tile < 2; ++tile) {
          const float e0 = ex2_approx_ftz(fmaf(score[i][tile][2 * half], scale_log2e, -shift));
          const float e1 = ex2_approx_ftz(fmaf(score[i][tile][2 * half + 1], scale_log2e, -shift));
          prob[i][2 * tile + half] = cvt_rn_x2<kIn>(e0, e1);
        }
      }
    }
  }

  // Skipped if no maximum of the warp grows, and for the first edges of a row: O and the sum are still 0. forward.cu
  // [3]
  __device__ __forceinline__ void rescale(const float (&new_max)[kBatch][2], int batch) {
    const auto grows = [&](int i, int half) {
      const float old_max = max[batch * kBatch + i][half];
      return new_max[i][half] > old_max && old_max != negative_infinity();
    };
    bool any = grows(0, 0) || grows(0, 1);
#pragma unroll
    for (int i = 1; i < kBatch; ++i) any = any || grows(i, 0) || grows(i, 1);
    if (!__any_sync(kFullWarp, any)) return;
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int head = batch * kBatch + i;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float factor = grows(i, half) ? ex2_approx_ftz((max[head][half] - new_max[i][half]) * scale_log2e) : 1.0f;
        rescale_sum(head, half, factor);
#pragma unroll
        for (int j = 0; j < kHeadTiles + kMoreTiles; ++j) {
          float (&tile)[4] = out[head * kHeadTiles + j];
          tile[2 * half] *= factor;
          tile[2 * half + 1] *= factor;
        }
      }
    }
  }

  // Sums of E. One head: all columns of C are equal. Several: C of head h is column h % 8 of a fragment, registers
  // h % 2 of lanes with t = h % 8 / 2.
  __device__ __forceinline__ void rescale_sum(int head, int half, float factor) {
    if (!kFolded) {
      sum[0][2 * half] *= factor;
    } else if (head < kHeads) {
      float& x = sum[head / kSumHeads][2 * half + head % 2];
      x *= t == head % kSumHeads / 2 ? factor : 1.0f;
    }
  }
  __device__ __forceinline__ float row_sum(int head, int half) const {
    if (!kFolded) return sum[0][2 * half];
    return __shfl_sync(kFullWarp, sum[head / kSumHeads][2 * half + head % 2], lane - t + head % kSumHeads / 2);
  }

  __device__ __forceinline__ float log2_max(int head, int half) const { return max[head][half] * scale_log2e; }

  // sums += E.
  __device__ __forceinline__ void accumulate_sums(const u32 (&prob)[kBatch][4], int batch) {
    const u32 ones = cvt_rn_x2<kIn>(1.0f, 1.0f);
#pragma unroll
    for (int i = 0; i < kBatch; ++i) {
      const int head = batch * kBatch + i;
      if (head >= kHeads) continue;
      const u32 column = !kFolded || g == head % kSumHeads ? ones : 0;
      mma_m16n8k16<kIn>(sum[head / kSumHeads], prob[i][0], prob[i][1], prob[i][2], prob[i][3], column, column);
    }
  }

  // SpMM: O += E V. ldmatrix: matrices (keys 0-7, 8-15) x (low, high chunk of a slice), keys innermost. Rows past the
  // last key are replaced by the last key; their weights are 0. forward.cu [2]
  __device__ __forceinline__ void accumulate(const u32 (&prob)[kBatch][4], int batch, u32 stage, int last_key) {
    const u32 row = min(lane % 16, last_key);
    const u32 lane_value =
        stage + sizeof(S::key) + row * S::kValueRow_bytes + (lane / 16 * kChunk_bytes ^ S::value_swizzle(row));
#pragma unroll
    for (int i = 0; i < kBatchSlices; ++i) {
      const int slice = batch * kBatchSlices + i;
      u32 b[4];
      ldmatrix_x4_trans(b, S::advance(lane_value, 32 * slice));
      const u32(&left)[4] = prob[kShortSteps ? 0 : 2 * kTileN * i / Group::kHeadDim];
      const u32(&right)[4] = prob[kShortSteps ? 1 : 2 * kTileN * i / Group::kHeadDim];
      mma_m16n8k16<kIn>(out[2 * slice], left[0], left[1], left[2], left[3], b[0], b[1]);
      mma_m16n8k16<kIn>(out[2 * slice + 1], right[0], right[1], right[2], right[3], b[2], b[3]);
    }
  }
};
