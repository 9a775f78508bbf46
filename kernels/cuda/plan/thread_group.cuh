// A warp or a block that processes one array: barrier, prefix sums, a minimum, and a sort in shared memory.
#pragma once
#include "common.cuh"
#include "ptx/bits.cuh"
#include "ptx/vote.cuh"

__device__ __forceinline__ u32 lanes_below(int lane) { return (1u << lane) - 1; }

__device__ __forceinline__ int warp_inclusive_sum(int x, int lane) {
#pragma unroll
  for (int distance = 1; distance < kWarpSize; distance *= 2) {
    const int other = __shfl_sync(kFullWarp, x, max(lane - distance, 0));
    if (lane >= distance) x += other;
  }
  return x;
}

__device__ __forceinline__ int warp_least(int x) {
#pragma unroll
  for (int distance = kWarpSize / 2; distance > 0; distance /= 2) x = min(x, __shfl_xor_sync(kFullWarp, x, distance));
  return x;
}

struct WarpGroup {
  static constexpr int kThreads = kWarpSize;
  int rank;  // lane

  __device__ __forceinline__ void sync() const { __syncwarp(); }

  // Number of lower lanes whose predicate is true; `total`: of all lanes.
  __device__ __forceinline__ int count_below(bool predicate, int& total) const {
    const u32 mask = vote_ballot(predicate);
    total = popc(mask);
    return popc(mask & lanes_below(rank));
  }

  // The smallest x of all threads.
  __device__ __forceinline__ int least(int x) const { return warp_least(x); }
};

template <int kWarps>
struct BlockGroup {
  static constexpr int kThreads = kWarps * kWarpSize;
  int rank;        // threadIdx.x
  int* smem_sums;  // [kWarps]

  __device__ __forceinline__ void sync() const { __syncthreads(); }

  // Exclusive prefix sum of each x[i] over the threads; `total`: sum over all threads. `smem_sums`: [kCount * kWarps].
  template <int kCount>
  __device__ __forceinline__ void exclusive_sums(int (&x)[kCount], int (&total)[kCount]) const {
    const int lane = rank % kWarpSize, warp = rank / kWarpSize;
    int sum[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      sum[i] = warp_inclusive_sum(x[i], lane);
      if (lane == kWarpSize - 1) smem_sums[i * kWarps + warp] = sum[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int warps = warp_inclusive_sum(lane < kWarps ? smem_sums[i * kWarps + lane] : 0, lane);
      const int below = __shfl_sync(kFullWarp, warps, max(warp - 1, 0));
      total[i] = __shfl_sync(kFullWarp, warps, kWarps - 1);
      x[i] = sum[i] - x[i] + (warp > 0 ? below : 0);
    }
    __syncthreads();  // smem_sums may be overwritten
  }

  __device__ __forceinline__ int count_below(bool predicate, int& total) const {
    int x[1] = {predicate}, sum[1];
    exclusive_sums(x, sum);
    total = sum[0];
    return x[0];
  }

  __device__ __forceinline__ int least(int x) const {
    const int lane = rank % kWarpSize;
    x = warp_least(x);
    if (lane == 0) smem_sums[rank / kWarpSize] = x;
    __syncthreads();
    x = warp_least(smem_sums[lane % kWarps]);
    __syncthreads();  // smem_sums may be overwritten
    return x;
  }
};

// Smallest power of two that is at least n.
__device__ __forceinline__ int round_up_to_power_of_two(int n) { return n <= 1 ? 1 : 2 << bfind(n - 1); }

// Bitonic sort, ascending. keys: [count] in shared memory, count a power of two. Starts and ends with a barrier of the
// group.
template <typename Key, typename Group>
__device__ __forceinline__ void sort_keys(Key* keys, int count, Group group) {
  group.sync();
  for (int width = 2; width <= count; width *= 2) {
    for (int distance = width / 2; distance > 0; distance /= 2) {
      for (int i = group.rank; i < count / 2; i += Group::kThreads) {
        const int low = 2 * i - (i & (distance - 1)), high = low + distance;
        const Key first = keys[low], second = keys[high];
        const bool ascending = (low & width) == 0;
        if ((first > second) == ascending) keys[low] = second, keys[high] = first;
      }
      group.sync();
    }
  }
}
