#pragma once
#include "common.cuh"

inline u32 vote_ballot(bool predicate, shim::Site site = shim::Site::here()) {
  struct Operands {
    bool predicate;
    u32 mask;
  } own{predicate, 0};
  shim::warp_collective("vote.sync.ballot", 50, 0xffffffffu, own, site, [](Operands** lanes) {
    u32 mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= static_cast<u32>(lanes[lane]->predicate) << lane;
    for (int lane = 0; lane < 32; ++lane) lanes[lane]->mask = mask;
  });
  return own.mask;
}
