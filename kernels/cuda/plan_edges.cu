// The edges of KV tiles: CSR, and the slots of edge data (oracles: csr_of_tiles and make_tile_slots in
// kernels/formats/schedule.py).
//
//   kCount   edges of each row, to `offsets` + 1, which then becomes their prefix sum
//   kCsr     the column of each edge
//   kSlots   the slots
//
// Grid: at least ceil(num_windows / 8), one warp per window. A warp processes four KV tiles at a time: lane 8 t + g
// holds word g of the bitmap of KV tile t, rows g and g + 8. Slots ascend by KV tile, word and bit; edges by row, KV
// tile and key.
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
  int* indices;            // [num_edges]  kCsr: column of each edge
  int* tile_slots;         // [most_tiles + 3]  kSlots: first slot of each KV tile, then num_edges
  int* slot_edges;         // [num_edges]  kSlots: the edge of each slot
  u8* slot_places;         // [num_edges]  kSlots: 16 * row + key in the KV tile
  int num_windows;
  int num_rows;            // 16 num_windows, unless kSlots
};

// Sum over lower lanes with the same g; `total`: over all lanes with the same g.
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
  int next[2] = {0, 0};  // edge of rows g and g + 8
  int slot = 0;
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
    if constexpr (kEdges != Edges::kCount) {
      const int up_to = warp_inclusive_sum(popc(bitmap), lane);
      int own_slot = slot + up_to - popc(bitmap);
      slot += __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
      if (kSlots && g == 0 && tile < end) p.tile_slots[tile] = own_slot;
      for (u32 bits = bitmap; bits; bits &= bits - 1) {
        const int bit = bfind(bits & -bits), half = bit / kTileK, key = bit % kTileK;  // the lowest
        const int own_edge = half ? edge[1]++ : edge[0]++;
        if constexpr (kSlots) {
          p.slot_edges[own_slot] = own_edge;
          p.slot_places[own_slot] = kTileM * (g + kWords * half) + key;
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
