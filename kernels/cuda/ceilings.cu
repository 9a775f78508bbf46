// What a GPU does at most, for scripts/roofline.py: random gathers of rows, and mma.sync.
//
//   gather   out[thread] = sum of the 32-bit words that the thread read, modulo 2^32
//            The i-th pair of rows is K[r] and V[r], r = random_row(i): no index is read, addresses depend on nothing.
//            [num_rows, kDim] of 16 bits each; a warp reads 16 bytes a lane, kPieces of them at a time.
//   mma      out[thread] = sum of the four elements of each of the kTiles accumulators, each `iterations` times A B_i
//
// Grid: a few blocks an SM, each walks the whole problem with the stride of the grid. Nothing is dropped as unused:
// every word read and every product is in the sums, which a caller compares with what they should be.
#include "warp.cuh"
#include "async_copy.cuh"

constexpr int kGatherWarps = 8;
constexpr int kBytesPerLane = 16;

// Murmur3's finaliser, scaled to a row.
__device__ __forceinline__ u32 random_row(u32 i, u32 num_rows) {
  i ^= i >> 16;
  i *= 0x85ebca6bu;
  i ^= i >> 13;
  i *= 0xc2b2ae35u;
  i ^= i >> 16;
  return __umulhi(i, num_rows);
}

// The address of the nth 16 bytes of the gathered rows: a pair is K's row, then V's.
template <int kDim>
__device__ __forceinline__ const char* piece_address(const char* k, const char* v, u32 nth, u32 num_rows) {
  constexpr u32 kRowBytes = 2 * kDim, kRowPieces = kRowBytes / kBytesPerLane;
  const u32 pair = nth / (2 * kRowPieces), piece = nth % (2 * kRowPieces);
  const char* matrix = piece < kRowPieces ? k : v;
  return matrix + static_cast<i64>(random_row(pair, num_rows)) * kRowBytes + piece % kRowPieces * kBytesPerLane;
}

__device__ __forceinline__ u32 sum_of(uint4 words) { return words.x + words.y + words.z + words.w; }

// Through registers: kPieces loads of a lane are in flight, and those of the SM's other warps.
template <int kDim, int kPieces>
__global__ void __launch_bounds__(kGatherWarps * kWarpSize) gather_ld(const char* k, const char* v, u32* out,
                                                                      u32 num_rows, u32 num_chunks) {
  const u32 lane = threadIdx.x % kWarpSize, warps = gridDim.x * kGatherWarps;
  u32 sum = 0;
  for (u32 chunk = blockIdx.x * kGatherWarps + threadIdx.x / kWarpSize; chunk < num_chunks; chunk += warps) {
    uint4 words[kPieces];
#pragma unroll
    for (int i = 0; i < kPieces; ++i) {
      const char* address = piece_address<kDim>(k, v, (chunk * kPieces + i) * kWarpSize + lane, num_rows);
      // volatile: all loads stay before the first use.
      asm volatile("ld.global.nc.v4.b32 {%0,%1,%2,%3}, [%4];"
                   : "=r"(words[i].x), "=r"(words[i].y), "=r"(words[i].z), "=r"(words[i].w)
                   : "l"(address));
    }
#pragma unroll
    for (int i = 0; i < kPieces; ++i) sum += sum_of(words[i]);
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Through L1 to shared memory: each warp has a ring of kStages chunks, each lane reads what it copied.
template <int kDim, int kPieces, int kStages>
__global__ void __launch_bounds__(kGatherWarps * kWarpSize) gather_async(const char* k, const char* v, u32* out,
                                                                         u32 num_rows, u32 num_chunks) {
  __shared__ uint4 smem_ring[kGatherWarps][kStages][kPieces][kWarpSize];
  const u32 lane = threadIdx.x % kWarpSize, warp = threadIdx.x / kWarpSize, warps = gridDim.x * kGatherWarps;
  const u32 first = blockIdx.x * kGatherWarps + warp;
  const auto fetch = [&](u32 chunk, u32 stage) {
    if (chunk < num_chunks) {
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        const char* address = piece_address<kDim>(k, v, (chunk * kPieces + i) * kWarpSize + lane, num_rows);
        copy_async(shared_address(&smem_ring[warp][stage][i][lane]), address, true);
      }
    }
    commit_copies();  // also without copies, so that the groups count the chunks
  };
  u32 sum = 0;
#pragma unroll
  for (int stage = 0; stage < kStages - 1; ++stage) fetch(first + stage * warps, stage);
  u32 stage = 0;
  for (u32 chunk = first; chunk < num_chunks; chunk += warps) {
    const u32 freed = stage == 0 ? kStages - 1 : stage - 1;
    fetch(chunk + (kStages - 1) * warps, freed);
    wait_copies<kStages - 1>();
#pragma unroll
    for (int i = 0; i < kPieces; ++i) sum += sum_of(load_shared(shared_address(&smem_ring[warp][stage][i][lane])));
    stage = stage + 1 == kStages ? 0 : stage + 1;
  }
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}

// Tensor cores from registers: kTiles independent accumulators a warp hide the instruction's latency.
//   a [kWarpSize, 4], b [kTiles, kWarpSize, 2]: fragments of two fp16 a word; out [threads] fp32
template <int kTiles>
__global__ void __launch_bounds__(8 * kWarpSize) mma_peak(const uint4* a, const uint2* b, float* out, int iterations) {
  const u32 lane = threadIdx.x % kWarpSize;
  const uint4 frag_a = a[lane];
  uint2 frag_b[kTiles];
  float frag_c[kTiles][4] = {};
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) frag_b[tile] = b[tile * kWarpSize + lane];
  for (int i = 0; i < iterations; ++i) {
#pragma unroll
    for (int tile = 0; tile < kTiles; ++tile) {
      mma<Element::kHalf>(frag_c[tile], frag_a.x, frag_a.y, frag_a.z, frag_a.w, frag_b[tile].x, frag_b[tile].y);
    }
  }
  float sum = 0;
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) sum += frag_c[tile][0] + frag_c[tile][1] + frag_c[tile][2] + frag_c[tile][3];
  out[blockIdx.x * blockDim.x + threadIdx.x] = sum;
}
