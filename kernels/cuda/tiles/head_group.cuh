// Head groups: the heads that a block computes together, and their columns in shared memory and in fragments.
//
// One head: any even kDim. Several heads (folded): K or V of all heads of the group is gathered as one row: whole lines
// are fetched, and records and bitmaps are read once for all heads. In shared memory a head starts on a chunk (16
// bytes):
//
//   global, kDim = 10, kHeads = 3    h0: 0 .. 9 | h1: 0 .. 9 | h2: 0 .. 9
//   shared, kHeadDim = 16            h0: 0 .. 9, padding 6 | h1: 0 .. 9, padding 6 | h2: 0 .. 9, padding 6
//   slices of 16 columns             slice 0                 slice 1                 slice 2
//
// Heads of up to 8 dimensions share a slice in pairs: n-tile 0 is the even head, n-tile 1 the odd one.
#pragma once
#include "common.cuh"

template <int kDim, int kHeads>
struct HeadGroup {
  static_assert(kDim % 2 == 0 && kDim <= 256, "pairs of elements; odd head dimensions are padded by the caller");
  static constexpr bool kFolded = kHeads > 1;
  static constexpr int kSliceHeads = kFolded && kDim <= kTileN ? 2 : 1;
  static constexpr int kHeadDim = divide_up(kDim, 2 * kTileN / kSliceHeads) * (2 * kTileN / kSliceHeads);
  static constexpr int kSlices = divide_up(kHeads * kHeadDim, 2 * kTileN);
  static constexpr int kWidth = 2 * kTileN * kSlices;

  // First head and first dimension of a slice.
  __device__ static constexpr int head_of(int slice) { return 2 * kTileN * slice / kHeadDim; }
  __device__ static constexpr int dim_of(int slice) { return kSliceHeads > 1 ? 0 : 2 * kTileN * slice % kHeadDim; }
  // Whether head `index` of the kSliceHeads heads of a slice exists in this block's group; `num_heads`: of all groups.
  __device__ static __forceinline__ bool exists(int slice, int index, int num_heads) {
    const int head = head_of(slice) + index;
    return !kFolded || (head < kHeads && static_cast<int>(blockIdx.y) * kHeads + head < num_heads);
  }
  // Output elements between the starts of the n-tiles of a slice.
  static constexpr int kTileGap = kSliceHeads > 1 ? kDim : kTileN;
  // Dimensions of an n-tile of a slice, where its head exists: 8 or fewer.
  __device__ static constexpr int dims_of(int slice, int tile) {
    const int rest = kDim - dim_of(slice) - (kSliceHeads > 1 ? 0 : kTileN * tile);
    return rest < 0 ? 0 : rest < kTileN ? rest : kTileN;
  }
};

// Columns of one head per warp of a team of kDimWarps: whole slices, which may end past kDim in the last warp.
template <int kDim, int kDimWarps>
__device__ constexpr int columns_of_warp() {
  return kDimWarps == 1 ? kDim : divide_up(kDim, 2 * kTileN * kDimWarps) * 2 * kTileN;
}
