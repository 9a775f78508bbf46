// mbarrier: barriers in shared memory (8 bytes each) that count arrivals and the bytes of bulk copies.
//
// A phase completes with the last arrival and the last expected byte; then the next one begins. Phases alternate in
// parity: a new barrier is in phase 0, and a wait for parity 1 returns at once.
#pragma once
#include "common.cuh"

__device__ __forceinline__ void mbarrier_init(u32 barrier, int arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to the other blocks of the cluster.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(u32 barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives at the barrier at the same offset in block `cta_rank` of the cluster.
__device__ __forceinline__ void mbarrier_arrive_remote(u32 barrier, int cta_rank) {
  asm volatile("{.reg .b32 remote; mapa.shared::cluster.u32 remote, %0, %1;"
               "mbarrier.arrive.shared::cluster.b64 _, [remote];}" ::"r"(barrier),
               "r"(cta_rank)
               : "memory");
}

// One arrival; adds `bytes` bytes of bulk copies to those that the phase expects.
__device__ __forceinline__ void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Whether the phase of this parity is complete; may suspend the thread for a while.
__device__ __forceinline__ bool mbarrier_try_wait_parity(u32 barrier, u32 parity) {
  u32 complete;
  asm volatile("{.reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(complete)
               : "r"(barrier), "r"(parity)
               : "memory");
  return complete;
}
