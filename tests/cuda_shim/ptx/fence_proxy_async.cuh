// fence.proxy.async: which bytes of shared memory a thread has written and not yet fenced; wgmma may not read those.
#pragma once
#include <hopper.h>

#include "common.cuh"
#include "ptx/mbarrier.cuh"

inline void fence_proxy_async_shared(shim::Site site = shim::Site::here()) {
  shim::linger(site);
  for (const shim::Thread*& writer : shim::generic_writes().writers) {
    if (writer == shim::current) writer = nullptr;
  }
  for (shim::Mbarrier& barrier : shim::mbarriers) {
    if (barrier.owner == shim::current) barrier.visible_to_copies = true;
  }
}
