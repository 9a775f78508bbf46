// Low-rank edge features on tensor cores, for instances of one head.
//
//   score_ij += <u_i, a_ij>, u_i = W^T q_i          O_i += W' s_i, s_i = sum_j p_ij a_ij
//
// Once per window: U = Q W [16 rows x 16 features] becomes A fragments, and O += s W'^T before the epilogue. Both are
// linear, so partials have no features. For every KV tile, 16 slots (edges) at a time:
//
//   C [rows x slots] = U a^T                 row i uses only the slots of its edges; the other entries are discarded
//   s [rows x features] += P a               P [rows x slots]: weight of a slot in the row of its edge, else 0
//
// Scores and weights are exchanged between C fragments by (row, key) and by (row, slot) through shared memory. u and s
// keep float32 accuracy as sums of two 16-bit terms.
//
// 16 x 16 matrices of scores and weights are stored in fragment order: [column / 8][row][column % 8]. The two elements
// of a lane in an n-tile and half are [n-tile][half][lane]; a row of ldmatrix is [matrix][lane % 8].
//
// Two buffers of 32 slots: the features of the next KV tile are copied while those of this one are read. A KV tile with
// more slots loads them into its buffer 32 at a time, once for scores and once for s (`reload`). A slot has two chunks,
// swapped if bit 2 of the slot is set: ldmatrix covers all banks, and the 32 bytes stay in one line.
#pragma once
#include "common.cuh"
#include "tiles/forward_params.cuh"
#include "tiles/gather.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/mma.cuh"
#include "ptx/opaque.cuh"
#include "score/score_terms.cuh"
#include "tiles/split_kv.cuh"
#include "two_terms.cuh"
#include "warp.cuh"

template <int kTerms>
constexpr bool kHasFeatures = (kTerms & (kKeyFeatures | kValueFeatures)) != 0;

constexpr int kFeatures = 16;                                  // features of an edge, zero past the last
constexpr int kStepSlots = 16;                                 // a k-step of P a, two n-tiles of U a^T
constexpr int kBufferSlots = 2 * kStepSlots;                   // one slot per lane
constexpr u32 kFeatureRow_bytes = kFeatures * sizeof(u16);
constexpr u32 kBuffer_bytes = kBufferSlots * kFeatureRow_bytes;
constexpr u32 kStep_bytes = kStepSlots * kFeatureRow_bytes;

// Packed weights of a head, in 16-byte elements: B fragments of W for the pairs of k-steps of SDDMM, then B fragments
// of W' for the slices of O (pack_features.cu).
template <int kDim, int kTerms>
struct PackedWeights {
  using S = Stage<kDim, 1>;
  static constexpr int kKey = kTerms & kKeyFeatures ? 2 * S::kPairs * kWarpSize : 0;
  static constexpr int kValue = kTerms & kValueFeatures ? S::kSlices * kWarpSize : 0;
};

// Matrices of a KV tile; weights reuse the memory of scores by slot, which are dead by then.
constexpr int kMatrix = kTileM * kTileKeys;
struct __align__(16) TileScratch {
  union {
    float score_by_slot[kMatrix];
    u16 weight[2][kMatrix];  // by key, by slot
  };
  float score_by_key[kMatrix];
};

template <int kDim>
struct __align__(16) TileFeaturesMemory {
  // Scratch in K of the stage, which is dead by then; not if K has padding, which must stay zero.
  static constexpr bool kScratchInKey =
      sizeof(Stage<kDim, 1>::key) >= sizeof(TileScratch) && Stage<kDim, 1>::kKeyRow_bytes == kDim * sizeof(u16);
  // U stays in registers if its shared memory would cost a block per SM.
  static constexpr bool kProjectedInRegisters = kDim == 128;
  unsigned char buffers[2][kBuffer_bytes];
  uint4 projected[kProjectedInRegisters ? 1 : 2][kProjectedInRegisters ? 1 : kWarpSize];
  int last;                 // TileFeatures::last of the next `prefetch`
  float projected_inverse;  // factor of TileFeatures::projected, fp16
  __align__(16) unsigned char scratch[kScratchInKey ? kChunk_bytes : sizeof(TileScratch)];
};

template <Element kIn, int kDim, int kTerms>
struct TileFeatures {
  using S = Stage<kDim, 1>;
  using Memory = TileFeaturesMemory<kDim>;
  using Packed = PackedWeights<kDim, kTerms>;
  static constexpr bool kOfKeys = kTerms & kKeyFeatures;

  const Params& p;
  u32 lane;
  Memory& memory;
  u32 record;                    // record 0
  int first, next, after, last;  // first slot of this KV tile and of the next three; past the last one its end
  u32 place;                     // place of slot first + lane, as index in a matrix by key
  u32 projected[2][4];           // U, high and low terms; fp16: divided by memory.projected_inverse

  __device__ __forceinline__ TileFeatures(const Params& p, int lane, Memory& memory)
      : p(p), lane(lane), memory(memory) {}

  // Copies the features of the first KV tile, in the caller's cp.async group.
  __device__ __forceinline__ void start(u32 record_0, int count) {
    record = record_0;
    // Padding slots have weight 0, and 0 * NaN is NaN.
    for (u32 i = lane; i < sizeof(Memory::buffers) / sizeof(uint4); i += kWarpSize) {
      reinterpret_cast<uint4*>(memory.buffers)[i] = make_uint4(0, 0, 0, 0);
    }
    __syncwarp();
    first = warp_uniform(first_slot(0)), next = warp_uniform(first_slot(min(1, count)));
    after = warp_uniform(first_slot(min(2, count)));
    copy_features(0, first, next);
    load_place(first, next);
    copy_last(-1, count);
  }
  // Copies the first slot of KV tile i + 4, for the next `prefetch`.
  __device__ __forceinline__ void copy_last(int i, int count) const {
    const int begin = ld_shared_b32(record + kRange);
    cp_async<sizeof(int)>(shared_address(&memory.last), p.tile_slots + (begin + min(i + 4, count)), lane == 0 ? 0 : -1);
  }
  // First slot of KV tile i of the work item.
  __device__ __forceinline__ int first_slot(int i) const {
    const int begin = ld_shared_b32(record + kRange);  // read again each time: registers are scarce
    return __ldg(p.tile_slots + (begin + i));
  }
  __device__ __forceinline__ void load_place(int slot, int end) {
    const u32 own = slot + lane;
    const u32 x = static_cast<int>(own) < end ? __ldg(p.slot_places + own) : 0;
    place = x % kTileN | x / 2 & (kTileM - 1) * kTileN | x % kTileKeys / kTileN * (kTileM * kTileN);
  }
  __device__ __forceinline__ unsigned char* buffer(int i) const { return memory.buffers[0] + i % 2 * kBuffer_bytes; }
  // Offset in a buffer of the lane's chunk of slot lane / 2; the same chunk in a row of `features`.
  __device__ __forceinline__ u32 own_chunk() const { return kChunk_bytes * lane ^ lane * 2 & kChunk_bytes; }
  __device__ __forceinline__ const uint4* features_of(i64 slot) const {
    return reinterpret_cast<const uint4*>(p.features) + (2 * slot + lane % 2);
  }
  // Copies the features of KV tile i for slots `slot` to `end`, 32 at most.
  __device__ __forceinline__ void copy_features(int i, int slot, int end) const {
    const u32 target = shared_address(buffer(i)) + own_chunk();
    const int own = slot + static_cast<int>(lane / 2);
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      if (step > 0 && end - slot <= kStepSlots) continue;
      cp_async<kChunk_bytes>(target + kStep_bytes * step, features_of(own + kStepSlots * step),
                             own + kStepSlots * step < end ? 0 : -1);
    }
  }

  // One cp.async group: features of KV tile i + 1. Needs a __syncwarp since `accumulate` of KV tile i - 1.
  __device__ __forceinline__ void prefetch(int i, int count) {
    lane = opaque(lane);  // recomputes the lane's offsets in every KV tile instead of keeping them in registers
    copy_features(i + 1, next, after);
    last = warp_uniform(memory.last);
    __syncwarp();  // the other lanes' reads
    copy_last(i, count);
    cp_async_commit_group();
  }
  // From KV tile i to the next one.
  __device__ __forceinline__ void advance() {
    load_place(next, after);
    first = next, next = after, after = last;
  }

  // Loads slots `slot` to slot + 31 of KV tile i into its buffer, and their places.
  __device__ __forceinline__ void reload(int i, int slot) {
    unsigned char* const target = buffer(i) + own_chunk();
    __syncwarp();  // the other lanes' reads
#pragma unroll
    for (int step = 0; step < 2; ++step) {
      const int own = slot + kStepSlots * step + static_cast<int>(lane / 2);
      if (own < next) {
        *reinterpret_cast<uint4*>(target + kStep_bytes * step) = __ldg(features_of(own));
      }
    }
    load_place(slot, next);
    __syncwarp();
  }

  // Index of the lane's slot in a 16 x 16 matrix by slot.
  __device__ __forceinline__ u32 place_by_slot() const {
    return place & (kTileM - 1) * kTileN | lane % kTileN | lane % kStepSlots / kTileN * (kTileM * kTileN);
  }
  // Whether the lane's slot exists and belongs to the step that begins with slot `start`.
  __device__ __forceinline__ bool has_slot(int start) const {
    const u32 step = (start - first) / kStepSlots % 2;
    return lane / kStepSlots == step && start + static_cast<int>(lane % kStepSlots) < next;
  }
  // Row address of ldmatrix in a step of the buffer: matrices (slots 0-7, 8-15) x (low, high chunk), chunks innermost.
  __device__ __forceinline__ u32 buffer_row(int i, int start) const {
    const u32 slot = lane / 16 * 8 + lane % 8;
    return shared_address(buffer(i)) + (start - first) / kStepSlots % 2 * kStep_bytes + slot * kFeatureRow_bytes +
           ((lane * 2 ^ lane * 4) & kChunk_bytes);
  }
  __device__ __forceinline__ TileScratch& scratch_of(unsigned char* key) const {
    return *reinterpret_cast<TileScratch*>(Memory::kScratchInKey ? key : memory.scratch);
  }

  // Packed weights of the head, from the lane's first element on.
  __device__ __forceinline__ const uint4* weights() const {
    return p.feature_weights + static_cast<i64>(blockIdx.y) * (Packed::kKey + Packed::kValue) + lane;
  }

  // U of the window from the A fragments of Q. The packed W has their order of dimensions.
  template <int kSteps>
  __device__ __forceinline__ void project(const u32 (&frag_query)[kSteps][4]) {
    float u[2][4] = {};
#pragma unroll
    for (int pair = 0; pair < S::kPairs; ++pair) {
      const u32(&even)[4] = frag_query[2 * pair];
      const u32(&odd)[4] = frag_query[2 * pair + 1];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 b = __ldg(weights() + (2 * pair + tile) * kWarpSize);
        mma_m16n8k16<kIn>(u[tile], even[0], even[1], even[2], even[3], b.x, b.y);
        mma_m16n8k16<kIn>(u[tile], odd[0], odd[1], odd[2], odd[3], b.z, b.w);
      }
    }
    float scale = 1.0f;
    if constexpr (kIn == Element::kHalf) {  // a power of two that keeps |u| below 2^15
      float most = 0.0f;
#pragma unroll
      for (int e = 0; e < 8; ++e) most = fmaxf(most, fabsf(u[e / 4][e % 4]));
      const int shift = excess_bits<kIn>(warp_max(most));
      scale = __int_as_float(127 - shift << 23);
      if (lane == 0) memory.projected_inverse = __int_as_float(127 + shift << 23);  // read after a __syncwarp
    }
    split_fragment<kIn>(projected, u, scale, scale);
    if constexpr (!Memory::kProjectedInRegisters) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const u32(&a)[4] = projected[part];
        memory.projected[part][lane] = make_uint4(a[0], a[1], a[2], a[3]);
      }
    }
  }

  // Adds <u, a> to the scores of the lane in KV tile i. Entries without an edge become undefined. `key`: K of the
  // stage, overwritten.
  __device__ __forceinline__ void add_scores(float (&score)[2][4], int i, unsigned char* key) {
    lane = opaque(lane);
    TileScratch& scratch = scratch_of(key);
    score_step(scratch, i, first);
#pragma unroll 1
    for (int start = first + kStepSlots; start < next; start += kStepSlots) {
      if ((start - first) % kBufferSlots == 0) reload(i, start);
      score_step(scratch, i, start);
    }
    __syncwarp();
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      const float2 added = reinterpret_cast<const float2*>(scratch.score_by_key)[kWarpSize * e + lane];
      score[e / 2][e % 2 * 2] += added.x, score[e / 2][e % 2 * 2 + 1] += added.y;
    }
  }
  // The scores of 16 slots.
  __device__ __forceinline__ void score_step(TileScratch& scratch, int i, int start) {
    u32 b[4];
    ldmatrix_x4(b, buffer_row(i, start));
    if constexpr (!Memory::kProjectedInRegisters) {
#pragma unroll
      for (int part = 0; part < 2; ++part) {
        const uint4 a = memory.projected[part][lane];
        projected[part][0] = a.x, projected[part][1] = a.y, projected[part][2] = a.z, projected[part][3] = a.w;
      }
    }
    float c[2][4] = {};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) mma_both_parts<kIn>(c[tile], projected, b[2 * tile], b[2 * tile + 1]);
    __syncwarp();  // the other lanes' reads of K, and of the previous step
#pragma unroll
    for (int e = 0; e < 4; ++e) {
      reinterpret_cast<float2*>(scratch.score_by_slot)[kWarpSize * e + lane] =
          make_float2(c[e / 2][e % 2 * 2], c[e / 2][e % 2 * 2 + 1]);
    }
    __syncwarp();
    if (has_slot(start)) {
      float x = scratch.score_by_slot[place_by_slot()];
      if constexpr (kIn == Element::kHalf) x *= memory.projected_inverse;
      scratch.score_by_key[place] = x;
    }
  }

  // s += P a. `out`: O and s, not divided by the sums. `prob`: weights of the KV tile as A fragments. `key`: K of the
  // stage, overwritten.
  template <int kTiles>
  __device__ __forceinline__ void accumulate(float (&out)[kTiles][4], const u32 (&prob)[4], int i, unsigned char* key) {
    lane = opaque(lane);
    TileScratch& scratch = scratch_of(key);
    if constexpr (!kOfKeys) __syncwarp();  // the other lanes' reads of K
#pragma unroll
    for (int e = 0; e < 4; ++e) reinterpret_cast<u32*>(scratch.weight[0])[kWarpSize * e + lane] = prob[e];
    if (kOfKeys && next - first > kBufferSlots) reload(i, first);
    value_step(out, scratch, i, first);
#pragma unroll 1
    for (int start = first + kStepSlots; start < next; start += kStepSlots) {
      if ((start - first) % kBufferSlots == 0) reload(i, start);
      __syncwarp();  // the other lanes' reads of weights by slot
      value_step(out, scratch, i, start);
    }
  }
  // s += P a of 16 slots.
  template <int kTiles>
  __device__ __forceinline__ void value_step(float (&out)[kTiles][4], TileScratch& scratch, int i, int start) const {
    uint4* const row = reinterpret_cast<uint4*>(scratch.weight[1]) + lane;
    *row = make_uint4(0, 0, 0, 0);
    __syncwarp();
    if (has_slot(start)) scratch.weight[1][place_by_slot()] = scratch.weight[0][place];
    __syncwarp();
    u32 a[4], b[4];
    ldmatrix_x4(a, shared_address(row));
    ldmatrix_x4_trans(b, buffer_row(i, start));
#pragma unroll
    for (int half = 0; half < 2; ++half) {  // halves of the slots
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        mma_m16n8k8<kIn>(out[kTiles - 2 + tile], a[2 * half], a[2 * half + 1], b[2 * half + tile]);
      }
    }
  }

  // O += s W'^T, both not divided by the sums. The product takes s divided by the sums, which fits 16 bits for any
  // number of edges.
  template <int kTiles>
  __device__ __forceinline__ void add_to_output(float (&out)[kTiles][4], const float (&sum)[4]) const {
    float s[2][4];
#pragma unroll
    for (int e = 0; e < 8; ++e) s[e / 4][e % 4] = out[kTiles - 2 + e / 4][e % 4];
    u32 parts[2][4];
    split_fragment<kIn>(parts, s, inverse_or_zero(sum[0]), inverse_or_zero(sum[2]));
#pragma unroll
    for (int slice = 0; slice < S::kSlices; ++slice) {
      const uint4 b = __ldg(weights() + Packed::kKey + slice * kWarpSize);
      float left[4] = {}, right[4] = {};
      mma_both_parts<kIn>(left, parts, b.x, b.y);
      mma_both_parts<kIn>(right, parts, b.z, b.w);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        out[2 * slice][e] = fmaf(sum[e / 2 * 2], left[e], out[2 * slice][e]);
        out[2 * slice + 1][e] = fmaf(sum[e / 2 * 2], right[e], out[2 * slice + 1][e]);
      }
    }
  }
};
