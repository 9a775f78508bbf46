// stmatrix.x4, by the PTX ISA manual: thread T brings row T / 4, elements 2 (T % 4) and the next of each matrix; thread
// 8i + n brings the address of row n of matrix i.
#pragma once
#include "common.cuh"
#include "ptx/fence_proxy_async.cuh"

inline void stmatrix_x4(u32 address, const u32 (&r)[4], shim::Site site = shim::Site::here()) {
  struct Operands {
    const u32* r;
    u32 address;
  } own{r, address};
  shim::linger(site);
  shim::warp_collective("stmatrix.x4", 21, kFullWarp, own, site, [site](Operands** lanes) SHIM_UNSEEN {
    shim::GenericWrites& writes = shim::generic_writes();
    for (int i = 0; i < 32; ++i) {
      u32 words[4];
      for (int column = 0; column < 4; ++column) words[column] = lanes[4 * (i % 8) + column]->r[i / 8];
      void* const place = shim::shared_pointer(lanes[i]->address, 16, 16, site);
      shim::shared_write(place, 16, shim::kAllLanes, site);
      memcpy(place, words, 16);
      shim::unfenced_writer(writes, lanes[i]->address) = shim::current->warp->lanes[i];
    }
  });
}
