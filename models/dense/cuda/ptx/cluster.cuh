// Thread-block clusters.
#pragma once
#include "common.cuh"

// Rank of this block in its cluster.
__device__ __forceinline__ int cluster_ctarank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Waits for all threads of the cluster.
__device__ __forceinline__ void barrier_cluster_sync() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}
