// wgmma products of a consumer warpgroup and the skeleton of the kernel, for the forward and the backward kernel of the
// dense block. [n]: the rules of dense_block.cu.
#pragma once
#include "common.cuh"
#include "dense_rows.cuh"
#include "dense_tiles.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/fence_proxy_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/opaque.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/wgmma.cuh"
#include "warp.cuh"

// Offsets in `vectors`, the biases and norms of a block as floats, [8 * kDim].
template <int kDim>
struct VectorOffsets {
  static constexpr int kOutBias = 0, kNorm1Weight = kDim, kNorm1Bias = 2 * kDim, kUpBias = 3 * kDim;
  static constexpr int kDownBias = 5 * kDim, kNorm2Weight = 6 * kDim, kNorm2Bias = 7 * kDim;
};

// In registers: acc, accumulators [64][kDim] of wide tiles; slices, accumulators [64][kSlice] of tall tiles; frag_...,
// 16-bit operands.
template <Element kElement, typename Traits>
struct DenseConsumer {
  using Panel = typename Traits::Panel;
  static constexpr int kDim = Traits::kDim;
  static constexpr int kSlice = Traits::kSlice;

  const u32 smem;
  const int num_rows;
  const int warpgroup, warp, lane;
  const float* const lane_vectors;  // in shared memory, + 8t
  int round = 0;
  Acc<kSlice> slices[2];
  WeightTile wide_tiles[2], tall_tiles[2];  // in use

  __device__ __forceinline__ DenseConsumer(int num_rows, unsigned char* smem_bytes, int warpgroup)
      : smem(shared_address(smem_bytes)),
        num_rows(num_rows),
        warpgroup(warpgroup),
        warp(threadIdx.x / kWarpSize % kWarpgroupWarps),
        lane(threadIdx.x % kWarpSize),
        lane_vectors(reinterpret_cast<const float*>(smem_bytes + Traits::kVectors) + 8 * (lane % 4)) {}

  __device__ __forceinline__ Rows rows_of(int row_tile) const {
    return Rows(row_tile, warp * kTileM + lane / 4, num_rows);
  }
  // The lane's first element of its first row: dimension 8t.
  template <typename Word>
  __device__ __forceinline__ Word* of_lane(Word* matrix, int pitch, const Rows& rows) const {
    return matrix + (rows.first * pitch + 8 * (lane % 4));
  }

  // [4]
  __device__ __forceinline__ WeightTile acquire(int tile) const { return acquire_tile<Traits>(smem, tile, round); }
  __device__ __forceinline__ void release(const WeightTile& tile) const { release_tile<Traits>(tile, lane); }

  // acc += frag W^T, W a wide tile; frag holds its k.
  __device__ __forceinline__ void issue_wide(Acc<kDim>& acc, const u32* frag, const WeightTile& tile) {
#pragma unroll
    for (int step = 0; step < kSlice / kTileK; ++step) {
      wgmma_m64nNk16_rs<kElement, kDim>(acc, frag + 4 * step, Panel::template step_desc<kDim>(tile.desc, step), true);
    }
    wgmma_commit_group();
  }

  // slice = frag W^T (+ slice), W a tall tile.
  __device__ __forceinline__ void issue_tall(Acc<kSlice>& slice, const Frag<kDim>& frag, const WeightTile& tile,
                                             bool accumulate) {
#pragma unroll
    for (int step = 0; step < kDim / kTileK; ++step) {
      wgmma_m64nNk16_rs<kElement, kSlice>(slice, frag + 4 * step, Panel::template step_desc<kSlice>(tile.desc, step),
                                          accumulate || step > 0);
    }
    wgmma_commit_group();
  }

  // The first product: acc += A W^T. operand(i): slice i of A, which wgmma reads until the wait that follows the issue
  // of slice i + 1.
  template <typename Operand>
  __device__ __forceinline__ void add_first_product(Acc<kDim>& acc, Operand operand) {
    warpgroup_fence_operand(acc);  // [5]
#pragma unroll
    for (int i = 0; i < Traits::kFirstTiles; ++i) {
      Frag<kSlice>& frag = operand(i);
      warpgroup_fence_operand(frag);  // [5]
      wide_tiles[i % 2] = acquire(i);
      wgmma_fence();
      issue_wide(acc, frag, wide_tiles[i % 2]);
      if (i > 0) {
        wgmma_wait_group<1>();
        release(wide_tiles[(i - 1) % 2]);  // [7]
      }
    }
    wgmma_wait_group<0>();
    warpgroup_fence_operand(acc);  // [6]
    release(wide_tiles[(Traits::kFirstTiles - 1) % 2]);
  }

  // Slice i of the last product.
  __device__ __forceinline__ void issue_last(int i, const Frag<kDim>& frag) {
    tall_tiles[i % 2] = acquire(Traits::last(i));
    wgmma_fence();
    issue_tall(slices[i % 2], frag, tall_tiles[i % 2], false);
  }

  // The rest of the last product, after issue_last(0): stores it to `matrix`. Addresses are recomputed for each slice:
  // kept in registers, they would make kDim = 256 spill.
  __device__ __forceinline__ void finish_last(const Frag<kDim>& frag, u16* matrix, const Rows& rows) {
    constexpr int kPitch = Traits::kLastTiles * kSlice;
#pragma unroll
    for (int i = 0; i < Traits::kLastTiles; ++i) {
      if (i + 1 < Traits::kLastTiles) {
        issue_last(i + 1, frag);
        wgmma_wait_group<1>();
      } else {
        wgmma_wait_group<0>();
      }
      warpgroup_fence_operand(slices[i % 2]);  // [6]
      release(tall_tiles[i % 2]);              // [7]
      Frag<kSlice> frag_slice;
      pack<kElement>(frag_slice, slices[i % 2]);
      store_rows(of_lane(matrix, kPitch, rows) + i * kSlice, frag_slice, kPitch, rows);
    }
  }

  // A round without rows: releases every streamed tile unused.
  __device__ __forceinline__ void drain() {
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      if (Traits::kCluster == 1 && !Traits::is_streamed(tile)) continue;  // [15]
      const WeightTile unused = acquire(tile);
      __syncwarp();  // [12]
      release(unused);
    }
  }

  // Prefetches a row tile of matrices, `pitch` elements per row, to L2. The tile may begin past the last row.
  template <typename... Pointers>
  __device__ __forceinline__ void prefetch_rows(int row_tile, int pitch, Pointers... matrices) const {
    const i64 start = static_cast<i64>(row_tile) * kWarpgroupM;
    if (threadIdx.x % kWarpgroupSize != 0 || start >= num_rows) return;
    const u32 bytes = static_cast<u32>(min(static_cast<i64>(kWarpgroupM), num_rows - start)) * (2 * pitch);
    (cp_async_bulk_prefetch_L2(matrices + start * pitch, bytes), ...);
  }
};

// The kernel: barriers, the producer, and the consumers' rounds over row tiles.
//
// Consumer: DenseConsumer with
//   load(row_tile)                        loads the operands of the first step of a tile
//   run(row_tile, next_row_tile)          all steps, load(next_row_tile), and prefetches into L2
//   finish()                              after the last round
template <typename Traits, typename Consumer, typename Params>
__device__ __forceinline__ void run_dense_block(const Params& p, unsigned char* smem_bytes) {
  constexpr int kCluster = Traits::kCluster, kConsumers = Traits::kConsumers;
  const u32 smem = shared_address(smem_bytes);
  float* const smem_vectors = reinterpret_cast<float*>(smem_bytes + Traits::kVectors);

  for (int i = threadIdx.x; i < Traits::kVectorFloats; i += blockDim.x) smem_vectors[i] = p.vectors[i];
  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < Traits::kBuffers; ++buffer) mbarrier_init(smem + Traits::full(buffer), 1);
    for (int stage = 0; stage < Traits::kStages; ++stage) {
      mbarrier_init(smem + Traits::empty(Traits::kResident + stage), kCluster * kConsumers * kWarpgroupWarps);
    }
    fence_mbarrier_init();  // [1]
    fence_proxy_async_shared();
  }
  __syncthreads();
  if (kCluster > 1) barrier_cluster_sync();

  // Consumer 0 of every block gets row tiles first, so that few rows spread over all SMs. All blocks of a cluster run
  // as many rounds as its first block, which has the most.
  const int row_tiles = (p.num_rows + kWarpgroupM - 1) / kWarpgroupM;
  const int tiles_per_round = gridDim.x * kConsumers;
  const int cluster_start = blockIdx.x / kCluster * kCluster;
  const int rounds = (row_tiles - cluster_start + tiles_per_round - 1) / tiles_per_round;
  const int warpgroup = warp_uniform(threadIdx.x / kWarpgroupSize);

  if (warpgroup == kConsumers) {
    setmaxnreg_dec<kProducerRegisters>();  // [14]
    if (threadIdx.x == kConsumers * kWarpgroupSize) produce<Traits>(smem, p.weights, rounds);
    if (kCluster > 1) barrier_cluster_sync();  // [13]
    return;
  }
  setmaxnreg_inc<Traits::kConsumerRegisters>();

  Consumer consumer(p, smem_bytes, warpgroup);
  const int first_tile = warpgroup * gridDim.x + blockIdx.x;
  griddepcontrol_wait();  // [2]
  griddepcontrol_launch_dependents();
  consumer.load(first_tile);
  for (int tile = first_tile; tile < row_tiles; tile += tiles_per_round, ++consumer.round) {
    const int row_tile = opaque(tile);  // [3]
    consumer.run(row_tile, row_tile + tiles_per_round);
  }
  if constexpr (Traits::kStreamed > 0) {
    for (; consumer.round < rounds; ++consumer.round) consumer.drain();
  }
  consumer.finish();
  if (kCluster > 1) barrier_cluster_sync();  // [13]
}
