#pragma once
#include <hopper.h>

#include "common.cuh"

template <int kThreads>
inline void bar_sync(int barrier, shim::Site site = shim::Site::here()) {
  if (barrier < 1 || barrier > 15) shim::fail(site, "bar.sync of barrier %d", barrier);
  shim::linger(site);
  shim::meet(shim::current->block->barriers[barrier], kThreads, "bar.sync", site);
}
