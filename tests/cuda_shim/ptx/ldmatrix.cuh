// ldmatrix.x4, by the PTX ISA manual: thread T gets row T / 4, elements 2 (T % 4) and the next of each matrix; with
// .trans those of the transposed matrix.
#pragma once
#include "common.cuh"

inline void ldmatrix_x4(u32 (&r)[4], u32 address, shim::Site site = shim::Site::here()) {
  shim::load_matrices(false, r, address, site);
}
inline void ldmatrix_x4_trans(u32 (&r)[4], u32 address, shim::Site site = shim::Site::here()) {
  shim::load_matrices(true, r, address, site);
}
