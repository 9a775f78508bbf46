// Output rows of a row window from C fragments, and the sum of a window's parts. After mma.cuh.
#pragma once

constexpr u32 kFullWarp = 0xffffffffu;

__device__ constexpr int divide_up(int x, int y) { return (x + y - 1) / y; }

// O, row maximum and row sum of a part of a window, O not yet divided, in the order of the C fragments.
template <int kDim>
struct Partial {
  float4 out[2 * divide_up(kDim, 16)][kWarpSize];
  float maximum[kTileM];
  float sum[kTileM];
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

// Adds up `count` parts of one window, `stride` bytes apart; steps of 16 dimensions warp, warp + kWarps, ... are this
// warp's. Writes the output, or one Partial if `result` is given.
template <int kDim, int kWarps, Element kOut>
__device__ __forceinline__ void merge_parts(const char* parts, i64 stride, int count, Partial<kDim>* result,
                                            void* output, float* lse, const WindowRows& rows, int window, int warp,
                                            int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
  const auto part = [&](int i) { return reinterpret_cast<const Partial<kDim>*>(parts + i * stride); };
  float maximum[2], sum[2] = {0.0f, 0.0f}, shift[2];
  i64 row_of_head[2];
  bool in_range[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    maximum[half] = negative_infinity();
    for (int i = 0; i < count; ++i) maximum[half] = fmaxf(maximum[half], part(i)->maximum[8 * half + g]);
    shift[half] = maximum[half] == negative_infinity() ? 0.0f : maximum[half];
    for (int i = 0; i < count; ++i) {
      sum[half] += part(i)->sum[8 * half + g] * exp2_approx(part(i)->maximum[8 * half + g] - shift[half]);
    }
    const int row = rows.of(window, 8 * half + g);
    row_of_head[half] = static_cast<i64>(row) * gridDim.y + blockIdx.y;
    in_range[half] = row < rows.num_rows;
    if (warp == 0 && t == 0) {
      if (result) {
        result->maximum[8 * half + g] = maximum[half];
        result->sum[8 * half + g] = sum[half];
      } else if (lse && in_range[half]) {
        lse[row_of_head[half]] = log_sum_exp(maximum[half], sum[half]);
      }
    }
  }
  for (int step = warp; step < divide_up(kDim, 16); step += kWarps) {
    float out[2][4] = {};
    for (int i = 0; i < count; ++i) {
      const float top = exp2_approx(part(i)->maximum[g] - shift[0]);
      const float bottom = exp2_approx(part(i)->maximum[8 + g] - shift[1]);
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        const float4 add = part(i)->out[2 * step + tile][lane];
        out[tile][0] += top * add.x;
        out[tile][1] += top * add.y;
        out[tile][2] += bottom * add.z;
        out[tile][3] += bottom * add.w;
      }
    }
    if (result) {
#pragma unroll
      for (int tile = 0; tile < 2; ++tile) {
        result->out[2 * step + tile][lane] = make_float4(out[tile][0], out[tile][1], out[tile][2], out[tile][3]);
      }
      continue;
    }
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float inverse = inverse_or_zero(sum[half]);
      store_step<kDim, kOut>(output, row_of_head[half] * kDim, in_range[half], step, t,
                             make_float2(out[0][2 * half] * inverse, out[0][2 * half + 1] * inverse),
                             make_float2(out[1][2 * half] * inverse, out[1][2 * half + 1] * inverse));
    }
  }
}
