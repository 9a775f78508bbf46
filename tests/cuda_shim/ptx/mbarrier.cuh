// mbarrier, by the PTX ISA manual: phase, pending arrivals and pending bytes. The state is kept aside; the 8 bytes in
// shared memory tell where, so that a barrier that was not initialised, or was overwritten, is noticed.
//
// An initialised barrier is visible to other blocks after fence.mbarrier_init and to bulk copies after
// fence.proxy.async, both by the thread that initialised it.
#pragma once
#include <hopper.h>

#include "common.cuh"

namespace shim {

struct Mbarrier {
  const Thread* owner;
  u32 arrivals, pending;
  i64 bytes = 0;  // expected, less those that came
  u32 phase = 0;
  bool visible_to_cluster = false, visible_to_copies = false;
  std::vector<int> arriving, arrived;  // clocks of the threads of this phase, of those before it (races.h)
};

inline std::deque<Mbarrier> mbarriers;
constexpr u32 kMbarrierMagic = 0xba221e20;

SHIM_UNSEEN inline Mbarrier& mbarrier_at(u32 address, Site site) {
  u32 words[2];
  memcpy(words, shared_pointer(address, 8, 8, site), 8);
  if (words[0] != kMbarrierMagic || words[1] >= mbarriers.size()) fail(site, "no mbarrier at %08x", address);
  return mbarriers[words[1]];
}

inline u32 address_in(u32 address, int cta_rank) {
  return (address & ((1u << kRankShift) - 1)) | static_cast<u32>(1 + cta_rank) << kRankShift;
}

inline void check_block_lives(int cta_rank, Site site) {
  if (cta_rank < 0 || cta_rank >= static_cast<int>(launch.cluster)) fail(site, "block %d of the cluster", cta_rank);
  if (!blocks[current->block->first + cta_rank].live) fail(site, "block %d of the cluster has exited", cta_rank);
}

inline void end_phase_if_complete(Mbarrier& barrier) {
  if (barrier.pending || barrier.bytes) return;
  barrier.pending = barrier.arrivals;
  barrier.arrived = barrier.arriving;
  ++barrier.phase;
}

inline void arrive(Mbarrier& barrier, Site site) {
  if (!barrier.pending) fail(site, "more than %u arrivals in a phase", barrier.arrivals);
  --barrier.pending;
  release(barrier.arriving);
  end_phase_if_complete(barrier);
}

}  // namespace shim

SHIM_UNSEEN inline void mbarrier_init(u32 barrier, int arrivals, shim::Site site = shim::Site::here()) {
  shim::linger(site, 8);
  const u32 words[2] = {shim::kMbarrierMagic, static_cast<u32>(shim::mbarriers.size())};
  memcpy(shim::shared_pointer(barrier, 8, 8, site), words, 8);
  shim::mbarriers.push_back({shim::current, static_cast<u32>(arrivals), static_cast<u32>(arrivals)});
}

inline void fence_mbarrier_init() {
  for (shim::Mbarrier& barrier : shim::mbarriers) {
    if (barrier.owner == shim::current) barrier.visible_to_cluster = true;
  }
}

inline void mbarrier_arrive(u32 barrier, shim::Site site = shim::Site::here()) {
  shim::linger(site);
  shim::arrive(shim::mbarrier_at(barrier, site), site);
}

inline void mbarrier_arrive_remote(u32 barrier, int cta_rank, shim::Site site = shim::Site::here()) {
  shim::linger(site);
  shim::check_block_lives(cta_rank, site);
  shim::Mbarrier& remote = shim::mbarrier_at(shim::address_in(barrier, cta_rank), site);
  if (!remote.visible_to_cluster) shim::fail(site, "fence.mbarrier_init is missing");
  shim::arrive(remote, site);
}

inline void mbarrier_arrive_expect_tx(u32 barrier, u32 bytes, shim::Site site = shim::Site::here()) {
  shim::linger(site);
  shim::Mbarrier& own = shim::mbarrier_at(barrier, site);
  own.bytes += bytes;
  shim::arrive(own, site);
}

// Suspends the thread until the phase is complete.
inline bool mbarrier_try_wait_parity(u32 barrier, u32 parity, shim::Site site = shim::Site::here()) {
  shim::linger(site);
  if (parity > 1) shim::fail(site, "parity %u", parity);
  const shim::Mbarrier& own = shim::mbarrier_at(barrier, site);
  shim::wait_until(parity ? "phase 1 of an mbarrier" : "phase 0 of an mbarrier", site,
                   [&] { return own.phase % 2 != parity; });
  shim::acquire(own.arrived);
  return true;
}
