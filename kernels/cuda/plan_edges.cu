// The edges of KV tiles: CSR, and the slots that edge data lies in (kernels/formats/schedule.py: csr_of_tiles,
// make_tile_slots; the tests compare with them).
//
//   kCount   edges of each row, at its place plus 1 of `offsets`, which then becomes their prefix sum
//   kCsr     the column of each edge; of repeated ones the second behind all first ones of the row, and so on
//   kSlots   the slots, for the CSR that the KV tiles were made from, where repeated edges are neighbours
//
// Grid: at least ceil(num_windows / 8), a warp for each window. The warp takes four KV tiles at a time: lane 8 t + g
// has word g of the bitmap of KV tile t, rows g and g + 8. Slots ascend by KV tile, word and bit; edges by row, KV tile
// and key, but for repeated ones.
#include "common.cuh"
#include "plan_data.cuh"
#include "thread_group.cuh"

constexpr int kWarps = 8;
constexpr int kWords = kTileM / 2;  // of a bitmap
constexpr int kTiles = kWarpSize / kWords;

enum class Edges { kCount, kCsr, kSlots };

struct Params {
  i64* offsets;            // [num_rows + 1]  kCount: written; else read
  const int* kv_tiles;     // [num_tiles + 2][24]
  const int* tile_offset;  // [num_windows + 1]
  int* indices;            // [num_edges]  kCsr: written; kSlots: column of each edge
  const i64* numbers;      // kSlots: PlanNumbers
  int* tile_slots;         // [most_tiles + 3]  kSlots: first slot of each KV tile, num_edges behind them
  int* slot_edges;         // [num_edges]  kSlots: the edge of each slot
  u8* slot_places;         // [num_edges]  kSlots: 16 * row + key in the KV tile
  int num_windows;
  int num_rows;            // 16 num_windows, unless kSlots
};

// Slots of the window up to each key of a KV tile whose columns do not ascend: so many edges of the same row and column
// may be in front. keys: of the KV tile; before: the last key of the one in front, -1 for none.
__device__ __forceinline__ int level_of(const int* keys, int before, int key) {
  int level = 0;
  for (int i = 0; i <= key; ++i) {
    level += keys[i] <= before;
    before = keys[i];
  }
  return level;
}

// Place of a column in a row of the CSR, whose columns ascend.
__device__ __forceinline__ int place_of(const int* indices, i64 low, i64 high, int column) {
  while (low < high) {
    const i64 middle = low + (high - low) / 2;
    if (indices[middle] < column) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return static_cast<int>(low);
}

// Sum over the lanes below with the same g; `total`: over all lanes with it.
__device__ __forceinline__ int sum_of_tiles_below(int x, int lane, int& total) {
  int sum = x;
#pragma unroll
  for (int distance = kWords; distance < kWarpSize; distance *= 2) {
    const int other = __shfl_sync(kFullWarp, sum, max(lane - distance, 0));
    if (lane >= distance) sum += other;
  }
  total = __shfl_sync(kFullWarp, sum, kWarpSize - kWords + lane % kWords);
  return sum - x;
}

template <Edges kEdges>
__global__ void __launch_bounds__(kWarps* kWarpSize) plan_edges(const __grid_constant__ Params p) {
  constexpr bool kSlots = kEdges == Edges::kSlots;
  const int lane = threadIdx.x % kWarpSize, g = lane % kWords;
  const int window = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  if (window >= p.num_windows) return;
  const int begin = p.tile_offset[window], end = p.tile_offset[window + 1];
  const auto offset_of = [&](int row) { return p.offsets[min(window * kTileM + row, p.num_rows)]; };
  const bool has_repeats = kSlots && p.numbers[kRepeats];
  int next[2] = {0, 0};  // edge of rows g and g + 8
  int slot = 0, level = 0;
  if (kEdges != Edges::kCount) {
    next[0] = static_cast<int>(offset_of(g));
    next[1] = static_cast<int>(offset_of(g + kWords));
    slot = static_cast<int>(offset_of(0));
  }
  for (int first = begin; first < end; first += kTiles) {
    const int tile = first + lane / kWords;
    const int* const words = p.kv_tiles + static_cast<i64>(tile) * kTileWords;
    const u32 bitmap = tile < end ? words[kTileK + g] : 0;
    int edge[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int total;
      edge[half] = next[half] + sum_of_tiles_below(popc(bitmap >> kTileK * half & 0xffff), lane, total);
      next[half] += total;
    }
    int own_level = 0, before = -1;
    if (has_repeats) {  // levels of the KV tiles below, and the last key in front
      int total, all = 0;
      if (tile > begin && tile < end) before = words[kTileK - 1 - kTileWords];
      if (tile < end) {
        int num_keys = 0;
        while (num_keys < kTileK && words[num_keys] >= 0) ++num_keys;
        all = level_of(words, before, num_keys - 1);
      }
      own_level = level + sum_of_tiles_below(all, lane, total);
      level += total;
    }
    if constexpr (kEdges != Edges::kCount) {
      const int up_to = warp_inclusive_sum(popc(bitmap), lane);
      int own_slot = slot + up_to - popc(bitmap);
      slot += __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
      if (kSlots && g == 0 && tile < end) p.tile_slots[tile] = own_slot;
      for (u32 bits = bitmap; bits; bits &= bits - 1) {
        const int bit = bfind(bits & -bits), half = bit / kTileK, key = bit % kTileK;  // the lowest
        int own_edge = half ? edge[1]++ : edge[0]++;
        if constexpr (kSlots) {
          const int row = g + kWords * half;
          if (has_repeats) {
            own_edge = place_of(p.indices, offset_of(row), offset_of(row + 1), words[key]) + own_level +
                       level_of(words, before, key);
          }
          p.slot_edges[own_slot] = own_edge;
          p.slot_places[own_slot] = kTileM * row + key;
        } else {
          p.indices[own_edge] = words[key];
        }
        ++own_slot;
      }
    }
  }
  if constexpr (kEdges == Edges::kCount) {
    i64* const counts = p.offsets + static_cast<i64>(window) * kTileM + 1;
    if (lane < kWords) {
      counts[g] = next[0];
      counts[g + kWords] = next[1];
    }
    if (window == 0 && lane == 0) p.offsets[0] = 0;
  } else if (kSlots && window == p.num_windows - 1 && lane < 3) {
    p.tile_slots[end + lane] = slot;
  }
}
