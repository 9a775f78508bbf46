#pragma once
#include "common.cuh"

// Atomics on shared memory count as reads of the race check: they may meet each other, but no plain write.
SHIM_UNSEEN inline void red_or_shared_b32(u32 address, u32 bits, shim::Site site = shim::Site::here()) {
  shim::pause(site);
  void* const place = shim::shared_pointer(address, 4, 4, site);
  shim::shared_read(place, 4, shim::own_lane(), site);
  u32 word;
  memcpy(&word, place, 4);
  word |= bits;
  memcpy(place, &word, 4);
}

SHIM_UNSEEN inline void red_min_shared_s32(u32 address, int x, shim::Site site = shim::Site::here()) {
  shim::pause(site);
  void* const place = shim::shared_pointer(address, 4, 4, site);
  shim::shared_read(place, 4, shim::own_lane(), site);
  int word;
  memcpy(&word, place, 4);
  word = x < word ? x : word;
  memcpy(place, &word, 4);
}

inline void red_or_global_b32(int* address, u32 bits, shim::Site site = shim::Site::here()) {
  shim::pause(site);
  shim::check_global(address, 4, site);
  *address |= bits;
}

inline int atom_add_global_s32(int* address, int x, shim::Site site = shim::Site::here()) {
  shim::pause(site);
  shim::check_global(address, 4, site);
  const int old = *address;
  *address = old + x;
  return old;
}

inline void red_add_global_s32(int* address, int x, shim::Site site = shim::Site::here()) {
  atom_add_global_s32(address, x, site);
}

inline void red_max_global_u64(i64* address, i64 x, shim::Site site = shim::Site::here()) {
  shim::pause(site);
  shim::check_global(address, 8, site);
  if (static_cast<u64>(x) > static_cast<u64>(*address)) *address = x;
}
