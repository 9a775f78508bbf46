// wgmma.mma_async; see wgmma.cpp.
#pragma once
#include <hopper.h>

#include "common.cuh"
#include "ptx/fence_proxy_async.cuh"

template <Element kElement, int kN>
inline void wgmma_m64nNk16_rs(float (&d)[kN / 2], const u32* a, u64 desc_b, bool scale_d,
                              shim::Site site = shim::Site::here()) {
  shim::issue_wgmma(kElement == Element::kHalf, kN, {d, a, 0, desc_b, scale_d}, site);
}
template <Element kElement, int kN>
inline void wgmma_m64nNk16_ss(float (&d)[kN / 2], u64 desc_a, u64 desc_b, bool scale_d,
                              shim::Site site = shim::Site::here()) {
  static_assert(kN % 16 == 0, "columns are computed 16 at a time");
  shim::issue_wgmma(kElement == Element::kHalf, kN, {d, nullptr, desc_a, desc_b, scale_d}, site);
}

inline void wgmma_fence(shim::Site site = shim::Site::here()) { shim::wgmma_fence(site); }

inline void wgmma_commit_group(shim::Site site = shim::Site::here()) { shim::wgmma_commit_group(site); }

template <int kPending>
inline void wgmma_wait_group(shim::Site site = shim::Site::here()) {
  shim::wgmma_wait_group(kPending, site);
}

// For the compiler of the GPU alone.
template <typename Register, int kCount>
inline void warpgroup_fence_operand(Register (&)[kCount]) {}
