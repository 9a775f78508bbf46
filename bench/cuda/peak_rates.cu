// Peak rate of mma.sync (bench/peak_rates.py): out[thread] = sum of the thread's four elements of kTiles accumulators, each
// `iterations` times A B_i. Every product is in the sums, so the compiler removes nothing, and the caller compares the sums
// with their expected values.
#include "common.cuh"
#include "ptx/mma.cuh"

struct MmaParams {
  const uint4* a;  // [32]  A fragment of each lane, fp16
  const uint2* b;  // [kTiles][32]  B fragments
  float* out;      // [threads of the grid]
  int iterations;
};

// Operands in registers; kTiles independent accumulators per warp hide the latency of an mma.
template <int kTiles>
__global__ void __launch_bounds__(8 * kWarpSize) mma_peak(const __grid_constant__ MmaParams p) {
  const u32 lane = threadIdx.x % kWarpSize;
  const uint4 frag_a = p.a[lane];
  uint2 frag_b[kTiles];
  float frag_c[kTiles][4] = {};
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) frag_b[tile] = p.b[tile * kWarpSize + lane];
  for (int i = 0; i < p.iterations; ++i) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      const uint2 b = frag_b[tile];
      mma_m16n8k16<Element::kHalf>(frag_c[tile], frag_a.x, frag_a.y, frag_a.z, frag_a.w, b.x, b.y);
    }
  }
  float sum = 0;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const float* c = frag_c[tile];
    sum += c[0] + c[1] + c[2] + c[3];
  }
  p.out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
