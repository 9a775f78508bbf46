// O = softmax(scale * Q K^T masked by A) V, made for the rate at which rows of K and V can be gathered. A is in BSB
// with 16 x 16 blocks; one such block is called a chunk: 16 queries by 16 keys, one k-step of SpMM, the unit of the
// pipeline.
//
//   col_sparse_to_dense  [num_chunks][16]   key of each chunk column; padding repeats the window's last key
//   bitmap               [num_chunks][16]   two bytes a row, bit j = column j
//   chunk_window         [num_chunks]       row window of each chunk
//   warp_range           [num_blocks][kWarps]  first chunk, end chunk, first row window, end row window of each warp
//   block_slot           [num_blocks]       kOwnWindows, kSharedWindow, or the block's slot in `partial`
//   query, key, value    [N][H][kDim]       16-bit, any row and head stride, kDim contiguous, 16-byte aligned
//   output               [num_rows][H][kDim]  contiguous; every element is written
//   partial              [num_slots][H]     Partial<kDim>: the part of a window that is cut between blocks
//
// Grid (num_blocks, H), block kWarps warps. The plan gives each block one of two jobs:
//   own windows     every warp walks over row windows of its own, consecutive and whole; no barrier at all
//   shared window   the warps split the chunks of one heavy window, or of a piece of one, and add their parts up once,
//                   at the end, through shared memory; pieces go on to `partial` and the merge kernel below
//
// A warp gathers K and V by cp.async into a ring of kStages chunks in shared memory that belongs to it alone. The ring
// runs on across window borders: neither the start nor the end of a window drains it. Q, the scores, E and O stay in
// registers. kCacheL1 gathers by cp.async.ca, which on Hopper brings more out of L2 than .cg does.
// A chunk with fewer than 16 keys copies only those; for the others the fragments read the last key again, with E = 0.
//
// Shared memory of a warp and stage (bytes at kDim = 128):
//   key      16 rows x 256    4096   read 16 bytes a lane, rows g = 0, 1, ... by pieces t, t + 4, ...; odd rows have
//                                    their 64-byte halves exchanged (piece ^ 4), so that two rows cover all banks
//   value    16 rows x 272    4352   read by ldmatrix; 17 pieces a row put eight rows into different banks
//   bitmap   16 rows x 2        32
//   window, keys                 8   row window and number of keys, padded to 16
#include "mma.cuh"
#include "async_copy.cuh"
#include "window_parts.cuh"

constexpr int kChunk = 16;
constexpr int kOwnWindows = -2;
constexpr int kSharedWindow = -1;

__device__ constexpr int next_power_of_two(int x) { return x <= 1 ? 1 : 2 * next_power_of_two((x + 1) / 2); }

template <int kDim>
struct Stage {
  static constexpr int kPairs = divide_up(kDim, 32);         // pairs of k-steps of SDDMM
  static constexpr int kSteps = divide_up(kDim, 16);         // pairs of n-tiles of SpMM
  static constexpr int kKeyPitch = kPairs * 64;              // bytes of a row
  static constexpr int kKeySwizzle = kPairs % 2 ? 0 : 4;     // an odd number of 64-byte pairs alternates banks itself
  static constexpr int kValuePitch = (2 * kSteps + 1) * 16;
  unsigned char key[kChunk * kKeyPitch];
  unsigned char value[kChunk * kValuePitch];
  u32 bitmap[kTileM / 2];  // word i: rows 2i and 2i + 1
  int window;
  int num_keys;
  int unused[2];
};

template <Element kIn, Element kOut, int kDim, int kWarps, int kStages, bool kCacheL1>
__global__ void __launch_bounds__(kWarps* kWarpSize, (kDim <= 64 ? 16 : kDim <= 128 ? 12 : 8) / kWarps)  // no spills
    fused3s(const int* __restrict__ col_sparse_to_dense, const u8* __restrict__ bitmap,
            const int* __restrict__ chunk_window, const int4* __restrict__ warp_range,
            const int* __restrict__ block_slot, const u16* __restrict__ query, const u16* __restrict__ key,
            const u16* __restrict__ value, void* __restrict__ output, Partial<kDim>* __restrict__ partial,
            const int* __restrict__ tcb_row_offset, i64 query_head_stride, i64 key_head_stride, i64 value_head_stride,
            int query_row_bytes, int key_row_bytes, int value_row_bytes, int num_rows, float scale_log2e) {
  static_assert(kDim % 8 == 0 && kDim <= 256, "a row is made of whole 16-byte pieces");
  using WarpStage = Stage<kDim>;
  constexpr int kPairs = WarpStage::kPairs;
  constexpr int kSteps = WarpStage::kSteps;
  constexpr int kPieces = kDim / 8;  // 16-byte pieces of a row
  static_assert(sizeof(Partial<kDim>) <= kStages * sizeof(WarpStage), "a part is left in the warp's ring");

  extern __shared__ uint4 smem[];
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int g = lane / 4;
  const int t = lane % 4;
  WarpStage* const ring = reinterpret_cast<WarpStage*>(smem) + warp * kStages;

  query += blockIdx.y * query_head_stride;
  key += blockIdx.y * key_head_stride;
  value += blockIdx.y * value_head_stride;
  const char* const query_bytes = reinterpret_cast<const char*>(query);
  const u32 hidden_zero = static_cast<u32>(num_rows) >> 31;
  const int4 range = warp_range[blockIdx.x * kWarps + warp];
  const int slot = block_slot[blockIdx.x];
  const int begin = range.x;
  const int end = range.y;

  // What pads kDim to whole steps stays zero in every stage: no copy touches it.
  for (int s = 0; s < kStages; ++s) {
    for (int n = lane; n < kChunk; n += kWarpSize) {
      for (int piece = kPieces; piece < 4 * kPairs; ++piece) {
        const int place = piece ^ (n % 2 * WarpStage::kKeySwizzle);
        *reinterpret_cast<uint4*>(ring[s].key + n * WarpStage::kKeyPitch + place * 16) = make_uint4(0, 0, 0, 0);
      }
      for (int piece = kPieces; piece < 2 * kSteps; ++piece) {
        *reinterpret_cast<uint4*>(ring[s].value + n * WarpStage::kValuePitch + piece * 16) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // Rows without any edge.
  for (int first = range.z; first < range.w; first += kWarpSize) {
    const int window = first + lane;
    const bool empty = window < range.w && tcb_row_offset[window] == tcb_row_offset[window + 1];
    for (u32 left = __ballot_sync(kFullWarp, empty); left; left &= left - 1) {
      const i64 first_row = static_cast<i64>(first + __ffs(left) - 1) * kTileM;
      for (int half = 0; half < 2; ++half) {
        const i64 row = first_row + 8 * half + g;
        for (int step = 0; step < kSteps; ++step) {
          store_step<kDim, kOut>(output, (row * gridDim.y + blockIdx.y) * kDim, row < num_rows, step, t,
                                 make_float2(0.0f, 0.0f), make_float2(0.0f, 0.0f));
        }
      }
    }
  }

  // The producer. `keys` holds the keys of two chunks, the next one to gather in lanes 0 to 15; it is loaded two to
  // four chunks ahead, like `windows` (lanes 0 and 1).
  int produced = begin;
  bool second = false;
  const auto load_keys = [&](int chunk) {
    return chunk + lane / kChunk < end ? col_sparse_to_dense[static_cast<i64>(chunk) * kChunk + lane] : 0;
  };
  const auto load_windows = [&](int chunk) {
    return lane < 2 && chunk + lane < end ? chunk_window[chunk + lane] : 0;
  };
  int keys = load_keys(begin), next_keys = load_keys(begin + 2);
  int windows = load_windows(begin), next_windows = load_windows(begin + 2);

  // kLanesPerRow lanes, a power of two, read one row of K or V, 16 bytes each; those past the end of a row sit out. So
  // a lane keeps its piece and its place in a row, and everything that changes is a constant.
  constexpr int kLanesPerRow = next_power_of_two(kPieces);
  constexpr int kRowsAtOnce = kWarpSize / kLanesPerRow;
  const int lane_row = lane / kLanesPerRow;
  const int lane_piece = lane % kLanesPerRow;
  const char* const key_lane = reinterpret_cast<const char*>(key) + 16 * lane_piece;
  const char* const value_lane = reinterpret_cast<const char*>(value) + 16 * lane_piece;
  const u32 ring_address = shared_address(ring);
  const u32 key_place = lane_row * WarpStage::kKeyPitch + 16 * (lane_piece ^ (lane_row % 2 * WarpStage::kKeySwizzle));
  const u32 value_place = lane_row * WarpStage::kValuePitch + 16 * lane_piece + sizeof(WarpStage::key);

  const auto produce = [&](int s) {
    WarpStage& stage = ring[s];
    if (produced < end) {
      // A padding slot repeats the key before it; within a window keys ascend, so nothing else does.
      const int before = __shfl_up_sync(kFullWarp, keys, 1);
      const int num_keys = __popc(__ballot_sync(kFullWarp, lane == 0 || keys != before) & 0xffff);
      const u32 base = ring_address + s * static_cast<u32>(sizeof(WarpStage));
      const int lane_keys = lane_piece < kPieces ? num_keys - lane_row : 0;
#pragma unroll
      for (int i = 0; i < divide_up(kChunk, kRowsAtOnce); ++i) {
        const int source = __shfl_sync(kFullWarp, keys, i * kRowsAtOnce + lane_row);
        const bool wanted = i * kRowsAtOnce < lane_keys;
        const u32 exchange = kRowsAtOnce == 1 && i % 2 ? 16 * WarpStage::kKeySwizzle : 0;
        copy_async<kCacheL1>(base + (key_place ^ exchange) + i * kRowsAtOnce * WarpStage::kKeyPitch,
                             key_lane + static_cast<i64>(source) * key_row_bytes, wanted);
        copy_async<kCacheL1>(base + value_place + i * kRowsAtOnce * WarpStage::kValuePitch,
                             value_lane + static_cast<i64>(source) * value_row_bytes, wanted);
      }
      copy_async<kCacheL1>(shared_address(stage.bitmap) + 16 * lane,
                           bitmap + static_cast<i64>(produced) * 2 * kTileM + 16 * lane, lane < 2);
      if (lane == 0) *reinterpret_cast<int2*>(&stage.window) = make_int2(windows, num_keys);
      ++produced;
      keys = second ? next_keys : __shfl_down_sync(kFullWarp, keys, kChunk);
      windows = second ? next_windows : __shfl_down_sync(kFullWarp, windows, 1);
      if (second) {
        next_keys = load_keys(produced + 2);
        next_windows = load_windows(produced + 2);
      }
      second = !second;
    }
    commit_copies();  // an empty group keeps the count of pending groups right
  };

  u32 frag_query[kPairs][2][4];  // A registers of two k-steps: words of pieces t, t + 4, ... (register remapping)
  float out[2 * kSteps][4];
  float maximum[2];  // rows g and g + 8; scores are in units of log 2
  // E times a column of ones: row sums of E as rounded, so that a row's largest weight loses nothing to the rounding.
  float row_sums[4];
  const auto reset = [&] {
#pragma unroll
    for (int tile = 0; tile < 2 * kSteps; ++tile) {
#pragma unroll
      for (int e = 0; e < 4; ++e) out[tile][e] = 0.0f;
    }
#pragma unroll
    for (int e = 0; e < 4; ++e) row_sums[e] = 0.0f;
    maximum[0] = maximum[1] = negative_infinity();
  };
  const auto write_window = [&](int window) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = inverse_or_zero(row_sums[2 * half]);
      const i64 row = static_cast<i64>(window) * kTileM + 8 * half + g;
      const i64 row_start = (row * gridDim.y + blockIdx.y) * kDim;
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const float* left = out[2 * step] + 2 * half;
        const float* right = out[2 * step + 1] + 2 * half;
        store_step<kDim, kOut>(output, row_start, row < num_rows, step, t,
                               make_float2(left[0] * inverse, left[1] * inverse),
                               make_float2(right[0] * inverse, right[1] * inverse));
      }
    }
  };

  const auto load_query = [&](int window) {
    uint4 rows[kPairs][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 row = static_cast<i64>(window) * kTileM + 8 * half + g;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int piece = 4 * pair + t;
        rows[pair][half] = row < num_rows && piece < kPieces
                               ? __ldg(reinterpret_cast<const uint4*>(query_bytes + row * query_row_bytes) + piece)
                               : make_uint4(0, 0, 0, 0);
      }
    }
    // An A operand is four registers in a row, of two rows of Q; a load fills four with one row. The xor with a zero
    // that the compiler cannot see moves them once a window; plain copies it would repeat before every mma.
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const uint4 top = rows[pair][0], bottom = rows[pair][1];
      const u32 words[2][4] = {{top.x, bottom.x, top.y, bottom.y}, {top.z, bottom.z, top.w, bottom.w}};
#pragma unroll
      for (int r = 0; r < 8; ++r) frag_query[pair][r / 4][r % 4] = words[r / 4][r % 4] ^ hidden_zero;
    }
  };

#pragma unroll
  for (int s = 0; s < kStages; ++s) produce(s);

  int current = -1;
  int s = 0;
  reset();
  for (int chunk = begin; chunk < end; ++chunk) {
    wait_copies<kStages - 1>();
    __syncwarp();
    WarpStage& stage = ring[s];
    const int2 about = *reinterpret_cast<const int2*>(&stage.window);
    if (about.x != current) {
      if (current >= 0) write_window(current);
      reset();
      current = about.x;
      load_query(current);
    }
    const int last_key = about.y - 1;

    // SDDMM: keys g and g + 8, 32 dimensions at a time
    float score[2][4] = {};
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int row = min(8 * tile + g, last_key);
      const u32 key_row = shared_address(stage.key) + row * WarpStage::kKeyPitch + 16 * t;
      // 64-byte pairs of an odd row are exchanged where kKeySwizzle says so: even pairs lie one on, odd ones one back.
      const int exchange = row % 2 * WarpStage::kKeySwizzle * 16;
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const uint4 b = load_shared(key_row + (pair % 2 ? -exchange : exchange) + 64 * pair);
        const u32(&a)[2][4] = frag_query[pair];
        mma<kIn>(score[tile], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
        mma<kIn>(score[tile], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
      }
    }

    // Mask and online softmax
    float new_max[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 row_bits = reinterpret_cast<const u16*>(stage.bitmap)[8 * half + g] >> (2 * t);
      new_max[half] = maximum[half];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = score[tile][2 * half + e];
          x = row_bits >> (8 * tile + e) & 1 ? x * scale_log2e : negative_infinity();
          new_max[half] = fmaxf(new_max[half], x);
        }
      }
      new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(kFullWarp, new_max[half], 1));
      new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(kFullWarp, new_max[half], 2));
    }
    if (__any_sync(kFullWarp, new_max[0] > maximum[0] || new_max[1] > maximum[1])) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float rescale = new_max[half] == negative_infinity() ? 1.0f : exp2_approx(maximum[half] - new_max[half]);
        maximum[half] = new_max[half];
        row_sums[2 * half] *= rescale;
#pragma unroll
        for (int tile = 0; tile < 2 * kSteps; ++tile) {
          out[tile][2 * half] *= rescale;
          out[tile][2 * half + 1] *= rescale;
        }
      }
    }
    u32 prob[4];  // A fragment: tile 0 rows g, g + 8, tile 1 rows g, g + 8
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      // A row without an edge so far keeps -infinity; subtracting it would give NaN.
      const float shift = maximum[half] == negative_infinity() ? 0.0f : maximum[half];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float e0 = exp2_approx(score[tile][2 * half] - shift);
        const float e1 = exp2_approx(score[tile][2 * half + 1] - shift);
        prob[2 * tile + half] = pack<kIn>(e0, e1);
      }
    }

    const u32 ones = pack<kIn>(1.0f, 1.0f);
    mma<kIn>(row_sums, prob[0], prob[1], prob[2], prob[3], ones, ones);

    // SpMM: matrices (keys 0-7, 8-15) x (low, high eight dimensions), keys innermost
    const u32 value_row =
        shared_address(stage.value) + min(lane % 16, last_key) * WarpStage::kValuePitch + lane / 16 * 16;
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      u32 b[4];
      load_transposed(b, value_row + 32 * step);
      mma<kIn>(out[2 * step], prob[0], prob[1], prob[2], prob[3], b[0], b[1]);
      mma<kIn>(out[2 * step + 1], prob[0], prob[1], prob[2], prob[3], b[2], b[3]);
    }
    __syncwarp();  // every lane has read the stage
    produce(s);
    s = s + 1 == kStages ? 0 : s + 1;
  }

  if (slot == kOwnWindows) {
    if (current >= 0) write_window(current);
    return;
  }
  // A shared window: leave the part in the ring, which no copy writes any more, and add the parts up.
  wait_copies<0>();
  __syncwarp();
  Partial<kDim>* const mine = reinterpret_cast<Partial<kDim>*>(ring);
#pragma unroll
  for (int tile = 0; tile < 2 * kSteps; ++tile) {
    mine->out[tile][lane] = make_float4(out[tile][0], out[tile][1], out[tile][2], out[tile][3]);
  }
  if (t == 0) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      mine->maximum[8 * half + g] = maximum[half];
      mine->sum[8 * half + g] = row_sums[2 * half];
    }
  }
  __syncthreads();
  // The window of the block is that of warp 0, which always has a chunk.
  const i64 first_row = static_cast<i64>(chunk_window[warp_range[blockIdx.x * kWarps].x]) * kTileM;
  merge_parts<kDim, kWarps, kOut>(reinterpret_cast<const char*>(smem), kStages * sizeof(WarpStage), kWarps,
                                  slot == kSharedWindow ? nullptr : partial + (i64)slot * gridDim.y + blockIdx.y,
                                  output, first_row, num_rows, warp, lane);
}

// Adds up the parts of the windows that are cut between blocks. Grid (num_cut_windows, H), block kWarps warps.
//   cut_window  [num_cut_windows]      row window
//   cut_slot    [num_cut_windows + 1]  first slot of its parts in `partial`
template <Element kOut, int kDim, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    fused3s_merge(const int* __restrict__ cut_window, const int* __restrict__ cut_slot,
                  const Partial<kDim>* __restrict__ partial, void* __restrict__ output, int num_rows) {
  const int first = cut_slot[blockIdx.x];
  const int count = cut_slot[blockIdx.x + 1] - first;
  merge_parts<kDim, kWarps, kOut>(reinterpret_cast<const char*>(partial + (i64)first * gridDim.y + blockIdx.y),
                                  sizeof(Partial<kDim>) * gridDim.y, count, nullptr, output,
                                  static_cast<i64>(cut_window[blockIdx.x]) * kTileM, num_rows,
                                  threadIdx.x / kWarpSize, threadIdx.x % kWarpSize);
}
