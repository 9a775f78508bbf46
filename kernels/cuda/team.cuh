// The warps of a team add up their parts of S, dP and delta, each over its own columns, through shared memory. All of
// them get the same bits.
#pragma once
#include "common.cuh"
#include "ptx/bar_sync.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/st_shared.cuh"

// S and dP as C fragments of four n-tiles.
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
  Exchange part[2][2];  // [KV tile % 2][warp]
};

template <>
struct TeamMemory<4> {
  Exchange part[4];  // [warp]
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

// Two warps: each adds the other's part. One barrier a KV tile is enough, since a warp writes to a place again only
// after the barrier that follows the other's reads. [11]
template <>
struct Team<2> {
  static constexpr u32 kNextPart = 2 * sizeof(Exchange);

  const u32 own_part, other_part;  // of this warp and of the other one, in the first place
  const int lane, barrier;

  __device__ __forceinline__ Team(const TeamMemory<2>* memory, int warp, int lane, int barrier)
      : own_part(shared_address(memory->part[0] + warp)),
        other_part(shared_address(memory->part[0] + 1 - warp)),
        lane(lane),
        barrier(barrier) {}

  __device__ __forceinline__ void add_parts(float (&score)[2][4], float (&grad_weight)[2][4], int kv_tile) const {
    const u32 place = kv_tile % 2 * kNextPart;
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store_fragment(own_part + place + Exchange::offset(i, lane), i < 2 ? score[i] : grad_weight[i - 2]);
    bar_sync<2 * kWarpSize>(barrier);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      add_fragment(i < 2 ? score[i] : grad_weight[i - 2], other_part + place + Exchange::offset(i, lane));
  }

  // The same of one number a lane, once, as KV tile -1. [11]
  __device__ __forceinline__ float add_part(float x) const {
    const u32 offset = kNextPart + sizeof(float) * lane;
    st_shared_b32(own_part + offset, __float_as_uint(x));
    bar_sync<2 * kWarpSize>(barrier);
    return x + __uint_as_float(ld_shared_b32(other_part + offset));
  }
};

// Four warps: warp i adds up all parts of fragment i, and the others read the sum. Parts are written again after the
// second barrier, which follows the reads of them all, and sums after the next KV tile's first. [11]
template <>
struct Team<4> {
  const u32 memory;
  const int warp, lane, barrier;

  __device__ __forceinline__ Team(const TeamMemory<4>* memory, int warp, int lane, int barrier)
      : memory(shared_address(memory)), warp(warp), lane(lane), barrier(barrier) {}

  __device__ __forceinline__ void add_parts(float (&score)[2][4], float (&grad_weight)[2][4], int) const {
    const u32 own_part = memory + warp * static_cast<u32>(sizeof(Exchange)) + Exchange::offset(0, lane);
    const u32 summed = memory + Exchange::offset(warp, lane), sums = memory + 4 * sizeof(Exchange);
#pragma unroll
    for (int i = 0; i < 4; ++i)
      store_fragment(own_part + Exchange::offset(i, 0), i < 2 ? score[i] : grad_weight[i - 2]);
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

  // The same of one number a lane, once, before the first KV tile: in the place of the sums.
  __device__ __forceinline__ float add_part(float x) const {
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
