// Accesses to rows of q and O in the kernels of feature products.
//
// Grid (head groups, row blocks, of project_query also steps of 16 features). Each warp strides over tiles of 16 rows. The
// weights of the block's heads lie in shared memory.
//
// Quad: four lanes of a row, t = lane % 4, access 64 bytes of q or O, one 16-byte chunk per lane. Heads of one or two
// chunks share a quad; longer heads need several quads.
//
//   chunks of a head   1              2              3 and more
//   head of lane t     t              t / 2          0
//   chunk of lane t    0              t % 2          4 * quad + t
#pragma once
#include "common.cuh"
#include "ptx/ld_global.cuh"

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarpSize;
constexpr int kFeatures = 16;  // features of u and s, zero past the last; one k-step
constexpr int kQuadLanes = 4;
constexpr int kChunkWords = 4;
constexpr int kMostBatch = 2;  // quads whose loads are in flight together

struct ProjectParams {
  const void* query;      // [num_rows][H][kDim]  any row and head stride, rows aligned to 16 bytes, or to 4 where
                          // their size is no multiple of 16
  const void* weight;     // [H][kDim][weight_columns]  W, contiguous
  float* projected;       // [H][num_rows][columns]  u; every element is written
  i64 query_head_stride;  // elements
  int query_row_bytes;
  int num_rows;
  int num_heads;
  int weight_columns;
  int num_features;  // columns - 15 to columns
  int columns;       // a multiple of 16
};

struct AddParams {
  void* output;              // [num_rows][H][kDim]  O, contiguous; read and written
  const void* feature_sums;  // [H][num_rows][16]  s
  const void* weight;        // [H][kDim][num_features]  W', contiguous
  int num_rows;
  int num_heads;
  int num_features;  // 1 to 16
};

// A row of a head of kDim elements in global memory, in quads.
template <int kDim, int kElement_bytes>
struct HeadRow {
  static_assert(kDim % 2 == 0 && kDim <= 256, "pairs of elements; odd head dimensions are padded by the caller");
  static constexpr int kWords = kDim * kElement_bytes / 4;
  static constexpr int kChunks = divide_up(kWords, kChunkWords);
  static constexpr int kHeads = kChunks == 1 ? 4 : kChunks == 2 ? 2 : 1;  // heads per quad
  static constexpr int kHeadLanes = kQuadLanes / kHeads;
  static constexpr int kBatches = divide_up(divide_up(kChunks, kQuadLanes), kMostBatch);
  static constexpr int kBatch = divide_up(divide_up(kChunks, kQuadLanes), kBatches);
  static constexpr int kQuads = kBatch * kBatches;  // rounded up to whole batches
  static constexpr bool kWholeChunks = kWords % kChunkWords == 0;

  __device__ static constexpr int head_of(int t) { return t / kHeadLanes; }
  __device__ static constexpr int chunk_of(int quad, int t) { return kQuadLanes * quad + t % kHeadLanes; }

  // Loads a chunk; zero past kDim, and unless `exists`.
  __device__ static __forceinline__ uint4 load(const void* head, int chunk, bool exists) {
    if constexpr (kWholeChunks) {
      const uint4* const address = static_cast<const uint4*>(head) + chunk;
      return exists && kChunkWords * chunk < kWords ? ld_global_no_allocate_v4_b32(address) : make_uint4(0, 0, 0, 0);
    } else {
      u32 words[kChunkWords];
#pragma unroll
      for (int i = 0; i < kChunkWords; ++i) {
        const int word = kChunkWords * chunk + i;
        words[i] = exists && word < kWords ? static_cast<const u32*>(head)[word] : 0;
      }
      return make_uint4(words[0], words[1], words[2], words[3]);
    }
  }

  __device__ static __forceinline__ void store(void* head, int chunk, bool exists, const u32 (&words)[kChunkWords]) {
    if constexpr (kWholeChunks) {
      if (!exists || kChunkWords * chunk >= kWords) return;
      st_global_v4_b32(static_cast<uint4*>(head) + chunk, make_uint4(words[0], words[1], words[2], words[3]));
    } else {
#pragma unroll
      for (int i = 0; i < kChunkWords; ++i) {
        const int word = kChunkWords * chunk + i;
        if (exists && word < kWords) static_cast<u32*>(head)[word] = words[i];
      }
    }
  }
};
