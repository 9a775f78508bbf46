// Votes of a warp.
#pragma once
#include "common.cuh"

// Mask of the lanes whose predicate is true.
__device__ __forceinline__ u32 vote_ballot(bool predicate) {
  u32 mask;
  asm volatile(
      "{\n"
      "  .reg .pred p;\n"
      "  setp.ne.u32 p, %1, 0;\n"
      "  vote.sync.ballot.b32 %0, p, 0xffffffff;\n"
      "}"
      : "=r"(mask)
      : "r"(static_cast<u32>(predicate)));
  return mask;
}
