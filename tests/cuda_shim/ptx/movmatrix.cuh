// movmatrix.sync.aligned.m8n8.trans.b16, by the PTX ISA manual: thread T has elements 2 (T % 4) and the next of row
// T / 4, and gets those of the transposed matrix.
#pragma once
#include "common.cuh"

inline u32 movmatrix_trans(u32 word, shim::Site site = shim::Site::here()) {
  return shim::transpose_matrix(word, site);
}
