// The slots of the edges in KV tiles that were made from a CSR: where edge data lies; of A, and of A^T.
//
// Grid: (at least ceil(num_windows / 8), patterns), one warp per window. A warp processes four KV tiles at a time: lane
// 8 t + g holds word g of the bitmap of KV tile t, rows g and g + 8. Slots ascend by KV tile, word and bit; edges by
// row, KV tile and key.
#include "common.cuh"
#include "plan/plan_data.cuh"
#include "plan/thread_group.cuh"

constexpr int kWarps = 8;
constexpr int kWords = kTileM / 2;  // words of a bitmap
constexpr int kTiles = kWarpSize / kWords;

struct Params {
  const i64* offsets[2];      // [num_rows + 1]
  const int* kv_tiles[2];     // [num_tiles + 2][24]
  const int* tile_offset[2];  // [num_windows + 1]
  int* tile_slots[2];         // [most_tiles + 3]  first slot of each KV tile, then num_edges
  int* slot_edges[2];         // [most_edges]  the edge of A of each slot; 0 after the last
  u8* slot_places[2];         // [num_edges]  16 * row + key in the KV tile
  const int* column_edges;    // [num_edges]  the edge of A of each edge of A^T
  int most_edges;
  int num_windows[2];
  int num_rows[2];
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

__global__ void __launch_bounds__(kWarps* kWarpSize) plan_edges(const __grid_constant__ Params p) {
  const int lane = threadIdx.x % kWarpSize, g = lane % kWords;
  const int window = blockIdx.x * kWarps + threadIdx.x / kWarpSize, side = blockIdx.y;
  const i64 thread = static_cast<i64>(blockIdx.x) * kWarps * kWarpSize + threadIdx.x;
  for (i64 i = p.offsets[side][p.num_rows[side]] + thread; i < p.most_edges; i += gridDim.x * kWarps * kWarpSize) {
    p.slot_edges[side][i] = 0;
  }
  if (window >= p.num_windows[side]) return;
  const int begin = p.tile_offset[side][window], end = p.tile_offset[side][window + 1];
  const auto offset_of = [&](int row) { return p.offsets[side][min(window * kTileM + row, p.num_rows[side])]; };
  int next[2] = {static_cast<int>(offset_of(g)), static_cast<int>(offset_of(g + kWords))};  // edge of rows g and g + 8
  int slot = static_cast<int>(offset_of(0));
  for (int first = begin; first < end; first += kTiles) {
    const int tile = first + lane / kWords;
    const int* const words = p.kv_tiles[side] + static_cast<i64>(tile) * kTileWords;
    const u32 bitmap = tile < end ? words[kTileK + g] : 0;
    int edge[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      int total;
      edge[half] = next[half] + sum_of_tiles_below(popc(bitmap >> kTileK * half & 0xffff), lane, total);
      next[half] += total;
    }
    const int up_to = warp_inclusive_sum(popc(bitmap), lane);
    int own_slot = slot + up_to - popc(bitmap);
    slot += __shfl_sync(kFullWarp, up_to, kWarpSize - 1);
    if (g == 0 && tile < end) p.tile_slots[side][tile] = own_slot;
    for (u32 bits = bitmap; bits; bits &= bits - 1) {
      const int bit = bfind(bits & -bits), half = bit / kTileK, key = bit % kTileK;  // the lowest
      const int found = half ? edge[1]++ : edge[0]++;
      p.slot_edges[side][own_slot] = side ? p.column_edges[found] : found;
      p.slot_places[side][own_slot] = kTileM * (g + kWords * half) + key;
      ++own_slot;
    }
  }
  if (window == p.num_windows[side] - 1 && lane < 3) p.tile_slots[side][end + lane] = slot;
}
