// O = softmax(scale * Q K^T masked by A) V, A in BSB with 16 x 8 TCBs: Algorithms 1 and 2 of the Fused3S paper.
//
//   tcb_row_offset       [num_row_windows + 1]   first TCB of each row window
//   col_sparse_to_dense  [num_tcbs][8]           key of each TCB column
//   bitmap               [num_tcbs][16]          one byte a row, bit j = column j
//   row_window_order     [num_row_windows]       row windows by decreasing TCB count
//   query, key, value    [N][H][kDim]            16-bit, any row and head stride, kDim contiguous, 16-byte aligned
//   output               [num_rows][H][kDim]     contiguous; every element is written
//   clocks               [H][num_row_windows][3] SM, its clock at the block's start and end; only if kClocked
//
// Grid (num_row_windows, H), block kWarps warps: one block a row window and head (node-parallel). The block walks over
// its window kWarps TCBs at a time: in softmax a warp owns one TCB, in SpMM it owns 16-column blocks of the output
// (split-column). In SDDMM it owns that one TCB too (split-column), or a part of the dimensions for all TCBs of the
// iteration (split-row, kSplitRows). K and V go from global memory straight into fragments; Q, E and O live in shared
// memory.
//
// Shared memory (bytes at kDim = 128, kWarps = 8; all in fragment order, so that lane L touches bank L):
//   query   [kDim/32][2][32] x 16 B   4096   row half (0: rows g, 1: rows g + 8), lane; written once
//   prob    [kWarps][2][32] x 4 B     2048   E of one TCB a warp: row half, lane
//   out     [kDim/16][8][32] x 4 B    8192   O: the eight C registers of a 16-column block; private to its warp
//   stat    [16][kWarps] x 4 B         512   row maxima of a warp's TCB; row sums after the loop
// With kSplitRows there is no `query`: a warp keeps its part of Q in registers. Instead, in dynamic shared memory:
//   partial [kWarps][kSplits][32] x 16 B  32768   S of a TCB from one warp's dimensions, its four C registers
//
// Barriers of an iteration:
//   kSplitRows: after `partial` is written: a TCB's warp adds the parts of all warps
//   after `stat` is written: every warp needs the maxima of all warps; it also orders last iteration's reads of `prob`
//     and this one's reads of `partial`
//   after `prob` is written: SpMM of every warp reads the E of all warps; it also orders the reads of `stat`
// The row sums need no barrier: each lane keeps the sum of its own columns, and they are added once, after the loop.
//
// Switches, none of which changes the result beyond rounding:
//   kReordered  walks the row windows in row_window_order instead of 0, 1, 2, ...
//   kPermuted   the paper's register remapping: a lane loads 16 bytes of K (4 of V) in one access where the plain
//               layout takes 4 (2) bytes at a time
//   kSplitRows  the rows of K^T instead of its columns are shared out to the warps in SDDMM (the paper's F3S_splitR). A
//               warp needs a fraction of Q, but the parts of S meet in shared memory behind one more barrier, and only
//               as many warps work as there are k-steps, four at kDim = 64. An iteration has kWarps TCBs as with split
//               columns, so that the two differ in nothing else
//   kClocked    writes `clocks`, from which the SM active time follows. An SM's clock counts its cycles, and has no
//               common zero with another SM's; %globaltimer has one but may advance by a microsecond at a time, as long
//               as a block runs. The time for which an SM has blocks needs nothing but its own clock
#include "mma.cuh"

constexpr u32 kFullWarp = 0xffffffffu;

__device__ constexpr int divide_up(int x, int y) { return (x + y - 1) / y; }

// The words of a row that feed one k-step of SDDMM in the plain layout, dimensions 16 step to 16 step + 15: b0 and b1
// for K, a0 (or a1) and a2 (or a3) for Q. Dimensions past kDim are zero.
template <int kDim>
__device__ __forceinline__ uint2 load_step_words(const u16* row, int step, int t) {
  uint2 words = make_uint2(0, 0);
  const int d = kTileK * step + 2 * t;
  if (d < kDim) words.x = __ldg(reinterpret_cast<const u32*>(row + d));
  if (d + 8 < kDim) words.y = __ldg(reinterpret_cast<const u32*>(row + d + 8));
  return words;
}

// The four words of a row that feed two k-steps of SDDMM, dimensions 32s to 32s + 31: (b0, b1) of step 2s and of 2s + 1
// for K, (a0 or a1, a2 or a3) of the two steps for Q. Dimensions past kDim are zero. Register remapping:
//
//   word        x          y          z          w
//   plain       2t, +1     2t+8, +9   2t+16,+17  2t+24,+25     four 4-byte loads
//   permuted    8t, +1     8t+2, +3   8t+4, +5   8t+6, +7      one 16-byte load; the sum over k does not mind the order
template <int kDim, bool kPermuted>
__device__ __forceinline__ uint4 load_row_words(const u16* row, int s, int t) {
  uint4 words = make_uint4(0, 0, 0, 0);
  if constexpr (kPermuted) {
    const int d = 32 * s + 8 * t;
    if (d < kDim) words = __ldg(reinterpret_cast<const uint4*>(row + d));
  } else {
    const uint2 even = load_step_words<kDim>(row, 2 * s, t);
    const uint2 odd = load_step_words<kDim>(row, 2 * s + 1, t);
    words = make_uint4(even.x, even.y, odd.x, odd.y);
  }
  return words;
}

// How split-row SDDMM shares out the k-steps: each of kSplits warps has kSteps neighbouring ones, of which the last
// warp's may lie past kDim.
template <int kDim, int kWarps>
struct RowSplit {
  static constexpr int kAllSteps = divide_up(kDim, kTileK);
  static constexpr int kSteps = divide_up(kAllSteps, kWarps);
  static constexpr int kSplits = divide_up(kAllSteps, kSteps);
};

extern __shared__ float4 smem_partial[];  // [kWarps][kSplits][32], only if kSplitRows

// Split-row SDDMM: the warp's part of S for each TCB of the iteration, to `smem_partial`.
template <Element kIn, int kDim, int kWarps>
__device__ __forceinline__ void multiply_split_rows(const uint2 (&frag_query)[RowSplit<kDim, kWarps>::kSteps][2],
                                                    const u16* key, i64 key_row_stride, const int* tcb_columns,
                                                    int num_active, int warp, int lane) {
  using Split = RowSplit<kDim, kWarps>;
  if (warp >= Split::kSplits) return;
  const int g = lane / 4;
  const int t = lane % 4;
  // One loop after the other, so that the loads of all TCBs are under way together.
  int column[kWarps];
#pragma unroll
  for (int slot = 0; slot < kWarps; ++slot) {
    column[slot] = slot < num_active ? tcb_columns[slot * kTileN + g] : 0;
  }
  uint2 frag_key[kWarps][Split::kSteps];
#pragma unroll
  for (int slot = 0; slot < kWarps; ++slot) {
    const u16* key_row = key + column[slot] * key_row_stride;
#pragma unroll
    for (int i = 0; i < Split::kSteps; ++i) {
      frag_key[slot][i] = make_uint2(0, 0);
      if (slot < num_active) frag_key[slot][i] = load_step_words<kDim>(key_row, warp * Split::kSteps + i, t);
    }
  }
#pragma unroll
  for (int slot = 0; slot < kWarps; ++slot) {
    if (slot < num_active) {
      float part[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
      for (int i = 0; i < Split::kSteps; ++i) {
        const uint2 top = frag_query[i][0], bottom = frag_query[i][1];
        mma<kIn>(part, top.x, bottom.x, top.y, bottom.y, frag_key[slot][i].x, frag_key[slot][i].y);
      }
      smem_partial[(slot * Split::kSplits + warp) * kWarpSize + lane] = make_float4(part[0], part[1], part[2], part[3]);
    }
  }
}

// S of the warp's TCB from the parts, always added in the same order.
template <int kSplits>
__device__ __forceinline__ void add_parts(float (&dot)[4], int warp, int lane) {
#pragma unroll
  for (int j = 0; j < 4; ++j) dot[j] = 0.0f;
#pragma unroll
  for (int split = 0; split < kSplits; ++split) {
    const float4 part = smem_partial[(warp * kSplits + split) * kWarpSize + lane];
    dot[0] += part.x;
    dot[1] += part.y;
    dot[2] += part.z;
    dot[3] += part.w;
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

// Two neighbouring output elements, converted to the output type.
template <Element kOut>
__device__ __forceinline__ void store_pair(void* output, i64 index, float first, float second) {
  if constexpr (kOut == Element::kFloat) {
    *reinterpret_cast<float2*>(static_cast<float*>(output) + index) = make_float2(first, second);
  } else {
    *reinterpret_cast<u32*>(static_cast<u16*>(output) + index) = pack<kOut>(first, second);
  }
}

// The lane's part of one output row in a 16-column block: c[n-tile][2] are its C registers of that row.
template <int kDim, bool kPermuted, Element kOut>
__device__ __forceinline__ void store_row(void* output, i64 row_start, int i, int t, const float (&c)[2][2]) {
  if constexpr (kPermuted) {
    // The remapping of V is undone here: the four values are neighbours, 8 or 16 bytes together.
    const int d = 16 * i + 4 * t;
    if (d >= kDim) return;
    if constexpr (kOut == Element::kFloat) {
      *reinterpret_cast<float4*>(static_cast<float*>(output) + row_start + d) =
          make_float4(c[0][0], c[1][0], c[0][1], c[1][1]);
    } else {
      *reinterpret_cast<uint2*>(static_cast<u16*>(output) + row_start + d) =
          make_uint2(pack<kOut>(c[0][0], c[1][0]), pack<kOut>(c[0][1], c[1][1]));
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
__device__ __forceinline__ float row_max(const float (&stat)[kWarps]) {
  float result = stat[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) result = fmaxf(result, stat[w]);
  return result;
}

template <int kWarps>
__device__ __forceinline__ float row_sum(const float (&stat)[kWarps]) {
  float result = stat[0];
#pragma unroll
  for (int w = 1; w < kWarps; ++w) result += stat[w];
  return result;
}

// Warps of an SM for which there must be registers; none spills at any kDim. Split columns keep to the 64 registers of
// 32 warps by themselves up to kDim = 128, split rows have to be told.
template <int kDim, bool kSplitRows>
__device__ constexpr int warps_per_sm() {
  return kSplitRows && kDim <= 128 ? 32 : 24;
}

__device__ __forceinline__ int sm_number() {
  int number;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}

template <Element kIn, Element kOut, int kDim, int kWarps, bool kReordered, bool kPermuted, bool kSplitRows,
          bool kClocked>
__global__ void __launch_bounds__(kWarps* kWarpSize, warps_per_sm<kDim, kSplitRows>() / kWarps)
    fused3s_paper(const int* __restrict__ tcb_row_offset, const int* __restrict__ col_sparse_to_dense,
                  const u8* __restrict__ bitmap, const int* __restrict__ row_window_order,
                  const u16* __restrict__ query, const u16* __restrict__ key, const u16* __restrict__ value,
                  void* __restrict__ output, i64 query_row_stride, i64 query_head_stride, i64 key_row_stride,
                  i64 key_head_stride, i64 value_row_stride, i64 value_head_stride, int num_rows, float scale_log2e,
                  i64* __restrict__ clocks) {
  static_assert(kDim % 8 == 0 && kDim <= 256, "a row is made of whole 16-byte pieces");
  static_assert(kWarps % 2 == 0, "SpMM takes the TCBs of two warps in one k-step");
  static_assert(!kSplitRows || !kPermuted, "a permuted load feeds two k-steps, which split-row gives to two warps");
  using Split = RowSplit<kDim, kWarps>;
  constexpr int kPairs = divide_up(kDim, 2 * kTileK);       // pairs of SDDMM k-steps
  constexpr int kOutBlocks = divide_up(kDim, 2 * kTileN);   // 16-column blocks of O

  __shared__ uint4 smem_query[kPairs][2][kWarpSize];
  __shared__ u32 smem_prob[kWarps][2][kWarpSize];
  __shared__ float smem_out[kOutBlocks][8][kWarpSize];
  __shared__ __align__(16) float smem_stat[kTileM][kWarps];

  i64* const block_clock = clocks + 3 * (static_cast<i64>(blockIdx.y) * gridDim.x + blockIdx.x);
  if constexpr (kClocked) {
    if (threadIdx.x == 0) {
      block_clock[0] = sm_number();
      block_clock[1] = clock64();
    }
  }

  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int g = lane / 4;
  const int t = lane % 4;
  const i64 row_window = kReordered ? row_window_order[blockIdx.x] : blockIdx.x;
  const i64 first_row = row_window * kTileM;
  const int tcb_begin = tcb_row_offset[row_window];
  const int tcb_end = tcb_row_offset[row_window + 1];

  query += blockIdx.y * query_head_stride;
  key += blockIdx.y * key_head_stride;
  value += blockIdx.y * value_head_stride;

  // Line 5: Q_i to shared memory, or the warp's part to registers. Rows past the end are zero, never read.
  uint2 frag_query[Split::kSteps][2];  // row half
  if constexpr (kSplitRows) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const i64 row = first_row + 8 * half + g;
#pragma unroll
      for (int i = 0; i < Split::kSteps; ++i) {
        frag_query[i][half] =
            row < num_rows ? load_step_words<kDim>(query + row * query_row_stride, warp * Split::kSteps + i, t)
                           : make_uint2(0, 0);
      }
    }
  } else {
    for (int piece = warp; piece < 2 * kPairs; piece += kWarps) {
      const i64 row = first_row + 8 * (piece % 2) + g;
      smem_query[piece / 2][piece % 2][lane] =
          row < num_rows ? load_row_words<kDim, kPermuted>(query + row * query_row_stride, piece / 2, t)
                         : make_uint4(0, 0, 0, 0);
    }
  }
  for (int i = warp; i < kOutBlocks; i += kWarps) {
#pragma unroll
    for (int e = 0; e < 8; ++e) smem_out[i][e][lane] = 0.0f;
  }
  __syncthreads();

  // Running maximum and the lane's share of the running sum, rows g and g + 8; scores are in units of log 2.
  float running_max[2] = {negative_infinity(), negative_infinity()};
  float partial_sum[2] = {0.0f, 0.0f};

  for (int tcb0 = tcb_begin; tcb0 < tcb_end; tcb0 += kWarps) {
    const int num_active = min(kWarps, tcb_end - tcb0);

    // SDDMM and mask (lines 13, 14). A warp past the window's end has no score: its E is 0.
    float score[4];
#pragma unroll
    for (int j = 0; j < 4; ++j) score[j] = negative_infinity();
    u32 edges[2];
    if constexpr (kSplitRows) {
      if (warp < num_active) load_edges(edges, bitmap, tcb0 + warp, g);  // on the way while warps wait for each other
      const int* tcb_columns = col_sparse_to_dense + static_cast<i64>(tcb0) * kTileN;
      multiply_split_rows<kIn, kDim, kWarps>(frag_query, key, key_row_stride, tcb_columns, num_active, warp, lane);
      __syncthreads();
    }
    if (warp < num_active) {
      const i64 tcb = tcb0 + warp;
      [[maybe_unused]] const u16* key_row = key + col_sparse_to_dense[tcb * kTileN + g] * key_row_stride;
      if constexpr (!kSplitRows) load_edges(edges, bitmap, tcb, g);
      float dot[4];
      if constexpr (kSplitRows) {
        add_parts<Split::kSplits>(dot, warp, lane);
      } else {
        uint4 frag_key[kPairs];
#pragma unroll
        for (int s = 0; s < kPairs; ++s) frag_key[s] = load_row_words<kDim, kPermuted>(key_row, s, t);
#pragma unroll
        for (int j = 0; j < 4; ++j) dot[j] = 0.0f;
#pragma unroll
        for (int s = 0; s < kPairs; ++s) {
          const uint4 top = smem_query[s][0][lane];
          const uint4 bottom = smem_query[s][1][lane];
          mma<kIn>(dot, top.x, bottom.x, top.y, bottom.y, frag_key[s].x, frag_key[s].y);
          mma<kIn>(dot, top.z, bottom.z, top.w, bottom.w, frag_key[s].z, frag_key[s].w);
        }
      }
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const bool is_edge = (edges[j / 2] >> (2 * t + j % 2)) & 1;
        score[j] = is_edge ? dot[j] * scale_log2e : negative_infinity();
      }
    }

    // Online softmax (lines 16 to 19).
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float tcb_max = fmaxf(score[2 * half], score[2 * half + 1]);
      tcb_max = fmaxf(tcb_max, __shfl_xor_sync(kFullWarp, tcb_max, 1));
      tcb_max = fmaxf(tcb_max, __shfl_xor_sync(kFullWarp, tcb_max, 2));
      if (t == 0) smem_stat[8 * half + g][warp] = tcb_max;
    }
    __syncthreads();
    float rescale[2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float new_max = fmaxf(running_max[half], row_max(smem_stat[8 * half + g]));
      // A row without an edge so far keeps -infinity; subtracting it would give NaN.
      const float shift = new_max == negative_infinity() ? 0.0f : new_max;
      rescale[half] = exp2_approx(running_max[half] - shift);
      running_max[half] = new_max;
      const float e0 = exp2_approx(score[2 * half] - shift);
      const float e1 = exp2_approx(score[2 * half + 1] - shift);
      partial_sum[half] = partial_sum[half] * rescale[half] + (e0 + e1);
      smem_prob[warp][half][lane] = pack<kIn>(e0, e1);
    }
    __syncthreads();

    // SpMM (lines 21, 22): O_i = rescale * O_i + E_i V, two TCBs a k-step.
    for (int i = warp; i < kOutBlocks; i += kWarps) {
      float out[2][4];
#pragma unroll
      for (int e = 0; e < 8; ++e) out[e / 4][e % 4] = smem_out[i][e][lane] * rescale[e % 4 / 2];
#pragma unroll
      for (int slot = 0; slot < kWarps; slot += 2) {
        if (slot < num_active) {
          // An odd last TCB has no partner: the partner's E is 0, and its keys are read again instead.
          const i64 left = tcb0 + slot;
          const i64 right = slot + 1 < num_active ? left + 1 : left;
          const int2 left_key = *reinterpret_cast<const int2*>(col_sparse_to_dense + left * kTileN + 2 * t);
          const int2 right_key = *reinterpret_cast<const int2*>(col_sparse_to_dense + right * kTileN + 2 * t);
          const u16* const value_row[4] = {value + left_key.x * value_row_stride, value + left_key.y * value_row_stride,
                                           value + right_key.x * value_row_stride,
                                           value + right_key.y * value_row_stride};
          const ValueFragments frag = load_value<kDim, kPermuted>(value_row, i, g);
          const u32 a0 = smem_prob[slot][0][lane], a1 = smem_prob[slot][1][lane];
          const u32 a2 = smem_prob[slot + 1][0][lane], a3 = smem_prob[slot + 1][1][lane];
          mma<kIn>(out[0], a0, a1, a2, a3, frag.b[0][0], frag.b[0][1]);
          mma<kIn>(out[1], a0, a1, a2, a3, frag.b[1][0], frag.b[1][1]);
        }
      }
#pragma unroll
      for (int e = 0; e < 8; ++e) smem_out[i][e][lane] = out[e / 4][e % 4];
    }
  }

  // Line 24: add the row sums of all lanes and warps, normalise, write. A row without an edge is 0.
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float sum = partial_sum[half];
    sum += __shfl_xor_sync(kFullWarp, sum, 1);
    sum += __shfl_xor_sync(kFullWarp, sum, 2);
    if (t == 0) smem_stat[8 * half + g][warp] = sum;
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const i64 row = first_row + 8 * half + g;
    if (row >= num_rows) continue;
    const float sum = row_sum(smem_stat[8 * half + g]);
    const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;
    const i64 row_start = (row * gridDim.y + blockIdx.y) * kDim;
    for (int i = warp; i < kOutBlocks; i += kWarps) {
      float c[2][2];
#pragma unroll
      for (int e = 0; e < 4; ++e) c[e / 2][e % 2] = smem_out[i][e / 2 * 4 + 2 * half + e % 2][lane] * inverse;
      store_row<kDim, kPermuted, kOut>(output, row_start, i, t, c);
    }
  }
  if constexpr (kClocked) {
    __syncthreads();
    if (threadIdx.x == 0) block_clock[2] = clock64();
  }
}
