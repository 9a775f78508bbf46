// Gradient of the dense block (dense_block.cu) with respect to its rows, in one kernel; compute capability 9.0 only.
//
//   dh2     = grad + qkv_grad Wqkv              Wqkv of the next block; without the product if not kHasNext
//   dS2     = gradient of norm 2 at dh2         -> sum2_grad
//   dhidden = dS2 Wdown * [hidden > 0]          -> hidden_grad
//   dh1     = dS2 + dhidden Wup
//   dS1     = gradient of norm 1 at dh1         -> sum1_grad, also the gradient of h
//   dattn   = dS1 Wout                          -> attn_grad
//
// Column sums, the gradients of biases and norms, go to `partial`. Gradients of the matrices are products over all rows
// (sum1_grad^T attn_out and so on), computed by cuBLAS.
//
// Accumulators, sums and norms are fp32; only operands of the next product are rounded to 16 bits. Blocks, warpgroups,
// tiles, registers and the permutation of dimensions: as in dense_block.cu, whose bracketed numbers mark the same order
// here. Weights are transposed: the first product has wide tiles of Wqkv^T, [kDim outputs][kSlice k of qkv].
//
// Column sums of a warp's 16 rows, in a group of 32 dimensions: lane (g, t) has rows g and g + 8 of dimensions 8t to
// 8t + 7. The eight lanes of a t add their rows and share the dimensions out in three exchanges, so that lane (g, t)
// ends with the sum of dimension 8t + g, which it adds to the warp's floats in shared memory:
//
//   lanes apart   16               8             4
//   sent          4 of 8 sums      2 of 4        1 of 2
//   kept          g / 4 = 0: 0-3   g / 2 % 2     g % 2
//                 g / 4 = 1: 4-7
//
// At the end the warps of a block are added in their order, and sum_partials (residual_norm.cu) adds the blocks: the
// same bits on every run.
//
// Instances (backward_layout in models/dense/weights.py); shared memory in bytes, with kHasNext
//   kDim                     64           96           128
//   kSlice                   64           96           64
//   kConsumers               2            2            2
//   resident tiles           8 x 8,192    8 x 18,432   0
//   stages                   0            0            8 x 16,384
//   vectors                  2,048        3,072        4,096
//   sums of a warp           8 x 2,048    8 x 3,072    8 x 4,096
//   full barriers            8 x 8        8 x 8        8 x 8
//   empty barriers           0            0            8 x 8
//   total                    84,032       175,168      168,064
//
// Registers of a consumer at kDim = 128, of 240
//   first product   acc 64, S2 32, qkv_grad as loaded 3 x 16, as operands 2 x 16          176
//   hidden units    acc 64, dS2 32, two slices 64, dhidden 16, hidden 16                  192
//   last product    dS1 32, two slices 64, of the next rows grad 32 and qkv_grad 3 x 16   176
//
// Bound by memory. At the end of a round, the first operands of the next one are prefetched to L2, and S1 at its start;
// prefetching everything that a round reads would evict what it writes (kernels/NOTES.md).
#include "common.cuh"
#include "dense_consumer.cuh"
#include "dense_rows.cuh"
#include "dense_tiles.cuh"
#include "ptx/bar_sync.cuh"
#include "ptx/cvt.cuh"
#include "ptx/wgmma.cuh"

struct Params {
  const u16* grad;           // [num_rows][kDim]  gradient of h_next as the next block's residual
  const u16* qkv_grad;       // [num_rows][3 * kDim]  null without kHasNext
  const u16* sum1;           // [num_rows][kDim]  sum1 to statistics: stored by the forward kernel
  const u16* hidden;         // [num_rows][2 * kDim]
  const u16* sum2;           // [num_rows][kDim]
  const float2* statistics;  // [2][num_rows]
  const char* weights;       // [kTiles][kDim * kSlice]  16-bit
  const float* vectors;      // [8 * kDim]  as in the forward kernel
  u16* sum2_grad;            // [num_rows][kDim]
  u16* hidden_grad;          // [num_rows][2 * kDim]
  u16* sum1_grad;            // [num_rows][kDim]
  u16* attn_grad;            // [num_rows][kDim]
  float* partial;            // [gridDim.x][8 * kDim]  SumOffsets
  int num_rows;
  float rescale;  // 1 / (1 - rate) of the dropout on hidden
};

// Offsets in a row of `partial`, in elements.
template <int kDim>
struct SumOffsets {
  static constexpr int kNorm2Weight = 0, kNorm2Bias = kDim, kDownBias = 2 * kDim, kUpBias = 3 * kDim;
  static constexpr int kNorm1Weight = 5 * kDim, kNorm1Bias = 6 * kDim, kOutBias = 7 * kDim;
};

// Adds `values`, dimensions 8t to 8t + 7 of the lane's rows, over the rows of the warp, to the sums of 32 dimensions.
__device__ __forceinline__ void add_column_sums(float* warp_sums, const float (&values)[8], int lane) {
  float four[4], two[2];
  const bool upper4 = lane & 16, upper2 = lane & 8, upper1 = lane & 4;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float sent = upper4 ? values[i] : values[i + 4], kept = upper4 ? values[i + 4] : values[i];
    four[i] = kept + __shfl_xor_sync(kFullWarp, sent, 16);
  }
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float sent = upper2 ? four[i] : four[i + 2], kept = upper2 ? four[i + 2] : four[i];
    two[i] = kept + __shfl_xor_sync(kFullWarp, sent, 8);
  }
  const float sent = upper1 ? two[0] : two[1], kept = upper1 ? two[1] : two[0];
  warp_sums[8 * (lane % 4) + lane / 4] += kept + __shfl_xor_sync(kFullWarp, sent, 4);
}

template <Element kElement, typename Traits>
struct BackwardConsumer : DenseConsumer<kElement, Traits> {
  using Base = DenseConsumer<kElement, Traits>;
  using Base::acquire, Base::add_first_product, Base::finish_last, Base::issue_last, Base::issue_tall;
  using Base::issue_wide, Base::lane, Base::lane_vectors, Base::of_lane, Base::prefetch_rows, Base::release;
  using Base::rows_of, Base::slices, Base::tall_tiles, Base::warp, Base::warpgroup, Base::wide_tiles;
  static constexpr int kDim = Traits::kDim;
  static constexpr int kSlice = Traits::kSlice;
  // Slices of qkv_grad loaded ahead: the most without spills.
  static constexpr int kAhead = Traits::kFirstTiles == 0 ? 0 : kDim == 96 ? 1 : kDim == 64 ? 2 : 3;
  using Vectors = VectorOffsets<kDim>;
  using Sums = SumOffsets<kDim>;

  const Params& p;
  float* const block_sums;  // [warps][8 * kDim], in shared memory
  float* const warp_sums;
  Loaded<kDim> loaded_grad;  // the next rows
  Loaded<kSlice> loaded_qkv[kAhead ? kAhead : 1];

  __device__ __forceinline__ BackwardConsumer(const Params& p, unsigned char* smem_bytes, int warpgroup)
      : Base(p.num_rows, smem_bytes, warpgroup),
        p(p),
        block_sums(reinterpret_cast<float*>(smem_bytes + Traits::kSums)),
        warp_sums(block_sums + (warpgroup * kWarpgroupWarps + warp) * Traits::kSumFloats) {
    for (int i = lane; i < Traits::kSumFloats; i += kWarpSize) warp_sums[i] = 0.0f;
    __syncwarp();
  }

  __device__ __forceinline__ void load_qkv(int slice, const Rows& rows) {
    load_valid_rows(loaded_qkv[slice % kAhead], p.qkv_grad + 8 * (lane % 4) + slice * kSlice, 3 * kDim, rows);
  }

  // grad and the first slices of qkv_grad.
  __device__ __forceinline__ void load(int row_tile) {
    const Rows rows = rows_of(row_tile);
    load_valid_rows(loaded_grad, p.grad + 8 * (lane % 4), kDim, rows);
#pragma unroll
    for (int i = 0; i < kAhead; ++i) load_qkv(i, rows);
  }

  // acc = grad + qkv_grad Wqkv; 0 in rows out of range, and so are all later results: they add nothing to the sums.
  __device__ __forceinline__ void first_product(Acc<kDim>& acc, const Rows& rows) {
    unpack_loaded<kElement>(acc, loaded_grad);
    if constexpr (Traits::kFirstTiles > 0) {
      Frag<kSlice> frags[2];
      add_first_product(acc, [&](int i) -> Frag<kSlice>& {
        to_frag(frags[i % 2], loaded_qkv[i % kAhead]);
        if (i + kAhead < Traits::kFirstTiles) load_qkv(i + kAhead, rows);
        return frags[i % 2];
      });
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      if (rows.in_range[r]) continue;
#pragma unroll
      for (int j = 0; j < kDim / kTileN; ++j) acc[4 * j + 2 * r] = acc[4 * j + 2 * r + 1] = 0.0f;
    }
  }

  __device__ __forceinline__ RowStatistics load_statistics(const float2* statistics, const Rows& rows) const {
    RowStatistics of_rows;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const float2 two = __ldg(statistics + (rows.in_range[r] ? rows.first + 8 * r : 0));
      of_rows.mean[r] = two.x;
      of_rows.scale[r] = two.y;
    }
    return of_rows;
  }

  // Gradient of LayerNorm, in place; n is the sum of residual and branch with mean 0 and deviation 1:
  //   acc = (acc * weight - mean(acc * weight) - n * mean(acc * weight * n)) / deviation
  // Adds column sums of acc * n, acc and the result to the three that begin at first_sum.
  __device__ __forceinline__ void norm_backward(Acc<kDim>& acc, const Loaded<kDim>& sum, const RowStatistics& of_rows,
                                                const float* lane_weight, int first_sum) const {
    float total[2] = {}, product[2] = {};
#pragma unroll
    for (int s = 0; s < kDim / kPermuteGroup; ++s) {
      const float4 low = *reinterpret_cast<const float4*>(lane_weight + kPermuteGroup * s);
      const float4 high = *reinterpret_cast<const float4*>(lane_weight + kPermuteGroup * s + 4);
      const float weight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
      float of_weight[8] = {}, of_bias[8] = {};
      visit_group<kElement>(sum, s, [&](int i, int d, int r, float x) {
        const float n = (x - of_rows.mean[r]) * of_rows.scale[r];
        of_weight[d] += acc[i] * n;
        of_bias[d] += acc[i];
        acc[i] *= weight[d];
        total[r] += acc[i];
        product[r] += acc[i] * n;
      });
      add_column_sums(warp_sums + first_sum + kPermuteGroup * s, of_weight, lane);
      add_column_sums(warp_sums + first_sum + kDim + kPermuteGroup * s, of_bias, lane);
    }
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      total[r] = quad_sum(total[r]) / kDim;
      product[r] = quad_sum(product[r]) / kDim;
    }
#pragma unroll
    for (int s = 0; s < kDim / kPermuteGroup; ++s) {
      float of_result[8] = {};
      visit_group<kElement>(sum, s, [&](int i, int d, int r, float x) {
        const float n = (x - of_rows.mean[r]) * of_rows.scale[r];
        acc[i] = (acc[i] - total[r] - n * product[r]) * of_rows.scale[r];
        of_result[d] += acc[i];
      });
      add_column_sums(warp_sums + first_sum + 2 * kDim + kPermuteGroup * s, of_result, lane);
    }
  }

  // slice i = dS2 Wdown
  __device__ __forceinline__ void issue_down(int i, const Frag<kDim>& frag) {
    tall_tiles[i % 2] = acquire(Traits::hidden_tall(i));
    wgmma_fence();
    issue_tall(slices[i % 2], frag, tall_tiles[i % 2], false);
  }

  // Gradient of ReLU and dropout on slice i, in place, with its column sums.
  __device__ __forceinline__ void relu_backward(int i, Acc<kSlice>& slice, const Loaded<kSlice>& hidden) const {
#pragma unroll
    for (int s = 0; s < kSlice / kPermuteGroup; ++s) {
      float sums[8] = {};
      visit_group<kElement>(hidden, s, [&](int j, int d, int, float x) {
        slice[j] = x > 0.0f ? slice[j] * p.rescale : 0.0f;
        sums[d] += slice[j];
      });
      add_column_sums(warp_sums + Sums::kUpBias + i * kSlice + kPermuteGroup * s, sums, lane);
    }
  }

  __device__ __forceinline__ void load_hidden(Loaded<kSlice>& hidden, int i, const Rows& rows) const {
    load_valid_rows(hidden, p.hidden + 8 * (lane % 4) + i * kSlice, 2 * kDim, rows);
  }

  // acc = dS2 + dhidden Wup; acc is dS2 on entry, frag is dS2 rounded. Loads are issued before stores, behind which
  // they would wait. At the end `sum` is S1.
  //
  //   slice i   issue      wait   complete, release   meanwhile on the CUDA cores
  //             down i+1   <1>    down i, up i-1      relu_backward of slice i while down i+1 runs
  //             up i
  __device__ __forceinline__ void hidden_units(Acc<kDim>& acc, Loaded<kDim>& sum, const Frag<kDim>& frag,
                                               const Rows& rows) {
    constexpr int kSlices = Traits::kHiddenTiles;
    Loaded<kSlice> hidden;
    Frag<kSlice> frag_hidden_grad;
    issue_down(0, frag);
    load_hidden(hidden, 0, rows);
    store_rows(of_lane(p.sum2_grad, kDim, rows), frag, kDim, rows);
    warpgroup_fence_operand(acc);  // [5]
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      const bool last = i + 1 == kSlices;
      if (!last) {
        issue_down(i + 1, frag);
        wgmma_wait_group<1>();
      } else {
        wgmma_wait_group<0>();
      }
      if (i > 0) release(wide_tiles[(i - 1) % 2]);  // [7]
      warpgroup_fence_operand(slices[i % 2]);       // [6]
      release(tall_tiles[i % 2]);                   // [7]
      relu_backward(i, slices[i % 2], hidden);
      pack<kElement>(frag_hidden_grad, slices[i % 2]);
      if (!last) {
        load_hidden(hidden, i + 1, rows);
      } else {
        load_valid_rows(sum, p.sum1 + 8 * (lane % 4), kDim, rows);
      }
      store_rows(of_lane(p.hidden_grad, 2 * kDim, rows) + i * kSlice, frag_hidden_grad, 2 * kDim, rows);
      warpgroup_fence_operand(frag_hidden_grad);  // [5]
      wide_tiles[i % 2] = acquire(Traits::hidden_wide(i));
      wgmma_fence();
      issue_wide(acc, frag_hidden_grad, wide_tiles[i % 2]);
    }
    wgmma_wait_group<0>();
    warpgroup_fence_operand(acc);  // [6]
    release(wide_tiles[(kSlices - 1) % 2]);
  }

  __device__ __forceinline__ void run(int row_tile, int next_row_tile) {
    const Rows rows = rows_of(row_tile);
    Acc<kDim> acc;
    Frag<kDim> frag;
    Loaded<kDim> sum;
    load_valid_rows(sum, p.sum2 + 8 * (lane % 4), kDim, rows);
    prefetch_rows(row_tile, kDim, p.sum1);
    RowStatistics of_rows = load_statistics(p.statistics + p.num_rows, rows);
    first_product(acc, rows);
    norm_backward(acc, sum, of_rows, lane_vectors + Vectors::kNorm2Weight, Sums::kNorm2Weight);
    pack<kElement>(frag, acc);
    warpgroup_fence_operand(frag);  // [5]
    hidden_units(acc, sum, frag, rows);
    prefetch_rows(next_row_tile, kDim, p.grad, p.sum2);
    if (Traits::kFirstTiles) prefetch_rows(next_row_tile, 3 * kDim, p.qkv_grad);
    of_rows = load_statistics(p.statistics, rows);
    norm_backward(acc, sum, of_rows, lane_vectors + Vectors::kNorm1Weight, Sums::kNorm1Weight);
    pack<kElement>(frag, acc);
    warpgroup_fence_operand(frag);  // [5]
    issue_last(0, frag);
    load(next_row_tile);  // [11]
    store_rows(of_lane(p.sum1_grad, kDim, rows), frag, kDim, rows);
    finish_last(frag, p.attn_grad, rows);
  }

  // The block's row of `partial`.
  __device__ __forceinline__ void finish() const {
    constexpr int kThreads = Traits::kConsumers * kWarpgroupSize;
    bar_sync<kThreads>(1);
    for (int i = threadIdx.x; i < Traits::kSumFloats; i += kThreads) {
      float total = 0.0f;
      for (int n = 0; n < Traits::kConsumers * kWarpgroupWarps; ++n) total += block_sums[n * Traits::kSumFloats + i];
      p.partial[static_cast<i64>(blockIdx.x) * Traits::kSumFloats + i] = total;
    }
  }
};

template <int kDim, int kSlice, int kConsumers, int kResident, int kStages, bool kHasNext>
using BackwardTraits =
    DenseBlockTraits<kDim, kSlice, kConsumers, false, 1, kResident, kStages, kHasNext ? 3 : 0, 1, 8, 8>;

template <Element kElement, int kDim, int kSlice, int kConsumers, int kResident, int kStages, bool kHasNext>
__device__ KernelSizes dense_block_backward_sizes = {
    BackwardTraits<kDim, kSlice, kConsumers, kResident, kStages, kHasNext>::kSmem_bytes, 0, 1, 0};

template <Element kElement, int kDim, int kSlice, int kConsumers, int kResident, int kStages, bool kHasNext>
__global__ void __launch_bounds__((kConsumers + 1) * kWarpgroupSize, 1)
    dense_block_backward(const __grid_constant__ Params p) {
  using Traits = BackwardTraits<kDim, kSlice, kConsumers, kResident, kStages, kHasNext>;
  static_assert(Traits::max_streamed(4) <= kStages, "a consumer holds as many tiles at a time");
  static_assert(kDim % kPermuteGroup == 0 && kSlice % kPermuteGroup == 0, "whole groups of dimensions");
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  run_dense_block<Traits, BackwardConsumer<kElement, Traits>>(p, smem_bytes);
}
