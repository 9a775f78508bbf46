// Rows of two matrices in shared memory, and the producer of a warp's ring in backward.cu.
#pragma once
#include "common.cuh"
#include "tiles/backward_params.cuh"
#include "tiles/gather.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/opaque_pointer.cuh"
#include "rows.cuh"

// Rows of one matrix in shared memory, elements of kBytes. Row r begins at start(r); its 16-byte chunk c lies at
// 16 c ^ swizzle(r). 16 bits: the swizzle of V in forward.cu, for ldmatrix, plain and transposed.
template <int kBytes, int kSlices>
struct RowLayout {
  using V = Stage<2 * kTileN * kSlices, 1>;
  static constexpr u32 kRow_bytes = 32 * kSlices;
  __device__ static constexpr u32 start(u32 row) { return row * kRow_bytes; }
  __device__ static constexpr u32 swizzle(u32 row) { return V::value_swizzle(row); }
  // Swizzled address `slice` slices after the swizzled `address`.
  __device__ static constexpr u32 advance(u32 address, int slice) { return V::advance(address, 32 * slice); }
};

// float32: rows begin on 128-byte lines; rows of one slice share a line in pairs. Accesses without bank conflicts:
//   SDDMM        16 bytes per lane, eight lanes at a time: a slice of rows 2i and 2i + 1
//   SpMM         8 bytes per lane, sixteen lanes at a time: two chunks of rows 0, 2, 4 and 6, or 1, 3, 5 and 7
//   PairGather   16 bytes per lane: 128 bytes of a row; one slice: rows 4i and 4i + 2, or 4i + 1 and 4i + 3; half a
//                slice: rows 4i to 4i + 3
template <int kSlices>
struct RowLayout<4, kSlices> {
  static_assert(kSlices <= 4, "64 columns a warp: more do not fit its registers");
  static constexpr u32 kRow_bytes = kSlices == 3 ? 256 : 64 * kSlices;
  __device__ static constexpr u32 start(u32 row) { return kSlices == 1 ? row / 2 * 128 : row * kRow_bytes; }
  __device__ static constexpr u32 swizzle(u32 row) { return (row ^ row / 2) % 2 * 64 + (row ^ row / 2) / 2 % 2 * 32; }
  __device__ static constexpr u32 advance(u32 address, int slice) {
    return (address ^ slice % 2 * 64) + slice / 2 * 128;
  }
};

// Sixteen rows of two matrices; in the column pass also their softmax statistics. Padding columns are zero.
template <int kBytes, int kDim, int kDimWarps>
struct RowPair {
  static constexpr int kSlices = divide_up(kDim, 2 * kTileN * kDimWarps);  // slices of one warp, 16 columns each
  static constexpr int kWidth = 2 * kTileN * kSlices;
  using Layout = RowLayout<kBytes, kSlices>;
  static constexpr u32 kMatrix_bytes = kTileKeys * Layout::kRow_bytes;
  static constexpr u32 kStats = 2 * kMatrix_bytes;
  static constexpr int kCopied_bytes = (kDimWarps > 1 ? kWidth : kDim) * kBytes;  // most bytes of a row

  unsigned char matrix[2][kMatrix_bytes];
  RowStats stats[kTileKeys];

  // 16 bits: addresses for ldmatrix of slice 0. Rows past `last_row` hold old data; row `last_row` is read instead.
  //   tall  matrices (rows 0-7, 8-15) x (low, high chunk), rows innermost: A fragments; transposed, B fragments of SpMM
  //   wide  matrices (rows 0-7, 8-15) x (low, high chunk), chunks innermost: B fragments of SDDMM in neighbouring
  //         registers
  __device__ static __forceinline__ u32 tall_address(u32 stage, int lane, int last_row) {
    return chunk_address(stage, min(lane % 16, last_row), lane / 16);
  }
  __device__ static __forceinline__ u32 wide_address(u32 stage, int lane, int last_row) {
    return chunk_address(stage, min(lane % 8 + lane / 16 * 8, last_row), lane / 8 % 2);
  }
  __device__ static __forceinline__ u32 chunk_address(u32 stage, u32 row, u32 chunk) {
    return stage + Layout::start(row) + (chunk * kChunk_bytes ^ Layout::swizzle(row));
  }
  __device__ static __forceinline__ u32 advance(u32 lane_address, int matrix, int slice) {
    return Layout::advance(lane_address, slice) + matrix * kMatrix_bytes;
  }
};

// Zeros the chunks that copies do not fill. `first`: first column of the warp.
template <int kBytes, int kDim, int kDimWarps>
__device__ __forceinline__ void zero_padding(RowPair<kBytes, kDim, kDimWarps>& stage, int first, int lane) {
  using S = RowPair<kBytes, kDim, kDimWarps>;
  using Layout = typename S::Layout;
  if (kDim == kDimWarps * S::kWidth) return;
  const int row = lane % kTileKeys;
  for (int chunk = max(0, kDim - first) * kBytes / kChunk_bytes; chunk < kBytes * S::kSlices; ++chunk) {
    const u32 offset = Layout::start(row) + (kChunk_bytes * chunk ^ Layout::swizzle(row));
    *reinterpret_cast<uint4*>(stage.matrix[lane / kTileKeys] + offset) = make_uint4(0, 0, 0, 0);
  }
}

// A matrix in global memory.
struct Source {
  const void* matrix;
  i64 head_stride;
  int row_bytes;
};

// The producer of backward.cu: rows of two matrices. O is read and the gradients are written in the same
// pieces: whole 128-byte lines, where C fragments would access one sector of each row at a time.
template <Element kIn, int kDim, int kDimWarps, bool kStats>
struct PairGather : RowPieces<kDim * kElement_bytes<kIn>, 1,
                              RowPair<kElement_bytes<kIn>, kDim, kDimWarps>::kCopied_bytes> {
  static constexpr int kBytes = kElement_bytes<kIn>;
  using S = RowPair<kBytes, kDim, kDimWarps>;
  using Layout = typename S::Layout;
  using Base = RowPieces<kDim * kBytes, 1, S::kCopied_bytes>;
  using Base::lane, Base::first_byte, Base::row, Base::piece, Base::skip, Base::count;
  using Base::kCopy_bytes, Base::kPieces, Base::kLanesPerRow, Base::kPiecesPerLane, Base::kRowsPerLane;
  static constexpr int kRow_bytes = kDim * kBytes;
  static constexpr int kPieceWords = kCopy_bytes / sizeof(u32);

  const BackwardParams& p;
  const Source first, second;
  u32 offset[kPiecesPerLane];  // the pieces of the first row in a stage

  __device__ __forceinline__ PairGather(const BackwardParams& p, Source first, Source second, int dim_warp, int lane)
      : Base(lane, dim_warp * S::kWidth * kBytes), p(p), first(first), second(second) {
#pragma unroll
    for (int i = 0; i < kPiecesPerLane; ++i) {
      const int index = piece + i * kLanesPerRow, byte = index * kCopy_bytes;
      const u32 chunk = byte / kChunk_bytes * kChunk_bytes, rest = byte % kChunk_bytes;
      skip[i] = index < kPieces && first_byte + byte < kRow_bytes ? 0 : -1;
      offset[i] = Layout::start(row) + rest + (chunk ^ Layout::swizzle(row));
    }
  }

  __device__ __forceinline__ void start(int begin, int num_tiles) { Base::start(p.kv_tiles, begin, num_tiles); }

  // Piece i of the lane in row 0.
  __device__ __forceinline__ const char* lane_piece(const Source& source, int i) const {
    const i64 head = static_cast<i64>(blockIdx.y) * source.head_stride;
    const void* matrix;  // a multiplication by kBytes would cost an instruction
    if constexpr (kBytes == sizeof(u16)) {
      matrix = static_cast<const u16*>(source.matrix) + head;
    } else {
      matrix = static_cast<const float*>(source.matrix) + head;
    }
    return opaque_pointer(static_cast<const char*>(matrix) + first_byte + (piece + i * kLanesPerRow) * kCopy_bytes);
  }

  // Piece i of the lane's row n in the first matrix of a stage. `row` is a multiple of kRowsPerLane.
  __device__ __forceinline__ u32 piece_address(u32 stage, int i, int n) const {
    return ((stage + offset[i]) ^ Layout::swizzle(n)) + Layout::start(n);
  }

  // The lane's rows of the window. window_row: row lane % 16 of the window; negative: no row.
  __device__ __forceinline__ void spread_rows(int (&rows)[kRowsPerLane], int window_row) const {
#pragma unroll
    for (int n = 0; n < kRowsPerLane; ++n) rows[n] = __shfl_sync(kFullWarp, window_row, row + n);
  }

  // Copies rows of both matrices to a stage. A negative row is not copied; float32: zeros. backward.cu [2]
  __device__ __forceinline__ void copy_rows(const Source& first, const Source& second, const int (&rows)[kRowsPerLane],
                                            u32 stage) const {
#pragma unroll
    for (int i = 0; i < kPiecesPerLane; ++i) {
      const char* const first_piece = lane_piece(first, i);
      const char* const second_piece = lane_piece(second, i);
#pragma unroll
      for (int n = 0; n < kRowsPerLane; ++n) {
        const u32 target = piece_address(stage, i, n);
        copy_piece(target, first_piece + static_cast<i64>(rows[n]) * first.row_bytes, rows[n], skip[i]);
        copy_piece(target + S::kMatrix_bytes, second_piece + static_cast<i64>(rows[n]) * second.row_bytes, rows[n],
                  skip[i]);
      }
    }
  }

  __device__ static __forceinline__ void copy_piece(u32 target, const char* source, int row, int skip) {
    if constexpr (kIsWide<kIn>) {
      cp_async_or_zero<kCopy_bytes>(target, source, row, skip);
    } else {
      cp_async<kCopy_bytes>(target, source, row | skip);  // negative: no copy
    }
  }

  // One cp.async group: the window's own rows.
  __device__ __forceinline__ void own_rows(const Source& first, const Source& second, const int (&rows)[kRowsPerLane],
                                           u32 stage) const {
    copy_rows(first, second, rows, stage);
    cp_async_commit_group();
  }

  // Pieces of the lane's rows in registers.
  struct Pieces {
    u32 word[kPiecesPerLane][kRowsPerLane][kPieceWords];
  };

  // Byte of piece i of the lane in a row of a contiguous matrix [..][row_heads][kDim].
  __device__ __forceinline__ i64 piece_offset(int row, int row_heads, int i) const {
    const i64 row_head = static_cast<i64>(row) * row_heads + blockIdx.y;
    return row_head * kRow_bytes + first_byte + (piece + i * kLanesPerRow) * kCopy_bytes;
  }

  // Loads rows of a contiguous matrix; 0 for a negative row.
  __device__ __forceinline__ void load_rows(Pieces& pieces, const void* matrix, int row_heads,
                                            const int (&rows)[kRowsPerLane]) const {
#pragma unroll
    for (int i = 0; i < kPiecesPerLane; ++i) {
#pragma unroll
      for (int n = 0; n < kRowsPerLane; ++n) {
        if ((rows[n] | skip[i]) >= 0) {
          load_words(pieces.word[i][n], static_cast<const char*>(matrix) + piece_offset(rows[n], row_heads, i));
        } else {
#pragma unroll
          for (int w = 0; w < kPieceWords; ++w) pieces.word[i][n][w] = 0;
        }
      }
    }
  }

  // Dot products of rows in registers with rows of the second matrix of a stage, over the warp's columns. Returns the
  // product of row lane % 16.
  __device__ __forceinline__ float row_products(const Pieces& pieces, u32 stage) const {
    float sum[kRowsPerLane];
#pragma unroll
    for (int n = 0; n < kRowsPerLane; ++n) {
      float2 pair = make_float2(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < kPiecesPerLane; ++i) {
        u32 other[kPieceWords];
        load_shared_words(other, piece_address(stage + S::kMatrix_bytes, i, n));
#pragma unroll
        for (int w = 0; w < kPieceWords; ++w) {
          const u32 own_word = pieces.word[i][n][w], other_word = skip[i] ? 0 : other[w];
          if constexpr (kIsWide<kIn>) {
            float& sum = w % 2 ? pair.y : pair.x;
            sum = fmaf(__uint_as_float(own_word), __uint_as_float(other_word), sum);
          } else {
            const float2 a = cvt_f32_x2<kIn>(own_word), b = cvt_f32_x2<kIn>(other_word);
            pair.x = fmaf(a.x, b.x, pair.x);
            pair.y = fmaf(a.y, b.y, pair.y);
          }
        }
      }
      sum[n] = pair.x + pair.y;
    }
    // Each step halves the rows per lane; after the last one lanes 2r and 2r + 1 hold row r.
#pragma unroll
    for (int count = kRowsPerLane / 2; count > 0; count /= 2) {
      const bool upper = lane & 2 * count;
#pragma unroll
      for (int n = 0; n < count; ++n) {
        const float own = upper ? sum[count + n] : sum[n], sent = upper ? sum[n] : sum[count + n];
        sum[n] = own + __shfl_xor_sync(kFullWarp, sent, 2 * count);
      }
    }
    sum[0] += __shfl_xor_sync(kFullWarp, sum[0], 1);
    return __shfl_sync(kFullWarp, sum[0], 2 * (lane % kTileM));
  }

  // Stores rows of matrix `number` of a stage to a contiguous matrix; a negative row is not stored.
  __device__ __forceinline__ void store_rows(void* matrix, int row_heads, const int (&rows)[kRowsPerLane], u32 stage,
                                             int number) const {
#pragma unroll
    for (int i = 0; i < kPiecesPerLane; ++i) {
#pragma unroll
      for (int n = 0; n < kRowsPerLane; ++n) {
        u32 words[kPieceWords];
        load_shared_words(words, piece_address(stage + number * S::kMatrix_bytes, i, n));
        if ((rows[n] | skip[i]) >= 0) {
          store_words(static_cast<char*>(matrix) + piece_offset(rows[n], row_heads, i), words);
        }
      }
    }
  }

  // One cp.async group: the rows of KV tile i, whose keys are in `record`, to `stage`; the record of KV tile i +
  // kStages.
  __device__ __forceinline__ void operator()(int i, u32 record, u32 stage) {
    if (i < count) {
      int keys[kRowsPerLane];
      load_shared_words(keys, record + sizeof(int) * row);
      copy_rows(first, second, keys, stage);
      if constexpr (kStats) {
        const int key = ld_shared_b32(record + sizeof(int) * (lane % kTileKeys));
        cp_async<sizeof(RowStats)>(stage + S::kStats + sizeof(RowStats) * (lane % kTileKeys),
                                   p.row_stats + (static_cast<i64>(key) * p.num_heads + blockIdx.y),
                                   lane < kTileKeys ? key : -1);
      }
      Base::copy_record(i, record);
    }
    cp_async_commit_group();  // [R1]
  }
};
