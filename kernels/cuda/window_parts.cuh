// Output rows of a row window from C fragments, and the sum of a window's parts. After mma.cuh.
#pragma once

constexpr u32 kFullWarp = 0xffffffffu;

__device__ constexpr int divide_up(int x, int y) { return (x + y - 1) / y; }

// A part of a window: O, not yet divided, in the order of the C fragments, with the maximum and the sum of each row. The
// 16 dimensions of a step stand alone, so that each can be added up by a warp that knows nothing of the others.
template <int kDim>
struct Partial {
  struct Step {
    float4 out[2][kWarpSize];  // of two n-tiles
    float maximum[kTileM];     // times log2(e)
    float sum[kTileM];
  } step[divide_up(kDim, 16)];
};

// Writes 16 dimensions from 16 * step on of the lane's row: `left` and `right` are its C registers of two n-tiles.
// In fp32 the four lanes of a row write a sector of 32 bytes with each. In 16 bits that would be half a sector: lanes
// 2i and 2i + 1 trade halves, so that each holds four neighbouring elements:
//
//   before   lane t: left 2t, 2t+1                     right 8+2t, 8+2t+1
//   after    even t: left 2t to 2t+3                   odd t: right 8+2t-2 to 8+2t+1
template <int kDim, Element kOut>
__device__ __forceinline__ void store_step(void* output, i64 row_start, bool in_range, int step, int t, float2 left,
                                           float2 right) {
  if constexpr (kOut == Element::kFloat) {
    float* const place = static_cast<float*>(output) + row_start + 16 * step + 2 * t;
    if (in_range) *reinterpret_cast<float2*>(place) = left;
    if (in_range && 16 * step + 8 < kDim) *reinterpret_cast<float2*>(place + 8) = right;
  } else {
    const bool odd = t % 2;
    const float2 give = odd ? left : right;
    float2 got;
    got.x = __shfl_xor_sync(kFullWarp, give.x, 1);
    got.y = __shfl_xor_sync(kFullWarp, give.y, 1);
    const int d = 16 * step + (odd ? 8 + 2 * (t - 1) : 2 * t);
    if (in_range && d < kDim) {
      const float2 low = odd ? got : left, high = odd ? right : got;
      *reinterpret_cast<uint2*>(static_cast<u16*>(output) + row_start + d) =
          make_uint2(pack<kOut>(low.x, low.y), pack<kOut>(high.x, high.y));
    }
  }
}

// 1 / sum within an ulp, 0 for a row without an edge.
__device__ __forceinline__ float inverse_or_zero(float sum) {
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(sum));
  return sum == 0.0f ? 0.0f : inverse;
}

// Natural logarithm of a row's sum of exponentials, from its maximum in units of log 2.
__device__ __forceinline__ float log_sum_exp(float maximum, float sum) {
  return sum == 0.0f ? negative_infinity() : (maximum + __log2f(sum)) * 0.693147180559945f;
}

// Which rows of Q and O a window has; num_rows and more stand for none.
struct WindowRows {
  const int* row_ids;  // [num_row_windows][16], or null for the natural order
  int num_rows;
  __device__ __forceinline__ int of(int window, int row) const {
    const int place = window * kTileM + row;
    return row_ids ? row_ids[place] : place;
  }
};

// Adds up `count` parts of one window, `stride` bytes apart; steps warp, warp + kWarps, ... are this warp's. Writes the
// output, or a part if `result` is given.
template <int kDim, int kWarps, Element kOut>
__device__ __forceinline__ void merge_parts(const char* parts, i64 stride, int count, Partial<kDim>* result,
                                            void* output, float* lse, const WindowRows& rows, int window, int warp,
                                            int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
  for (int step = warp; step < divide_up(kDim, 16); step += kWarps) {
    float maximum[2] = {negative_infinity(), negative_infinity()}, sum[2] = {};
    float out[2][4] = {};
#pragma unroll 4  // the loads of several parts wait together
    for (int i = 0; i < count; ++i) {
      const auto& part = reinterpret_cast<const Partial<kDim>*>(parts + i * stride)->step[step];
      const float4 add[2] = {part.out[0][lane], part.out[1][lane]};
      float kept[2], added[2];  // what the scales of the rows become
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const float part_maximum = part.maximum[8 * half + g];
        const float new_maximum = fmaxf(maximum[half], part_maximum);
        const float shift = new_maximum == negative_infinity() ? 0.0f : new_maximum;
        kept[half] = exp2_approx(maximum[half] - shift);
        added[half] = exp2_approx(part_maximum - shift);
        sum[half] = sum[half] * kept[half] + part.sum[8 * half + g] * added[half];
        maximum[half] = new_maximum;
      }
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        out[tile][0] = out[tile][0] * kept[0] + add[tile].x * added[0];
        out[tile][1] = out[tile][1] * kept[0] + add[tile].y * added[0];
        out[tile][2] = out[tile][2] * kept[1] + add[tile].z * added[1];
        out[tile][3] = out[tile][3] * kept[1] + add[tile].w * added[1];
      }
    }
    if (result) {
      auto& added_up = result->step[step];
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        added_up.out[tile][lane] = make_float4(out[tile][0], out[tile][1], out[tile][2], out[tile][3]);
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        if (t == 0) added_up.maximum[8 * half + g] = maximum[half], added_up.sum[8 * half + g] = sum[half];
      }
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int row = rows.of(window, 8 * half + g);
      const bool in_range = row < rows.num_rows;
      const i64 row_of_head = static_cast<i64>(row) * gridDim.y + blockIdx.y;
      if (step == 0 && t == 0 && lse && in_range) lse[row_of_head] = log_sum_exp(maximum[half], sum[half]);
      const float inverse = inverse_or_zero(sum[half]);
      store_step<kDim, kOut>(output, row_of_head * kDim, in_range, step, t,
                             make_float2(out[0][2 * half] * inverse, out[0][2 * half + 1] * inverse),
                             make_float2(out[1][2 * half] * inverse, out[1][2 * half + 1] * inverse));
    }
  }
}

// Counts to `all` and starts over; true for the last. What the warps before it wrote before they counted is there for
// the warp that is the last.
__device__ __forceinline__ bool is_last_of(int all, int* counter, int lane) {
  int before = 0;
  __syncwarp();
  if (lane == 0) {
    asm volatile("atom.inc.acq_rel.gpu.u32 %0, [%1], %2;" : "=r"(before) : "l"(counter), "r"(all - 1) : "memory");
  }
  return __shfl_sync(kFullWarp, before, 0) == all - 1;
}

// Adds up what the warps of a block have of its window, and is the end of a window of one block. The result of a piece
// of a cut window goes to `partial`; of each warp's steps, the last block to bring them adds all pieces up, always in
// the order of their slots. Not inlined: it would cost the main loop registers.
//   parts    one Partial a warp, `stride` bytes apart
//   partial  [num_slots][H]
//   arrived  [num_slots][H][kWarps]  pieces that are in `partial`, counted at the window's first slot
//   slot     of the piece; negative where the block has all of the window
template <int kDim, int kWarps, Element kOut>
__device__ __noinline__ void finish_shared(const char* parts, i64 stride, Partial<kDim>* partial, int* arrived,
                                           int slot, int first_slot, int num_pieces, void* output, float* lse,
                                           WindowRows rows, int window, int warp, int lane) {
  const auto place = [](int of_slot) { return static_cast<i64>(of_slot) * gridDim.y + blockIdx.y; };
  Partial<kDim>* const result = slot < 0 ? nullptr : partial + place(slot);
  merge_parts<kDim, kWarps, kOut>(parts, stride, kWarps, result, output, lse, rows, window, warp, lane);
  if (!result || !is_last_of(num_pieces, arrived + place(first_slot) * kWarps + warp, lane)) return;
  merge_parts<kDim, kWarps, kOut>(reinterpret_cast<const char*>(partial + place(first_slot)),
                                  sizeof(Partial<kDim>) * gridDim.y, num_pieces, nullptr, output, lse, rows, window,
                                  warp, lane);
}
