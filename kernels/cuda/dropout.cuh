// Dropout of softmax weights: a counter-based mask, a hash of row, column, head and seed.
//
//   O_i = sum_j keep_ij p_ij / (1 - rate) v_j          p is normalised over all edges, kept or not
//
// The mask depends on row and column in A, head and seed, not on tiles or the order of rows: the forward pass and both
// backward passes compute the same mask. terms/dropout.py computes it with torch.
#pragma once
#include "common.cuh"

struct DropoutParams {
  const i64* seed;  // [1]  in memory, so that the next replay of a CUDA graph can use another seed
  u32 threshold;    // rate * 2^32: an edge is kept if its hash is at least this
  float rescale;    // 1 / (1 - rate)
};

// A bijection of 32 bits in which every input bit changes every output bit with probability 1/2, within 0.1 %
// (constants: "lowbias32", C. Wellons, Prospecting for Hash Functions, 2018).
__device__ __forceinline__ u32 mix_bits(u32 x) {
  x = (x ^ x >> 16) * 0x7feb352du;
  x = (x ^ x >> 15) * 0x846ca68bu;
  return x ^ x >> 16;
}

// Hash of a row and head, for `keeps`. Both rounds take the seed's low word: with the first alone, row i of one seed
// would have the mask of row i ^ 1 of the next seed.
__device__ __forceinline__ u32 dropout_row(i64 seed, int row, int head) {
  const u32 low = static_cast<u32>(seed), high = static_cast<u32>(static_cast<u64>(seed) >> 32);
  const u32 of_row = mix_bits(low ^ static_cast<u32>(row)) + static_cast<u32>(head) * 0x9e3779b9u;
  return mix_bits(of_row ^ high ^ low * 0xc2b2ae35u);
}

__device__ __forceinline__ bool keeps(u32 of_row, int column, u32 threshold) {
  return mix_bits(of_row ^ static_cast<u32>(column) * 0x85ebca6bu) >= threshold;
}
