// Values of a score term of the 16 rows of a window, or of the 16 gathered rows of a KV tile: lanes i and i + 16 hold
// the values of row i. (A C fragment would need the values of several rows in each lane.)
#pragma once
#include "common.cuh"
#include "tiles/forward_params.cuh"
#include "ptx/ld_shared.cuh"
#include "score/score_terms.cuh"

// A tensor [..][heads][n]; heads is 1 or H.
struct ValueSource {
  const float* values;
  int heads;
};

template <int kCount>
struct LaneValues {
  float lane_value[at_least_one(kCount)];

  // row: row lane % 16 of the tensor.
  __device__ __forceinline__ void load(ValueSource source, int row) {
    if constexpr (kCount > 0) load_values<kCount>(lane_value, source.values, row, source.heads, blockIdx.y);
  }

  // Values of row i. All lanes of a warp call it.
  __device__ __forceinline__ void of(float (&x)[at_least_one(kCount)], int i) const {
#pragma unroll
    for (int n = 0; n < kCount; ++n) x[n] = __shfl_sync(kFullWarp, lane_value[n], i);
  }
};

// Values of gathered rows. A single value is loaded one KV tile ahead, so that no score waits for it; several would
// take too many registers.
template <int kCount>
struct GatheredValues : LaneValues<kCount> {
  static constexpr bool kAhead = kCount == 1;
  LaneValues<kAhead ? kCount : 0> next;

  // Before the first KV tile, `record`, if it exists.
  __device__ __forceinline__ void start(ValueSource source, u32 record, int lane, bool exists) {
    if constexpr (kAhead) {
      if (exists) next.load(source, row_of(record, lane));
    }
  }

  // Makes the KV tile `record` current; `next_record`: of the next one, if it exists.
  __device__ __forceinline__ void advance(ValueSource source, u32 record, u32 next_record, int lane, bool exists) {
    if constexpr (kAhead) {
      this->lane_value[0] = next.lane_value[0];
      if (exists) next.load(source, row_of(next_record, lane));
    } else {
      this->load(source, row_of(record, lane));
    }
  }

  // Row lane % 16; row 0 past the last one.
  __device__ static __forceinline__ int row_of(u32 record, int lane) {
    return kCount > 0 ? max(static_cast<int>(ld_shared_b32(record + sizeof(int) * (lane % kTileKeys))), 0) : 0;
  }
};
