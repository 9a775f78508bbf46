// Epilogues of a row window in registers: O, maxima and sums to the output, or to a partial.
//
// Window is RowWindow (row_window.cuh) or FloatRowWindow (float_row_window.cuh), of one of kDimWarps warps:
//   out                    C fragments of O, two n-tiles a slice
//   row_sum(head, half)    sum of the weights of row g + 8 * half; all lanes call it
//   log2_max(head, half)   maximum of its scores, times log2(e)
#pragma once
#include "common.cuh"
#include "tiles/forward_params.cuh"
#include "tiles/head_group.cuh"
#include "tiles/split_kv.cuh"

template <typename Window>
__device__ __forceinline__ void scale_output(Window& window, float factor) {
#pragma unroll
  for (auto& tile : window.out) {
#pragma unroll
    for (float& x : tile) x *= factor;
  }
}

// kWarp: O / sum to the output, and the LSE.
template <int kDim, int kHeads, Element kOut, typename Window>
__device__ __forceinline__ void store_output(const Window& window, const Params& p, const int (&row)[2]) {
  using Group = typename Window::Group;
  const int t = window.t;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const bool in_range = row[half] < p.num_rows;
    const i64 row_head = static_cast<i64>(row[half]) * p.num_heads + blockIdx.y * kHeads;
    void* const target = row_output<kDim, kOut>(p.output, row_head);
    float inverse[kHeads];
#pragma unroll
    for (int head = 0; head < kHeads; ++head) {
      const float total = window.row_sum(head, half);
      inverse[head] = inverse_or_zero(total);
      if (p.lse && t == 0 && window.dim_warp == 0 && in_range &&
          (!Group::kFolded || head < heads_of_group<kHeads>(p))) {
        p.lse[row_head + head] = log_sum_exp(window.log2_max(head, half), total);
      }
    }
#pragma unroll
    for (int slice = 0; slice < Window::S::kSlices; ++slice) {
      const int place = Window::S::kSlices * window.dim_warp + slice, head = Group::head_of(slice);
      if (Window::kDimWarps > 1 && place >= Partial<kDim, kHeads>::kSlices) break;
      float slice_inverse[Group::kSliceHeads];
#pragma unroll
      for (int i = 0; i < Group::kSliceHeads; ++i) {
        slice_inverse[i] = inverse[head + i < kHeads ? head + i : kHeads - 1];
      }
      const float* left = window.out[2 * slice] + 2 * half;
      const float* right = window.out[2 * slice + 1] + 2 * half;
      store_row_slice<kDim, kHeads, kOut>(target, in_range, place, t, p.num_heads, slice_inverse,
                                          make_float2(left[0], left[1]), make_float2(right[0], right[1]));
    }
  }
}

// kBlock and splits: O, maxima and sums to shared memory.
template <int kDim, int kHeads, typename Window>
__device__ __forceinline__ void store_partial(const Window& window, Partial<kDim, kHeads>& partial) {
  using Group = typename Window::Group;
  const int lane = window.lane, g = window.g, t = window.t;
#pragma unroll
  for (int slice = 0; slice < Window::S::kSlices; ++slice) {
    const int place = Window::S::kSlices * window.dim_warp + slice;
    if (Window::kDimWarps > 1 && place >= Partial<kDim, kHeads>::kSlices) break;
    PartialSlice<Group::kSliceHeads>& target = partial.slices[place];
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float* c = window.out[2 * slice + tile];
      target.out[tile][lane] = make_float4(c[0], c[1], c[2], c[3]);
    }
#pragma unroll
    for (int i = 0; i < Group::kSliceHeads; ++i) {
      const int head = Group::head_of(slice) + i;
      if (head >= kHeads) continue;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float total = window.row_sum(head, half);
        if (t == 0) {
          target.max[i][8 * half + g] = window.log2_max(head, half);
          target.sum[i][8 * half + g] = total;
        }
      }
    }
  }
}
