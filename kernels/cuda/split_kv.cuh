// Output rows of a row window from C fragments, and split-KV: partials and how they are combined.
#pragma once
#include "common.cuh"
#include "ptx/atom.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"

// WorkItem::split, unless it is the number of a split.
constexpr int kWarp = -1;
constexpr int kBlock = -2;

// 16 dimensions of a partial: O, not yet divided by the sum, as C fragments of two n-tiles, with the maximum and sum of
// each row. Every slice has its own copy of both, so that the warps of a block combine different slices independently.
struct PartialSlice {
  float4 out[2][kWarpSize];  // [n-tile][lane]
  float max[kTileM];         // times log2(e)
  float sum[kTileM];
};

template <int kDim>
struct Partial {
  static constexpr int kSlices = divide_up(kDim, 2 * kTileN);
  PartialSlice slices[kSlices];
};

// Rows of Q and O that belong to a window.
struct WindowRows {
  const int* row_ids;  // [num_row_windows][16], num_rows for no row; null: rows in their own order
  int num_rows;
  __device__ __forceinline__ int of(int window, int row) const {
    const int index = window * kTileM + row;
    return row_ids ? row_ids[index] : index;
  }
};

// Stores dimensions 16 * slice to 16 * slice + 15 of a lane's row; `left` and `right` are its C registers of the two
// n-tiles. fp32: the four lanes of a row fill a 32-byte sector with each store. 16 bits: half a sector; so lanes 2i and
// 2i + 1 swap halves, and each stores four neighbouring elements.
//
//   before   lane t: left 2t, 2t+1                     right 8+2t, 8+2t+1
//   after    even t: left 2t to 2t+3                   odd t: right 8+2t-2 to 8+2t+1
template <int kDim, Element kOut>
__device__ __forceinline__ void store_slice(void* output, i64 row_start, bool in_range, int slice, int t, float2 left,
                                            float2 right) {
  if constexpr (kOut == Element::kFloat) {
    float* const target = static_cast<float*>(output) + row_start + 16 * slice + 2 * t;
    if (in_range) *reinterpret_cast<float2*>(target) = left;
    if (in_range && 16 * slice + 8 < kDim) *reinterpret_cast<float2*>(target + 8) = right;
  } else {
    const bool odd = t % 2;
    const float2 sent = odd ? left : right;
    float2 received;
    received.x = __shfl_xor_sync(kFullWarp, sent.x, 1);
    received.y = __shfl_xor_sync(kFullWarp, sent.y, 1);
    const int d = 16 * slice + (odd ? 8 + 2 * (t - 1) : 2 * t);
    if (in_range && d < kDim) {
      const float2 low = odd ? received : left, high = odd ? right : received;
      *reinterpret_cast<uint2*>(static_cast<u16*>(output) + row_start + d) =
          make_uint2(cvt_rn_x2<kOut>(low.x, low.y), cvt_rn_x2<kOut>(high.x, high.y));
    }
  }
}

// 1 / sum within an ulp; 0 for a row without an edge.
__device__ __forceinline__ float inverse_or_zero(float sum) {
  const float inverse = rcp_approx_ftz(sum);  // outside of the ?:, which would become a branch around it
  return sum == 0.0f ? 0.0f : inverse;
}

// Natural logarithm of a row's sum of exponentials; max in units of log 2.
__device__ __forceinline__ float log_sum_exp(float max, float sum) {
  return sum == 0.0f ? negative_infinity() : (max + __log2f(sum)) * 0.693147180559945f;
}

// Combines `count` partials of a window, `stride` bytes apart: the warp takes slices warp, warp + kWarps, ... Writes a
// partial if `result` is given, else the output. The partials are added in their order: the same bits on every run.
template <int kDim, int kWarps, Element kOut>
__device__ __forceinline__ void combine(const char* partials, i64 stride, int count, Partial<kDim>* result,
                                        void* output, float* lse, const WindowRows& rows, int window, int warp,
                                        int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
  for (int slice = warp; slice < Partial<kDim>::kSlices; slice += kWarps) {
    float max[2] = {negative_infinity(), negative_infinity()}, sum[2] = {};
    float out[2][4] = {};
#pragma unroll 4  // loads of several partials in flight
    for (int i = 0; i < count; ++i) {
      const PartialSlice& next = reinterpret_cast<const Partial<kDim>*>(partials + i * stride)->slices[slice];
      const float4 next_out[2] = {next.out[0][lane], next.out[1][lane]};
      float rescale[2], next_rescale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next_max = next.max[8 * half + g];
        const float new_max = fmaxf(max[half], next_max);
        const float shift = new_max == negative_infinity() ? 0.0f : new_max;  // -inf - -inf would be NaN
        rescale[half] = ex2_approx_ftz(max[half] - shift);
        next_rescale[half] = ex2_approx_ftz(next_max - shift);
        sum[half] = sum[half] * rescale[half] + next.sum[8 * half + g] * next_rescale[half];
        max[half] = new_max;
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        out[tile][0] = out[tile][0] * rescale[0] + next_out[tile].x * next_rescale[0];
        out[tile][1] = out[tile][1] * rescale[0] + next_out[tile].y * next_rescale[0];
        out[tile][2] = out[tile][2] * rescale[1] + next_out[tile].z * next_rescale[1];
        out[tile][3] = out[tile][3] * rescale[1] + next_out[tile].w * next_rescale[1];
      }
    }
    if (result) {
      PartialSlice& combined = result->slices[slice];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        combined.out[tile][lane] = make_float4(out[tile][0], out[tile][1], out[tile][2], out[tile][3]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (t == 0) combined.max[8 * half + g] = max[half], combined.sum[8 * half + g] = sum[half];
      }
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = rows.of(window, 8 * half + g);
      const bool in_range = row < rows.num_rows;
      const i64 row_of_head = static_cast<i64>(row) * gridDim.y + blockIdx.y;
      if (slice == 0 && t == 0 && lse && in_range) lse[row_of_head] = log_sum_exp(max[half], sum[half]);
      const float inverse = inverse_or_zero(sum[half]);
      store_slice<kDim, kOut>(output, row_of_head * kDim, in_range, slice, t,
                              make_float2(out[0][2 * half] * inverse, out[0][2 * half + 1] * inverse),
                              make_float2(out[1][2 * half] * inverse, out[1][2 * half + 1] * inverse));
    }
  }
}

// Whether this warp is the last of `count` to arrive at the semaphore, which it sets back to 0. All that the earlier
// warps wrote before they arrived is then visible to every lane.
__device__ __forceinline__ bool arrive_is_last(int* semaphore, int count, int lane) {
  int before = 0;
  __syncwarp();  // the other lanes' writes stay in front of lane 0's release
  if (lane == 0) before = atom_inc_acq_rel_gpu(semaphore, count - 1);
  before = __shfl_sync(kFullWarp, before, 0);
  __syncwarp();  // a shuffle orders no memory: the other lanes' reads stay behind lane 0's acquire
  return before == count - 1;
}

// Combines the partials of a block's warps. kBlock: writes the output. A split: writes the partial of the split; for
// each warp's slices, the last block of the window to arrive combines the partials of all splits and writes the output.
// Not inlined: the main loop would get fewer registers, and run 2 to 3 % slower at kDim = 64.
//   block_partials  [kWarps] Partial, `stride` bytes apart
//   partial         [num_splits][H]
//   semaphores      [num_splits][H][kWarps]  those of a window's first split count its splits
//   split           kBlock, or the split
template <int kDim, int kWarps, Element kOut>
__device__ __noinline__ void combine_block(const char* block_partials, i64 stride, Partial<kDim>* partial,
                                           int* semaphores, int split, int first_split, int num_splits, void* output,
                                           float* lse, WindowRows rows, int window, int warp, int lane) {
  const auto of_head = [](int split) { return static_cast<i64>(split) * gridDim.y + blockIdx.y; };
  Partial<kDim>* const result = split == kBlock ? nullptr : partial + of_head(split);
  combine<kDim, kWarps, kOut>(block_partials, stride, kWarps, result, output, lse, rows, window, warp, lane);
  if (!result || !arrive_is_last(semaphores + of_head(first_split) * kWarps + warp, num_splits, lane)) return;
  combine<kDim, kWarps, kOut>(reinterpret_cast<const char*>(partial + of_head(first_split)),
                              sizeof(Partial<kDim>) * gridDim.y, num_splits, nullptr, output, lse, rows, window, warp,
                              lane);
}
