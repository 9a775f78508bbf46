// fence.proxy.async: which bytes of shared memory a thread has written and not yet fenced; wgmma may not read those.
#pragma once
#include <hopper.h>

#include "common.cuh"
#include "ptx/mbarrier.cuh"

namespace shim {

// The last writer of each 16 bytes of dynamic shared memory by way of the generic proxy, where it has not fenced since.
// Writes of stmatrix are followed, others are not.
struct GenericWrites {
  std::vector<const Thread*> writers = std::vector<const Thread*>(kDynamicMost / 16);
};

inline GenericWrites& generic_writes() { return block_state<GenericWrites>("fence.proxy.async"); }
inline const Thread*& unfenced_writer(GenericWrites& writes, u32 address) {
  return writes.writers[(address - kDynamicBase) / 16];
}

}  // namespace shim

inline void fence_proxy_async_shared(shim::Site site = shim::Site::here()) {
  shim::linger(site);
  for (const shim::Thread*& writer : shim::generic_writes().writers) {
    if (writer == shim::current) writer = nullptr;
  }
  for (shim::Mbarrier& barrier : shim::mbarriers) {
    if (barrier.owner == shim::current) barrier.visible_to_copies = true;
  }
}
