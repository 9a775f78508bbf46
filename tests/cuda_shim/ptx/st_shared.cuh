#pragma once
#include "common.cuh"

SHIM_UNSEEN inline void st_shared_b32(u32 address, u32 word, shim::Site site = shim::Site::here()) {
  shim::pause(site);
  void* const place = shim::shared_pointer(address, 4, 4, site);
  shim::shared_write(place, 4, shim::own_lane(), site);
  memcpy(place, &word, 4);
}
SHIM_UNSEEN inline void st_shared_v2_b32(u32 address, uint2 words, shim::Site site = shim::Site::here()) {
  shim::pause(site);
  void* const place = shim::shared_pointer(address, 8, 8, site);
  shim::shared_write(place, 8, shim::own_lane(), site);
  memcpy(place, &words, 8);
}
SHIM_UNSEEN inline void st_shared_v4_b32(u32 address, uint4 words, shim::Site site = shim::Site::here()) {
  shim::pause(site);
  void* const place = shim::shared_pointer(address, 16, 16, site);
  shim::shared_write(place, 16, shim::own_lane(), site);
  memcpy(place, &words, 16);
}
