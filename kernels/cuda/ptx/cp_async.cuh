// cp.async: 16 bytes from global to shared memory without registers, past L1.
//
// A 128-byte line should stay one line in shared memory, with its 16-byte chunks in any order: a line split in two
// takes two requests, and a 32-byte sector split in two is fetched twice.
#pragma once
#include "common.cuh"

// Copies if `index` is not negative: a predicate, where an `if` would become a branch.
__device__ __forceinline__ void cp_async_16(u32 target, const void* source, int index) {
  asm volatile("{.reg .pred p; setp.ge.s32 p, %2, 0; @p cp.async.cg.shared.global [%0], [%1], 16;}" ::"r"(target),
               "l"(source), "r"(index));
}

__device__ __forceinline__ void cp_async_commit_group() { asm volatile("cp.async.commit_group;"); }

// Waits until at most kPending of this thread's latest groups are in flight.
template <int kPending>
__device__ __forceinline__ void cp_async_wait_group() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}
