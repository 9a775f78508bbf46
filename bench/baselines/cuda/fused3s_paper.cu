// O = softmax(scale * Q K^T masked by A) V, A in BSB with 16 x 8 TCBs: Algorithms 1 and 2 of the Fused3S paper.
//
// Grid (num_row_windows, H), kWarps warps per block: one block per row window and head (node-parallel). An iteration
// takes kWarps TCBs of the window:
//   SDDMM    a TCB per warp (split-column), or some of the dimensions of all TCBs per warp (split-row, kSplitRows)
//   softmax  a TCB per warp
//   SpMM     16-column blocks of O per warp (split-column)
// K and V go from global memory to fragments, without shared memory; Q, E and O are in shared memory. The last
// iteration writes O to global memory from its C registers. Pointers and shapes: struct Params.
//
// Shared memory (bytes at kDim = 128, kWarps = 8), in fragment order: lane L accesses bank L
//   query   [kDim/32][2][32] x 16 B   4,096  row half (0: rows g, 1: rows g + 8), lane; written once a window
//   prob    [kWarps][2][32] x 4 B     2,048  E of a TCB per warp: row half, lane
//   out     [kDim/16][8][32] x 4 B    8,192  O: the eight C registers of a 16-column block; used by one warp only
//   max     [16][kWarps] x 4 B          512  row maxima of each warp's TCB
//   sum     [16][kWarps] x 4 B          512  row sums of each warp's TCBs, written by the last iteration
// kSplitRows: Q in registers instead of `query`, and dynamic shared memory
//   partial_score [kWarps][kSplits][32] x 16 B  32,768  [TCB][warp][lane] S from the dimensions of a warp: C registers
//
// Barriers of an iteration
//   before SDDMM of the first iteration  every warp reads `query` (not with kSplitRows)
//   after `partial_score` (kSplitRows)   the warp of a TCB adds the partial scores of all warps
//   after `max`    every warp reads the maxima of all warps; also, `prob` of the last iteration and `query` or
//                  `partial_score` of this one have been read
//   after `prob`   SpMM of every warp reads E of all warps, and `sum`; also, `max` has been read
//
// Switches; results differ by rounding only
//   kReordered     row windows in row_window_order instead of 0, 1, 2, ...
//   kPermuted      register remapping of the paper: a lane loads 16 bytes of Q and K (4 of V) at once; the plain layout
//                  takes 4 (2) bytes at a time
//   kSplitRows     F3S_splitR of the paper: warps split the rows of K^T in SDDMM, not its columns. A warp needs a
//                  fraction of Q, but partial scores go through shared memory with one more barrier, and only as many
//                  warps work as there are k-steps: four at kDim = 64. An iteration has kWarps TCBs, as with split
//                  columns
//   kEdgeParallel  grid (num_blocks, H): each block takes tcbs_per_block consecutive TCBs, whichever windows they are
//                  of. A window of several blocks has a partial (max, sum, O) per block in global memory; the last
//                  block to arrive (semaphore) combines them in their order, so the bits are the same on every run
//   kClocked       writes `clocks`, for the active time of each SM. It needs no clock common to all SMs, and
//                  %globaltimer has steps of up to a microsecond
#include "common.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/special_registers.cuh"
#include "rows.cuh"
#include "tiles/split_kv.cuh"

struct Params {
  const int* tcb_row_offset;       // [num_row_windows + 1]  first TCB of each row window
  const int* col_sparse_to_dense;  // [num_tcbs][8]  key of each TCB column
  const u8* bitmap;                // [num_tcbs][16]  one byte per row, bit j: column j
  const int* row_window_order;     // [num_row_windows]  row windows by decreasing number of TCBs
  const u16* query;                // [num_rows][H][kDim]  16-bit, any row and head stride, rows 16-byte aligned
  const u16* key;                  // [num_cols][H][kDim]  as query
  const u16* value;                // [num_cols][H][kDim]  as query
  void* output;                    // [num_rows][H][kDim]  contiguous; every element is written
  i64* clocks;                     // [H][num_blocks][3]  SM, its clock at the start and end of a block; kClocked
  void* partial;                   // [num_blocks][H][2] Partial: window continued, window begun; kEdgeParallel
  int* semaphores;                 // [num_blocks][H][kWarps], 0: of the window begun in a block; kEdgeParallel
  i64 query_row_stride;            // elements
  i64 query_head_stride;
  i64 key_head_stride;
  i64 value_head_stride;
  int key_row_bytes;               // row strides in 32 bits: the address of a row takes one instruction
  int value_row_bytes;
  int num_rows;
  float scale_log2e;  // scale * log2(e)
  int num_row_windows;
  int num_tcbs;
  int tcbs_per_block;  // kEdgeParallel
};

// Row `row` of K or V, whose rows are row_bytes apart.
__device__ __forceinline__ const u16* row_of(const u16* rows, int row, int row_bytes) {
  return reinterpret_cast<const u16*>(reinterpret_cast<const u8*>(rows) + static_cast<i64>(row) * row_bytes);
}

// Words of a row for one k-step of SDDMM in the plain layout, dimensions 16 step to 16 step + 15: b0 and b1 for K, a0
// (or a1) and a2 (or a3) for Q. Dimensions past kDim are zero.
template <int kDim>
__device__ __forceinline__ uint2 load_step_words(const u16* row, int step, int t) {
  uint2 words = make_uint2(0, 0);
  const int d = kTileK * step + 2 * t;
  if (d < kDim) words.x = __ldg(reinterpret_cast<const u32*>(row + d));
  if (d + 8 < kDim) words.y = __ldg(reinterpret_cast<const u32*>(row + d + 8));
  return words;
}

// Words of a row for k-steps 2s and 2s + 1 of SDDMM, dimensions 32s to 32s + 31: (b0, b1) of both for K, (a0 or a1, a2
// or a3) of both for Q. Dimensions past kDim are zero. Register remapping:
//
//   word        x          y          z          w
//   plain       2t, +1     2t+8, +9   2t+16,+17  2t+24,+25     four 4-byte loads
//   permuted    8t, +1     8t+2, +3   8t+4, +5   8t+6, +7      one 16-byte load; any order of k gives the same sum
template <int kDim, bool kPermuted>
__device__ __forceinline__ uint4 load_pair_words(const u16* row, int s, int t) {
  if constexpr (kPermuted) {
    return load_row_words<kDim>(row, s, t);
  } else {
    const uint2 even = load_step_words<kDim>(row, 2 * s, t);
    const uint2 odd = load_step_words<kDim>(row, 2 * s + 1, t);
    return make_uint4(even.x, even.y, odd.x, odd.y);
  }
}

// Split-row SDDMM: each of kSplits warps takes kSteps neighbouring k-steps; those of the last warp may lie past kDim.
template <int kDim, int kWarps>
struct RowSplit {
  static constexpr int kAllSteps = divide_up(kDim, kTileK);
  static constexpr int kSteps = divide_up(kAllSteps, kWarps);
  static constexpr int kSplits = divide_up(kAllSteps, kSteps);
};

extern __shared__ float4 smem_partial_score[];  // [kWarps][kSplits][32], only with kSplitRows

// Split-row SDDMM: S of each TCB of the iteration from the dimensions of this warp, to smem_partial_score.
template <Element kIn, int kDim, int kWarps>
__device__ __forceinline__ void multiply_split_rows(const uint2 (&frag_query)[RowSplit<kDim, kWarps>::kSteps][2],
                                                    const u16* key, int key_row_bytes, const int* tcb_columns,
                                                    int num_active, int warp, int lane) {
  using Split = RowSplit<kDim, kWarps>;
  if (warp >= Split::kSplits) return;
  const int g = lane / 4;
  const int t = lane % 4;
  // Separate loops: the loads of all TCBs are in flight together.
  int column[kWarps];
#pragma unroll
  for (int tcb = 0; tcb < kWarps; ++tcb) {
    column[tcb] = tcb < num_active ? tcb_columns[tcb * kTileN + g] : 0;
  }
  uint2 frag_key[kWarps][Split::kSteps];
#pragma unroll
  for (int tcb = 0; tcb < kWarps; ++tcb) {
    const u16* key_row = row_of(key, column[tcb], key_row_bytes);
#pragma unroll
    for (int i = 0; i < Split::kSteps; ++i) {
      frag_key[tcb][i] = make_uint2(0, 0);
      if (tcb < num_active) frag_key[tcb][i] = load_step_words<kDim>(key_row, warp * Split::kSteps + i, t);
    }
  }
#pragma unroll
  for (int tcb = 0; tcb < kWarps; ++tcb) {
    if (tcb < num_active) {
      float partial[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < Split::kSteps; ++i) {
        const uint2 top = frag_query[i][0], bottom = frag_query[i][1];
        mma_m16n8k16<kIn>(partial, top.x, bottom.x, top.y, bottom.y, frag_key[tcb][i].x, frag_key[tcb][i].y);
      }
      smem_partial_score[(tcb * Split::kSplits + warp) * kWarpSize + lane] =
          make_float4(partial[0], partial[1], partial[2], partial[3]);
    }
  }
}

// S of the warp's TCB: the partial scores of all warps, added in the order of the warps.
template <int kSplits>
__device__ __forceinline__ void add_partial_scores(float (&dot)[4], int warp, int lane) {
#pragma unroll
  for (int j = 0; j < 4; ++j) dot[j] = 0.0f;
#pragma unroll
  for (int split = 0; split < kSplits; ++split) {
    const float4 partial = smem_partial_score[(warp * kSplits + split) * kWarpSize + lane];
    dot[0] += partial.x;
    dot[1] += partial.y;
    dot[2] += partial.z;
    dot[3] += partial.w;
  }
}

// Bit masks of rows g and g + 8 of a TCB.
__device__ __forceinline__ void load_edges(u32 (&edges)[2], const u8* bitmap, i64 tcb, int g) {
  edges[0] = bitmap[tcb * kTileM + g];
  edges[1] = bitmap[tcb * kTileM + 8 + g];
}

// B fragments of two n-tiles of SpMM, output dimensions 16i to 16i + 15, from V's rows of keys 2t, 2t+1, 2t+8, 2t+9:
//
//              n-tile 0, column n    n-tile 1, column n
//   plain      16i + n               16i + 8 + n             eight 2-byte loads
//   permuted   16i + 2n              16i + 2n + 1            four 4-byte loads
struct ValueFragments {
  u32 b[2][2];  // [n-tile][register]
};

template <int kDim, bool kPermuted>
__device__ __forceinline__ ValueFragments load_value(const u16* const (&row)[4], int i, int g) {
  ValueFragments fragments;
  if constexpr (kPermuted) {
    u32 word[4] = {0, 0, 0, 0};
    const int d = 16 * i + 2 * g;
    if (d < kDim) {
#pragma unroll
      for (int j = 0; j < 4; ++j) word[j] = __ldg(reinterpret_cast<const u32*>(row[j] + d));
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      fragments.b[0][half] = low_halves(word[2 * half], word[2 * half + 1]);
      fragments.b[1][half] = high_halves(word[2 * half], word[2 * half + 1]);
    }
  } else {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int d = 16 * i + 8 * tile + g;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        fragments.b[tile][half] = 0;
        if (d < kDim) {
          fragments.b[tile][half] = low_halves(__ldg(row[2 * half] + d), __ldg(row[2 * half + 1] + d));
        }
      }
    }
  }
  return fragments;
}

// A lane's elements of one output row in a 16-column block; c[n-tile][2] are its C registers of that row.
template <int kDim, bool kPermuted, Element kOut>
__device__ __forceinline__ void store_row(void* output, i64 row_start, int i, int t, const float (&c)[2][2]) {
  if constexpr (kPermuted) {
    // Undoes the remapping of V: the four values are neighbours, 8 or 16 bytes.
    const int d = 16 * i + 4 * t;
    if (d >= kDim) return;
    if constexpr (kOut == Element::kFloat) {
      *reinterpret_cast<float4*>(static_cast<float*>(output) + row_start + d) =
          make_float4(c[0][0], c[1][0], c[0][1], c[1][1]);
    } else {
      *reinterpret_cast<uint2*>(static_cast<u16*>(output) + row_start + d) =
          make_uint2(cvt_rn_x2<kOut>(c[0][0], c[1][0]), cvt_rn_x2<kOut>(c[0][1], c[1][1]));
    }
  } else {
#pragma unroll
    for (int tile = 0; tile < 2; ++tile) {
      const int d = 16 * i + 8 * tile + 2 * t;
      if (d < kDim) store_pair<kOut>(output, row_start + d, c[tile][0], c[tile][1]);
    }
  }
}

template <int kWarps>
__device__ __forceinline__ float row_max(const float (&max)[kWarps]) {
  float result = max[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) result = fmaxf(result, max[w]);
  return result;
}

template <int kWarps>
__device__ __forceinline__ float row_sum(const float (&sum)[kWarps]) {
  float result = sum[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) result += sum[w];
  return result;
}

// Stores C fragments of a 16-column block of O: rows g and g + 8 of the window, each times its factor.
template <int kDim, bool kPermuted, Element kOut>
__device__ __forceinline__ void store_block(void* output, int num_rows, i64 first_row, int i, int lane,
                                            const float (&out)[2][4], const float (&factor)[2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i64 row = first_row + 8 * half + lane / 4;
    if (row >= num_rows) continue;
    float c[2][2];
#pragma unroll
    for (int e = 0; e < 4; ++e) c[e / 2][e % 2] = out[e / 2][2 * half + e % 2] * factor[half];
    store_row<kDim, kPermuted, kOut>(output, (row * gridDim.y + blockIdx.y) * kDim, i, lane % 4, c);
  }
}

// Writes 0 to the 16-column blocks first_block, first_block + step, ... of a window without an edge.
template <int kDim, bool kPermuted, Element kOut>
__device__ __forceinline__ void store_zeros(void* output, int num_rows, i64 first_row, int first_block, int step,
                                            int lane) {
  const float zeros[2][4] = {}, factor[2] = {};
  for (int i = first_block; i < divide_up(kDim, 2 * kTileN); i += step) {
    store_block<kDim, kPermuted, kOut>(output, num_rows, first_row, i, lane, zeros, factor);
  }
}

// Index of the last of offset[0, count) that is at most x; offset ascends and offset[0] is at most x.
__device__ __forceinline__ int last_at_most(const int* offset, int count, int x) {
  int low = 0, high = count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (offset[middle] <= x) low = middle;
    else high = middle;
  }
  return low;
}

// The blocks of a window that has TCBs [begin, end), with tcbs_per_block to a block.
struct WindowBlocks {
  int first;
  int count;
  __device__ __forceinline__ WindowBlocks(int begin, int end, int tcbs_per_block)
      : first(begin / tcbs_per_block), count((end - 1) / tcbs_per_block - first + 1) {}
  // Index in Params::partial of the window's part in a block.
  __device__ __forceinline__ i64 part(int block) const {
    return 2 * (static_cast<i64>(block) * gridDim.y + blockIdx.y) + (block == first);
  }
};

// For a window of several blocks: the last of them to arrive writes the output from the partials of all, added in the
// order of the blocks. Each warp does so for its 16-column blocks, independently of the others.
template <int kDim, int kWarps, bool kPermuted, Element kOut>
__device__ __forceinline__ void combine_window(const Params& p, int window, int warp, int lane) {
  const WindowBlocks blocks(p.tcb_row_offset[window], p.tcb_row_offset[window + 1], p.tcbs_per_block);
  if (blocks.count == 1) return;
  int* const semaphore = p.semaphores + (static_cast<i64>(blocks.first) * gridDim.y + blockIdx.y) * kWarps + warp;
  if (!arrive_is_last(semaphore, blocks.count, lane)) return;
  const Partial<kDim>* const partial = static_cast<const Partial<kDim>*>(p.partial);
  const int g = lane / 4;
  for (int i = warp; i < Partial<kDim>::kSlices; i += kWarps) {
    float max[2] = {negative_infinity(), negative_infinity()}, sum[2] = {}, out[2][4] = {};
#pragma unroll 2  // loads of two partials in flight
    for (int block = blocks.first; block < blocks.first + blocks.count; ++block) {
      const PartialSlice<1>& next = partial[blocks.part(block)].slices[i];
      float rescale[2], next_rescale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float next_max = next.max[0][8 * half + g];
        const float new_max = fmaxf(max[half], next_max);
        const float shift = new_max == negative_infinity() ? 0.0f : new_max;  // -inf - -inf would be NaN
        rescale[half] = ex2_approx_ftz(max[half] - shift);
        next_rescale[half] = ex2_approx_ftz(next_max - shift);
        sum[half] = sum[half] * rescale[half] + next.sum[0][8 * half + g] * next_rescale[half];
        max[half] = new_max;
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float4 next_out = next.out[tile][lane];
        out[tile][0] = out[tile][0] * rescale[0] + next_out.x * next_rescale[0];
        out[tile][1] = out[tile][1] * rescale[0] + next_out.y * next_rescale[0];
        out[tile][2] = out[tile][2] * rescale[1] + next_out.z * next_rescale[1];
        out[tile][3] = out[tile][3] * rescale[1] + next_out.w * next_rescale[1];
      }
    }
    const float inverse[2] = {inverse_or_zero(sum[0]), inverse_or_zero(sum[1])};
    store_block<kDim, kPermuted, kOut>(p.output, p.num_rows, static_cast<i64>(window) * kTileM, i, lane, out, inverse);
  }
}

// Loads in flight and registers, the fastest of those tried with 8 warps (kernels/NOTES.md has the times).
// The plain layout of V takes more registers: eight 2-byte loads in place of four of 4 bytes.
template <int kDim, bool kPermuted, bool kEdgeParallel>
struct Tuning {
  static constexpr bool kIsWide = kDim > 128;
  static constexpr int kKeyPairs = kIsWide || kEdgeParallel ? 2 : 4;  // pairs of k-steps whose K is in flight
  static constexpr int kValuePairs = kIsWide || !kPermuted || kEdgeParallel ? 1 : 4;  // pairs of TCBs, their V
  static constexpr bool kUnrolled = kIsWide && !kPermuted;  // the loop over TCBs of SpMM
  static constexpr int kBlocks = kIsWide ? 2 : 1;           // 16-column blocks of O that a warp has at a time
  static constexpr int kResidentWarps = kIsWide && (!kPermuted || kEdgeParallel) ? 24 : 32;  // per SM
};

template <Element kIn, Element kOut, int kDim, int kWarps, bool kReordered, bool kPermuted, bool kSplitRows,
          bool kEdgeParallel, bool kClocked>
__device__ KernelSizes fused3s_paper_sizes = {
    kSplitRows ? kWarps * RowSplit<kDim, kWarps>::kSplits * kWarpSize * static_cast<int>(sizeof(float4)) : 0,
    static_cast<int>(sizeof(Partial<kDim>) / sizeof(float)),
    Tuning<kDim, kPermuted, kEdgeParallel>::kResidentWarps / kWarps,
    0,
};

template <Element kIn, Element kOut, int kDim, int kWarps, bool kReordered, bool kPermuted, bool kSplitRows,
          bool kEdgeParallel, bool kClocked>
__global__ void __launch_bounds__(kWarps* kWarpSize, Tuning<kDim, kPermuted, kEdgeParallel>::kResidentWarps / kWarps)
    fused3s_paper(const __grid_constant__ Params p) {
  static_assert(kDim % 8 == 0 && kDim <= 256, "rows of whole 16-byte chunks");
  static_assert(kWarps % 2 == 0, "SpMM takes the TCBs of two warps in one k-step");
  static_assert(!kSplitRows || !kPermuted, "a permuted load feeds two k-steps, which split-row gives to two warps");
  static_assert(!kEdgeParallel || !kReordered, "edge-parallel blocks take TCBs, not row windows");
  using Split = RowSplit<kDim, kWarps>;
  constexpr int kPairs = divide_up(kDim, 2 * kTileK);       // pairs of SDDMM k-steps
  constexpr int kOutBlocks = divide_up(kDim, 2 * kTileN);   // 16-column blocks of O
  using Tuned = Tuning<kDim, kPermuted, kEdgeParallel>;
  constexpr int kValuePairs = Tuned::kValuePairs;
  constexpr int kBlocks = Tuned::kBlocks;
  constexpr int kLoads = Tuned::kKeyPairs < kPairs ? Tuned::kKeyPairs : kPairs;

  __shared__ uint4 smem_query[kPairs][2][kWarpSize];
  __shared__ u32 smem_prob[kWarps][2][kWarpSize];
  __shared__ float smem_out[kOutBlocks][8][kWarpSize];
  __shared__ __align__(16) float smem_max[kTileM][kWarps];
  __shared__ __align__(16) float smem_sum[kTileM][kWarps];

  i64* const block_clock = p.clocks + 3 * (static_cast<i64>(blockIdx.y) * gridDim.x + blockIdx.x);
  if constexpr (kClocked) {
    if (threadIdx.x == 0) {
      block_clock[0] = smid();
      block_clock[1] = clock64();
    }
  }

  // Loaded here and restrict: loaded where they are used, they cost up to six registers more.
  const int* const __restrict__ tcb_row_offset = p.tcb_row_offset;
  const int* const __restrict__ col_sparse_to_dense = p.col_sparse_to_dense;
  const u8* const __restrict__ bitmap = p.bitmap;
  void* const __restrict__ output = p.output;
  const int key_row_bytes = p.key_row_bytes, value_row_bytes = p.value_row_bytes;
  const int num_rows = p.num_rows;
  const float scale_log2e = p.scale_log2e;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int g = lane / 4;
  const int t = lane % 4;

  const u16* const query = p.query + blockIdx.y * p.query_head_stride;
  const u16* const key = p.key + blockIdx.y * p.key_head_stride;
  const u16* const value = p.value + blockIdx.y * p.value_head_stride;

  // Edge-parallel: the TCBs of this block.
  [[maybe_unused]] const int block_begin = blockIdx.x * p.tcbs_per_block;
  [[maybe_unused]] const int block_end = min(block_begin + p.tcbs_per_block, p.num_tcbs);
  int row_window = kReordered ? p.row_window_order[blockIdx.x] : blockIdx.x;
  bool is_done = false;
  if constexpr (kEdgeParallel) {
    // Windows without a TCB, shared out to all warps: most have none to write.
    for (int first = (blockIdx.x * kWarps + warp) * kWarpSize; first < p.num_row_windows;
         first += gridDim.x * kWarps * kWarpSize) {
      const int window = first + lane;
      const bool is_empty = window < p.num_row_windows && tcb_row_offset[window] == tcb_row_offset[window + 1];
      if (!__any_sync(kFullWarp, is_empty)) continue;
      for (int i = 0; i < kWarpSize; ++i) {
        if (!__shfl_sync(kFullWarp, static_cast<int>(is_empty), i)) continue;
        store_zeros<kDim, kPermuted, kOut>(output, num_rows, static_cast<i64>(first + i) * kTileM, 0, 1, lane);
      }
    }
    is_done = block_begin >= block_end;
    if (!is_done) row_window = last_at_most(tcb_row_offset, p.num_row_windows, block_begin);
  }
  [[maybe_unused]] const int first_window = row_window;

  // One window; edge-parallel: each window with TCBs of this block.
  for (; !is_done; ++row_window) {
    const i64 first_row = static_cast<i64>(row_window) * kTileM;
    const int window_begin = tcb_row_offset[row_window], window_end = tcb_row_offset[row_window + 1];
    int tcb_begin = window_begin, tcb_end = window_end;
    bool is_split = false;
    is_done = true;
    if constexpr (kEdgeParallel) {
      if (window_begin == window_end) {
        is_done = false;
        continue;
      }
      tcb_begin = max(window_begin, block_begin);
      tcb_end = min(window_end, block_end);
      is_split = tcb_end - tcb_begin < window_end - window_begin;
      is_done = tcb_end == block_end;
    }

    // Key and bit masks of the warp's TCB, one iteration ahead.
    [[maybe_unused]] int column;
    u32 edges[2];
    const auto load_tcb = [&](int tcb0) {
      if (warp >= tcb_end - tcb0) return;
      if constexpr (!kSplitRows) column = col_sparse_to_dense[static_cast<i64>(tcb0 + warp) * kTileN + g];
      load_edges(edges, bitmap, tcb0 + warp, g);
    };
    load_tcb(tcb_begin);

    // Line 5: Q_i to shared memory; kSplitRows: its dimensions of this warp to registers. Rows past the end are zero.
    [[maybe_unused]] uint2 frag_query[Split::kSteps][2];  // row half
    if constexpr (kSplitRows) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const i64 row = first_row + 8 * half + g;
#pragma unroll
        for (int i = 0; i < Split::kSteps; ++i) {
          frag_query[i][half] =
              row < num_rows ? load_step_words<kDim>(query + row * p.query_row_stride, warp * Split::kSteps + i, t)
                             : make_uint2(0, 0);
        }
      }
    } else if (tcb_begin < tcb_end) {
      for (int i = warp; i < 2 * kPairs; i += kWarps) {
        const int pair = i / 2, half = i % 2;
        const i64 row = first_row + 8 * half + g;
        const u16* const query_row = query + row * p.query_row_stride;
        if constexpr (kPermuted) {
          const int d = 2 * kTileK * pair + 8 * t;
          const bool is_inside = row < num_rows && d < kDim;
          cp_async<16>(shared_address(&smem_query[pair][half][lane]), query_row + d, is_inside ? 0 : -1);
          if (!is_inside) smem_query[pair][half][lane] = make_uint4(0, 0, 0, 0);
        } else {
          smem_query[pair][half][lane] =
              row < num_rows ? load_pair_words<kDim, kPermuted>(query_row, pair, t) : make_uint4(0, 0, 0, 0);
        }
      }
      cp_async_commit_group();
    }

    // Running maximum, and running sum over the lane's columns, of rows g and g + 8; scores in units of log 2.
    float running_max[2] = {negative_infinity(), negative_infinity()};
    float partial_sum[2] = {0.0f, 0.0f};

    for (int tcb0 = tcb_begin; tcb0 < tcb_end; tcb0 += kWarps) {
      const int num_active = min(kWarps, tcb_end - tcb0);
      const bool is_active = warp < num_active;
      const bool is_first = tcb0 == tcb_begin;
      const bool is_last = tcb0 + kWarps >= tcb_end;

      // SDDMM and mask (lines 13, 14). A warp past the window's end has no score: its E is 0.
      float dot[4] = {0.0f, 0.0f, 0.0f, 0.0f};
      if constexpr (kSplitRows) {
        const int* tcb_columns = col_sparse_to_dense + static_cast<i64>(tcb0) * kTileN;
        multiply_split_rows<kIn, kDim, kWarps>(frag_query, key, key_row_bytes, tcb_columns, num_active, warp, lane);
        __syncthreads();
        if (is_active) add_partial_scores<Split::kSplits>(dot, warp, lane);
      } else {
        const u16* const key_row = row_of(key, column, key_row_bytes);
        uint4 frag_key[kLoads];
        const auto load_keys = [&](int pair) {
#pragma unroll
          for (int i = 0; i < kLoads; ++i) {
            if (pair + i < kPairs) frag_key[i] = load_pair_words<kDim, kPermuted>(key_row, pair + i, t);
          }
        };
        if (is_active) load_keys(0);
        if (is_first) {
          cp_async_wait_group<0>();
          __syncthreads();
        }
        if (is_active) {
#pragma unroll
          for (int pair = 0; pair < kPairs; pair += kLoads) {
            if (pair > 0) load_keys(pair);
#pragma unroll
            for (int i = 0; i < kLoads && pair + i < kPairs; ++i) {
              const uint4 top = smem_query[pair + i][0][lane];
              const uint4 bottom = smem_query[pair + i][1][lane];
              mma_m16n8k16<kIn>(dot, top.x, bottom.x, top.y, bottom.y, frag_key[i].x, frag_key[i].y);
              mma_m16n8k16<kIn>(dot, top.z, bottom.z, top.w, bottom.w, frag_key[i].z, frag_key[i].w);
            }
          }
        }
      }
      float score[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool is_edge = is_active && (edges[j / 2] >> (2 * t + j % 2)) & 1;
        score[j] = is_edge ? dot[j] * scale_log2e : negative_infinity();
      }
      load_tcb(tcb0 + kWarps);

      // Online softmax (lines 16 to 19).
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        float tcb_max = fmaxf(score[2 * half], score[2 * half + 1]);
        tcb_max = fmaxf(tcb_max, __shfl_xor_sync(kFullWarp, tcb_max, 1));
        tcb_max = fmaxf(tcb_max, __shfl_xor_sync(kFullWarp, tcb_max, 2));
        if (t == 0) smem_max[8 * half + g][warp] = tcb_max;
      }
      __syncthreads();
      float rescale[2];
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float new_max = fmaxf(running_max[half], row_max(smem_max[8 * half + g]));
        // A row without an edge so far keeps -infinity; subtracting it would give NaN.
        const float shift = new_max == negative_infinity() ? 0.0f : new_max;
        rescale[half] = ex2_approx_ftz(running_max[half] - shift);
        running_max[half] = new_max;
        const float e0 = ex2_approx_ftz(score[2 * half] - shift);
        const float e1 = ex2_approx_ftz(score[2 * half + 1] - shift);
        partial_sum[half] = partial_sum[half] * rescale[half] + (e0 + e1);
        smem_prob[warp][half][lane] = cvt_rn_x2<kIn>(e0, e1);
        if (is_last) {
          float sum = partial_sum[half];
          sum += __shfl_xor_sync(kFullWarp, sum, 1);
          sum += __shfl_xor_sync(kFullWarp, sum, 2);
          if (t == 0) smem_sum[8 * half + g][warp] = sum;
        }
      }
      __syncthreads();

      // SpMM (lines 21, 22): O_i = rescale * O_i + E_i V, two TCBs a k-step, kBlocks column blocks at a time. Line 24:
      // the last iteration normalises.
      for (int first_block = warp; first_block < kOutBlocks; first_block += kBlocks * kWarps) {
        const auto is_block = [&](int b) {
          return kOutBlocks % (kBlocks * kWarps) == 0 || b == 0 || first_block + b * kWarps < kOutBlocks;
        };
        float out[kBlocks][2][4];
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
#pragma unroll
          for (int e = 0; e < 8; ++e) {
            out[b][e / 4][e % 4] = 0.0f;
            if (!is_first && is_block(b)) {
              out[b][e / 4][e % 4] = smem_out[first_block + b * kWarps][e][lane] * rescale[e % 4 / 2];
            }
          }
        }
#pragma unroll(Tuned::kUnrolled ? kWarps : 1)
        for (int first = 0; first < (Tuned::kUnrolled ? kWarps : num_active); first += 2 * kValuePairs) {
          if (Tuned::kUnrolled && first >= num_active) break;
          ValueFragments frag[kValuePairs][kBlocks];
#pragma unroll
          for (int pair = 0; pair < kValuePairs; ++pair) {
            if (first + 2 * pair < num_active) {
              // An odd last TCB has no partner: the partner's E is 0, and its keys are read again instead.
              const i64 left = tcb0 + first + 2 * pair;
              const i64 right = first + 2 * pair + 1 < num_active ? left + 1 : left;
              const int2 left_key = *reinterpret_cast<const int2*>(col_sparse_to_dense + left * kTileN + 2 * t);
              const int2 right_key = *reinterpret_cast<const int2*>(col_sparse_to_dense + right * kTileN + 2 * t);
              const u16* const value_row[4] = {
                  row_of(value, left_key.x, value_row_bytes), row_of(value, left_key.y, value_row_bytes),
                  row_of(value, right_key.x, value_row_bytes), row_of(value, right_key.y, value_row_bytes)};
#pragma unroll
              for (int b = 0; b < kBlocks; ++b) {
                frag[pair][b] = load_value<kDim, kPermuted>(value_row, first_block + b * kWarps, g);
              }
            }
          }
#pragma unroll
          for (int pair = 0; pair < kValuePairs; ++pair) {
            const int tcb = first + 2 * pair;
            if (tcb < num_active) {
              const u32 a0 = smem_prob[tcb][0][lane], a1 = smem_prob[tcb][1][lane];
              const u32 a2 = smem_prob[tcb + 1][0][lane], a3 = smem_prob[tcb + 1][1][lane];
#pragma unroll
              for (int b = 0; b < kBlocks; ++b) {
                const u32(&value_words)[2][2] = frag[pair][b].b;
                mma_m16n8k16<kIn>(out[b][0], a0, a1, a2, a3, value_words[0][0], value_words[0][1]);
                mma_m16n8k16<kIn>(out[b][1], a0, a1, a2, a3, value_words[1][0], value_words[1][1]);
              }
            }
          }
        }
#pragma unroll
        for (int b = 0; b < kBlocks; ++b) {
          const int i = first_block + b * kWarps;
          if (!is_block(b)) continue;
          if (!is_last) {
#pragma unroll
            for (int e = 0; e < 8; ++e) smem_out[i][e][lane] = out[b][e / 4][e % 4];
            continue;
          }
          const float sum[2] = {row_sum(smem_sum[g]), row_sum(smem_sum[8 + g])};
          if (kEdgeParallel && is_split) {
            const WindowBlocks blocks(window_begin, window_end, p.tcbs_per_block);
            PartialSlice<1>& slice = static_cast<Partial<kDim>*>(p.partial)[blocks.part(blockIdx.x)].slices[i];
#pragma unroll
            for (int tile = 0; tile < 2; ++tile) {
              slice.out[tile][lane] = make_float4(out[b][tile][0], out[b][tile][1], out[b][tile][2], out[b][tile][3]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
              if (t == 0) slice.max[0][8 * half + g] = running_max[half], slice.sum[0][8 * half + g] = sum[half];
            }
          } else {
            // A row without an edge is 0.
            const float inverse[2] = {sum[0] == 0.0f ? 0.0f : 1.0f / sum[0], sum[1] == 0.0f ? 0.0f : 1.0f / sum[1]};
            store_block<kDim, kPermuted, kOut>(output, num_rows, first_row, i, lane, out[b], inverse);
          }
        }
      }
    }

    if constexpr (!kEdgeParallel) {
      if (tcb_begin == tcb_end) {
        store_zeros<kDim, kPermuted, kOut>(output, num_rows, first_row, warp, kWarps, lane);
      }
    }
  }
  if constexpr (kEdgeParallel) {
    // The first and the last window may be split. Not in the loop: its state would be live here.
    if (block_begin < block_end && warp < kOutBlocks) {
      combine_window<kDim, kWarps, kPermuted, kOut>(p, first_window, warp, lane);
      if (row_window - 1 > first_window) {
        combine_window<kDim, kWarps, kPermuted, kOut>(p, row_window - 1, warp, lane);
      }
    }
  }
  if constexpr (kClocked) {
    __syncthreads();
    if (threadIdx.x == 0) block_clock[2] = clock64();
  }
}
