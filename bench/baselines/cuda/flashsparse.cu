// O = softmax(scale * Q K^T masked by A) V on tensor cores with S materialised: FlashSparse's SDDMM and SpMM over 8 x 1
// vectors, with a softmax between them. A is in BSB with 8 x 16 TCBs, the TCBs of a window in parts of at most 32.
// H heads, T TCBs, P parts. Pointers and shapes: the structs of parameters.
//
// Five kernels, the last only if a window has several parts. Blocks of 4 warps, no shared memory, no barriers, no
// atomics.
//
//   flashsparse_sddmm       warp = TCB      grid (ceil(T / 4), H)           Q, K -> score
//   flashsparse_statistics  warp = part     grid (ceil(P / 4), H)           score -> part_max, part_sum
//   flashsparse_normalise   warp = part     grid (ceil(P / 4), H)           score, part_max, part_sum -> prob
//   flashsparse_spmm        warp = part, 16 dimensions   grid (P, ceil(kDim / 64), H)   prob, V -> output or partial
//   flashsparse_merge       block = window of several parts   grid (their number, H)    partial -> output
//
// Swap and transpose: S^T = K Q^T and O^T = V^T P^T have the 8 rows of a window on the n side of m16n8k16, so a TCB has
// an 8 x 1 vector per key instead of 16 x 1.
//
//   sddmm   A = K (16 keys x 16 dimensions), B = Q^T (16 dimensions x 8 rows), C = S^T (16 keys x 8 rows)
//   spmm    A = V^T (16 dimensions x 16 keys), B = P^T (16 keys x 8 rows), C = O^T (16 dimensions x 8 rows)
//
// kStable subtracts the maximum of the row before the exponential. Without it (naive) a score above 88 overflows
// float32, and its row becomes NaN.
#include "common.cuh"
#include "ptx/cvt.cuh"
#include "ptx/math.cuh"
#include "ptx/mma.cuh"
#include "rows.cuh"

constexpr int kWarps = 4;  // per block
constexpr int kRows = 8;
constexpr int kKeys = 16;  // columns of a TCB
constexpr int kTcbSize = kRows * kKeys;
constexpr int kUnroll = 4;  // TCBs, or pairs of k-steps of SDDMM, in flight

struct SddmmParams {
  const int* tcb_window;           // [T]  row window of each TCB
  const int* col_sparse_to_dense;  // [T][16]  key of each TCB column
  const u32* bitmap;               // [T][8]  16 bits per row, bit j: column j
  const u16* query;                // [num_rows][H][kDim]  16-bit, any row and head stride, rows 16-byte aligned
  const u16* key;                  // [num_cols][H][kDim]  as query
  float* score;                    // [H][T][8][16]  scale * log2(e) * <Q, K>, -infinity without an edge
  i64 query_row_stride;            // elements
  i64 query_head_stride;
  i64 key_row_stride;
  i64 key_head_stride;
  int num_rows;
  int num_tcbs;
  float scale_log2e;  // scale * log2(e)
};

struct StatisticsParams {
  const int* part_tcb;  // [P + 1]  first TCB of each part
  const float* score;   // [H][T][8][16]
  float* part_max;      // [H][P][8]  of the scores of the part; not written unless kStable
  float* part_sum;      // [H][P][8]  of their exponentials; kStable: after subtracting the maximum
  int num_parts;
  int num_tcbs;
};

struct NormaliseParams {
  const int* part_tcb;     // [P + 1]
  const int* part_window;  // [P]  row window of each part; every window has at least one, which may be empty
  const int* window_part;  // [num_windows + 1]  first part of each window
  const float* score;      // [H][T][8][16]
  const float* part_max;   // [H][P][8]
  const float* part_sum;   // [H][P][8]
  u16* prob;               // [H][T][8][16]  16-bit, rows of the softmax
  int num_parts;
  int num_tcbs;
};

struct SpmmParams {
  const int* part_tcb;             // [P + 1]
  const int* part_window;          // [P]
  const int* part_slot;            // [P]  index of the output of the part in `partial`; -1: the only part of its window
  const int* col_sparse_to_dense;  // [T][16]
  const u16* prob;                 // [H][T][8][16]
  const u16* value;                // [num_cols][H][kDim]  16-bit, any row and head stride, rows 4-byte aligned
  void* output;                    // [num_rows][H][kDim]  contiguous; every element is written
  float* partial;                  // [H][num_slots][8][kDim]  outputs of the parts of windows with several parts
  i64 value_row_stride;            // elements
  i64 value_head_stride;
  int num_rows;
  int num_tcbs;
  int num_slots;
};

struct MergeParams {
  const int* split_window;  // [windows with several parts]
  const int* window_part;   // [num_windows + 1]
  const int* part_slot;     // [P]
  const float* partial;     // [H][num_slots][8][kDim]
  void* output;             // [num_rows][H][kDim]
  int num_rows;
  int num_slots;
};

// Kernels copy their parameters into locals first: __restrict__ has no effect on members of a struct, and reads of
// scalar members further down change the registers and the address code.

template <Element kElement, int kDim>
__global__ void __launch_bounds__(kWarps* kWarpSize, 6)  // 24 warps an SM: registers for the loads in flight
    flashsparse_sddmm(const __grid_constant__ SddmmParams p) {
  const int* __restrict__ tcb_window = p.tcb_window;
  const int* __restrict__ col_sparse_to_dense = p.col_sparse_to_dense;
  const u32* __restrict__ bitmap = p.bitmap;
  const u16* __restrict__ query = p.query;
  const u16* __restrict__ key = p.key;
  float* __restrict__ score = p.score;
  const i64 query_row_stride = p.query_row_stride, query_head_stride = p.query_head_stride;
  const i64 key_row_stride = p.key_row_stride, key_head_stride = p.key_head_stride;
  const int num_rows = p.num_rows, num_tcbs = p.num_tcbs;
  const float scale_log2e = p.scale_log2e;

  static_assert(kDim % 8 == 0 && kDim <= 256, "rows of whole 16-byte chunks");
  constexpr int kPairs = divide_up(kDim, 32);  // pairs of k-steps
  const int lane = threadIdx.x % kWarpSize;
  const int g = lane / 4;
  const int t = lane % 4;
  const i64 tcb = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (tcb >= num_tcbs) return;

  const i64 query_row = static_cast<i64>(tcb_window[tcb]) * kRows + g;
  const u16* row = query + query_row * query_row_stride + blockIdx.y * query_head_stride;
  const int* columns = col_sparse_to_dense + tcb * kKeys;
  key += blockIdx.y * key_head_stride;
  const u16* low_key = key + columns[g] * key_row_stride;
  const u16* high_key = key + columns[g + 8] * key_row_stride;
  const u32 edges = bitmap[tcb * kRows / 2 + t];  // rows 2t (lower half-word) and 2t + 1

  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
  for (int first = 0; first < kPairs; first += kUnroll) {
    uint4 low[kUnroll], high[kUnroll], q[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      low[i] = load_row_words<kDim>(low_key, first + i, t);
      high[i] = load_row_words<kDim>(high_key, first + i, t);
      q[i] = query_row < num_rows ? load_row_words<kDim>(row, first + i, t) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i >= kPairs) break;
      mma_m16n8k16<kElement>(c, low[i].x, high[i].x, low[i].y, high[i].y, q[i].x, q[i].y);
      mma_m16n8k16<kElement>(c, low[i].z, high[i].z, low[i].w, high[i].w, q[i].z, q[i].w);
    }
  }

  score += (blockIdx.y * static_cast<i64>(num_tcbs) + tcb) * kTcbSize;
#pragma unroll
  for (int j = 0; j < 4; ++j) {  // C[g + 8 (j / 2)][2t + j % 2]: key, row
    const int column = g + 8 * (j / 2);
    const bool is_edge = (edges >> (16 * (j % 2) + column)) & 1;
    score[(2 * t + j % 2) * kKeys + column] = is_edge ? c[j] * scale_log2e : negative_infinity();
  }
}

// Softmax kernels: a lane holds columns 4t to 4t + 3 of row g of a TCB; a warp reads 512 consecutive bytes.
__device__ __forceinline__ float4 load_scores(const float* score, i64 tcb, int lane) {
  return __ldg(reinterpret_cast<const float4*>(score + tcb * kTcbSize) + lane);
}

// The maximum to subtract. A row without an edge has -infinity, and subtracting that would give NaN.
__device__ __forceinline__ float finite_shift(float maximum) {
  return maximum == negative_infinity() ? 0.0f : maximum;
}

template <bool kStable>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    flashsparse_statistics(const __grid_constant__ StatisticsParams p) {
  const int* __restrict__ part_tcb = p.part_tcb;
  const float* __restrict__ score = p.score;
  float* __restrict__ part_max = p.part_max;
  float* __restrict__ part_sum = p.part_sum;
  const int num_parts = p.num_parts, num_tcbs = p.num_tcbs;

  const int lane = threadIdx.x % kWarpSize;
  const i64 part = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (part >= num_parts) return;
  score += blockIdx.y * static_cast<i64>(num_tcbs) * kTcbSize;
  const int end = part_tcb[part + 1];

  float maximum = negative_infinity();
  float sum = 0.0f;
  for (int first = part_tcb[part]; first < end; first += kUnroll) {
    float4 s[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const float none = negative_infinity();
      s[i] = first + i < end ? load_scores(score, first + i, lane) : make_float4(none, none, none, none);
    }
    float shift = 0.0f;
    if constexpr (kStable) {
      float new_max = maximum;
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) {
        new_max = fmaxf(new_max, fmaxf(fmaxf(s[i].x, s[i].y), fmaxf(s[i].z, s[i].w)));
      }
      shift = finite_shift(new_max);
      sum *= ex2_approx_ftz(maximum - shift);
      maximum = new_max;
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      sum += (ex2_approx_ftz(s[i].x - shift) + ex2_approx_ftz(s[i].y - shift)) +
             (ex2_approx_ftz(s[i].z - shift) + ex2_approx_ftz(s[i].w - shift));
    }
  }

  if constexpr (kStable) {
    float row_max = fmaxf(maximum, __shfl_xor_sync(kFullWarp, maximum, 1));
    row_max = fmaxf(row_max, __shfl_xor_sync(kFullWarp, row_max, 2));
    sum *= ex2_approx_ftz(maximum - finite_shift(row_max));
    maximum = row_max;
  }
  sum += __shfl_xor_sync(kFullWarp, sum, 1);
  sum += __shfl_xor_sync(kFullWarp, sum, 2);
  if (lane % 4 == 0) {
    const i64 index = (blockIdx.y * static_cast<i64>(num_parts) + part) * kRows + lane / 4;
    part_sum[index] = sum;
    if constexpr (kStable) part_max[index] = maximum;
  }
}

template <Element kElement, bool kStable>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    flashsparse_normalise(const __grid_constant__ NormaliseParams p) {
  const int* __restrict__ part_tcb = p.part_tcb;
  const int* __restrict__ part_window = p.part_window;
  const int* __restrict__ window_part = p.window_part;
  const float* __restrict__ score = p.score;
  const float* __restrict__ part_max = p.part_max;
  const float* __restrict__ part_sum = p.part_sum;
  u16* __restrict__ prob = p.prob;
  const int num_parts = p.num_parts, num_tcbs = p.num_tcbs;

  const int lane = threadIdx.x % kWarpSize;
  const i64 part = static_cast<i64>(blockIdx.x) * kWarps + threadIdx.x / kWarpSize;
  if (part >= num_parts) return;
  const i64 head_tcb = blockIdx.y * static_cast<i64>(num_tcbs);
  const i64 head_part = blockIdx.y * static_cast<i64>(num_parts);

  // Maximum and sum of row g over all parts of its window.
  const int window = part_window[part];
  const int first_part = window_part[window];
  const int last_part = window_part[window + 1];
  part_max += head_part * kRows + lane / 4;
  part_sum += head_part * kRows + lane / 4;
  float shift = 0.0f;
  if constexpr (kStable) {
    float maximum = negative_infinity();
    for (i64 i = first_part; i < last_part; ++i) maximum = fmaxf(maximum, part_max[i * kRows]);
    shift = finite_shift(maximum);
  }
  float sum = 0.0f;
  for (i64 i = first_part; i < last_part; ++i) {
    if constexpr (kStable) {
      sum += part_sum[i * kRows] * ex2_approx_ftz(part_max[i * kRows] - shift);
    } else {
      sum += part_sum[i * kRows];
    }
  }
  const float inverse = sum == 0.0f ? 0.0f : 1.0f / sum;

  const int end = part_tcb[part + 1];
#pragma unroll kUnroll
  for (int tcb = part_tcb[part]; tcb < end; ++tcb) {
    const float4 s = load_scores(score, head_tcb + tcb, lane);
    const u32 low = cvt_rn_x2<kElement>(ex2_approx_ftz(s.x - shift) * inverse, ex2_approx_ftz(s.y - shift) * inverse);
    const u32 high = cvt_rn_x2<kElement>(ex2_approx_ftz(s.z - shift) * inverse, ex2_approx_ftz(s.w - shift) * inverse);
    reinterpret_cast<uint2*>(prob + (head_tcb + tcb) * kTcbSize)[lane] = make_uint2(low, high);
  }
}

// A warp has output dimensions 16i to 16i + 15. Row m of A is dimension 16i + 2m for m < 8, else 16i + 2(m - 8) + 1: a
// 4-byte load of V, dimensions 16i + 2g and 16i + 2g + 1, fills rows g and g + 8 of a lane, and its C registers of one
// row of O are neighbours.
template <Element kElement, Element kOut, int kDim>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    flashsparse_spmm(const __grid_constant__ SpmmParams p) {
  const int* __restrict__ part_tcb = p.part_tcb;
  const int* __restrict__ part_window = p.part_window;
  const int* __restrict__ part_slot = p.part_slot;
  const int* __restrict__ col_sparse_to_dense = p.col_sparse_to_dense;
  const u16* __restrict__ prob = p.prob;
  const u16* __restrict__ value = p.value;
  void* __restrict__ output = p.output;
  float* __restrict__ partial = p.partial;
  const i64 value_row_stride = p.value_row_stride, value_head_stride = p.value_head_stride;
  const int num_rows = p.num_rows, num_tcbs = p.num_tcbs, num_slots = p.num_slots;

  const int lane = threadIdx.x % kWarpSize;
  const int g = lane / 4;
  const int t = lane % 4;
  const int d = 16 * (blockIdx.y * kWarps + threadIdx.x / kWarpSize) + 2 * g;
  if (d - 2 * g >= kDim) return;
  const bool has_dim = kDim % 16 == 0 || d < kDim;  // false for half a warp where kDim is an odd multiple of 8
  const i64 part = blockIdx.x;
  const int end = part_tcb[part + 1];
  value += blockIdx.z * value_head_stride + d;
  prob += (blockIdx.z * static_cast<i64>(num_tcbs) * kRows + g) * kKeys + 2 * t;

  float c[4] = {0.0f, 0.0f, 0.0f, 0.0f};
  for (int first = part_tcb[part]; first < end; first += kUnroll) {
    int2 column[kUnroll][2];
    u32 weight[kUnroll][2], word[kUnroll][4];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const i64 tcb = first + i;
#pragma unroll
      for (int half = 0; half < 2; ++half) {  // keys 2t and 2t + 1, then 2t + 8 and 2t + 9
        const bool valid = tcb < end;
        const int2* columns = reinterpret_cast<const int2*>(col_sparse_to_dense + tcb * kKeys);
        column[i][half] = valid ? __ldg(columns + t + 4 * half) : make_int2(0, 0);
        weight[i][half] = valid ? __ldg(reinterpret_cast<const u32*>(prob + tcb * kTcbSize) + 4 * half) : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int key = j % 2 ? column[i][j / 2].y : column[i][j / 2].x;
        const bool valid = has_dim && first + i < end;
        word[i][j] = valid ? __ldg(reinterpret_cast<const u32*>(value + key * value_row_stride)) : 0;
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      mma_m16n8k16<kElement>(c, low_halves(word[i][0], word[i][1]), high_halves(word[i][0], word[i][1]),
                    low_halves(word[i][2], word[i][3]), high_halves(word[i][2], word[i][3]), weight[i][0],
                    weight[i][1]);
    }
  }
  if (!has_dim) return;

  const int slot = part_slot[part];
#pragma unroll
  for (int j = 0; j < 2; ++j) {  // row 2t + j of the window, dimensions d and d + 1
    if (slot >= 0) {
      const i64 partial_row = (blockIdx.z * static_cast<i64>(num_slots) + slot) * kRows + 2 * t + j;
      store_pair<Element::kFloat>(partial, partial_row * kDim + d, c[j], c[2 + j]);
    } else {
      const i64 row = static_cast<i64>(part_window[part]) * kRows + 2 * t + j;
      if (row < num_rows) store_pair<kOut>(output, (row * gridDim.z + blockIdx.z) * kDim + d, c[j], c[2 + j]);
    }
  }
}

template <Element kOut, int kDim>
__global__ void __launch_bounds__(kWarps* kWarpSize)
    flashsparse_merge(const __grid_constant__ MergeParams p) {
  const int* __restrict__ split_window = p.split_window;
  const int* __restrict__ window_part = p.window_part;
  const int* __restrict__ part_slot = p.part_slot;
  const float* __restrict__ partial = p.partial;
  void* __restrict__ output = p.output;
  const int num_rows = p.num_rows, num_slots = p.num_slots;

  const int window = split_window[blockIdx.x];
  const int first_part = window_part[window];
  const int num_parts = window_part[window + 1] - first_part;
  const int first_slot = part_slot[first_part];
  partial += (blockIdx.y * static_cast<i64>(num_slots) + first_slot) * kRows * kDim;
  for (int pair = threadIdx.x; pair < kRows * kDim / 2; pair += kWarps * kWarpSize) {
    const i64 row = static_cast<i64>(window) * kRows + 2 * pair / kDim;
    if (row >= num_rows) return;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 8
    for (i64 i = 0; i < num_parts; ++i) {
      const float2 next = __ldg(reinterpret_cast<const float2*>(partial + i * kRows * kDim) + pair);
      sum.x += next.x;
      sum.y += next.y;
    }
    store_pair<kOut>(output, (row * gridDim.y + blockIdx.y) * kDim + 2 * pair % kDim, sum.x, sum.y);
  }
}
