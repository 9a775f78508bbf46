#pragma once
#include "common.cuh"

inline int atom_inc_acq_rel_gpu(int* address, int limit, shim::Site site = shim::Site::here()) {
  shim::pause(site);
  shim::check_global(address, 4, site);
  const u32 old = *address;
  *address = old >= static_cast<u32>(limit) ? 0 : old + 1;
  shim::pause(site);
  return old;
}
