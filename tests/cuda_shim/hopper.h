// Parts that several Hopper instructions of ptx/ are made of.
#pragma once
#include "memory.h"

namespace shim {

// State of an instruction that belongs to a block, beside its shared memory: new for each block that starts.
template <typename State>
SHIM_UNSEEN State& block_state(const char* name) {
  static std::deque<State> states;
  struct Handle {
    uint32_t magic, index;
  };
  constexpr uint32_t kMagic = 0x57a7e000;
  Handle& handle = static_shared<Handle>(name, 0);  // poisoned when a block starts
  if (handle.magic != kMagic) {
    states.emplace_back();
    handle = {kMagic, static_cast<uint32_t>(states.size() - 1)};
  }
  return states[handle.index];
}

// A pause; one in `calls` is so long that other warps run as far ahead as barriers let them.
void linger(Site site, uint32_t calls = 512);

// The last writer of each 16 bytes of dynamic shared memory by way of the generic proxy, where it has not fenced since.
// Writes of stmatrix are followed, others are not.
struct GenericWrites {
  std::vector<const Thread*> writers = std::vector<const Thread*>(kDynamicMost / 16);
};

GenericWrites& generic_writes();
inline const Thread*& unfenced_writer(GenericWrites& writes, uint32_t address) {
  return writes.writers[(address - kDynamicBase) / 16];
}

// wgmma.mma_async of a warpgroup, m64n`n`k16: what a lane brings. A comes from registers, or `a` is null.
struct WgmmaOperands {
  float* d;
  const uint32_t* a;
  uint64_t desc_a, desc_b;
  bool scale_d;
};
void issue_wgmma(bool is_half, int n, WgmmaOperands own, Site site);
void wgmma_fence(Site site);
void wgmma_commit_group(Site site);
void wgmma_wait_group(size_t pending, Site site);

}  // namespace shim
