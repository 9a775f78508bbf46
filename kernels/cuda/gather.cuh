// K and V of a KV tile in shared memory, and the producer of a warp's ring.
#pragma once
#include "common.cuh"
#include "fused3s_params.cuh"
#include "head_group.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ld_shared.cuh"

// K and V of a KV tile: rows of whole k-steps. Padding is zero in K; in V it is never stored, and holds anything.
template <int kDim, int kHeads, int kBytes = 2>
struct Stage {
  static_assert(kBytes == 2 || kBytes == 4, "bytes of an element");
  using Group = HeadGroup<kDim, kHeads>;
  static constexpr bool kWide = kBytes == 4;
  static constexpr int kSlices = Group::kSlices;  // 16 columns: pairs of n-tiles of SpMM
  static constexpr u32 kSlice_bytes = 2 * kTileN * kBytes;
  // Pairs of k-steps of SDDMM, 64 bytes each, where ld.shared.v4 reads K.
  static constexpr int kPairs = Group::kFolded ? kSlices : divide_up(kDim * kBytes, 64);
  // Rows of heads that share slices, and of V, are read a quarter of a 128-byte line at a time: whole lines.
  static constexpr u32 kWideRow_bytes = divide_up(kSlices, 2) * 128;
  static constexpr bool kKeyQuarters = kWide && Group::kSliceHeads > 1;
  static constexpr u32 kValueRow_bytes = kWide ? kWideRow_bytes : kSlices * kSlice_bytes;
  static constexpr u32 kKeyRow_bytes = kKeyQuarters              ? kWideRow_bytes
                                       : Group::kFolded && !kWide ? kSlices * kSlice_bytes
                                                                  : kPairs * 64;
  static constexpr u32 kKeySwizzle = kPairs % 2 ? 0 : 64;
  // Rows kPeriod apart start in the same bank, and kSpread neighbouring chunks are in one 128-byte line in all of them:
  // every kPeriod rows the chunks are permuted among kSpread.
  static constexpr u32 kPeriod = kWide || kSlices % 4 == 0 ? 1 : kSlices % 2 == 0 ? 2 : 4;
  static constexpr u32 kSpread = 8 / kPeriod;
  __device__ static constexpr u32 value_swizzle(u32 row) {
    return kWide ? row / 2 % 4 * 32 : row / kPeriod % kSpread * kChunk_bytes;
  }
  // 16 bits, several heads: ldmatrix, as for V. Heads that share slices: ld.shared.v2. Else ld.shared.v4.
  __device__ static constexpr u32 key_swizzle(u32 row) {
    if (kKeyQuarters) return row % 4 * 32;
    return Group::kFolded && !kWide ? value_swizzle(row) : row % 2 * kKeySwizzle;
  }
  // Address of the columns `offset` bytes on from those of `address`, which is swizzled; `offset` is a multiple of 32.
  __device__ static constexpr u32 advance(u32 address, u32 offset) {
    constexpr u32 kPermuted_bytes = kChunk_bytes * kSpread;
    return (address ^ offset % kPermuted_bytes) + offset / kPermuted_bytes * kPermuted_bytes;
  }

  unsigned char key[kTileKeys * kKeyRow_bytes];
  unsigned char value[kTileKeys * kValueRow_bytes];
};

// kCount words, a power of two, from an address aligned to all of them (16 bytes at most).
template <typename Word, int kCount>
__device__ __forceinline__ void load_shared_words(Word (&words)[kCount], u32 address) {
  static_assert(sizeof(Word) == sizeof(u32), "words");
  if constexpr (kCount >= 4) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const uint4 four = ld_shared_v4_b32(address + sizeof(int) * i);
      words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = ld_shared_b32(address + sizeof(int) * i);
  }
}

__device__ constexpr int next_power_of_two(int x) { return x <= 1 ? 1 : 2 * next_power_of_two((x + 1) / 2); }

// Zeros the chunks of K that copies leave as they are, or in part: padding, and heads that the last group lacks. Q is 0
// there, 0 * NaN is NaN, and a NaN of one head would reach the sums of all heads of the group.
//   dims   columns of a head that are copied: kDim, or fewer for the last warp of a team
template <int kDim, int kHeads, int kBytes>
__device__ __forceinline__ void zero_padding(Stage<kDim, kHeads, kBytes>& stage, int heads, int dims, int lane) {
  using S = Stage<kDim, kHeads, kBytes>;
  using Group = typename S::Group;
  constexpr int kElements = kChunk_bytes / kBytes;  // of a chunk
  constexpr int kHeadChunks = Group::kFolded ? Group::kHeadDim / kElements : S::kKeyRow_bytes / kChunk_bytes;
  constexpr bool kPadded = kDim < kElements * kHeadChunks || kHeads * kHeadChunks * kChunk_bytes < S::kKeyRow_bytes;
  if (!kPadded && (!Group::kFolded || heads == kHeads) && dims == kDim) return;
  for (int row = lane; row < kTileKeys; row += kWarpSize) {
    for (int chunk = 0; chunk < static_cast<int>(S::kKeyRow_bytes) / kChunk_bytes; ++chunk) {
      if (chunk / kHeadChunks < heads && chunk % kHeadChunks < dims / kElements) continue;
      const u32 offset = kChunk_bytes * chunk ^ S::key_swizzle(row);
      *reinterpret_cast<uint4*>(stage.key + row * S::kKeyRow_bytes + offset) = make_uint4(0, 0, 0, 0);
    }
  }
}

// Zeros the rows of V that no KV tile of the window fills: rows past the last key, where the stage has none before. Their
// weights are 0, and 0 * NaN is NaN. Rows of earlier KV tiles may stay: the window has their NaN already.
template <int kDim, int kHeads, int kBytes>
__device__ __forceinline__ void zero_missing_values(Stage<kDim, kHeads, kBytes>& stage, int num_keys, int lane) {
  using S = Stage<kDim, kHeads, kBytes>;
  uint4* const value = reinterpret_cast<uint4*>(stage.value);
  for (int i = num_keys * S::kValueRow_bytes / kChunk_bytes + lane; i < sizeof(stage.value) / kChunk_bytes;
       i += kWarpSize) {
    value[i] = make_uint4(0, 0, 0, 0);
  }
}

// Heads of this block's group.
template <int kHeads>
__device__ __forceinline__ int heads_of_group(const Params& p) {
  return kHeads > 1 ? min(kHeads, p.num_heads - static_cast<int>(blockIdx.y) * kHeads) : 1;
}

// The producer of a warp's ring. A row of K or V of the head group is copied in parts of kCopy_bytes, by kLanesPerRow
// lanes, a power of two; lanes past the last part copy nothing. A lane copies the same parts of kRowsPerLane
// neighbouring rows. A warp of a team copies columns `first` to first + kWidth - 1 of one head.
//
//   kDim     columns of a head in memory
//   kWidth   columns of a head that the warp copies, at most: kDim without teams
template <int kDim, int kHeads, int kBytes = 2, int kWidth = kDim>
struct Gather {
  using S = Stage<kWidth, kHeads, kBytes>;
  using Group = HeadGroup<kWidth, kHeads>;
  static constexpr bool kTeams = kWidth != kDim;
  static constexpr int kRow_bytes = kDim * kBytes;
  static constexpr int kCopy_bytes = kRow_bytes % 16 == 0 ? 16 : kRow_bytes % 8 == 0 ? 8 : 4;
  static constexpr int kHeadParts = kWidth * kBytes / kCopy_bytes;
  static constexpr int kParts = kHeads * kHeadParts;
  static constexpr int kLanesPerRow = kParts == 1 ? 2 : kParts > kWarpSize ? kWarpSize : next_power_of_two(kParts);
  static constexpr int kPartsPerLane = divide_up(kParts, kLanesPerRow);
  static constexpr int kRowsPerLane = kTileKeys * kLanesPerRow / kWarpSize;

  static_assert(!kTeams || kHeads == 1, "teams share one head");

  const Params& p;
  const int lane, first_byte;
  const int row, part;                                         // the lane's first row and first part
  int skip[kPartsPerLane];                                     // -1 for a part past the last one, else 0
  u32 key_offset[kPartsPerLane], value_offset[kPartsPerLane];  // the parts of the first row in a stage
  const char* next_tile;                                       // the lane's chunk of the KV tile that is copied next
  int count, tile_count;  // KV tiles; 0 in tile_count for a lane past the end of a KV tile

  __device__ __forceinline__ Gather(const Params& p, int lane, int first = 0)
      : p(p),
        lane(lane),
        first_byte(first * kBytes),
        row(lane / kLanesPerRow * kRowsPerLane),
        part(lane % kLanesPerRow) {
    const int heads = heads_of_group<kHeads>(p);
#pragma unroll
    for (int i = 0; i < kPartsPerLane; ++i) {
      const int index = part + i * kLanesPerRow, head = index / kHeadParts;
      const u32 byte = kBytes * Group::kHeadDim * head + index % kHeadParts * kCopy_bytes;
      const u32 chunk = byte / kChunk_bytes * kChunk_bytes, rest = byte % kChunk_bytes;
      skip[i] = head < heads && (!kTeams || first_byte + static_cast<int>(byte) < kRow_bytes) ? 0 : -1;
      key_offset[i] = row * S::kKeyRow_bytes + rest + (Group::kFolded ? chunk ^ S::key_swizzle(row) : chunk);
      value_offset[i] = row * S::kValueRow_bytes + sizeof(S::key) + rest + (chunk ^ S::value_swizzle(row));
    }
  }

  __device__ __forceinline__ void start(int begin, int num_tiles) {
    next_tile = reinterpret_cast<const char*>(p.kv_tiles + begin + kStages) + kChunk_bytes * lane;
    count = num_tiles;
    tile_count = lane < static_cast<int>(sizeof(KVTile)) / kChunk_bytes ? num_tiles : 0;  // [5]
  }

  // Part i of the lane in row 0 of `tensor`.
  __device__ __forceinline__ const char* lane_part(const void* tensor, i64 head_stride, int i) const {
    const int index = part + i * kLanesPerRow, head = kHeads > 1 ? index / kHeadParts : 0;
    using Bits = typename ElementBits<kBytes>::Type;
    const Bits* const first = static_cast<const Bits*>(tensor) + (static_cast<i64>(blockIdx.y) * kHeads + head) * head_stride;
    return reinterpret_cast<const char*>(first) + (index - head * kHeadParts) * kCopy_bytes + (kTeams ? first_byte : 0);
  }

  // One cp.async group: K and V of KV tile i, whose keys are in `record`, to `stage`; KV tile i + kStages to its own
  // record.
  __device__ __forceinline__ void operator()(int i, u32 record, u32 stage) {
    if (i < count) {
      int keys[kRowsPerLane];
      load_shared_words(keys, record + sizeof(int) * row);
#pragma unroll
      for (int j = 0; j < kPartsPerLane; ++j) {
        // Recomputed for every KV tile: kept in registers, the addresses cost more than they save at kDim = 256.
        const char* const key = lane_part(p.key, p.key_head_stride, j);
        const char* const value = lane_part(p.value, p.value_head_stride, j);
#pragma unroll
        for (int n = 0; n < kRowsPerLane; ++n) {
          const int index = keys[n] | skip[j];  // negative: no copy
          // `row` is even, and a multiple of kPeriod or inside of one, wherever a lane has several rows.
          const u32 key_swizzle = S::key_swizzle(kRowsPerLane == 1 && !Group::kFolded ? row : n);
          cp_async<kCopy_bytes>(((stage + key_offset[j]) ^ key_swizzle) + n * S::kKeyRow_bytes,
                                key + static_cast<i64>(keys[n]) * p.key_row_bytes, index);
          cp_async<kCopy_bytes>(((stage + value_offset[j]) ^ S::value_swizzle(n)) + n * S::kValueRow_bytes,
                                value + static_cast<i64>(keys[n]) * p.value_row_bytes, index);
        }
      }
      cp_async<kChunk_bytes>((record ^ kStages * kRecord_bytes) + kChunk_bytes * lane, next_tile,
                             tile_count - (i + kStages + 1));
      next_tile += sizeof(KVTile);
    }
    cp_async_commit_group();  // [2]
  }
};
