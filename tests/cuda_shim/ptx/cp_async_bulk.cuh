// cp.async.bulk: the old bytes at the target are lost at once. The data, and its bytes at the mbarrier, come at once
// (kEarly), when all threads wait (kLate) or at any time.
#pragma once
#include "common.cuh"
#include "ptx/mbarrier.cuh"

namespace shim {

inline void check_bulk_source(const void* source, u32 bytes, Site site) {
  const auto address = reinterpret_cast<uint64_t>(source);
  if (address % 16 || bytes % 16 || !bytes) fail(site, "%u bytes at %p are not a multiple of 16 bytes", bytes, source);
  for (u32 i = 0; i < launch.num_ranges; ++i) {
    const Range& range = launch.ranges[i];
    if (address >= range.start && address + bytes <= range.start + range.bytes) return;
  }
  fail(site, "%u bytes at global address %p are in no tensor of the launch", bytes, source);
}

inline void bulk_copy(int cta_rank, u32 target, const void* source, u32 bytes, u32 mbarrier, Site site) {
  check_block_lives(cta_rank, site);
  unsigned char* const there = shared_pointer(address_in(target, cta_rank), bytes, 16, site);
  Mbarrier& barrier = mbarrier_at(address_in(mbarrier, cta_rank), site);
  if (!barrier.visible_to_copies) fail(site, "fence.proxy.async is missing after mbarrier.init");
  if (cta_rank != static_cast<int>(current->block->rank) && !barrier.visible_to_cluster) {
    fail(site, "fence.mbarrier_init is missing");
  }
  const auto complete = [=, &barrier] {
    check_block_lives(cta_rank, site);
    memcpy(there, source, bytes);
    barrier.bytes -= bytes;
    end_phase_if_complete(barrier);
  };
  if (launch.completion == kEarly) return complete();
  poison(there, there + bytes);
  post(complete);
}

}  // namespace shim

inline void cp_async_bulk(u32 target, const void* source, u32 bytes, u32 mbarrier,
                          shim::Site site = shim::Site::here()) {
  shim::linger(site);
  shim::check_bulk_source(source, bytes, site);
  shim::bulk_copy(shim::current->block->rank, target, source, bytes, mbarrier, site);
}

inline void cp_async_bulk_multicast(u32 target, const void* source, u32 bytes, u32 mbarrier, u16 cta_mask,
                                    shim::Site site = shim::Site::here()) {
  shim::linger(site);
  shim::check_bulk_source(source, bytes, site);
  for (int rank = 0; rank < 16; ++rank) {
    if (cta_mask >> rank & 1) shim::bulk_copy(rank, target, source, bytes, mbarrier, site);
  }
}

inline void cp_async_bulk_prefetch_L2(const void* source, u32 bytes, shim::Site site = shim::Site::here()) {
  shim::check_bulk_source(source, bytes, site);
}
