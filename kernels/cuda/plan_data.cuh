// Arrays that the kernels of a plan hand on to each other (kernels/formats/gpu_plan.py).
#pragma once
#include "common.cuh"

// As in kernels/formats/schedule.py:
constexpr int kTileWords = 24;   // of a KV tile: 16 columns, kNoColumn past the last, and 8 words of bitmap
constexpr int kItemWords = 56;   // of a work item
constexpr int kNoColumn = -1;
constexpr int kWarpItem = -1;
constexpr int kBlockItem = -2;
constexpr int kSortSegment = 32;  // neighbouring windows that are sorted by size; one a lane

template <bool kWide>
struct IndexOf {
  using Type = int;
};
template <>
struct IndexOf<true> {
  using Type = i64;
};

// Numbers of a plan that the host may read, int64: of the CSR, then kScheduleNumbers of each schedule, then 2 of the row
// items of A and of its transpose.
enum PlanNumber {
  kBadOffset,  // num_rows + 1 less the first offset of a CSR that is wrong; 0: none
  kBadEdge,    // num_edges less the first edge with an id out of range; 0: none
  kSchedules = 8,
  kRowItems = kSchedules + 3 * 16,
  kCounts = kRowItems + 8,  // what lies behind
};

// Numbers of a schedule.
enum ScheduleNumber {
  kNumTiles,       // KV tiles
  kNumBlocks,      // of the grid
  kNumSplits,      // of all windows of several blocks
  kWarpWindows,    // windows of one warp
  kSplitWindows,   // windows of several blocks
  kWarpTiles,      // most KV tiles of a window that one warp takes alone
  kSplitTiles,     // most KV tiles of a block
  kSegment,        // kSortSegment; 0 where all windows of one warp are sorted
  kLeadingBlocks,  // shared blocks in front of the windows of one warp
  kSharedBlocks,   // blocks of windows of one and several blocks
  kScheduleNumbers = 16,
};

// Scratch memory of a schedule between plan_schedule and plan_items. `most_blocks`: at least the shared blocks.
struct ScheduleScratch {
  int4* blocks;        // [most_blocks]  window, split of the window, splits of the window, number of the first of them
  int* block_order;    // [most_blocks]  shared blocks in the order of the grid
  int* warp_windows;   // [num_windows]  windows of one warp, ascending
  int* dealt_windows;  // [num_windows]  the same, most KV tiles first; only with kSegment == 0
  int* tile_offset;    // [num_windows + 1]  first KV tile of each window; not of the first schedule

  // `schedule`: number of the schedule. Each has a multiple of 16 bytes, for `blocks`.
  __device__ __forceinline__ ScheduleScratch(int* memory, i64 most_blocks, i64 num_windows, int schedule) {
    int* const scratch = memory + schedule * ((5 * most_blocks + 3 * num_windows + 4) / 4 * 4);
    blocks = reinterpret_cast<int4*>(scratch);
    block_order = scratch + 4 * most_blocks;
    warp_windows = block_order + most_blocks;
    dealt_windows = warp_windows + num_windows;
    tile_offset = dealt_windows + num_windows;
  }
};

// First KV tile of part `index` of `parts` of a window.
__device__ __forceinline__ int part_begin(int count, int index, int parts) {
  return static_cast<int>(static_cast<i64>(count) * index / parts);
}

// Neighbouring edges of a CSR pattern that one block takes.
struct EdgeBlock {
  static constexpr int kThreads = 256;
  static constexpr int kThreadEdges = 4;
  i64 first, last;

  __device__ __forceinline__ EdgeBlock(i64 block, i64 num_edges) : first(block * kThreads * kThreadEdges) {
    const i64 end = first + kThreads * kThreadEdges;
    last = (end < num_edges ? end : num_edges) - 1;
  }

  // Edge `i` of a thread, which may be past the last.
  __device__ __forceinline__ i64 edge(int i) const { return first + i * kThreads + threadIdx.x; }
};
