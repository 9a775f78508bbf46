#pragma once
#include "common.cuh"

SHIM_UNSEEN inline u32 ld_shared_b32(u32 address, shim::Site site = shim::Site::here()) {
  shim::pause(site);
  shim::current->shared_loads.push_back({address, 4});
  u32 word;
  const void* const place = shim::shared_pointer(address, 4, 4, site);
  shim::shared_read(place, 4, shim::own_lane(), site);
  memcpy(&word, place, 4);
  return word;
}
SHIM_UNSEEN inline uint2 ld_shared_v2_b32(u32 address, shim::Site site = shim::Site::here()) {
  shim::pause(site);
  shim::current->shared_loads.push_back({address, 8});
  uint2 words;
  const void* const place = shim::shared_pointer(address, 8, 8, site);
  shim::shared_read(place, 8, shim::own_lane(), site);
  memcpy(&words, place, 8);
  return words;
}
SHIM_UNSEEN inline uint4 ld_shared_v4_b32(u32 address, shim::Site site = shim::Site::here()) {
  shim::pause(site);
  shim::current->shared_loads.push_back({address, 16});
  uint4 words;
  const void* const place = shim::shared_pointer(address, 16, 16, site);
  shim::shared_read(place, 16, shim::own_lane(), site);
  memcpy(&words, place, 16);
  return words;
}
