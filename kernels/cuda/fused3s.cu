// O = softmax(scale * Q K^T masked by A) V, made for the rate at which rows of K and V can be gathered. The schedule
// (kernels/schedule.py) lists A as chunks, 16 x 16 blocks of BSB; a chunk is one k-step of SpMM and the unit of the
// pipeline.
//
//   chunks               [num_tcbs + 2]     struct Chunk: the keys and the bitmap
//   warp_jobs            [num_blocks][kWarps]  struct WarpJob: which chunks each warp takes
//   row_ids              [num_row_windows][16] row of Q and O of each row of the windows, or null: 16 w, 16 w + 1, ...
//   query, key, value    [N][H][kDim]       16-bit, any row and head stride, kDim contiguous, 16-byte aligned
//   output               [num_rows][H][kDim]  contiguous; every element is written
//   lse                  [num_rows][H]      log of the sum of exp(scores), -infinity for an empty row; may be null
//   partial              [num_slots][H]     Partial<kDim>: what each piece of a cut window comes to
//   arrived              [num_slots][H][kWarps]  zeros, before and after, to count the pieces of a window
//
// Grid (num_blocks, H), block kWarps warps. Blocks are of two kinds, which their jobs tell apart (WarpJob::finish):
//   own windows     every warp has a row window of its own; no barrier at all
//   shared window   the warps split the chunks of one heavy window, or of a piece of one, and add their parts up once,
//                   at the end, through shared memory. The result of a piece goes to `partial`; the block that
//                   brings the last one adds all of the window's up, always in the same order
//
// A warp gathers K and V by cp.async into a ring of kStages chunks in shared memory that belongs to it alone. Q, the
// scores, E and O stay in registers. A chunk with fewer than 16 keys copies only those.
//
// Shared memory of a warp (bytes at kDim = 128):
//   kStages of
//     key      16 rows x 256    4096   read 16 bytes a lane, rows g = 0, 1, ... by pieces t, t + 4, ...; odd rows have
//                                      their 64-byte halves exchanged (piece ^ 4), so that two rows cover all banks
//     value    16 rows x 256    4096   read by ldmatrix; piece p of row n lies at p ^ (n % 8), so that eight rows cover
//                                      all banks and each line of 128 bytes stays one (async_copy.cuh)
//   kRecords slots of 128 bytes, of which the first has in its last 32 what the warp does
//     Chunk                       96   arrives with the K and V of the chunk kStages before it; chunk i lies in slot
//                                      i % kRecords
// In the end the ring of each warp holds its part of a shared window.
#include "mma.cuh"
#include "async_copy.cuh"
#include "overlap.cuh"
#include "window_parts.cuh"

constexpr int kChunk = 16;

struct __align__(16) Chunk {
  int key[kChunk];         // -1 past the last one
  u32 bitmap[kTileM / 2];  // word g: row g in the lower half, row g + 8 in the upper one; bit j: column j
};

// Chunks `begin` to `begin + count` of a window. The first two come along, so that a warp waits once before it gathers,
// not twice; the whole lies as the slots of the chunks do in shared memory.
struct __align__(16) WarpJob {
  Chunk first;
  int begin;
  int count;       // 0 in an empty window, and where a shared window has no chunk for a warp
  int window;      // row window, or -1: nothing to do
  int num_keys;    // of the last chunk
  int finish;      // kDone, kShared, or the slot in `partial` for the part of a cut window
  int first_slot;  // of the pieces of the window that is cut, and their number
  int num_pieces;
  int unused;
  Chunk second;
};
constexpr int kDone = -1;    // the warp has all of the window
constexpr int kShared = -2;  // the block has

constexpr int kStages = 2;
constexpr int kRecords = 2 * kStages;
constexpr u32 kSlot = 128;  // bytes
constexpr u32 kBitmap = sizeof(int) * kChunk;  // of a chunk
// In a warp's first slot: begin, count, window and num_keys; finish, first_slot and num_pieces
constexpr u32 kTask = sizeof(Chunk);
constexpr u32 kResult = kTask + sizeof(uint4);

__device__ constexpr int next_power_of_two(int x) { return x <= 1 ? 1 : 2 * next_power_of_two((x + 1) / 2); }

template <int kDim>
struct Stage {
  static constexpr int kPairs = divide_up(kDim, 32);         // pairs of k-steps of SDDMM
  static constexpr int kSteps = divide_up(kDim, 16);         // pairs of n-tiles of SpMM
  static constexpr int kKeyPitch = kPairs * 64;              // bytes of a row
  static constexpr int kKeySwizzle = kPairs % 2 ? 0 : 64;    // an odd number of 64-byte pairs alternates banks itself
  static constexpr int kValuePitch = 2 * kSteps * 16;
  // Rows kPeriod apart start in the same bank, and kSpread pieces that follow each other never leave a bank's reach:
  // every kPeriod rows pieces are exchanged within kSpread.
  static constexpr int kPeriod = kSteps % 4 == 0 ? 1 : kSteps % 2 == 0 ? 2 : 4;
  static constexpr int kSpread = 8 / kPeriod;
  __device__ static constexpr u32 value_swizzle(u32 row) { return 16 * (row / kPeriod % kSpread); }
  unsigned char key[kChunk * kKeyPitch];
  unsigned char value[kChunk * kValuePitch];
};

template <Element kIn, Element kOut, int kDim, int kWarps>
__global__ void __launch_bounds__(kWarps* kWarpSize, (kDim <= 64 ? 16 : kDim <= 128 ? 12 : 8) / kWarps)  // no spills
    fused3s(const Chunk* __restrict__ chunks, const WarpJob* __restrict__ warp_jobs, const u16* __restrict__ query,
            const u16* __restrict__ key, const u16* __restrict__ value, void* __restrict__ output,
            float* __restrict__ lse, Partial<kDim>* partial, int* arrived, const int* __restrict__ row_ids,
            i64 query_head_stride, i64 key_head_stride, i64 value_head_stride, int query_row_bytes, int key_row_bytes,
            int value_row_bytes, int num_rows, u32 query_signs, float scale_log2e) {
  static_assert(kDim % 8 == 0 && kDim <= 256, "a row is made of whole 16-byte pieces");
  using WarpStage = Stage<kDim>;
  constexpr int kPairs = WarpStage::kPairs;
  constexpr int kSteps = WarpStage::kSteps;
  constexpr int kPieces = kDim / 8;  // 16-byte pieces of a row
  static_assert(sizeof(Partial<kDim>) <= kStages * sizeof(WarpStage), "a part is left in a ring");

  extern __shared__ __align__(1024) uint4 smem[];
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int g = lane / 4;
  const int t = lane % 4;
  WarpStage* const rings = reinterpret_cast<WarpStage*>(smem);
  WarpStage* const ring = rings + warp * kStages;
  // Slots of the records that belong to chunks kStages apart differ in one bit of their address.
  const u32 records = shared_address(rings + kWarps * kStages) + warp * kRecords * kSlot;

  query += blockIdx.y * query_head_stride;
  key += blockIdx.y * key_head_stride;
  value += blockIdx.y * value_head_stride;
  const char* const query_bytes = reinterpret_cast<const char*>(query);
  copy_async(records + 16 * lane, reinterpret_cast<const char*>(warp_jobs + blockIdx.x * kWarps + warp) + 16 * lane,
             lane < static_cast<int>(sizeof(WarpJob) / 16) ? 0 : -1);
  commit_copies();
  const WindowRows rows{row_ids, num_rows};

  // What pads kDim to whole steps is zero, and no copy touches it.
  for (int s = 0; s < kStages; ++s) {
    for (int n = lane; n < kChunk; n += kWarpSize) {
      for (int piece = kPieces; piece < 4 * kPairs; ++piece) {
        const int place = 16 * piece ^ (n % 2 * WarpStage::kKeySwizzle);
        *reinterpret_cast<uint4*>(ring[s].key + n * WarpStage::kKeyPitch + place) = make_uint4(0, 0, 0, 0);
      }
      for (int piece = kPieces; piece < 2 * kSteps; ++piece) {
        const int place = 16 * piece ^ WarpStage::value_swizzle(n);
        *reinterpret_cast<uint4*>(ring[s].value + n * WarpStage::kValuePitch + place) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // The producer. kLanesPerRow lanes, a power of two, read one row of K or V, 16 bytes each; those past a row's end sit
  // out. A lane always copies the same piece of the same kRowsPerLane rows, one after the other.
  constexpr int kLanesPerRow = kPieces == 1 ? 2 : next_power_of_two(kPieces);
  constexpr int kRowsPerLane = kChunk * kLanesPerRow / kWarpSize;
  const int lane_row = lane / kLanesPerRow * kRowsPerLane;
  const int lane_piece = lane % kLanesPerRow;
  const int sits_out = lane_piece < kPieces ? 0 : -1;
  const char* const key_lane = reinterpret_cast<const char*>(key) + 16 * lane_piece;
  const char* const value_lane = reinterpret_cast<const char*>(value) + 16 * lane_piece;
  const u32 key_place = lane_row * WarpStage::kKeyPitch + 16 * lane_piece;
  const u32 value_place = lane_row * WarpStage::kValuePitch + sizeof(WarpStage::key) +
                          (16 * lane_piece ^ WarpStage::value_swizzle(lane_row));
  const u32 ring_address = shared_address(ring);

  wait_copies<0>();
  __syncwarp();
  const uint4 task = load_shared(records + kTask);
  int row[2];  // of Q and O, the window's rows g and g + 8; num_rows and more stand for none
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    row[half] = static_cast<int>(task.z) < 0 ? num_rows : rows.of(task.z, 8 * half + g);
  }
  wait_for_previous();  // which has written Q, K and V, or reads what is written here
  const int count = task.y, last_key = static_cast<int>(task.w) - 1;
  // The lane's piece of the record that is fetched next.
  const char* next_record = reinterpret_cast<const char*>(chunks + static_cast<int>(task.x) + kStages) + 16 * lane;
  const int fetched = lane < static_cast<int>(sizeof(Chunk) / 16) ? count : 0;

  // Gathers chunk i, whose record is in `slot`, into `stage`, and fetches the record of the chunk kStages after it.
  const auto produce = [&](int i, u32 slot, u32 stage) {
    if (i < count) {
      int source[kRowsPerLane];
      load_shared(source, slot + sizeof(int) * lane_row);
#pragma unroll
      for (int n = 0; n < kRowsPerLane; ++n) {
        const int wanted = source[n] | sits_out;
        // lane_row is even wherever a lane has several rows, so that the row's parity is that of n.
        const u32 exchange = (kRowsPerLane == 1 ? lane_row : n) % 2 * WarpStage::kKeySwizzle;
        copy_async(((stage + key_place) ^ exchange) + n * WarpStage::kKeyPitch,
                   key_lane + static_cast<i64>(source[n]) * key_row_bytes, wanted);
        copy_async(((stage + value_place) ^ WarpStage::value_swizzle(n)) + n * WarpStage::kValuePitch,
                   value_lane + static_cast<i64>(source[n]) * value_row_bytes, wanted);
      }
      copy_async((slot ^ kStages * kSlot) + 16 * lane, next_record, fetched - (i + kStages + 1));
      next_record += sizeof(Chunk);
    }
    commit_copies();  // an empty group keeps the count of pending groups right
  };
#pragma unroll
  for (int i = 0; i < kStages; ++i) {
    produce(i, records + i * kSlot, ring_address + i * static_cast<u32>(sizeof(WarpStage)));
  }

  // Q: A registers of two k-steps, words of pieces t, t + 4, ... (register remapping). An A operand is four registers in
  // a row, of two rows of Q; a load fills four with one row. The xor, which changes the signs where the scale is
  // negative, moves them once; plain copies the compiler would repeat before every mma.
  u32 frag_query[kPairs][2][4];
  {
    uint4 pieces[kPairs][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        const int piece = 4 * pair + t;
        const char* const address = query_bytes + static_cast<i64>(row[half]) * query_row_bytes;
        pieces[pair][half] = count > 0 && row[half] < num_rows && piece < kPieces
                                 ? __ldg(reinterpret_cast<const uint4*>(address) + piece)
                                 : make_uint4(0, 0, 0, 0);
      }
    }
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const uint4 top = pieces[pair][0], bottom = pieces[pair][1];
      const u32 words[2][4] = {{top.x, bottom.x, top.y, bottom.y}, {top.z, bottom.z, top.w, bottom.w}};
#pragma unroll
      for (int r = 0; r < 8; ++r) frag_query[pair][r / 4][r % 4] = words[r / 4][r % 4] ^ query_signs;
    }
  }

  float out[2 * kSteps][4] = {};
  float maximum[2] = {negative_infinity(), negative_infinity()};  // of the scores of rows g and g + 8, not yet scaled
  // E times a column of ones: row sums of E as rounded, so that a row's largest weight loses nothing to the rounding.
  float row_sums[4] = {};

  // One chunk: the scores, the weights, and what they add to O.
  const int exchange = g % 2 * WarpStage::kKeySwizzle;  // of odd rows even pairs of k-steps lie one on, odd one back
  const u32 key_fragments[2] = {g * WarpStage::kKeyPitch + 16 * t + exchange,
                                g * WarpStage::kKeyPitch + 16 * t - exchange};
  const auto work = [&](u32 stage, u32 slot, int last_key) {
    // SDDMM: keys g and g + 8, 32 dimensions at a time. Rows past the last key hold whatever was there; no bit is set
    // for them.
    float score[2][4] = {}, more[2][4] = {};
#pragma unroll
    for (int pair = 0; pair < kPairs; ++pair) {
      const u32(&a)[2][4] = frag_query[pair];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const uint4 b =
            load_shared(stage + key_fragments[pair % 2] + tile * kTileN * WarpStage::kKeyPitch + 64 * pair);
        mma<kIn>(score[tile], a[0][0], a[0][1], a[0][2], a[0][3], b.x, b.y);
        mma<kIn>(more[tile], a[1][0], a[1][1], a[1][2], a[1][3], b.z, b.w);
      }
    }

#pragma unroll
    for (int e = 0; e < 4; ++e) score[0][e] += more[0][e], score[1][e] += more[1][e];

    // Mask and online softmax
    const u32 bits = load_shared_word(slot + kBitmap + sizeof(u32) * g) >> (2 * t);
    float new_max[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      new_max[half] = maximum[half];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
#pragma unroll
        for (int e = 0; e < 2; ++e) {
          float& x = score[tile][2 * half + e];
          x = bits >> (16 * half + 8 * tile + e) & 1 ? x : negative_infinity();
          new_max[half] = fmaxf(new_max[half], x);
        }
      }
      new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(kFullWarp, new_max[half], 1));
      new_max[half] = fmaxf(new_max[half], __shfl_xor_sync(kFullWarp, new_max[half], 2));
    }
    // What a row without an edge so far has, zeros, needs no new scale.
    const auto grows = [&](int half) {
      return new_max[half] > maximum[half] && maximum[half] != negative_infinity();
    };
    if (__any_sync(kFullWarp, grows(0) || grows(1))) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float rescale = grows(half) ? exp2_approx((maximum[half] - new_max[half]) * scale_log2e) : 1.0f;
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
      maximum[half] = new_max[half];
      // A row without an edge so far keeps -infinity; subtracting it would give NaN.
      const float shift = maximum[half] == negative_infinity() ? 0.0f : maximum[half] * scale_log2e;
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float e0 = exp2_approx(fmaf(score[tile][2 * half], scale_log2e, -shift));
        const float e1 = exp2_approx(fmaf(score[tile][2 * half + 1], scale_log2e, -shift));
        prob[2 * tile + half] = pack<kIn>(e0, e1);
      }
    }

    const u32 ones = pack<kIn>(1.0f, 1.0f);
    mma<kIn>(row_sums, prob[0], prob[1], prob[2], prob[3], ones, ones);

    // SpMM: matrices (keys 0-7, 8-15) x (low, high eight dimensions), keys innermost. In place of rows past the last
    // key, which may hold anything, the last one is read again: 0 times NaN would not be 0.
    const u32 value_row = min(lane % 16, last_key);
    const u32 value_pieces = stage + sizeof(WarpStage::key) + value_row * WarpStage::kValuePitch +
                             (lane / 16 * 16 ^ WarpStage::value_swizzle(value_row));
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      u32 b[4];
      constexpr int kBytes = 16 * WarpStage::kSpread;  // within which pieces are exchanged
      load_transposed(b, (value_pieces ^ (32 * step % kBytes)) + 32 * step / kBytes * kBytes);
      mma<kIn>(out[2 * step], prob[0], prob[1], prob[2], prob[3], b[0], b[1]);
      mma<kIn>(out[2 * step + 1], prob[0], prob[1], prob[2], prob[3], b[2], b[3]);
    }
  };

  u32 slot = records, stage = ring_address;
  for (int i = 0; i < count; ++i) {
    wait_copies<kStages - 1>();
    __syncwarp();
    work(stage, slot, i + 1 < count ? kChunk - 1 : last_key);
    __syncwarp();  // every lane has read the stage and the record
    produce(i + kStages, slot ^ kStages * kSlot, stage);
    stage = 2 * ring_address + static_cast<u32>(sizeof(WarpStage)) - stage;  // the other one
    constexpr u32 kPlaces = kRecords * kSlot - 1;  // a warp's slots are aligned to the size of all of them
    slot = (slot & ~kPlaces) | ((slot + kSlot) & kPlaces);
  }

  const uint4 result = load_shared(records + kResult);
  const int finish = result.x;
  if (finish == kDone) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = inverse_or_zero(row_sums[2 * half]);
      const bool in_range = row[half] < num_rows;
      const i64 row_of_head = static_cast<i64>(row[half]) * gridDim.y + blockIdx.y;
      if (lse && t == 0 && in_range) {
        lse[row_of_head] = log_sum_exp(maximum[half] * scale_log2e, row_sums[2 * half]);
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        const float* left = out[2 * step] + 2 * half;
        const float* right = out[2 * step + 1] + 2 * half;
        store_step<kDim, kOut>(output, row_of_head * kDim, in_range, step, t,
                               make_float2(left[0] * inverse, left[1] * inverse),
                               make_float2(right[0] * inverse, right[1] * inverse));
      }
    }
    return;
  }

  auto* const mine = reinterpret_cast<Partial<kDim>*>(ring);
#pragma unroll
  for (int step = 0; step < kSteps; ++step) {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const float* c = out[2 * step + tile];
      mine->step[step].out[tile][lane] = make_float4(c[0], c[1], c[2], c[3]);
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      if (t == 0) {
        mine->step[step].maximum[8 * half + g] = maximum[half] * scale_log2e;
        mine->step[step].sum[8 * half + g] = row_sums[2 * half];
      }
    }
  }
  const int window = load_shared(records + kTask).z;
  __syncthreads();
  finish_shared<kDim, kWarps, kOut>(reinterpret_cast<const char*>(rings), kStages * sizeof(WarpStage), partial, arrived,
                                    finish, result.y, result.z, output, lse, rows, window, warp, lane);
}
