// Peak rates of a GPU (bench/peak_rates.py): random gathers of rows, and mma.sync.
//
//   gather_ld, gather_async   out[thread] = sum of the 32-bit words that the thread read, modulo 2^32
//   mma_peak                  out[thread] = sum of the thread's four elements of kTiles accumulators, each
//                             `iterations` times A B_i
//
// Gathers: pair i of rows is K[r] and V[r], r = random_row(i). No index is read, so addresses depend on no load. A warp
// reads 16-byte chunks, one per lane, kChunks of them in flight.
//
// Grid: a few blocks per SM; blocks take work with the stride of the grid. Every word read and every product is in the
// sums, so the compiler removes nothing, and the caller compares the sums with their expected values.
#include "common.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ld_global.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/mma.cuh"

constexpr int kGatherWarps = 8;
constexpr int kChunk_bytes = 16;

struct GatherParams {
  const char* k;  // [num_rows][kDim]  16-bit
  const char* v;  // [num_rows][kDim]
  u32* out;       // [threads of the grid]
  u32 num_rows;
  u32 num_batches;  // of kChunks * 32 chunks, for a warp
};

struct MmaParams {
  const uint4* a;  // [32]  A fragment of each lane, fp16
  const uint2* b;  // [kTiles][32]  B fragments
  float* out;      // [threads of the grid]
  int iterations;
};

// Murmur3's finaliser, scaled to [0, num_rows).
__device__ __forceinline__ u32 random_row(u32 i, u32 num_rows) {
  i ^= i >> 16;
  i *= 0x85ebca6bu;
  i ^= i >> 13;
  i *= 0xc2b2ae35u;
  i ^= i >> 16;
  return __umulhi(i, num_rows);
}

// Address of chunk n of the gathered rows; a pair is a row of K, then a row of V.
template <int kDim>
__device__ __forceinline__ const char* chunk_address(const GatherParams& p, u32 n) {
  constexpr u32 kRow_bytes = 2 * kDim, kRowChunks = kRow_bytes / kChunk_bytes;
  const u32 pair = n / (2 * kRowChunks), chunk = n % (2 * kRowChunks);
  const char* matrix = chunk < kRowChunks ? p.k : p.v;
  return matrix + static_cast<i64>(random_row(pair, p.num_rows)) * kRow_bytes + chunk % kRowChunks * kChunk_bytes;
}

__device__ __forceinline__ u32 sum_of(uint4 words) { return words.x + words.y + words.z + words.w; }

// Through registers.
template <int kDim, int kChunks>
__global__ void __launch_bounds__(kGatherWarps * kWarpSize) gather_ld(const __grid_constant__ GatherParams p) {
  const u32 lane = threadIdx.x % kWarpSize, warps = gridDim.x * kGatherWarps;
  u32 sum = 0;
  for (u32 batch = blockIdx.x * kGatherWarps + threadIdx.x / kWarpSize; batch < p.num_batches; batch += warps) {
    uint4 words[kChunks];
#pragma unroll
    for (int i = 0; i < kChunks; ++i) {
      const char* address = chunk_address<kDim>(p, (batch * kChunks + i) * kWarpSize + lane);
      words[i] = ld_global_nc_v4_b32(address);
    }
#pragma unroll
    for (int i = 0; i < kChunks; ++i) sum += sum_of(words[i]);
  }
  p.out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// cp.async to shared memory: each warp has a ring of kStages batches; each lane reads the chunks that it copied.
template <int kDim, int kChunks, int kStages>
__global__ void __launch_bounds__(kGatherWarps * kWarpSize) gather_async(const __grid_constant__ GatherParams p) {
  __shared__ uint4 smem_ring[kGatherWarps][kStages][kChunks][kWarpSize];
  const u32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = gridDim.x * kGatherWarps;
  const u32 first = blockIdx.x * kGatherWarps + warp;
  const auto fetch = [&](u32 batch, u32 stage) {
    if (batch < p.num_batches) {
#pragma unroll
      for (int i = 0; i < kChunks; ++i) {
        const char* address = chunk_address<kDim>(p, (batch * kChunks + i) * kWarpSize + lane);
        cp_async<16>(shared_address(&smem_ring[warp][stage][i][lane]), address, true);
      }
    }
    cp_async_commit_group();  // also without copies: wait_group counts groups
  };
  u32 sum = 0;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) fetch(first + stage * warps, stage);
  u32 stage = 0;
  for (u32 batch = first; batch < p.num_batches; batch += warps) {
    const u32 freed = stage == 0 ? kStages - 1 : stage - 1;
    fetch(batch + (kStages - 1) * warps, freed);
    cp_async_wait_group<kStages - 1>();
#pragma unroll
    for (int i = 0; i < kChunks; ++i) sum += sum_of(ld_shared_v4_b32(shared_address(&smem_ring[warp][stage][i][lane])));
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  p.out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

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
