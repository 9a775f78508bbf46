// ldmatrix.x4.trans, by the PTX ISA manual: thread T gets row T / 4, elements 2 (T % 4) and the next of each matrix; with
// .trans those of the transposed matrix.
#pragma once
#include "common.cuh"

inline void ldmatrix_x4_trans(u32 (&r)[4], u32 address, shim::Site site = shim::Site::here()) {
  struct Operands {
    u32* r;
    u32 address;
  } own{r, address};
  shim::pause(site);
  shim::current->shared_loads.push_back(address);
  shim::warp_collective("ldmatrix.x4.trans", 20, kFullWarp, own, site, [site](Operands** lanes) SHIM_UNSEEN {
    for (int matrix = 0; matrix < 4; ++matrix) {
      u16 element[8][8];
      for (int row = 0; row < 8; ++row) {
        const void* const place = shim::shared_pointer(lanes[8 * matrix + row]->address, 16, 16, site);
        shim::shared_read(place, 16, shim::kAllLanes, site);
        memcpy(element[row], place, 16);
      }
      for (int thread = 0; thread < 32; ++thread) {
        const int row = thread / 4, column = 2 * (thread % 4);
        lanes[thread]->r[matrix] = element[column][row] | static_cast<u32>(element[column + 1][row]) << 16;
      }
    }
  });
}
