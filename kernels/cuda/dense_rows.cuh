// A lane's part of 64 rows in registers: read, written, unpacked, joined with vectors and normalised, see
// dense_block.cu for the order of dimensions. After mma.cuh and hopper.cuh.
#pragma once

constexpr int kBlockK = 32;  // dimensions that are exchanged among themselves

template <Element kElement>
__device__ __forceinline__ float2 unpack(u32 word) {
  float2 values;
  if constexpr (kElement == Element::kHalf) {
    asm("{.reg .f16 low, high; mov.b32 {low, high}, %2; cvt.f32.f16 %0, low; cvt.f32.f16 %1, high;}"
        : "=f"(values.x), "=f"(values.y)
        : "r"(word));
  } else {
    values = make_float2(__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000));
  }
  return values;
}

// pack(max(low, 0), max(high, 0))
template <Element kElement>
__device__ __forceinline__ u32 pack_relu(float low, float high) {
  u32 word;
  if constexpr (kElement == Element::kHalf) {
    asm("cvt.rn.relu.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.relu.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(high), "f"(low));
  }
  return word;
}

__device__ __forceinline__ uint4 load_once(const uint4* address) {
  uint4 words;
  asm volatile("ld.global.L1::no_allocate.v4.b32 {%0,%1,%2,%3}, [%4];"
               : "=r"(words.x), "=r"(words.y), "=r"(words.z), "=r"(words.w)
               : "l"(address));
  return words;
}

// A lane's part of 64 rows by kColumns columns: fp32 d[4j + 2r + b], or packed words[2j + r], of n-tile j, row g + 8r.
template <int kColumns>
using Floats = float[kColumns / 2];
template <int kColumns>
using Words = u32[kColumns / 4];

// The two rows of a lane in a tile: `first`, and 8 further.
struct Rows {
  i64 first;
  bool in_range[2];
  __device__ __forceinline__ Rows(int row_tile, int warp, int g, int num_rows) {
    first = static_cast<i64>(row_tile) * kGroupM + warp * kTileM + g;
    in_range[0] = first < num_rows;
    in_range[1] = first + 8 < num_rows;
  }
};

template <int kCount>
__device__ __forceinline__ void read_rows(u32 (&words)[kCount], const u16* lane_start, int pitch, const Rows& rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const uint4* source = reinterpret_cast<const uint4*>(lane_start + 8 * r * pitch);
#pragma unroll
    for (int s = 0; s < kCount / 8; ++s) {
      const uint4 four = rows.in_range[r] ? load_once(source + 4 * s) : make_uint4(0, 0, 0, 0);
      words[8 * s + r] = four.x;
      words[8 * s + 2 + r] = four.y;
      words[8 * s + 4 + r] = four.z;
      words[8 * s + 6 + r] = four.w;
    }
  }
}

template <int kCount>
__device__ __forceinline__ void write_rows(u16* lane_start, const u32 (&words)[kCount], int pitch, const Rows& rows) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    uint4* target = reinterpret_cast<uint4*>(lane_start + 8 * r * pitch);
#pragma unroll
    for (int s = 0; s < kCount / 8; ++s) {
      if (rows.in_range[r]) {
        store_global(target + 4 * s,
                     make_uint4(words[8 * s + r], words[8 * s + 2 + r], words[8 * s + 4 + r], words[8 * s + 6 + r]));
      }
    }
  }
}

// d[...] = op(d[...], the element of `vector` of its dimension); `lane_vector` is vector + 8t.
template <int kCount, typename Op>
__device__ __forceinline__ void with_vector(float (&d)[kCount], const float* lane_vector, Op op) {
#pragma unroll
  for (int s = 0; s < kCount / 16; ++s) {
    const float4 low = *reinterpret_cast<const float4*>(lane_vector + kBlockK * s);
    const float4 high = *reinterpret_cast<const float4*>(lane_vector + kBlockK * s + 4);
    const float eight[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 16; ++i) {  // 4w + 2r + b
      const int w = i / 4, b = i % 2;
      d[16 * s + i] = op(d[16 * s + i], eight[2 * w + b]);
    }
  }
}

template <int kCount>
__device__ __forceinline__ void set_vector(float (&d)[kCount], const float* lane_vector) {
  with_vector(d, lane_vector, [](float, float element) { return element; });
}

template <Element kElement, int kCount>
__device__ __forceinline__ void pack_all(u32 (&words)[kCount], const float (&d)[2 * kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) words[i] = pack<kElement>(d[2 * i], d[2 * i + 1]);
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

// Sums of op(x) over a lane's two rows, whole rows in every lane of the quad; four chains of additions.
template <int kCount, typename Op>
__device__ __forceinline__ float2 row_sums(const float (&d)[kCount], Op op) {
  float sums[4] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i % 4] += op(d[i], i / 2 % 2);
  return make_float2(quad_sum(sums[0] + sums[1]), quad_sum(sums[2] + sums[3]));
}

template <int kDim>
__device__ __forceinline__ void layer_norm(Floats<kDim>& d, const float* lane_weight, const float* lane_bias,
                                           float eps) {
  const float2 sums = row_sums(d, [](float x, int) { return x; });
  const float mean[2] = {sums.x / kDim, sums.y / kDim};
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) d[i] -= mean[i / 2 % 2];
  const float2 squares = row_sums(d, [](float x, int) { return x * x; });
  const float scale[2] = {rsqrtf(squares.x / kDim + eps), rsqrtf(squares.y / kDim + eps)};
#pragma unroll
  for (int i = 0; i < kDim / 2; ++i) d[i] *= scale[i / 2 % 2];
  with_vector(d, lane_weight, [](float x, float weight) { return x * weight; });
  with_vector(d, lane_bias, [](float x, float bias) { return x + bias; });
}
