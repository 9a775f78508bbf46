// The warps of a team add up their partial sums of S, dP and delta, each over its own columns, through shared memory.
// All of them get the same bits.
//
//   [1] A warp writes to a buffer again only after a barrier that follows all reads of its last contents. Two warps:
//       two buffers, one barrier. Four warps: one buffer, two barriers.
#pragma once
#include "common.cuh"
#include "ptx/bar_sync.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/st_shared.cuh"

// Partial sums of S and dP as C fragments of four n-tiles.
struct Exchange {
  float4 fragment[4][kWarpSize];

  __device__ static constexpr u32 offset(int fragment, int lane) {
    return fragment * static_cast<u32>(sizeof(Exchange::fragment[0])) + static_cast<u32>(sizeof(float4)) * lane;
  }
};

template <int kDimWarps>
struct TeamMemory;

template <>
struct TeamMemory<1> {};

template <>
struct TeamMemory<2> {
  Exchange partial_sums[2][2];  // [KV tile % 2][warp]
};

template <>
struct TeamMemory<4> {
  Exchange partial_sums[4];  // [warp]
  Exchange sum;      // fragment i by warp i
};

__device__ __forceinline__ void store_fragment(u32 address, const float (&c)[4]) {
  st_shared_v4_b32(address, make_uint4(__float_as_uint(c[0]), __float_as_uint(c[1]), __float_as_uint(c[2]),
                                       __float_as_uint(c[3])));
}

__device__ __forceinline__ void add_fragment(float (&c)[4], u32 address) {
  const uint4 other = ld_shared_v4_b32(address);
  c[0] += __uint_as_float(other.x), c[1] += __uint_as_float(other.y);
  c[2] += __uint_as_float(other.z), c[3] += __uint_as_float(other.w);
}

template <int kDimWarps>
struct Team;

template <>
struct Team<1> {
  __device__ __forceinline__ Team(const TeamMemory<1>*, int, int, int) {}
};

// Two warps: each adds the other's partial sums, with one barrier per KV tile. The buffers alternate, so a warp writes
// to one again only after the barrier that follows the other's reads. [1]
template <>
struct Team<2> {
  static constexpr u32 kNextBuffer = 2 * sizeof(Exchange);

  const u32 own_sums, other_sums;  // addresses of the sums of this warp and the other one, in the first buffer
  const int lane, barrier;

  __device__ __forceinline__ Team(const TeamMemory<2>* memory, int warp, int lane, int barrier)
      : own_sums(shared_address(memory->partial_sums[0] + warp)),
        other_sums(shared_address(memory->partial_sums[0] + 1 - warp)),
        lane(lane),
        barrier(barrier) {}

  __device__ __forceinline__ void add_up(float (&score)[2][4], float (&grad_weight)[2][4], int kv_tile) const {
    const u32 place = kv_tile % 2 * kNextBuffer;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store_fragment(own_sums + place + Exchange::offset(i, lane), i < 2 ? score[i] : grad_weight[i - 2]);
    bar_sync<2 * kWarpSize>(barrier);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      add_fragment(i < 2 ? score[i] : grad_weight[i - 2], other_sums + place + Exchange::offset(i, lane));
  }

  // Sum of x over the team, once, before KV tile 0: uses the second buffer. [1]
  __device__ __forceinline__ float add_up(float x) const {
    const u32 offset = kNextBuffer + sizeof(float) * lane;
    st_shared_b32(own_sums + offset, __float_as_uint(x));
    bar_sync<2 * kWarpSize>(barrier);
    return x + __uint_as_float(ld_shared_b32(other_sums + offset));
  }
};

// Four warps: warp i sums fragment i over all warps, and the others read the sum. Partial sums are written again after
// the second barrier, which follows all reads of them; sums after the first barrier of the next KV tile. [1]
template <>
struct Team<4> {
  const u32 memory;
  const int warp, lane, barrier;

  __device__ __forceinline__ Team(const TeamMemory<4>* memory, int warp, int lane, int barrier)
      : memory(shared_address(memory)), warp(warp), lane(lane), barrier(barrier) {}

  __device__ __forceinline__ void add_up(float (&score)[2][4], float (&grad_weight)[2][4], int) const {
    const u32 own_sums = memory + warp * static_cast<u32>(sizeof(Exchange)) + Exchange::offset(0, lane);
    const u32 summed = memory + Exchange::offset(warp, lane), sums = memory + 4 * sizeof(Exchange);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store_fragment(own_sums + Exchange::offset(i, 0), i < 2 ? score[i] : grad_weight[i - 2]);
    bar_sync<4 * kWarpSize>(barrier);
    float sum[4] = {};
#pragma unroll
    for (int each = 0; each < 4; ++each) add_fragment(sum, summed + each * static_cast<u32>(sizeof(Exchange)));
    store_fragment(sums + Exchange::offset(warp, lane), sum);
    bar_sync<4 * kWarpSize>(barrier);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float(&c)[4] = i < 2 ? score[i] : grad_weight[i - 2];
      c[0] = c[1] = c[2] = c[3] = 0.0f;
      add_fragment(c, sums + Exchange::offset(i, lane));
    }
  }

  // Sum of x over the team, once, before KV tile 0: uses the memory of the sums.
  __device__ __forceinline__ float add_up(float x) const {
    const u32 sums = memory + 4 * sizeof(Exchange) + sizeof(float) * lane;
    st_shared_b32(sums + warp * static_cast<u32>(sizeof(float) * kWarpSize), __float_as_uint(x));
    bar_sync<4 * kWarpSize>(barrier);
    float sum = 0.0f;
#pragma unroll
    for (int each = 0; each < 4; ++each)
      sum += __uint_as_float(ld_shared_b32(sums + each * static_cast<u32>(sizeof(float) * kWarpSize)));
    return sum;
  }
};
