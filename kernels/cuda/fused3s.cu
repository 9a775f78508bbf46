// O = softmax(scale * Q K^T masked by A) V on tensor cores; bound by the gathers of rows of K and V.
//
// The schedule (kernels/formats/schedule.py) lists A as KV tiles: 16 gathered keys of a row window and the bitmap of
// the 16 x 16 block. A KV tile is one k-step of SpMM and the unit of the cp.async ring. Pointers and shapes: struct
// Params.
//
// Grid (num_blocks, H), kWarps warps per block. A window goes to one warp, to one block, or to several blocks
// (WorkItem::split):
//   kWarp    one work item: the warp writes the output; no block barrier
//   kBlock   a work item for each warp of a block: the block combines them and writes the output
//   >= 0     splits, a block each (split-KV): the last block to arrive combines the partials in the order of the
//            splits, so the bits are the same on every run
//
// A warp copies K and V by cp.async into a ring of its own. Q, scores, E and O stay in registers. A KV tile with fewer
// than 16 keys copies only those.
//
// Shared memory: struct SharedMemory                         bytes at kDim 64   128      256
//   ring [kWarps][kStages]    Stage: key, value               2,048 each         4,096    8,192
//   records [kWarps][kRecords]    a KV tile                   128                128      128
//   a warp                                                    8,704              16,896   33,280
//
// Swizzle of K. A phase of ld.shared.v4 is eight lanes: rows g = 2i and 2i + 1, chunks (16 bytes) 4p to 4p + 3 of both.
// Odd rows swap their 64-byte halves, so that a phase covers all 32 banks. Where a row is an odd number of 64 bytes,
// rows alternate between the halves by themselves.
//
//   banks     0-3  4-7  8-11 12-15 16-19 20-23 24-27 28-31
//   row 0      0    1    2    3     4     5     6     7       chunk; phase of p = 0: chunks 0 to 3 of rows 0 and 1
//   row 1      4    5    6    7     0     1     2     3
//
// Swizzle of V. A phase of ldmatrix is one chunk of eight rows. Chunk c of row n lies at c ^ (n % 8), so that a phase
// covers all banks and 128-byte lines stay whole (ptx/cp_async.cuh). Shorter rows: kPeriod, kSpread.
//
//   banks     0-3  4-7  8-11 12-15 16-19 20-23 24-27 28-31
//   row 0      0    1    2    3     4     5     6     7
//   row 1      1    0    3    2     5     4     7     6
//   row 2      2    3    0    1     6     7     4     5
//   ...
//   row 7      7    6    5    4     3     2     1     0
//
// Timeline of a warp. cp.async groups complete in order; wait<n> leaves the latest n in flight.
//
//   group      copies                                                       complete
//   item       work item: KV tiles 0 and 1 to records 0 and 1               wait<0>, before the first gather
//   0          K, V of KV tile 0 to stage 0; KV tile 2 to record 2          wait<1> of iteration 0
//   1          K, V of KV tile 1 to stage 1; KV tile 3 to record 3          wait<1> of iteration 1
//   i + 2      K, V of KV tile i + 2 to stage i % 2; KV tile i + 4 to record i % 4
//
//   iteration i    reads                                  in flight        then overwritten
//   wait<1>                                               group i + 1
//   scores         K in stage i % 2
//   mask           bitmap in record i % 4
//   accumulate     V in stage i % 2
//   gather i + 2   keys in record (i + 2) % 4             + group i + 2    stage i % 2, record i % 4
//
// Order that must not change, marked [n] in the code, and what breaks otherwise
//   [1]  Before griddepcontrol_wait a block reads only work items, with their KV tiles, and row ids: the kernel in
//        front may still write Q, K and V, or read memory that this kernel writes.
//   [2]  Commit a group also where nothing is copied: wait<1> counts groups, and would leave the needed one in flight.
//   [3]  wait, then __syncwarp, then the first read: a lane waits only for its own copies.
//   [4]  __syncwarp between the last read of a stage or record and the copies to it: other lanes may still read.
//   [5]  A KV tile copies 96 of 128 bytes of a record: the last 32 of record 0 hold the work item to the end.
//   [6]  V rows past the last key are never read: they hold old data, and 0 * NaN is NaN.
//   [7]  A maximum of -infinity is never subtracted: a row without an edge so far would become NaN.
//   [8]  store_partial after the loop: then no copy is in flight, and no lane reads the ring.
//   [9]  __syncthreads before combine_block: it reads the partials of all warps.
//   [10] The ^ with sign_bits also where they are 0: with plain copies the compiler repeats the moves before every mma.
//
// Choices and their worth (kernels/NOTES.md)
//   V swizzled in 128-byte lines, cp.async.cg   fb100-cornell5 103 to 88 us, at kDim = 256 223 to 177
//   two stages                                  three are slower: one block per SM fewer
//   registers for 16 warps per SM at kDim = 64  since the swizzle of V faster than 20 on most graphs
//   work item with two KV tiles                 one latency fewer before the first gather
//   sums by an mma with ones                    half the error: E as rounded adds up to 1
//   scale in the exponent, its sign in Q        8 instructions per KV tile fewer
//   programmatic dependent launch               1 to 2 us per launch
#include "common.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "split_kv.cuh"

constexpr int kStages = 2;
constexpr int kRecords = 2 * kStages;
constexpr int kTileKeys = 16;
constexpr int kChunk_bytes = 16;

struct __align__(16) KVTile {
  int key[kTileKeys];      // -1 past the last one
  u32 bitmap[kTileM / 2];  // word g: row g in the lower half, row g + 8 in the upper half; bit j: key j
};

// The consecutive KV tiles of one window that one warp takes. Lies in the records as in global memory: `first` and the
// fields in record 0, `second` in record 1.
struct __align__(16) WorkItem {
  KVTile first;     // KV tiles `begin` and begin + 1: no second wait before the first gather
  int begin;        // first KV tile
  int count;        // KV tiles; 0 in an empty window, and where a block has more warps than the window KV tiles
  int window;       // -1: no work
  int num_keys;     // of the last KV tile
  int split;        // kWarp, kBlock, or the split
  int first_split;  // of the window
  int num_splits;   // of the window
  int unused;
  KVTile second;
};

// Offsets in a KV tile, in a work item and in record 0.
constexpr u32 kBitmap = sizeof(KVTile::key);
constexpr u32 kRange = sizeof(KVTile);          // begin, count, window, num_keys
constexpr u32 kSplit = kRange + sizeof(uint4);  // split, first_split, num_splits
constexpr u32 kRecord_bytes = 128;
static_assert(sizeof(KVTile) == 96 && sizeof(WorkItem) == 224, "TILE_WORDS and ITEM_WORDS in schedule.py");
static_assert(sizeof(WorkItem) == kRecord_bytes + sizeof(KVTile), "`second` in record 1");

struct Params {
  const KVTile* kv_tiles;      // [num_tiles + 2]
  const WorkItem* work_items;  // [num_blocks][kWarps]
  const u16* query;            // [num_rows][H][kDim]  16-bit, any row and head stride, rows 16-byte aligned
  const u16* key;              // [num_cols][H][kDim]  likewise
  const u16* value;            // [num_cols][H][kDim]  likewise
  void* output;                // [num_rows][H][kDim]  contiguous; every element is written
  float* lse;                  // [num_rows][H]  log of the sum of exp(scores), -infinity without an edge; may be null
  void* partial;               // [num_splits][H] Partial<kDim>
  int* semaphores;             // [num_splits][H][kWarps]  0 before and after
  const int* row_ids;          // [num_row_windows][16]  rows of Q and O of each window; null: 16 w, 16 w + 1, ...
  i64 query_head_stride;       // elements
  i64 key_head_stride;
  i64 value_head_stride;
  int query_row_bytes;
  int key_row_bytes;
  int value_row_bytes;
  int num_rows;
  u32 sign_bits;      // 0x80008000 where the scale is negative, else 0: changes the signs in Q
  float scale_log2e;  // |scale| * log2(e)
};

// K and V of a KV tile: rows of whole k-steps, zero past kDim.
template <int kDim>
struct Stage {
  static constexpr int kPairs = divide_up(kDim, 2 * kTileK);   // pairs of k-steps of SDDMM
  static constexpr int kSlices = divide_up(kDim, 2 * kTileN);  // pairs of n-tiles of SpMM
  static constexpr u32 kKeyRow_bytes = kPairs * 64;
  static constexpr u32 kValueRow_bytes = kSlices * 32;
  static constexpr u32 kKeySwizzle = kPairs % 2 ? 0 : 64;
  // Rows kPeriod apart start in the same bank, and kSpread neighbouring chunks are in one 128-byte line in all of them:
  // every kPeriod rows the chunks are permuted among kSpread.
  static constexpr u32 kPeriod = kSlices % 4 == 0 ? 1 : kSlices % 2 == 0 ? 2 : 4;
  static constexpr u32 kSpread = 8 / kPeriod;
  __device__ static constexpr u32 key_swizzle(u32 row) { return row % 2 * kKeySwizzle; }
  __device__ static constexpr u32 value_swizzle(u32 row) { return row / kPeriod % kSpread * kChunk_bytes; }

  unsigned char key[kTileKeys * kKeyRow_bytes];
  unsigned char value[kTileKeys * kValueRow_bytes];
};

template <int kDim, int kWarps>
struct SharedMemory {
  Stage<kDim> ring[kWarps][kStages];  // at the end: a partial in the ring of each warp, unless kWarp
  unsigned char records[kWarps][kRecords][kRecord_bytes];
};

// kCount ints, a power of two, from an address aligned to all of them (16 bytes at most).
template <int kCount>
__device__ __forceinline__ void load_shared_words(int (&words)[kCount], u32 address) {
  if constexpr (kCount >= 4) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      const uint4 four = ld_shared_v4_b32(address + sizeof(int) * i);
      words[i] = four.x, words[i + 1] = four.y, words[i + 2] = four.z, words[i + 3] = four.w;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) words[i] = ld_shared_b32(address + sizeof(int) * i);
  }
}

__device__ constexpr int next_power_of_two(int x) { return x <= 1 ? 1 : 2 * next_power_of_two((x + 1) / 2); }

// Zeros the padding of rows to whole k-steps, which no copy touches.
template <int kDim>
__device__ __forceinline__ void zero_padding(Stage<kDim>& stage, int lane) {
  using S = Stage<kDim>;
  for (int row = lane; row < kTileKeys; row += kWarpSize) {
    for (int chunk = kDim / 8; chunk < 4 * S::kPairs; ++chunk) {
      const u32 offset = kChunk_bytes * chunk ^ S::key_swizzle(row);
      *reinterpret_cast<uint4*>(stage.key + row * S::kKeyRow_bytes + offset) = make_uint4(0, 0, 0, 0);
    }
    for (int chunk = kDim / 8; chunk < 2 * S::kSlices; ++chunk) {
      const u32 offset = kChunk_bytes * chunk ^ S::value_swizzle(row);
      *reinterpret_cast<uint4*>(stage.value + row * S::kValueRow_bytes + offset) = make_uint4(0, 0, 0, 0);
    }
  }
}

// The producer of a warp's ring. kLanesPerRow lanes, a power of two, copy a row of K and of V, a chunk each; lanes past
// the end of a row copy nothing. A lane copies the same chunk of kRowsPerLane neighbouring rows.
template <int kDim>
struct Gather {
  using S = Stage<kDim>;
  static constexpr int kChunks = kDim / 8;
  static constexpr int kLanesPerRow = kChunks == 1 ? 2 : next_power_of_two(kChunks);
  static constexpr int kRowsPerLane = kTileKeys * kLanesPerRow / kWarpSize;

  const Params& p;
  const int lane;
  const int row, chunk;                // the lane's first row, its chunk
  const int skip;                      // -1 for a lane past the end of a row, else 0
  const u32 key_offset, value_offset;  // the chunk of the first row in a stage
  const char* next_tile;               // the lane's chunk of the KV tile that is copied next
  int count, tile_count;               // KV tiles; 0 in tile_count for a lane past the end of a KV tile

  __device__ __forceinline__ Gather(const Params& p, int lane)
      : p(p),
        lane(lane),
        row(lane / kLanesPerRow * kRowsPerLane),
        chunk(lane % kLanesPerRow),
        skip(chunk < kChunks ? 0 : -1),
        key_offset(row * S::kKeyRow_bytes + kChunk_bytes * chunk),
        value_offset(row * S::kValueRow_bytes + sizeof(S::key) + (kChunk_bytes * chunk ^ S::value_swizzle(row))) {}

  __device__ __forceinline__ void start(int begin, int num_tiles) {
    next_tile = reinterpret_cast<const char*>(p.kv_tiles + begin + kStages) + kChunk_bytes * lane;
    count = num_tiles;
    tile_count = lane < static_cast<int>(sizeof(KVTile)) / kChunk_bytes ? num_tiles : 0;  // [5]
  }

  __device__ __forceinline__ const char* lane_chunk(const u16* row) const {
    return reinterpret_cast<const char*>(row) + kChunk_bytes * chunk;
  }

  // One cp.async group: K and V of KV tile i, whose keys are in `record`, to `stage`; KV tile i + kStages to its own
  // record.
  __device__ __forceinline__ void operator()(int i, u32 record, u32 stage) {
    if (i < count) {
      int keys[kRowsPerLane];
      load_shared_words(keys, record + sizeof(int) * row);
      // Recomputed for every KV tile: kept in registers, the addresses cost more than they save at kDim = 256.
      const char* const key = lane_chunk(p.key + blockIdx.y * p.key_head_stride);
      const char* const value = lane_chunk(p.value + blockIdx.y * p.value_head_stride);
#pragma unroll
      for (int n = 0; n < kRowsPerLane; ++n) {
        const int index = keys[n] | skip;  // negative: no copy
        // `row` is even, and a multiple of kPeriod, wherever a lane has several rows.
        const u32 key_swizzle = S::key_swizzle(kRowsPerLane == 1 ? row : n);
        cp_async_16(((stage + key_offset) ^ key_swizzle) + n * S::kKeyRow_bytes,
                    key + static_cast<i64>(keys[n]) * p.key_row_bytes, index);
        cp_async_16(((stage + value_offset) ^ S::value_swizzle(n)) + n * S::kValueRow_bytes,
                    value + static_cast<i64>(keys[n]) * p.value_row_bytes, index);
      }
      cp_async_16((record ^ kStages * kRecord_bytes) + kChunk_bytes * lane, next_tile, tile_count - (i + kStages + 1));
      next_tile += sizeof(KVTile);
    }
    cp_async_commit_group();  // [2]
  }
};

// Q and O of a window in a warp's registers; a lane has elements of rows g and g + 8 (`half` 0 and 1).
template <Element kIn, int kDim>
struct RowWindow {
  using S = Stage<kDim>;

  const int lane, g, t;
  const float scale_log2e;
  u32 frag_query[S::kPairs][2][4];  // [pair][k-step] A fragments
  float out[2 * S::kSlices][4] = {};
  float max[2] = {negative_infinity(), negative_infinity()};  // of the scores, not scaled
  float sum[4] = {};  // C fragment of E times a column of ones: rows g, g + 8 in sum[0], sum[2]

  __device__ __forceinline__ RowWindow(int lane, float scale_log2e)
      : lane(lane), g(lane / 4), t(lane % 4), scale_log2e(scale_log2e) {}

  // Chunk 4 * pair + t of a row feeds both k-steps of a pair (register remapping; K likewise). A load fills four
  // registers with one row; an A fragment has two rows.
  __device__ __forceinline__ void load_query(const Params& p, const int (&row)[2], bool has_keys) {
    const char* const query = reinterpret_cast<const char*>(p.query + blockIdx.y * p.query_head_stride);
    uint4 chunks[S::kPairs][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int pair = 0; pair < S::kPairs; ++pair) {
        const int chunk = 4 * pair + t;
        const char* const address = query + static_cast<i64>(row[half]) * p.query_row_bytes;
        chunks[pair][half] = has_keys && row[half] < p.num_rows && chunk < kDim / 8
                                 ? __ldg(reinterpret_cast<const uint4*>(address) + chunk)
                                 : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int pair = 0; pair < S::kPairs; ++pair) {
      const uint4 top = chunks[pair][0], bottom = chunks[pair][1];
      const u32 words[2][4] = {{top.x, bottom.x, top.y, bottom.y}, {top.z, bottom.z, top.w, bottom.w}};
#pragma unroll
      for (int r = 0; r < 8; ++r) frag_query[pair][r / 4][r % 4] = words[r / 4][r % 4] ^ p.sign_bits;  // [10]
    }
  }

  // SDDMM: C fragments of keys g and g + 8, four independent chains of mma. Rows of K past the last key hold old data;
  // no bit is set for them.
  __device__ __forceinline__ void scores(float (&score)[2][4], u32 stage) const {
    const u32 row = g * S::kKeyRow_bytes + kChunk_bytes * t, swizzle = S::key_swizzle(g);
    const u32 lane_key[2] = {row + swizzle, row - swizzle};  // even and odd pairs: (64 * pair) ^ swizzle
    float odd_score[2][4] = {};
#pragma unroll
    for (int e = 0; e < 8; ++e) score[e / 4][e % 4] = 0.0f;
#pragma unroll
    for (int pair = 0; pair < S::kPairs; ++pair) {
      const u32(&a)[2][4] = frag_query[pair];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 b = ld_shared_v4_b32(stage + lane_key[pair % 2] + tile * kTileN * S::kKeyRow_bytes + 64 * pair);
        mma_m16n8k16<kIn>(score[tile], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
        mma_m16n8k16<kIn>(odd_score[tile], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
      }
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) score[0][e] += odd_score[0][e], score[1][e] += odd_score[1][e];
  }

  // Scores without an edge become -infinity.
  __device__ __forceinline__ void mask(float (&score)[2][4], u32 record) const {
    const u32 bits = ld_shared_b32(record + kBitmap + sizeof(u32) * g) >> (2 * t);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = score[tile][2 * half + e];
          x = bits >> (16 * half + 8 * tile + e) & 1 ? x : negative_infinity();
        }
      }
    }
  }

  // E = exp(scale * (score - max)) as the A fragment of SpMM; rescales O and the sums where the maximum grows.
  __device__ __forceinline__ void online_softmax(u32 (&prob)[4], const float (&score)[2][4]) {
    float new_max[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      new_max[half] = max[half];
#pragma unroll
      for (int e = 0; e < 4; ++e) new_max[half] = fmaxf(new_max[half], score[e / 2][2 * half + e % 2]);
      new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(kFullWarp, new_max[half], 1));
      new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(kFullWarp, new_max[half], 2));
    }
    rescale(new_max);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      max[half] = new_max[half];
      const float shift = max[half] == negative_infinity() ? 0.0f : max[half] * scale_log2e;  // [7]
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float e0 = ex2_approx_ftz(fmaf(score[tile][2 * half], scale_log2e, -shift));
        const float e1 = ex2_approx_ftz(fmaf(score[tile][2 * half + 1], scale_log2e, -shift));
        prob[2 * tile + half] = cvt_rn_x2<kIn>(e0, e1);
      }
    }
  }

  // Skipped by the whole warp where no maximum grows, and for the first edges of a row: O and the sum are still 0. [7]
  __device__ __forceinline__ void rescale(const float (&new_max)[2]) {
    const auto grows = [&](int half) { return new_max[half] > max[half] && max[half] != negative_infinity(); };
    if (!__any_sync(kFullWarp, grows(0) || grows(1))) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float factor = grows(half) ? ex2_approx_ftz((max[half] - new_max[half]) * scale_log2e) : 1.0f;
      sum[2 * half] *= factor;
#pragma unroll
      for (int tile = 0; tile < 2 * S::kSlices; ++tile) {
        out[tile][2 * half] *= factor;
        out[tile][2 * half + 1] *= factor;
      }
    }
  }

  // SpMM: O += E V, sums += E. ldmatrix: matrices (keys 0-7, 8-15) x (low, high eight dimensions), keys innermost. In
  // place of rows past the last key it reads the last one, whose weight there is 0. [6]
  __device__ __forceinline__ void accumulate(const u32 (&prob)[4], u32 stage, int last_key) {
    const u32 ones = cvt_rn_x2<kIn>(1.0f, 1.0f);
    mma_m16n8k16<kIn>(sum, prob[0], prob[1], prob[2], prob[3], ones, ones);
    const u32 row = min(lane % 16, last_key);
    const u32 lane_value = stage + sizeof(S::key) + row * S::kValueRow_bytes +
                           (lane / 16 * kChunk_bytes ^ S::value_swizzle(row));
#pragma unroll
    for (int slice = 0; slice < S::kSlices; ++slice) {
      u32 b[4];
      constexpr u32 kPermuted_bytes = kChunk_bytes * S::kSpread;
      const u32 offset = 32 * slice;
      ldmatrix_x4_trans(b, (lane_value ^ offset % kPermuted_bytes) + offset / kPermuted_bytes * kPermuted_bytes);
      mma_m16n8k16<kIn>(out[2 * slice], prob[0], prob[1], prob[2], prob[3], b[0], b[1]);
      mma_m16n8k16<kIn>(out[2 * slice + 1], prob[0], prob[1], prob[2], prob[3], b[2], b[3]);
    }
  }

  // Epilogue of kWarp: O / sum to the output.
  template <Element kOut>
  __device__ __forceinline__ void store_output(const Params& p, const int (&row)[2]) const {
    void* const output = p.output;
    float* const lse = p.lse;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = inverse_or_zero(sum[2 * half]);
      const bool in_range = row[half] < p.num_rows;
      const i64 row_of_head = static_cast<i64>(row[half]) * gridDim.y + blockIdx.y;
      if (lse && t == 0 && in_range) lse[row_of_head] = log_sum_exp(max[half] * scale_log2e, sum[2 * half]);
#pragma unroll
      for (int slice = 0; slice < S::kSlices; ++slice) {
        const float* left = out[2 * slice] + 2 * half;
        const float* right = out[2 * slice + 1] + 2 * half;
        store_slice<kDim, kOut>(output, row_of_head * kDim, in_range, slice, t,
                                make_float2(left[0] * inverse, left[1] * inverse),
                                make_float2(right[0] * inverse, right[1] * inverse));
      }
    }
  }

  // Epilogue of kBlock and of a split: O, maxima and sums to shared memory.
  __device__ __forceinline__ void store_partial(Partial<kDim>& partial) const {
#pragma unroll
    for (int slice = 0; slice < S::kSlices; ++slice) {
      PartialSlice& target = partial.slices[slice];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float* c = out[2 * slice + tile];
        target.out[tile][lane] = make_float4(c[0], c[1], c[2], c[3]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (t == 0) target.max[8 * half + g] = max[half] * scale_log2e, target.sum[8 * half + g] = sum[2 * half];
      }
    }
  }
};

template <Element kIn, Element kOut, int kDim, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpSize, (kDim <= 64 ? 16 : kDim <= 128 ? 12 : 8) / kWarps)  // no spills
    fused3s(const __grid_constant__ Params p) {
  using S = Stage<kDim>;
  using Shared = SharedMemory<kDim, kWarps>;
  constexpr u32 kStage_bytes = sizeof(S);
  static_assert(kDim % 8 == 0 && kDim <= 256, "rows of whole chunks");
  static_assert(kStages == 2, "the timeline above; the other stage and the other record are found by - and ^");
  static_assert(sizeof(Partial<kDim>) <= sizeof(Shared::ring[0]), "a partial fits the ring of a warp");
  static_assert(sizeof(Shared::ring) % sizeof(Shared::records[0]) == 0, "record addresses by ^ and &");

  extern __shared__ __align__(1024) uint4 smem[];
  Shared& shared = *reinterpret_cast<Shared*>(smem);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const u32 ring = shared_address(shared.ring[warp]);
  const u32 records = shared_address(shared.records[warp]);

  const WorkItem* const item = p.work_items + blockIdx.x * kWarps + warp;
  cp_async_16(records + kChunk_bytes * lane, reinterpret_cast<const char*>(item) + kChunk_bytes * lane,
              lane < static_cast<int>(sizeof(WorkItem)) / kChunk_bytes ? 0 : -1);
  cp_async_commit_group();
  for (int stage = 0; stage < kStages; ++stage) zero_padding(shared.ring[warp][stage], lane);
  Gather<kDim> gather(p, lane);
  RowWindow<kIn, kDim> rows(lane, p.scale_log2e);
  const WindowRows window_rows{p.row_ids, p.num_rows};

  cp_async_wait_group<0>();
  __syncwarp();  // [3]
  const uint4 range = ld_shared_v4_b32(records + kRange);
  int row[2];  // of Q and O; num_rows and more: none
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row[half] = static_cast<int>(range.z) < 0 ? p.num_rows : window_rows.of(range.z, 8 * half + rows.g);
  }
  griddepcontrol_wait();  // [1]
  griddepcontrol_launch_dependents();
  const int count = range.y, num_keys = range.w;
  gather.start(range.x, count);
#pragma unroll
  for (int i = 0; i < kStages; ++i) gather(i, records + i * kRecord_bytes, ring + i * kStage_bytes);
  rows.load_query(p, row, count > 0);

  u32 record = records, stage = ring;
  for (int i = 0; i < count; ++i) {
    cp_async_wait_group<kStages - 1>();
    __syncwarp();  // [3]
    float score[2][4];
    rows.scores(score, stage);
    rows.mask(score, record);
    u32 prob[4];
    rows.online_softmax(prob, score);
    rows.accumulate(prob, stage, (i + 1 < count ? kTileKeys : num_keys) - 1);
    __syncwarp();  // [4]
    gather(i + kStages, record ^ kStages * kRecord_bytes, stage);
    stage = 2 * ring + kStage_bytes - stage;  // the other one
    constexpr u32 kMask = kRecords * kRecord_bytes - 1;
    record = (record & ~kMask) | ((record + kRecord_bytes) & kMask);
  }

  const uint4 split = ld_shared_v4_b32(records + kSplit);  // [5]
  if (static_cast<int>(split.x) == kWarp) {
    rows.template store_output<kOut>(p, row);
    return;
  }
  rows.store_partial(*reinterpret_cast<Partial<kDim>*>(shared.ring[warp]));  // [8]
  const int window = ld_shared_v4_b32(records + kRange).z;
  __syncthreads();  // [9]
  combine_block<kDim, kWarps, kOut>(reinterpret_cast<const char*>(shared.ring), sizeof(shared.ring[0]),
                                    static_cast<Partial<kDim>*>(p.partial), p.semaphores, split.x, split.y, split.z,
                                    p.output, p.lse, window_rows, window, warp, lane);
}
