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

template <Element kOut>
__device__ __forceinline__ void store_four(void* output, i64 index, float2 first, float2 second) {
  if constexpr (kOut == Element::kFloat) {
    *reinterpret_cast<float4*>(static_cast<float*>(output) + index) = make_float4(first.x, first.y, second.x, second.y);
  } else {
    *reinterpret_cast<uint2*>(static_cast<u16*>(output) + index) =
        make_uint2(pack<kOut>(first.x, first.y), pack<kOut>(second.x, second.y));
  }
}

// Writes 16 dimensions from 16 * step on of the lane's row: `left` and `right` are its C registers of two n-tiles.
// Lanes 2i and 2i + 1 trade halves, so that each holds four neighbouring elements and a row's 32 bytes are one sector:
//
//   before   lane t: left 2t, 2t+1                     right 8+2t, 8+2t+1
//   after    even t: left 2t to 2t+3                   odd t: right 8+2t-2 to 8+2t+1
template <int kDim, Element kOut>
__device__ __forceinline__ void store_step(void* output, i64 row_start, bool in_range, int step, int t, float2 left,
                                           float2 right) {
  const bool odd = t % 2;
  const float2 give = odd ? left : right;
  float2 got;
  got.x = __shfl_xor_sync(kFullWarp, give.x, 1);
  got.y = __shfl_xor_sync(kFullWarp, give.y, 1);
  const int d = 16 * step + (odd ? 8 + 2 * (t - 1) : 2 * t);
  if (in_range && d < kDim) {
    store_four<kOut>(output, row_start + d, odd ? got : left, odd ? right : got);
  }
}

__device__ __forceinline__ float inverse_or_zero(float sum) { return sum == 0.0f ? 0.0f : 1.0f / sum; }

// Adds up `count` parts of one window, `stride` bytes apart; steps of 16 dimensions warp, warp + kWarps, ... are this
// warp's. Writes the output, or one Partial if `result` is given.
template <int kDim, int kWarps, Element kOut>
__device__ __forceinline__ void merge_parts(const char* parts, i64 stride, int count, Partial<kDim>* result,
                                            void* output, i64 first_row, int num_rows, int warp, int lane) {
  const int g = lane / 4;
  const int t = lane % 4;
  const auto part = [&](int i) { return reinterpret_cast<const Partial<kDim>*>(parts + i * stride); };
  float maximum[2], sum[2] = {0.0f, 0.0f}, shift[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    maximum[half] = negative_infinity();
    for (int i = 0; i < count; ++i) maximum[half] = fmaxf(maximum[half], part(i)->maximum[8 * half + g]);
    shift[half] = maximum[half] == negative_infinity() ? 0.0f : maximum[half];
    for (int i = 0; i < count; ++i) {
      sum[half] += part(i)->sum[8 * half + g] * exp2_approx(part(i)->maximum[8 * half + g] - shift[half]);
    }
    if (result && warp == 0 && t == 0) {
      result->maximum[8 * half + g] = maximum[half];
      result->sum[8 * half + g] = sum[half];
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
      const i64 row = first_row + 8 * half + g;
      store_step<kDim, kOut>(output, (row * gridDim.y + blockIdx.y) * kDim, row < num_rows, step, t,
                             make_float2(out[0][2 * half] * inverse, out[0][2 * half + 1] * inverse),
                             make_float2(out[1][2 * half] * inverse, out[1][2 * half + 1] * inverse));
    }
  }
}
