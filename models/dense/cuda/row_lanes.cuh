// Rows of 16-bit elements in the lanes of a warp, for kernels without matrix products.
//
// A row of kColumns 16-bit elements is a sequence of 16-byte chunks. kLanes neighbouring lanes hold a row, lane l of
// them chunks l, l + kLanes, ...; a warp holds 32 / kLanes rows at a time:
//
//   kColumns = 64    8 chunks    8 lanes   1 chunk per lane     4 rows
//   kColumns = 128   16 chunks   16 lanes  1 chunk per lane     2 rows
//   kColumns = 320   40 chunks   32 lanes  2 chunks per lane    1 row; lanes 8 to 31 have no second chunk
#pragma once
#include "common.cuh"
#include "ptx/cvt.cuh"
#include "ptx/ld_global.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kChunk = 8;  // elements

template <int kColumns>
struct RowLanes {
  static_assert(kColumns % kChunk == 0 && kColumns <= 1024, "whole chunks; sums of a thread's columns in registers");
  static constexpr int kChunks = kColumns / kChunk;
  static constexpr int kLanes = kChunks > 16 ? 32 : kChunks > 8 ? 16 : kChunks > 4 ? 8 : kChunks > 2 ? 4 : kChunks;
  static constexpr int kOfLane = divide_up(kChunks, kLanes);
  static constexpr int kWarpRows = kWarpSize / kLanes;
  static constexpr int kBlockRows = kWarps * kWarpRows;

  // The thread's row in a tile of kBlockRows.
  __device__ static __forceinline__ int row() { return threadIdx.x / kLanes; }
  __device__ static __forceinline__ int chunk(int i) { return threadIdx.x % kLanes + i * kLanes; }
  __device__ static __forceinline__ bool has(int i) { return chunk(i) < kChunks; }

  __device__ static __forceinline__ uint4 load(const u16* matrix, int row, int i, bool exists) {
    if (!exists || !has(i)) return make_uint4(0, 0, 0, 0);
    return ld_global_no_allocate_v4_b32(matrix + static_cast<i64>(row) * kColumns + kChunk * chunk(i));
  }

  // Loads the thread's elements of a vector that all rows read.
  __device__ static __forceinline__ uint4 load_vector(const u16* vector, int i) {
    return has(i) ? ld_global_nc_v4_b32(vector + kChunk * chunk(i)) : make_uint4(0, 0, 0, 0);
  }

  __device__ static __forceinline__ void store(u16* matrix, int row, int i, uint4 words) {
    if (has(i)) st_global_v4_b32(matrix + static_cast<i64>(row) * kColumns + kChunk * chunk(i), words);
  }

  // Sum over the lanes of a row, in every lane.
  __device__ static __forceinline__ float add_lanes(float value) {
#pragma unroll
    for (int distance = 1; distance < kLanes; distance *= 2) value += __shfl_xor_sync(kFullWarp, value, distance);
    return value;
  }
};

template <Element kElement>
__device__ __forceinline__ void unpack(float (&values)[kChunk], uint4 words) {
  const u32 each[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = cvt_f32_x2<kElement>(each[i]);
    values[2 * i] = pair.x, values[2 * i + 1] = pair.y;
  }
}

template <Element kElement>
__device__ __forceinline__ uint4 pack(const float (&values)[kChunk]) {
  return make_uint4(cvt_rn_x2<kElement>(values[0], values[1]), cvt_rn_x2<kElement>(values[2], values[3]),
                    cvt_rn_x2<kElement>(values[4], values[5]), cvt_rn_x2<kElement>(values[6], values[7]));
}

// Adds the sums of the block's threads, kSums of each column, in the order of the rows, to a row of `partial`.
template <int kColumns, int kSums>
__device__ __forceinline__ void store_column_sums(
    const float (&sums)[kSums][RowLanes<kColumns>::kOfLane][kChunk], float* partial) {
  using Lanes = RowLanes<kColumns>;
  __shared__ float of_rows[Lanes::kBlockRows * kColumns];
#pragma unroll
  for (int n = 0; n < kSums; ++n) {
    if (n) __syncthreads();
#pragma unroll
    for (int i = 0; i < Lanes::kOfLane; ++i) {
      if (!Lanes::has(i)) continue;
#pragma unroll
      for (int j = 0; j < kChunk; ++j) of_rows[Lanes::row() * kColumns + kChunk * Lanes::chunk(i) + j] = sums[n][i][j];
    }
    __syncthreads();
    for (int column = threadIdx.x; column < kColumns; column += kThreads) {
      float total = 0.0f;
#pragma unroll 8
      for (int row = 0; row < Lanes::kBlockRows; ++row) total += of_rows[row * kColumns + column];
      partial[n * kColumns + column] = total;
    }
  }
}
