// O = softmax(scale * Q K^T masked by A) V, A in BSB with 16 x 8 TCBs: Algorithms 1 and 2 of the Fused3S paper.
//
// Grid (num_row_windows, H), kWarps warps per block: one block per row window and head (node-parallel). An iteration
// takes kWarps TCBs of the window:
//   SDDMM    a TCB per warp (split-column), or some of the dimensions of all TCBs per warp (split-row, kSplitRows)
//   softmax  a TCB per warp
//   SpMM     16-column blocks of O per warp (split-column)
// K and V go from global memory to fragments, without shared memory; Q, E and O are in shared memory. Pointers and
// shapes: struct Params.
//
// Shared memory (bytes at kDim = 128, kWarps = 8), in fragment order: lane L accesses bank L
//   query   [kDim/32][2][32] x 16 B   4,096  row half (0: rows g, 1: rows g + 8), lane; written once
//   prob    [kWarps][2][32] x 4 B     2,048  E of a TCB per warp: row half, lane
//   out     [kDim/16][8][32] x 4 B    8,192  O: the eight C registers of a 16-column block; used by one warp only
//   stat    [16][kWarps] x 4 B          512  row maxima of each warp's TCB; row sums after the loop
// kSplitRows: Q in registers instead of `query`, and dynamic shared memory
//   partial_score [kWarps][kSplits][32] x 16 B  32,768  [TCB][warp][lane] S from the dimensions of a warp: C registers
//
// Barriers of an iteration
//   after `partial_score` (kSplitRows)  the warp of a TCB adds the partial scores of all warps
//   after `stat`   every warp reads the maxima of all warps; also, `prob` of the last iteration and `partial_score` of
//                  this one have been read
//   after `prob`   SpMM of every warp reads E of all warps; also, `stat` has been read
// Row sums need no barrier: each lane keeps the sum of its own columns; they are added once, after the loop.
//
// Switches; results differ by rounding only
//   kReordered  row windows in row_window_order instead of 0, 1, 2, ...
//   kPermuted   register remapping of the paper: a lane loads 16 bytes of K (4 of V) at once; the plain layout takes 4
//               (2) bytes at a time
//   kSplitRows  F3S_splitR of the paper: warps split the rows of K^T in SDDMM, not its columns. A warp needs a fraction
//               of Q, but partial scores go through shared memory with one more barrier, and only as many warps work
//               as there are k-steps: four at kDim = 64. An iteration has kWarps TCBs, as with split columns
//   kClocked    writes `clocks`, for the active time of each SM. It needs no clock common to all SMs, and %globaltimer
//               may advance by a microsecond at a time
#include "common.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "ptx/special_registers.cuh"
#include "rows.cuh"

struct Params {
  const int* tcb_row_offset;       // [num_row_windows + 1]  first TCB of each row window
  const int* col_sparse_to_dense;  // [num_tcbs][8]  key of each TCB column
  const u8* bitmap;                // [num_tcbs][16]  one byte per row, bit j: column j
  const int* row_window_order;     // [num_row_windows]  row windows by decreasing number of TCBs
  const u16* query;                // [num_rows][H][kDim]  16-bit, any row and head stride, rows 16-byte aligned
  const u16* key;                  // [num_cols][H][kDim]  likewise
  const u16* value;                // [num_cols][H][kDim]  likewise
  void* output;                    // [num_rows][H][kDim]  contiguous; every element is written
  i64* clocks;                     // [H][num_row_windows][3]  SM, its clock at the start and end of a block; kClocked
  i64 query_row_stride;            // elements
  i64 query_head_stride;
  i64 key_row_stride;
  i64 key_head_stride;
  i64 value_row_stride;
  i64 value_head_stride;
  int num_rows;
  float scale_log2e;  // scale * log2(e)
};

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
                                                    const u16* key, i64 key_row_stride, const int* tcb_columns,
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
    const u16* key_row = key + column[tcb] * key_row_stride;
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

// Warps per SM in the launch bounds; no spills at any kDim. With split columns ptxas takes at most 64 registers (32
// warps per SM) up to kDim = 128 by itself.
template <int kDim, bool kSplitRows>
__device__ constexpr int warps_per_sm() {
  return kSplitRows && kDim <= 128 ? 32 : 24;
}

template <Element kIn, Element kOut, int kDim, int kWarps, bool kReordered, bool kPermuted, bool kSplitRows,
          bool kClocked>
__global__ void __launch_bounds__(kWarps* kWarpSize, warps_per_sm<kDim, kSplitRows>() / kWarps)
    fused3s_paper(const __grid_constant__ Params p) {
  static_assert(kDim % 8 == 0 && kDim <= 256, "rows of whole 16-byte chunks");
  static_assert(kWarps % 2 == 0, "SpMM takes the TCBs of two warps in one k-step");
  static_assert(!kSplitRows || !kPermuted, "a permuted load feeds two k-steps, which split-row gives to two warps");
  using Split = RowSplit<kDim, kWarps>;
  constexpr int kPairs = divide_up(kDim, 2 * kTileK);       // pairs of SDDMM k-steps
  constexpr int kOutBlocks = divide_up(kDim, 2 * kTileN);   // 16-column blocks of O

  __shared__ uint4 smem_query[kPairs][2][kWarpSize];
  __shared__ u32 smem_prob[kWarps][2][kWarpSize];
  __shared__ float smem_out[kOutBlocks][8][kWarpSize];
  __shared__ __align__(16) float smem_stat[kTileM][kWarps];

  i64* const block_clock = p.clocks + 3 * (static_cast<i64>(blockIdx.y) * gridDim.x + blockIdx.x);
  if constexpr (kClocked) {
    if (threadIdx.x == 0) {
      block_clock[0] = smid();
      block_clock[1] = clock64();
    }
  }

  // Loaded here and restrict: loaded where they are used, they cost up to six registers more.
  const int* const __restrict__ col_sparse_to_dense = p.col_sparse_to_dense;
  const u8* const __restrict__ bitmap = p.bitmap;
  void* const __restrict__ output = p.output;
  const i64 key_row_stride = p.key_row_stride, value_row_stride = p.value_row_stride;
  const int num_rows = p.num_rows;
  const float scale_log2e = p.scale_log2e;
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int g = lane / 4;
  const int t = lane % 4;
  const i64 row_window = kReordered ? p.row_window_order[blockIdx.x] : blockIdx.x;
  const i64 first_row = row_window * kTileM;
  const int tcb_begin = p.tcb_row_offset[row_window];
  const int tcb_end = p.tcb_row_offset[row_window + 1];

  const u16* const query = p.query + blockIdx.y * p.query_head_stride;
  const u16* const key = p.key + blockIdx.y * p.key_head_stride;
  const u16* const value = p.value + blockIdx.y * p.value_head_stride;

  // Line 5: Q_i to shared memory; kSplitRows: its dimensions of this warp to registers. Rows past the end are zero.
  uint2 frag_query[Split::kSteps][2];  // row half
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
  } else {
    for (int i = warp; i < 2 * kPairs; i += kWarps) {
      const int pair = i / 2, half = i % 2;
      const i64 row = first_row + 8 * half + g;
      smem_query[pair][half][lane] =
          row < num_rows ? load_pair_words<kDim, kPermuted>(query + row * p.query_row_stride, pair, t)
                           : make_uint4(0, 0, 0, 0);
    }
  }
  for (int i = warp; i < kOutBlocks; i += kWarps) {
#pragma unroll
    for (int e = 0; e < 8; ++e) smem_out[i][e][lane] = 0.0f;
  }
  __syncthreads();

  // Running maximum, and running sum over the lane's columns, of rows g and g + 8; scores in units of log 2.
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
      if (warp < num_active) load_edges(edges, bitmap, tcb0 + warp, g);  // in flight during the barrier
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
        add_partial_scores<Split::kSplits>(dot, warp, lane);
      } else {
        uint4 frag_key[kPairs];
#pragma unroll
        for (int s = 0; s < kPairs; ++s) frag_key[s] = load_pair_words<kDim, kPermuted>(key_row, s, t);
#pragma unroll
        for (int j = 0; j < 4; ++j) dot[j] = 0.0f;
#pragma unroll
        for (int s = 0; s < kPairs; ++s) {
          const uint4 top = smem_query[s][0][lane];
          const uint4 bottom = smem_query[s][1][lane];
          mma_m16n8k16<kIn>(dot, top.x, bottom.x, top.y, bottom.y, frag_key[s].x, frag_key[s].y);
          mma_m16n8k16<kIn>(dot, top.z, bottom.z, top.w, bottom.w, frag_key[s].z, frag_key[s].w);
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
      rescale[half] = ex2_approx_ftz(running_max[half] - shift);
      running_max[half] = new_max;
      const float e0 = ex2_approx_ftz(score[2 * half] - shift);
      const float e1 = ex2_approx_ftz(score[2 * half + 1] - shift);
      partial_sum[half] = partial_sum[half] * rescale[half] + (e0 + e1);
      smem_prob[warp][half][lane] = cvt_rn_x2<kIn>(e0, e1);
    }
    __syncthreads();

    // SpMM (lines 21, 22): O_i = rescale * O_i + E_i V, two TCBs a k-step.
    for (int i = warp; i < kOutBlocks; i += kWarps) {
      float out[2][4];
#pragma unroll
      for (int e = 0; e < 8; ++e) out[e / 4][e % 4] = smem_out[i][e][lane] * rescale[e % 4 / 2];
#pragma unroll
      for (int first = 0; first < kWarps; first += 2) {
        if (first < num_active) {
          // An odd last TCB has no partner: the partner's E is 0, and its keys are read again instead.
          const i64 left = tcb0 + first;
          const i64 right = first + 1 < num_active ? left + 1 : left;
          const int2 left_key = *reinterpret_cast<const int2*>(col_sparse_to_dense + left * kTileN + 2 * t);
          const int2 right_key = *reinterpret_cast<const int2*>(col_sparse_to_dense + right * kTileN + 2 * t);
          const u16* const value_row[4] = {value + left_key.x * value_row_stride, value + left_key.y * value_row_stride,
                                           value + right_key.x * value_row_stride,
                                           value + right_key.y * value_row_stride};
          const ValueFragments frag = load_value<kDim, kPermuted>(value_row, i, g);
          const u32 a0 = smem_prob[first][0][lane], a1 = smem_prob[first][1][lane];
          const u32 a2 = smem_prob[first + 1][0][lane], a3 = smem_prob[first + 1][1][lane];
          mma_m16n8k16<kIn>(out[0], a0, a1, a2, a3, frag.b[0][0], frag.b[0][1]);
          mma_m16n8k16<kIn>(out[1], a0, a1, a2, a3, frag.b[1][0], frag.b[1][1]);
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
