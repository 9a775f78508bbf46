// Output rows of a row window from C fragments, and split-KV: partials and how they are combined.
#pragma once
#include "common.cuh"
#include "tiles/head_group.cuh"
#include "ptx/atom.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"

// WorkItem::split, unless it is the number of a split.
constexpr int kWarp = -1;
constexpr int kBlock = -2;

// A slice (16 columns) of a partial: O before the division by the sum, as C fragments of two n-tiles, and the maximum
// and sum of each row and head. Every slice has its own copy of both, so that the warps of a block combine slices
// independently.
template <int kSliceHeads>
struct PartialSlice {
  float4 out[2][kWarpSize];        // [n-tile][lane]
  float max[kSliceHeads][kTileM];  // times log2(e)
  float sum[kSliceHeads][kTileM];
};

template <int kDim, int kHeads = 1>
struct Partial {
  using Group = HeadGroup<kDim, kHeads>;
  static constexpr int kSlices = Group::kSlices;
  PartialSlice<Group::kSliceHeads> slices[kSlices];
};

// Rows of Q and O of a window.
struct WindowRows {
  const int* row_ids;  // [num_row_windows][16], num_rows for no row; null: rows in order
  int num_rows;
  __device__ __forceinline__ int of(int window, int row) const {
    const int index = window * kTileM + row;
    return row_ids ? row_ids[index] : index;
  }
};

// Stores a slice of one row; `left` and `right` are the lane's C registers of the two n-tiles. `row_output` points to
// the first head of the group; the slice begins `offset` elements after it. left_count, right_count: dimensions of each
// n-tile that exist, 0 for no row or no head. fp32: the four lanes of a row fill a 32-byte sector per store. 16 bits
// would fill half a sector: lanes 2i and 2i + 1 swap halves, and each stores four neighbouring elements.
//
//   before   lane t: left 2t, 2t+1                     right 2t, 2t+1
//   after    even t: left 2t to 2t+3                   odd t: right 2t-2 to 2t+1
template <int kDim, int kTileGap, Element kOut>
__device__ __forceinline__ void store_slice(void* row_output, int offset, int left_count, int right_count, int t,
                                            float2 left, float2 right) {
  if constexpr (kOut == Element::kFloat) {
    float* const target = static_cast<float*>(row_output) + 2 * t + offset;
    if (2 * t < left_count) *reinterpret_cast<float2*>(target) = left;
    if (2 * t < right_count) *reinterpret_cast<float2*>(target + kTileGap) = right;
  } else if constexpr (kDim % 4) {  // four elements are not aligned
    u16* const target = static_cast<u16*>(row_output) + 2 * t + offset;
    if (2 * t < left_count) *reinterpret_cast<u32*>(target) = cvt_rn_x2<kOut>(left.x, left.y);
    if (2 * t < right_count) *reinterpret_cast<u32*>(target + kTileGap) = cvt_rn_x2<kOut>(right.x, right.y);
  } else {
    const bool odd = t % 2;
    const float2 sent = odd ? left : right;
    float2 received;
    received.x = __shfl_xor_sync(kFullWarp, sent.x, 1);
    received.y = __shfl_xor_sync(kFullWarp, sent.y, 1);
    const int d = odd ? 2 * (t - 1) : 2 * t;
    if (d < (odd ? right_count : left_count)) {
      const float2 low = odd ? received : left, high = odd ? right : received;
      u16* const target = static_cast<u16*>(row_output) + ((odd ? kTileGap : 0) + d) + offset;
      *reinterpret_cast<uint2*>(target) = make_uint2(cvt_rn_x2<kOut>(low.x, low.y), cvt_rn_x2<kOut>(high.x, high.y));
    }
  }
}

// Output of a row, from the first head of the group on. `row_head`: row * num_heads + that head.
template <int kDim, Element kOut>
__device__ __forceinline__ void* row_output(void* output, i64 row_head) {
  return static_cast<char*>(output) + row_head * (kDim * static_cast<int>(kOut == Element::kFloat ? 4 : 2));
}

// Stores a slice of one row of O, divided by the sums of its heads. `num_heads`: of the whole tensor.
template <int kDim, int kHeads, Element kOut>
__device__ __forceinline__ void store_row_slice(void* row_output, bool in_range, int slice, int t, int num_heads,
                                                const float (&inverse)[HeadGroup<kDim, kHeads>::kSliceHeads],
                                                float2 left, float2 right) {
  using Group = HeadGroup<kDim, kHeads>;
  const bool has_left = in_range && Group::exists(slice, 0, num_heads);
  const bool has_right = in_range && Group::exists(slice, Group::kSliceHeads - 1, num_heads);
  const float right_inverse = inverse[Group::kSliceHeads - 1];
  store_slice<kDim, Group::kTileGap, kOut>(
      row_output, Group::head_of(slice) * kDim + Group::dim_of(slice), has_left ? Group::dims_of(slice, 0) : 0,
      has_right ? Group::dims_of(slice, 1) : 0, t, make_float2(left.x * inverse[0], left.y * inverse[0]),
      make_float2(right.x * right_inverse, right.y * right_inverse));
}

// 1 / sum to within an ulp; 0 for a row without an edge.
__device__ __forceinline__ float inverse_or_zero(float sum) {
  const float inverse = rcp_approx_ftz(sum);  // not inside the ?:, which would become a branch
  return sum == 0.0f ? 0.0f : inverse;
}

// Natural logarithm of a row's sum of exponentials; max in units of log 2.
__device__ __forceinline__ float log_sum_exp(float max, float sum) {
  return sum == 0.0f ? negative_infinity() : (max + __log2f(sum)) * kLn2;
}

// Combines `count` partials of a window, `stride` bytes apart: the warp combines slices warp, warp + kWarps, ... Writes
// a partial if `result` is given, else the output. The partials are added in order: the same bits on every run.
template <int kDim, int kHeads, int kWarps, Element kOut>
__device__ __forceinline__ void combine(const char* partials, i64 stride, int count, Partial<kDim, kHeads>* result,
                                        void* output, float* lse, int num_heads, const WindowRows& rows, int window,
                                        int warp, int lane) {
  using Group = HeadGroup<kDim, kHeads>;
  constexpr int kSliceHeads = Group::kSliceHeads;
  const int g = lane / 4;
  const int t = lane % 4;
  for (int slice = warp; slice < Group::kSlices; slice += kWarps) {
    float max[kSliceHeads][2], sum[kSliceHeads][2];
#pragma unroll
    for (int i = 0; i < 2 * kSliceHeads; ++i) max[i / 2][i % 2] = negative_infinity(), sum[i / 2][i % 2] = 0.0f;
    float out[2][4] = {};
#pragma unroll 4  // loads of several partials in flight
    for (int i = 0; i < count; ++i) {
      const PartialSlice<kSliceHeads>& next =
          reinterpret_cast<const Partial<kDim, kHeads>*>(partials + i * stride)->slices[slice];
      const float4 next_out[2] = {next.out[0][lane], next.out[1][lane]};
      float rescale[kSliceHeads][2], next_rescale[kSliceHeads][2];
#pragma unroll
      for (int head = 0; head < kSliceHeads; ++head) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float next_max = next.max[head][8 * half + g];
          const float new_max = fmaxf(max[head][half], next_max);
          const float shift = new_max == negative_infinity() ? 0.0f : new_max;  // -inf - -inf would be NaN
          rescale[head][half] = ex2_approx_ftz(max[head][half] - shift);
          next_rescale[head][half] = ex2_approx_ftz(next_max - shift);
          sum[head][half] =
              sum[head][half] * rescale[head][half] + next.sum[head][8 * half + g] * next_rescale[head][half];
          max[head][half] = new_max;
        }
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const int head = kSliceHeads > 1 ? tile : 0;
        out[tile][0] = out[tile][0] * rescale[head][0] + next_out[tile].x * next_rescale[head][0];
        out[tile][1] = out[tile][1] * rescale[head][0] + next_out[tile].y * next_rescale[head][0];
        out[tile][2] = out[tile][2] * rescale[head][1] + next_out[tile].z * next_rescale[head][1];
        out[tile][3] = out[tile][3] * rescale[head][1] + next_out[tile].w * next_rescale[head][1];
      }
    }
    if (result) {
      PartialSlice<kSliceHeads>& combined = result->slices[slice];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        combined.out[tile][lane] = make_float4(out[tile][0], out[tile][1], out[tile][2], out[tile][3]);
      }
#pragma unroll
      for (int i = 0; i < 2 * kSliceHeads; ++i) {
        const int head = i / 2, half = i % 2;
        if (t == 0)
          combined.max[head][8 * half + g] = max[head][half], combined.sum[head][8 * half + g] = sum[head][half];
      }
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = rows.of(window, 8 * half + g);
      const bool in_range = row < rows.num_rows;
      const i64 row_head = static_cast<i64>(row) * num_heads + blockIdx.y * kHeads;
      float inverse[kSliceHeads];
#pragma unroll
      for (int head = 0; head < kSliceHeads; ++head) {
        inverse[head] = inverse_or_zero(sum[head][half]);
        if (Group::dim_of(slice) == 0 && t == 0 && lse && in_range && Group::exists(slice, head, num_heads)) {
          lse[row_head + Group::head_of(slice) + head] = log_sum_exp(max[head][half], sum[head][half]);
        }
      }
      store_row_slice<kDim, kHeads, kOut>(row_output<kDim, kOut>(output, row_head), in_range, slice, t, num_heads,
                                               inverse, make_float2(out[0][2 * half], out[0][2 * half + 1]),
                                               make_float2(out[1][2 * half], out[1][2 * half + 1]));
    }
  }
}

// Whether this warp is the last of `count` to arrive at the semaphore, which atomicInc then wraps to 0. The writes of
// the earlier warps before their arrival are visible to every lane of the last one.
__device__ __forceinline__ bool arrive_is_last(int* semaphore, int count, int lane) {
  int before = 0;
  __syncwarp();  // orders the other lanes' writes before lane 0's release
  if (lane == 0) before = atom_inc_acq_rel_gpu(semaphore, count - 1);
  before = __shfl_sync(kFullWarp, before, 0);
  __syncwarp();  // a shuffle orders no memory: orders the other lanes' reads after lane 0's acquire
  return before == count - 1;
}

// Combines the partials of a block's warps, or teams of warps (kPartials of them). kBlock: writes the output. A split:
// writes the partial of the split; for each warp's slices, the last block of the window to arrive combines the partials
// of all splits and writes the output.
// Not inlined: ptxas would take registers from the main loop.
//   block_partials  [kPartials] Partial, `stride` bytes apart
//   partial         [num_splits][num_groups]
//   semaphores      [num_splits][num_groups][kWarps]  the semaphore of a window's first split counts its splits
//   split           kBlock, or the split
template <int kDim, int kHeads, int kWarps, int kPartials, Element kOut>
__device__ __noinline__ void combine_block(const char* block_partials, i64 stride, Partial<kDim, kHeads>* partial,
                                           int* semaphores, int split, int first_split, int num_splits, void* output,
                                           float* lse, int num_heads, WindowRows rows, int window, int warp, int lane) {
  const auto of_group = [](int split) { return static_cast<i64>(split) * gridDim.y + blockIdx.y; };
  Partial<kDim, kHeads>* const result = split == kBlock ? nullptr : partial + of_group(split);
  combine<kDim, kHeads, kWarps, kOut>(block_partials, stride, kPartials, result, output, lse, num_heads, rows,
                                           window, warp, lane);
  if (!result || !arrive_is_last(semaphores + of_group(first_split) * kWarps + warp, num_splits, lane)) return;
  combine<kDim, kHeads, kWarps, kOut>(reinterpret_cast<const char*>(partial + of_group(first_split)),
                                           sizeof(Partial<kDim, kHeads>) * gridDim.y, num_splits, nullptr, output, lse,
                                           num_heads, rows, window, warp, lane);
}
