// cp.async.bulk: one thread copies whole blocks of memory. Addresses and sizes are multiples of 16 bytes.
#pragma once
#include "common.cuh"

// Global to shared memory; the bytes count at `mbarrier`.
__device__ __forceinline__ void cp_async_bulk(u32 target, const void* source, u32 bytes, u32 mbarrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
               "l"(source), "r"(bytes), "r"(mbarrier)
               : "memory");
}

// Multicast: global memory to the same offset of shared memory in each block of the cluster whose bit is set in
// cta_mask; the bytes count at the mbarrier at the same offset of that block.
__device__ __forceinline__ void cp_async_bulk_multicast(u32 target, const void* source, u32 bytes, u32 mbarrier,
                                                        u16 cta_mask) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
               "[%0], [%1], %2, [%3], %4;" ::"r"(target),
               "l"(source), "r"(bytes), "r"(mbarrier), "h"(cta_mask)
               : "memory");
}

// Global memory into L2; nothing waits for it.
__device__ __forceinline__ void cp_async_bulk_prefetch_L2(const void* source, u32 bytes) {
  asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(source), "r"(bytes));
}
