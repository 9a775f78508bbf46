// Values of the edges of a KV tile, of all heads of a block.
//
// The edges of a KV tile are consecutive slots. Each lane loads the values of its slots (lane, lane + 32, ...) and
// stores them to a 16 x 16 matrix in shared memory for each value and head, from which the lanes read them as C
// fragments. Entries without an edge hold old data, and the mask discards their scores afterwards. The first slot of
// each lane is loaded one KV tile ahead, the next ones before the scores of their KV tile, if there are registers.
//
// Swizzle: rows with bit 1 set swap their halves, so that rows g to g + 3 of a read cover all banks.
#pragma once
#include "common.cuh"
#include "elements.cuh"
#include "ptx/cvt.cuh"
#include "tiles/forward_params.cuh"

constexpr int kTileValues = kTileM * kTileKeys;  // values of a matrix

// Place of row g + 8 * half and keys 8 * tile + 2t and 8 * tile + 2t + 1 in a matrix.
__device__ __forceinline__ int pair_place(int half, int tile, int g, int t) {
  return (8 * half + g) * kTileKeys + ((kTileN * tile) ^ (g & 2) << 2) + 2 * t;
}

//   kValues   of an edge and head
//   kAtOnce   slots of a lane past the first that are loaded together
//   kAhead    whether the first of these are loaded before the scores; else `load_others` has no effect
//   Params    of forward.cu or backward.cu
template <Element kIn, int kValues, int kHeads, int kAtOnce, bool kAhead, typename Params>
struct TileEdges {
  static constexpr int kMatrices = kValues * kHeads;

  // Place and values of kCount slots of a lane, 32 slots apart. Elements, not floats: a conversion would wait for them
  // where they are loaded.
  template <int kCount>
  struct Slots {
    int place[kCount];
    u16 value[kCount][kMatrices];
  };

  const Params& p;
  const int lane;
  float* const matrices;
  const int heads;         // with values of their own: kHeads, or 1 for all
  const int* tile_slots;   // first slot of the next KV tile but one
  int first, next, after;  // first slot of the KV tile and of the two behind it
  Slots<1> slot;           // first + lane
  Slots<kAtOnce> others;   // the next ones

  __device__ __forceinline__ TileEdges(const Params& p, int lane, float* matrices)
      : p(p), lane(lane), matrices(matrices), heads(p.edge_value_heads > 1 ? kHeads : 1) {}

  __device__ __forceinline__ void start(int begin, int count) {
    tile_slots = p.tile_slots + begin;
    first = __ldg(tile_slots), next = __ldg(tile_slots + 1), after = __ldg(tile_slots + 2);
    tile_slots += 2;
    load(slot, first, count > 0 ? next : first);
  }

  // Loads the KV tile's next slots.
  __device__ __forceinline__ void load_others() {
    if (kAhead && first + kWarpSize < next) load(others, first + kWarpSize, next);
  }

  // Values of the KV tile to shared memory; loads the first ones of the next KV tile. Before: __syncwarp since the last
  // read.
  __device__ __forceinline__ void scatter() {
    store(slot, first, next);
    int begin = first + kWarpSize;
    if constexpr (kAhead) {
      if (begin < next) store(others, begin, next);
      begin += kAtOnce * kWarpSize;
    }
    for (; begin < next; begin += kAtOnce * kWarpSize) {
      load(others, begin, next);
      store(others, begin, next);
    }
    load(slot, next, after);
  }
  // Makes the next KV tile current; after the last use of this one.
  __device__ __forceinline__ void advance() { first = next, next = after, after = __ldg(++tile_slots); }

  // Value i of two neighbouring scores; head: of the block.
  __device__ __forceinline__ float2 pair(int i, int head, int place) const {
    return *reinterpret_cast<const float2*>(matrices + matrix(i, head) * kTileValues + place);
  }
  // In the place of value i of an edge, its gradient. One head.
  __device__ __forceinline__ void set_gradients(int i, int place, float2 gradients) const {
    *reinterpret_cast<float2*>(matrices + i * kTileValues + place) = gradients;
  }
  // The gradients to global memory. Before: __syncwarp since `set_gradients`.
  __device__ __forceinline__ void store_gradients() const {
    const i64 of_head = static_cast<i64>(blockIdx.y) * p.num_slots;
    for (int each = first + lane; each < next; each += kWarpSize) {
      const i64 edge = of_head + __ldg(p.slot_edges + each);
      const int place = swizzled(__ldg(p.slot_places + each));
#pragma unroll
      for (int i = 0; i < kValues; ++i) p.edge_value_gradients[edge * kValues + i] = matrices[i * kTileValues + place];
    }
  }

 private:
  __device__ static __forceinline__ int swizzled(int place) { return place ^ (place >> 5 & 1) << 3; }
  __device__ __forceinline__ int matrix(int i, int head) const { return (heads > 1 ? head : 0) * kValues + i; }

  // Slots from `begin` on, up to `end`. Heads past the last get its values: 0 * NaN is NaN.
  template <int kCount>
  __device__ __forceinline__ void load(Slots<kCount>& slots, int begin, int end) const {
    const int first_head = p.edge_value_heads > 1 ? blockIdx.y * kHeads : 0, last_head = p.edge_value_heads - 1;
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      const int each = begin + j * kWarpSize + lane;
      if (each >= end) continue;
      slots.place[j] = __ldg(p.slot_places + each);
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        if (h >= heads) break;
        const i64 start = static_cast<i64>(min(first_head + h, last_head)) * p.num_slots + each;
#pragma unroll
        for (int i = 0; i < kValues; ++i) {
          const char* const address = element_address<kIn>(p.edge_values, start * kValues + i);
          slots.value[j][h * kValues + i] = __ldg(reinterpret_cast<const u16*>(address));
        }
      }
    }
  }
  template <int kCount>
  __device__ __forceinline__ void store(const Slots<kCount>& slots, int begin, int end) const {
#pragma unroll
    for (int j = 0; j < kCount; ++j) {
      if (begin + j * kWarpSize + lane >= end) continue;
      const int place = swizzled(slots.place[j]);
#pragma unroll
      for (int i = 0; i < kMatrices; ++i) {
        if (i < heads * kValues) matrices[i * kTileValues + place] = cvt_f32_x2<kIn>(slots.value[j][i]).x;
      }
    }
  }
};

// Without values of edges.
template <Element kIn, int kHeads, int kAtOnce, bool kAhead, typename Params>
struct TileEdges<kIn, 0, kHeads, kAtOnce, kAhead, Params> {
  __device__ __forceinline__ TileEdges(const Params&, int, float*) {}
};
