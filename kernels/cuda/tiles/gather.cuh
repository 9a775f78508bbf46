// K and V of a KV tile in shared memory, and the producer of a warp's ring (ring.cuh).
#pragma once
#include "common.cuh"
#include "tiles/forward_params.cuh"
#include "tiles/head_group.cuh"
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
  // float32: V, and K of heads that share slices, are read a quarter of a 128-byte line at a time: rows are whole
  // lines.
  static constexpr u32 kWideRow_bytes = divide_up(kSlices, 2) * 128;
  static constexpr bool kKeyQuarters = kWide && Group::kSliceHeads > 1;
  static constexpr u32 kValueRow_bytes = kWide ? kWideRow_bytes : kSlices * kSlice_bytes;
  static constexpr u32 kKeyRow_bytes = kKeyQuarters              ? kWideRow_bytes
                                       : Group::kFolded && !kWide ? kSlices * kSlice_bytes
                                                                  : kPairs * 64;
  static constexpr u32 kKeySwizzle = kPairs % 2 ? 0 : 64;
  // Rows kPeriod apart start in the same bank, and kSpread neighbouring chunks of each lie in one 128-byte line: every
  // kPeriod rows the swizzle permutes chunks among kSpread.
  static constexpr u32 kPeriod = kWide || kSlices % 4 == 0 ? 1 : kSlices % 2 == 0 ? 2 : 4;
  static constexpr u32 kSpread = 8 / kPeriod;
  __device__ static constexpr u32 value_swizzle(u32 row) {
    return kWide ? row / 2 % 4 * 32 : row / kPeriod % kSpread * kChunk_bytes;
  }
  // 16 bits, several heads: ldmatrix, as for V. float32 heads that share slices: ld.shared.v2. Else ld.shared.v4.
  __device__ static constexpr u32 key_swizzle(u32 row) {
    if (kKeyQuarters) return row % 4 * 32;
    return Group::kFolded && !kWide ? value_swizzle(row) : row % 2 * kKeySwizzle;
  }
  // Swizzled address `offset` bytes after the swizzled `address`; `offset` is a multiple of 32.
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

// Zeros the chunks of K that copies do not fill: padding, and heads that the last group lacks. Q is 0 there, 0 * NaN is
// NaN, and a NaN of one head would reach the sums of all heads of the group.
//   dims   columns of a head that are copied: kDim, or fewer for the last warp of a team
template <int kDim, int kHeads, int kBytes>
__device__ __forceinline__ void zero_padding(Stage<kDim, kHeads, kBytes>& stage, int heads, int dims, int lane) {
  using S = Stage<kDim, kHeads, kBytes>;
  using Group = typename S::Group;
  constexpr int kElements = kChunk_bytes / kBytes;  // elements per chunk
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

// Zeros the rows of V past the last key in a stage that no other KV tile of the window fills. Their weights are 0, and
// 0 * NaN is NaN. Rows of earlier KV tiles may stay: their NaN is already in the window's rows.
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

// The pieces of rows that a lane copies, and the records of a warp's ring; the base of both producers. A row (of all
// heads of the group) is copied in pieces of kCopy_bytes, by kLanesPerRow lanes, a power of two; lanes past the last
// piece copy nothing. A lane copies the same pieces of kRowsPerLane neighbouring rows. A warp of a team copies the
// columns from byte first_byte on.
//
//   kRow_bytes     a row of one head in memory
//   kWidth_bytes   of it, copied by the warp at most
//
//   kDim = 128 in 16 bits, pieces of 16 bytes   lane    0       1      ...   15        16     ...   31
//                                               piece   0       1      ...   15        0      ...   15
//                                               rows    0 to 7                         8 to 15
template <int kRow_bytes, int kHeads, int kWidth_bytes>
struct RowPieces {
  static constexpr int kCopy_bytes = kRow_bytes % 16 == 0 ? 16 : kRow_bytes % 8 == 0 ? 8 : 4;
  static constexpr int kHeadPieces = kWidth_bytes / kCopy_bytes;
  static constexpr int kPieces = kHeads * kHeadPieces;
  static constexpr int kLanesPerRow = kPieces == 1 ? 2 : kPieces > kWarpSize ? kWarpSize : next_power_of_two(kPieces);
  static constexpr int kPiecesPerLane = divide_up(kPieces, kLanesPerRow);
  static constexpr int kRowsPerLane = kTileKeys * kLanesPerRow / kWarpSize;

  const int lane, first_byte;
  const int row, piece;           // the lane's first row and first piece
  int skip[kPiecesPerLane];       // -1 for a piece past the last one, else 0
  const char* next_tile;          // the lane's chunk of the KV tile whose record is copied next
  int count = 0, tile_count = 0;  // KV tiles; tile_count is 0 in lanes past the end of a record

  __device__ __forceinline__ RowPieces(int lane, int first_byte)
      : lane(lane), first_byte(first_byte), row(lane / kLanesPerRow * kRowsPerLane), piece(lane % kLanesPerRow) {}

  __device__ __forceinline__ void start(const KVTile* kv_tiles, int begin, int num_tiles) {
    next_tile = reinterpret_cast<const char*>(kv_tiles + begin + kStages) + kChunk_bytes * lane;
    count = num_tiles;
    tile_count = lane < static_cast<int>(sizeof(KVTile)) / kChunk_bytes ? num_tiles : 0;  // [R4]
  }
  // The record of KV tile i + kStages; `record`: of KV tile i.
  __device__ __forceinline__ void copy_record(int i, u32 record) {
    cp_async<kChunk_bytes>((record ^ kStages * kRecord_bytes) + kChunk_bytes * lane, next_tile,
                           tile_count - (i + kStages + 1));
    next_tile += sizeof(KVTile);
  }
};

// The producer of forward.cu: rows of K and V. A warp of a team copies columns `first` to first + kWidth - 1 of one
// head.
//
//   kDim     columns of a head in memory
//   kWidth   columns of a head that the warp copies, at most: kDim without teams
template <int kDim, int kHeads, int kBytes = 2, int kWidth = kDim>
struct Gather : RowPieces<kDim * kBytes, kHeads, kWidth * kBytes> {
  using Base = RowPieces<kDim * kBytes, kHeads, kWidth * kBytes>;
  using Base::first_byte, Base::row, Base::piece, Base::skip, Base::count;
  using Base::kCopy_bytes, Base::kHeadPieces, Base::kLanesPerRow, Base::kPiecesPerLane, Base::kRowsPerLane;
  using S = Stage<kWidth, kHeads, kBytes>;
  using Group = HeadGroup<kWidth, kHeads>;
  static constexpr bool kTeams = kWidth != kDim;
  static constexpr int kRow_bytes = kDim * kBytes;

  static_assert(!kTeams || kHeads == 1, "teams share one head");

  const Params& p;
  u32 key_offset[kPiecesPerLane], value_offset[kPiecesPerLane];  // the pieces of the first row in a stage

  __device__ __forceinline__ Gather(const Params& p, int lane, int first = 0) : Base(lane, first * kBytes), p(p) {
    const int heads = heads_of_group<kHeads>(p);
#pragma unroll
    for (int i = 0; i < kPiecesPerLane; ++i) {
      const int index = piece + i * kLanesPerRow, head = index / kHeadPieces;
      const u32 byte = kBytes * Group::kHeadDim * head + index % kHeadPieces * kCopy_bytes;
      const u32 chunk = byte / kChunk_bytes * kChunk_bytes, rest = byte % kChunk_bytes;
      skip[i] = head < heads && (!kTeams || first_byte + static_cast<int>(byte) < kRow_bytes) ? 0 : -1;
      key_offset[i] = row * S::kKeyRow_bytes + rest + (Group::kFolded ? chunk ^ S::key_swizzle(row) : chunk);
      value_offset[i] = row * S::kValueRow_bytes + sizeof(S::key) + rest + (chunk ^ S::value_swizzle(row));
    }
  }

  __device__ __forceinline__ void start(int begin, int num_tiles) { Base::start(p.kv_tiles, begin, num_tiles); }

  // Piece i of the lane in row 0 of `tensor`.
  __device__ __forceinline__ const char* lane_piece(const void* tensor, i64 head_stride, int i) const {
    const int index = piece + i * kLanesPerRow, head = kHeads > 1 ? index / kHeadPieces : 0;
    using Bits = typename ElementBits<kBytes>::Type;
    const Bits* const first =
        static_cast<const Bits*>(tensor) + (static_cast<i64>(blockIdx.y) * kHeads + head) * head_stride;
    return reinterpret_cast<const char*>(first) + (index - head * kHeadPieces) * kCopy_bytes +
           (kTeams ? first_byte : 0);
  }

  // One cp.async group: K and V of KV tile i, whose keys are in `record`, to `stage`; the record of KV tile i +
  // kStages.
  __device__ __forceinline__ void operator()(int i, u32 record, u32 stage) {
    if (i < count) {
      int keys[kRowsPerLane];
      load_shared_words(keys, record + sizeof(int) * row);
#pragma unroll
      for (int j = 0; j < kPiecesPerLane; ++j) {
        // Recomputed for every KV tile: kept in registers, the addresses cost more than they save at kDim = 256.
        const char* const key = lane_piece(p.key, p.key_head_stride, j);
        const char* const value = lane_piece(p.value, p.value_head_stride, j);
#pragma unroll
        for (int n = 0; n < kRowsPerLane; ++n) {
          const int index = keys[n] | skip[j];  // negative: no copy
          // With several rows per lane, `row` is a multiple of kRowsPerLane, so that its swizzle and that of n combine
          // by xor.
          const u32 key_swizzle = S::key_swizzle(kRowsPerLane == 1 && !Group::kFolded ? row : n);
          cp_async<kCopy_bytes>(((stage + key_offset[j]) ^ key_swizzle) + n * S::kKeyRow_bytes,
                                key + static_cast<i64>(keys[n]) * p.key_row_bytes, index);
          cp_async<kCopy_bytes>(((stage + value_offset[j]) ^ S::value_swizzle(n)) + n * S::kValueRow_bytes,
                                value + static_cast<i64>(keys[n]) * p.value_row_bytes, index);
        }
      }
      Base::copy_record(i, record);
    }
    cp_async_commit_group();  // [R1]
  }
};
