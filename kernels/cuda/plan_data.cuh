// Arrays that the kernels of a plan hand on to each other (kernels/formats/gpu_plan.py).
#pragma once
#include "common.cuh"

// As in kernels/formats/schedule.py:
constexpr int kTileWords = 24;   // of a KV tile: 16 columns, kNoColumn past the last, and 8 words of bitmap
constexpr int kItemWords = 56;   // of a work item
constexpr int kNoColumn = -1;
constexpr int kWarpItem = -1;    // KWARP
constexpr int kBlockItem = -2;   // KBLOCK
constexpr int kSortSegment = 32;  // SORT_SEGMENT, a segment for each warp

// In place of the KV tiles of a window, and besides them:
constexpr int kDamaged = -1;           // the CSR is damaged
constexpr int kNotDistinct = 1 << 30;  // a row whose columns do not ascend strictly

// Numbers of a plan that the host reads, int64.
enum PlanNumber {
  kDamage,           // 1: the CSR is damaged, and the other numbers are 0
  kNumTiles,         // KV tiles
  kIsDistinct,       // 1: the columns of each row ascend strictly
  kDuplicates,       // repeated edges
  kNumBlocks,        // of the grid
  kNumSplits,        // of all windows of several blocks
  kWarpWindows,      // windows of one warp
  kSplitWindows,     // windows of several blocks
  kWarpTiles,        // SplitHeuristic
  kSplitTiles,       // SplitHeuristic
  kSegment,          // SplitHeuristic; 0 for None
  kBlockWarps,       // warps of a block
  kLeadingBlocks,    // shared blocks in front of the windows of one warp
  kSharedBlocks,     // blocks of windows of one and several blocks
  kNumNumbers,
};

// Scratch memory between plan_schedule and plan_items. `most_blocks`: at least the shared blocks.
struct ScheduleScratch {
  int4* blocks;        // [most_blocks]  window, split of the window, splits of the window, number of the first of them
  int* block_order;    // [most_blocks]  shared blocks in the order of the grid
  int* warp_windows;   // [num_windows]  windows of one warp, ascending
  int* dealt_windows;  // [num_windows]  the same, most KV tiles first; only with kSegment == 0

  __device__ __forceinline__ ScheduleScratch(int* scratch, i64 most_blocks, int num_windows)
      : blocks(reinterpret_cast<int4*>(scratch)),
        block_order(scratch + 4 * most_blocks),
        warp_windows(scratch + 5 * most_blocks),
        dealt_windows(scratch + 5 * most_blocks + num_windows) {}
};

// First KV tile of part `index` of `parts` of a window.
__device__ __forceinline__ int part_begin(int count, int index, int parts) {
  return static_cast<int>(static_cast<i64>(count) * index / parts);
}
