// Arrays shared by the planning kernels (fused/planning/gpu_plan.py).
#pragma once
#include "common.cuh"

// Constants of fused/planning/schedule.py:
constexpr int kTileWords = 24;   // per KV tile: 16 columns, kNoColumn past the last, and 8 words of bitmap
constexpr int kItemWords = 56;   // per work item
constexpr int kNoColumn = -1;
constexpr int kWarpItem = -1;
constexpr int kBlockItem = -2;
constexpr int kSortSegment = 32;  // neighbouring windows sorted by size, one per lane

template <bool kWide>
struct IndexOf {
  using Type = int;
};
template <>
struct IndexOf<true> {
  using Type = i64;
};

// Numbers of a plan for the host, int64: the CSR's, then kScheduleNumbers per schedule, then 2 each for the row items
// of A and of its transpose.
enum PlanNumber {
  kBadOffset,  // num_rows + 1 minus the first wrong offset of a CSR; 0: none
  kBadEdge,    // num_edges minus the first edge with an id out of range; 0: none
  kKeysTaken,  // bump pointer into the sort keys in global memory, for the windows of a CSR
  kSchedules = 8,
  kRowItems = kSchedules + 3 * 16,
  kCounts = kRowItems + 8,  // index of the int counts after the numbers
};

// Numbers of a schedule.
enum ScheduleNumber {
  kNumTiles,       // KV tiles
  kNumBlocks,      // blocks of the grid
  kNumSplits,      // splits of all split windows
  kWarpWindows,    // windows processed by one warp
  kSplitWindows,   // windows processed by several blocks
  kWarpTiles,      // most KV tiles of a window that one warp processes alone
  kSplitTiles,     // most KV tiles of a block
  kSegment,        // kSortSegment; 0 where all windows of one warp are sorted
  kLeadingBlocks,  // shared blocks before the windows of one warp in the grid
  kSharedBlocks,   // blocks of block windows and split windows
  kScheduleNumbers = 16,
};

// Scratch memory of a schedule, from plan_schedule to plan_items. `most_blocks`: upper bound of the shared blocks.
struct ScheduleScratch {
  int4* blocks;        // [most_blocks]  window, split of the window, splits of the window, number of the first of them
  int* block_order;    // [most_blocks]  shared blocks in the order of the grid
  int* warp_windows;   // [num_windows]  windows of one warp, ascending
  int* dealt_windows;  // [num_windows]  windows of one warp, most KV tiles first; only with kSegment == 0
  int* tile_offset;    // [num_windows + 1]  first KV tile of each window; unused by the first schedule of a pattern

  // `schedule`: number of the schedule. The size of each is a multiple of 16 bytes, the alignment of `blocks`.
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

// Neighbouring edges of a CSR pattern that one block processes.
struct EdgeBlock {
  static constexpr int kThreads = 256;
  static constexpr int kThreadEdges = 4;
  i64 first, last;

  __device__ __forceinline__ EdgeBlock(i64 block, i64 num_edges) : first(block * kThreads * kThreadEdges) {
    const i64 end = first + kThreads * kThreadEdges;
    last = (end < num_edges ? end : num_edges) - 1;
  }

  // Edge `i` of a thread; may be past the last.
  __device__ __forceinline__ i64 edge(int i) const { return first + i * kThreads + threadIdx.x; }
};
