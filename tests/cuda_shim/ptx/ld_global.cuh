#pragma once
#include "common.cuh"

inline uint4 ld_global_nc_v4_b32(const void* address, shim::Site site = shim::Site::here()) {
  return __ldg(static_cast<const uint4*>(address), site);
}
inline uint4 ld_global_no_allocate_v4_b32(const void* address, shim::Site site = shim::Site::here()) {
  return __ldg(static_cast<const uint4*>(address), site);
}
inline uint2 ld_global_no_allocate_v2_b32(const void* address, shim::Site site = shim::Site::here()) {
  return __ldg(static_cast<const uint2*>(address), site);
}
inline void st_global_v4_b32(void* address, uint4 words, shim::Site site = shim::Site::here()) {
  shim::check_global(address, 16, site);
  memcpy(address, &words, 16);
}
inline void st_global_v2_b32(void* address, uint2 words, shim::Site site = shim::Site::here()) {
  shim::check_global(address, 8, site);
  memcpy(address, &words, 8);
}
