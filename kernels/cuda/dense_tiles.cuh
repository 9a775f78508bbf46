// Tiles of packed weights on their way through shared memory, see dense_block.cu. After mma.cuh and hopper.cuh.
#pragma once

constexpr int kSlice = kPanelK;  // columns of a tall tile

template <int kDim, int kConsumers, bool kSharedH1, int kBlocks, int kResidentTiles, int kRingStages, bool kNext>
struct Plan {
  static constexpr int kCluster = kBlocks;
  static constexpr int kResident = kResidentTiles;
  static constexpr int kStages = kRingStages;
  static constexpr int kOutTiles = kDim / kSlice;
  static constexpr int kUpTiles = 2 * kDim / kSlice;
  static constexpr int kQkvTiles = kNext ? 3 * kDim / kSlice : 0;
  static constexpr int kTiles = kOutTiles + 2 * kUpTiles + kQkvTiles;
  static constexpr int kStreamed = kTiles - kResident;
  static constexpr int kLap = kStages ? kStages : 1;
  static constexpr int kLaps = kStreamed / kLap;  // of the ring in a round
  static_assert(kLaps * kStages == kStreamed, "a tile has the same place in every round");
  static constexpr int kPlaces = kResident + kStages;
  static constexpr u32 kTile_bytes = kDim * kPanelPitch_bytes;
  static constexpr u32 kH1Panel_bytes = kGroupM * kPanelPitch_bytes;
  static constexpr u32 kH1_bytes = kDim / kPanelK * kH1Panel_bytes;  // of a consumer
  static constexpr u32 kH1 = kPlaces * kTile_bytes;                  // offsets in shared memory
  static constexpr u32 kVectors = kH1 + (kSharedH1 ? kConsumers * kH1_bytes : 0);
  static constexpr u32 kFull = kVectors + 8 * kDim * sizeof(float);
  static constexpr u32 kEmpty = kFull + kPlaces * sizeof(u64);

  // Place in the order of a tile.
  static __device__ constexpr int up(int i) { return kOutTiles + (!kSharedH1 && i > 0 ? 2 * i - 1 : 2 * i); }
  static __device__ constexpr int down(int i) {
    return kOutTiles + (!kSharedH1 && i + 1 < kUpTiles ? 2 * i + 2 : 2 * i + 1);
  }
  static __device__ constexpr int qkv(int i) { return kOutTiles + 2 * kUpTiles + i; }

  static __device__ constexpr int streamed_before(int tile) { return tile * kStreamed / kTiles; }
  static __device__ constexpr bool is_streamed(int tile) { return streamed_before(tile + 1) > streamed_before(tile); }
  static __device__ constexpr int place(int tile) {
    return is_streamed(tile) ? kResident + streamed_before(tile) % kLap : tile - streamed_before(tile);
  }
  // Of the phase in which the place of a streamed tile is full; the place is empty for it before the one of the other.
  static __device__ __forceinline__ u32 parity(int tile, int round) {
    return (streamed_before(tile) / kLap + round * kLaps) & 1;
  }
};

// A tile in shared memory: the panel word of its start, and the barrier to arrive at afterwards, 0 if it is resident.
struct Tile {
  u32 word;
  u32 empty;
};

// One thread copies all tiles, in the order of their use; the resident ones in the first round alone.
template <typename P>
__device__ __forceinline__ void produce(u32 smem, const char* weights, int rounds) {
  constexpr u32 kPart_bytes = P::kTile_bytes / P::kCluster;
  const u32 part = P::kCluster > 1 ? block_of_cluster() * kPart_bytes : 0;
  for (int round = 0; round < rounds; ++round) {
    for (int tile = 0; tile < P::kTiles; ++tile) {
      const int place = P::place(tile);
      if (P::is_streamed(tile)) {
        wait_barrier(smem + P::kEmpty + (place - P::kResident) * sizeof(u64), P::parity(tile, round) ^ 1);
      } else if (round) {
        continue;
      }
      const u32 full = smem + P::kFull + place * sizeof(u64);
      const u32 target = smem + place * P::kTile_bytes + part;
      const char* const source = weights + tile * P::kTile_bytes + part;
      arrive_expecting(full, P::kTile_bytes);
      if constexpr (P::kCluster == 1) {
        copy_bulk(target, source, kPart_bytes, full);
      } else {
        copy_bulk_to_blocks(target, source, kPart_bytes, full, (1 << P::kCluster) - 1);
      }
    }
  }
}
