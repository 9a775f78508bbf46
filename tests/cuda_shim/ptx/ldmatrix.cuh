// ldmatrix.x4, by the PTX ISA manual: thread T gets row T / 4, elements 2 (T % 4) and the next of each matrix; with .trans
// those of the transposed matrix.
#pragma once
#include "common.cuh"

namespace shim {

template <bool kTransposed>
inline void load_matrices(const char* name, int op, u32 (&r)[4], u32 address, Site site) {
  struct Operands {
    u32* r;
    u32 address;
  } own{r, address};
  pause(site);
  current->shared_loads.push_back(address);
  warp_collective(name, op, kFullWarp, own, site, [site](Operands** lanes) SHIM_UNSEEN {
    for (int matrix = 0; matrix < 4; ++matrix) {
      u16 element[8][8];
      for (int row = 0; row < 8; ++row) {
        const void* const place = shared_pointer(lanes[8 * matrix + row]->address, 16, 16, site);
        shared_read(place, 16, kAllLanes, site);
        memcpy(element[row], place, 16);
      }
      for (int thread = 0; thread < 32; ++thread) {
        const int row = thread / 4, column = 2 * (thread % 4);
        lanes[thread]->r[matrix] = kTransposed ? element[column][row] | static_cast<u32>(element[column + 1][row]) << 16
                                               : element[row][column] | static_cast<u32>(element[row][column + 1]) << 16;
      }
    }
  });
}

}  // namespace shim

inline void ldmatrix_x4(u32 (&r)[4], u32 address, shim::Site site = shim::Site::here()) {
  shim::load_matrices<false>("ldmatrix.x4", 22, r, address, site);
}
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 address, shim::Site site = shim::Site::here()) {
  shim::load_matrices<true>("ldmatrix.x4.trans", 20, r, address, site);
}
