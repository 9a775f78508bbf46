// cp.async: 4, 8 or 16 bytes from global to shared memory without registers; 16 bytes bypass L1 (.cg).
//
// A 128-byte line should stay one line in shared memory, in any order of its 16-byte chunks: a line split in two takes
// two requests, and a 32-byte sector split in two is fetched twice.
#pragma once
#include "common.cuh"

// Copies if `index` is not negative: predicated, where an `if` would become a branch.
template <int kBytes>
__device__ __forceinline__ void cp_async(u32 target, const void* source, int index) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "sizes of cp.async");
  if constexpr (kBytes == 16) {
    asm volatile("{.reg .pred p; setp.ge.s32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(target),
                 "l"(source), "r"(index));
  } else {
    asm volatile("{.reg .pred p; setp.ge.s32 p, %2, 0; @p cp.async.ca.shared.global [%0], [%1], %3;}" ::"r"(target),
                 "l"(source), "r"(index), "n"(kBytes));
  }
}

// Copies, or writes zeros if `index` is negative, unless `skip` is negative.
template <int kBytes>
__device__ __forceinline__ void cp_async_or_zero(u32 target, const void* source, int index, int skip) {
  static_assert(kBytes == 4 || kBytes == 8 || kBytes == 16, "sizes of cp.async");
  if constexpr (kBytes == 16) {
    asm volatile(
        "{.reg .pred p, z; setp.ge.s32 p, %3, 0; setp.lt.s32 z, %2, 0;"
        " @p cp.async.cg.shared.global [%0], [%1], 16, z;}" ::"r"(target),
        "l"(source), "r"(index), "r"(skip));
  } else {
    asm volatile(
        "{.reg .pred p, z; setp.ge.s32 p, %3, 0; setp.lt.s32 z, %2, 0;"
        " @p cp.async.ca.shared.global [%0], [%1], %4, z;}" ::"r"(target),
        "l"(source), "r"(index), "r"(skip), "n"(kBytes));
  }
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;"); }

// Waits until at most kPending of this thread's latest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
