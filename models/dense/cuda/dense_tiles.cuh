// Weight tiles of the dense block (dense_block.cu, dense_block_backward.cu) in shared memory: layout, order, ring,
// producer.
#pragma once
#include "common.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/opaque.cuh"

constexpr int kWarpgroupWarps = 4;
constexpr int kWarpgroupSize = kWarpgroupWarps * kWarpSize;  // threads
constexpr int kWarpgroupM = kWarpgroupWarps * kTileM;        // rows of A and D of a wgmma

// A wgmma operand is a sequence of panels, [rows][kK k] of 16-bit elements, K-major, with wgmma's swizzle for rows of
// this length: a 16-byte chunk of 8 successive rows covers all banks. Panels start at multiples of 8 rows.
//
//   kK   bytes of a row   chunk i of row n lies at   swizzle field of the descriptor
//   64   128              i ^ n % 8                  1
//   32   64               i ^ n / 2 % 4              2
//   16   32               i ^ n / 4 % 2              3
//
// Matrix descriptor: address / 16 in bits 0-13, leading byte offset in bits 16-29 (ignored with a swizzle), stride
// between groups of 8 rows / 16 in bits 32-45, swizzle in bits 62-63. Offsets in shared memory are added to the low
// word.
constexpr int kDescUnit_bytes = 16;
__device__ __forceinline__ u32 desc_low(u32 address) { return address / kDescUnit_bytes | 1u << 16; }

template <int kK>
struct PanelLayout {
  static_assert(kK == 64 || kK == 32 || kK == 16, "the swizzles of wgmma");
  static constexpr int kRow_bytes = 2 * kK;
  static constexpr int kChunks = kRow_bytes / 16;  // per row
  static constexpr int kSteps = kK / kTileK;       // k-steps of a wgmma
  static constexpr u32 kSwizzle = kK == 64 ? 1 : kK == 32 ? 2 : 3;

  // Swizzle: the operand of XOR with the index of a row's chunks.
  static __device__ __forceinline__ int swizzle(int row) { return row / (8 / kChunks) % kChunks; }
  // Descriptor of k-step `step` of a matrix of kRows rows.
  template <int kRows>
  static __device__ __forceinline__ u64 step_desc(u32 low, int step) {
    constexpr u32 kStepDesc = 2 * kTileK / kDescUnit_bytes, kPanelDesc = kRows * kRow_bytes / kDescUnit_bytes;
    return static_cast<u64>(kSwizzle << 30 | 8 * kRow_bytes / kDescUnit_bytes) << 32 |
           (low + step / kSteps * kPanelDesc + step % kSteps * kStepDesc);
  }
};

constexpr int kProducerRegisters = 24;  // per thread

// Compile-time layout of an instance: three successive products, named by dense_block.cu and dense_block_backward.cu.
// DenseLayout in models/dense/weights.py computes the same tiles and bytes.
//   first    [64][kFirst * kDim] by a matrix of kFirst * kDim inputs and kDim outputs
//   hidden   kDim to 2 * kDim to kDim
//   last     kDim to kLast * kDim
// kVectors, kSums: numbers of vectors of kDim floats, shared by all warps and per warp.
template <int kDim_, int kSlice_, int kConsumers_, bool kSharedH1_, int kCluster_, int kResident_, int kStages_,
          int kFirst_, int kLast_, int kVectors_, int kSums_>
struct DenseBlockTraits {
  static constexpr int kDim = kDim_;
  static constexpr int kSlice = kSlice_;
  static constexpr int kConsumers = kConsumers_;
  static constexpr bool kSharedH1 = kSharedH1_;
  static constexpr int kCluster = kCluster_;
  static constexpr int kResident = kResident_;
  static constexpr int kStages = kStages_;
  static_assert(kDim % kSlice == 0 && kSlice % kTileK == 0, "whole tiles of whole k-steps");
  static_assert(!kSharedH1_ || kDim % 32 == 0, "attn_out of a lane in whole 16-byte chunks");

  using Panel = PanelLayout<kDim % 64 == 0 && kSlice % 64 == 0 ? 64 : kDim % 32 == 0 && kSlice % 32 == 0 ? 32 : 16>;

  // Tiles in the order of use: wide tiles of the first product; tall and wide ones of the hidden units interleaved;
  // tall ones of the last product.
  static constexpr int kFirstTiles = kFirst_ * kDim / kSlice;
  static constexpr int kHiddenTiles = 2 * kDim / kSlice;  // tall, and as many wide
  static constexpr int kLastTiles = kLast_ * kDim / kSlice;
  static constexpr int kTiles = kFirstTiles + 2 * kHiddenTiles + kLastTiles;
  static __device__ constexpr int hidden_tall(int i) {
    return kFirstTiles + (!kSharedH1 && i > 0 ? 2 * i - 1 : 2 * i);
  }
  static __device__ constexpr int hidden_wide(int i) {
    return kFirstTiles + (!kSharedH1 && i + 1 < kHiddenTiles ? 2 * i + 2 : 2 * i + 1);
  }
  static __device__ constexpr int last(int i) { return kFirstTiles + 2 * kHiddenTiles + i; }

  // Buffers in shared memory: one per resident tile, then the ring of stages for the streamed tiles, which are spread
  // evenly over the order.
  static constexpr int kBuffers = kResident + kStages;
  static constexpr int kStreamed = kTiles - kResident;
  static constexpr int kRing = kStages ? kStages : 1;  // a divisor
  static constexpr int kLaps = kStreamed / kRing;      // of the ring per round
  static __device__ constexpr int streamed_before(int tile) { return tile * kStreamed / kTiles; }
  static __device__ constexpr bool is_streamed(int tile) { return streamed_before(tile + 1) > streamed_before(tile); }
  static __device__ constexpr int buffer(int tile) {
    return is_streamed(tile) ? kResident + streamed_before(tile) % kRing : tile - streamed_before(tile);
  }
  // Parity of the `full` barrier of a streamed tile in this round. The `empty` barrier is one phase behind.
  static __device__ __forceinline__ u32 parity(int tile, int round) {
    return (streamed_before(tile) / kRing + round * kLaps) & 1;
  }
  // Largest number of streamed tiles among `count` successive tiles.
  static __device__ constexpr int max_streamed(int count) {
    int most = 0;
    for (int tile = 0; tile + count <= kTiles; ++tile) {
      const int streamed = streamed_before(tile + count) - streamed_before(tile);
      if (streamed > most) most = streamed;
    }
    return most;
  }

  static constexpr int kConsumerRegisters = kConsumers == 2 ? 240 : 160;  // per thread
  static_assert((kProducerRegisters + kConsumers * kConsumerRegisters) * kWarpgroupSize <= 65536, "registers of an SM");

  // Shared memory, offsets in bytes.
  static constexpr u32 kTile_bytes = 2 * kDim * kSlice;
  static constexpr u32 kH1Panel_bytes = kWarpgroupM * Panel::kRow_bytes;
  static constexpr u32 kH1_bytes = kSharedH1 ? 2 * kDim * kWarpgroupM : 0;  // per consumer
  static constexpr u32 kH1 = kBuffers * kTile_bytes;
  static constexpr u32 kVectors = kH1 + kConsumers * kH1_bytes;
  static constexpr int kVectorFloats = kVectors_ * kDim, kSumFloats = kSums_ * kDim;
  static constexpr u32 kSums = kVectors + kVectorFloats * sizeof(float);
  static constexpr u32 kFull = kSums + kConsumers * kWarpgroupWarps * kSumFloats * sizeof(float);
  static constexpr u32 kEmpty = kFull + kBuffers * sizeof(u64);
  static constexpr u32 kSmem_bytes = kEmpty + kStages * sizeof(u64);
  static __device__ __forceinline__ u32 full(int buffer) { return kFull + buffer * sizeof(u64); }
  static __device__ __forceinline__ u32 empty(int buffer) { return kEmpty + (buffer - kResident) * sizeof(u64); }

  static_assert(kTile_bytes % (8 * Panel::kRow_bytes) == 0 && kH1_bytes % (8 * Panel::kRow_bytes) == 0,
                "panels on 8 rows");
  static_assert(kLaps * kStages == kStreamed, "a tile has the same stage and parity rule in every round");
  static_assert(kSmem_bytes <= 227 * 1024, "shared memory of a block, compute capability 9.0");
  static_assert(kTile_bytes % (16 * kCluster) == 0 && kCluster <= kWarpSize, "each block copies an equal part");
};

__device__ __forceinline__ void mbarrier_wait(u32 barrier, u32 parity) {
  while (!mbarrier_try_wait_parity(barrier, parity)) {
  }
}

// A tile in shared memory.
struct WeightTile {
  u32 desc;           // low word of its matrix descriptor
  u32 empty_barrier;  // 0: resident
};

// Waits until a tile is in shared memory.
template <typename Traits>
__device__ __forceinline__ WeightTile acquire_tile(u32 smem, int tile, int round) {
  const bool streamed = Traits::is_streamed(tile);
  const int buffer = Traits::buffer(tile);
  mbarrier_wait(smem + Traits::full(buffer), streamed ? Traits::parity(tile, round) : 0);
  return {opaque(desc_low(smem) + buffer * (Traits::kTile_bytes / kDescUnit_bytes)),  // [3] of dense_block.cu
          streamed ? smem + Traits::empty(buffer) : 0};
}

// Releases a tile's stage to the producers of all blocks of the cluster: one arrival per warp.
template <typename Traits>
__device__ __forceinline__ void release_tile(const WeightTile& tile, int lane) {
  if (!tile.empty_barrier) return;
  if constexpr (Traits::kCluster == 1) {
    if (lane == 0) mbarrier_arrive(tile.empty_barrier);
  } else {
    if (lane < Traits::kCluster) mbarrier_arrive_remote(tile.empty_barrier, lane);
  }
}

// The producer: one thread copies all tiles in the order of use, resident tiles in the first round only. In a cluster
// it multicasts its share of each tile to all blocks, and each block's barrier expects the whole tile.
template <typename Traits>
__device__ __forceinline__ void produce(u32 smem, const char* weights, int rounds) {
  constexpr u32 kPart_bytes = Traits::kTile_bytes / Traits::kCluster;
  const u32 part = Traits::kCluster > 1 ? cluster_ctarank() * kPart_bytes : 0;
  for (int round = 0; round < rounds; ++round) {
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      const int buffer = Traits::buffer(tile);
      if (Traits::is_streamed(tile)) {
        mbarrier_wait(smem + Traits::empty(buffer), Traits::parity(tile, round) ^ 1);
      } else if (round) {
        continue;
      }
      const u32 full = smem + Traits::full(buffer);
      const u32 target = smem + buffer * Traits::kTile_bytes + part;
      const char* const source = weights + tile * Traits::kTile_bytes + part;
      mbarrier_arrive_expect_tx(full, Traits::kTile_bytes);
      if constexpr (Traits::kCluster == 1) {
        cp_async_bulk(target, source, kPart_bytes, full);
      } else {
        cp_async_bulk_multicast(target, source, kPart_bytes, full, (1 << Traits::kCluster) - 1);
      }
    }
  }
}
