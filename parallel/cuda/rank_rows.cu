// The two steps of attention on several ranks between its kernels and the exchange. Both are bound by memory.
//
//   pack_rows       keys and values of the rows that other ranks need, side by side in one buffer
//   combine_rows    combines attention over two sets of columns (the combine of split-KV), in place:
//                   O <- w O + w' O',  w = exp(L) / (exp(L) + exp(L')),  L <- log(exp(L) + exp(L'))
//
// A row is read and written in chunks of kBytes: 16, or less where sizes or addresses are no multiples of 16.
// Neighbouring threads have neighbouring chunks. pack_rows only copies bytes:
//
//   key     row 0 | row 1 | row 2 | ...                  rows = {2, 0}
//   value   row 0 | row 1 | row 2 | ...                  row_chunks = chunks of one row of one tensor
//   packed  key 2 | value 2 | key 0 | value 0            a segment is a row of one tensor
//
//   output  [num_rows][H][d] as segments (row, head) of head_chunks chunks; one L and one weight for each segment
//
// Grid (blocks of whole segments), kThreads threads. A block has about kThreads * kBatch chunks; a thread issues the
// loads of kBatch of them before the first store. Indices inside a block fit 32 bits, places in a tensor need 64.
#include "chunk.cuh"
#include "common.cuh"
#include "ptx/cvt.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_global.cuh"
#include "ptx/math.cuh"

constexpr int kThreads = 256;
constexpr int kPackBatch = 4;
constexpr int kCombineBatch = 2;  // of the output and of the partial output each

struct PackParams {
  u8* packed;         // [num_rows][2][row_chunks * kBytes]
  const u8* key;      // rows of row_chunks * kBytes bytes, key_stride apart
  const u8* value;    // rows of row_chunks * kBytes bytes, value_stride apart
  const i64* rows;    // [num_rows]
  i64 key_stride;     // bytes
  i64 value_stride;   // bytes
  i64 num_segments;   // 2 num_rows
  u32 row_chunks;
  u32 block_segments;
};

struct CombineParams {
  u8* output;              // [num_segments][head_chunks * kBytes]  O, read and written
  float* lse;              // [num_segments]  L, read and written; -infinity for no columns
  const u8* other_output;  // [num_segments][head_chunks * kBytes]  O'
  const float* other_lse;  // [num_segments]  L'
  i64 num_segments;        // rows * heads
  u32 head_chunks;
  u32 block_segments;
};

template <int kBytes>
__device__ __forceinline__ Chunk<kBytes> load_chunk(const u8* address) {
  if constexpr (kBytes == 16) {
    return ld_global_no_allocate_v4_b32(address);
  } else if constexpr (kBytes == 8) {
    return ld_global_no_allocate_v2_b32(address);
  } else {
    return *reinterpret_cast<const Chunk<kBytes>*>(address);
  }
}

template <int kBytes>
__device__ __forceinline__ void store_chunk(u8* address, Chunk<kBytes> chunk) {
  if constexpr (kBytes == 16) {
    st_global_v4_b32(address, chunk);
  } else if constexpr (kBytes == 8) {
    st_global_v2_b32(address, chunk);
  } else {
    *reinterpret_cast<Chunk<kBytes>*>(address) = chunk;
  }
}

// Segments of this block, the first of which is blockIdx.x * block_segments.
__device__ __forceinline__ u32 segments_of_block(i64 num_segments, u32 block_segments) {
  const i64 left = num_segments - static_cast<i64>(blockIdx.x) * block_segments;
  return left < block_segments ? static_cast<u32>(left) : block_segments;
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads) pack_rows(const __grid_constant__ PackParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const i64 first_segment = static_cast<i64>(blockIdx.x) * p.block_segments;
  const u32 num_chunks = segments_of_block(p.num_segments, p.block_segments) * p.row_chunks;
  u8* const packed = p.packed + first_segment * p.row_chunks * kBytes;
  for (u32 start = threadIdx.x; start < num_chunks; start += kThreads * kPackBatch) {
    // Row numbers of the whole batch before its first row: their latencies overlap.
    i64 row[kPackBatch];
    u32 place[kPackBatch];  // byte in the row
    bool is_value[kPackBatch];
#pragma unroll
    for (int b = 0; b < kPackBatch; ++b) {
      const u32 chunk = start + b * kThreads, segment = chunk / p.row_chunks;
      row[b] = chunk < num_chunks ? __ldg(p.rows + (first_segment + segment) / 2) : 0;
      place[b] = (chunk - segment * p.row_chunks) * kBytes;
      is_value[b] = (first_segment + segment) % 2;
    }
    Chunk<kBytes> chunks[kPackBatch];
#pragma unroll
    for (int b = 0; b < kPackBatch; ++b) {
      if (start + b * kThreads >= num_chunks) break;
      const u8* const tensor = is_value[b] ? p.value : p.key;
      const i64 stride = is_value[b] ? p.value_stride : p.key_stride;
      chunks[b] = load_chunk<kBytes>(tensor + row[b] * stride + place[b]);
    }
#pragma unroll
    for (int b = 0; b < kPackBatch; ++b) {
      const u32 chunk = start + b * kThreads;
      if (chunk < num_chunks) store_chunk<kBytes>(packed + static_cast<i64>(chunk) * kBytes, chunks[b]);
    }
  }
}

struct Combined {
  float weight, other_weight;  // add up to 1; both are 0 if neither set has a column
  float lse;
};

// The smaller weight comes from its own exponential: 1 - w has no digits left where w is near 1. NaN in, NaN out.
__device__ __forceinline__ Combined combine_lse(float lse, float other_lse) {
  constexpr float kLog2E = 1.4426950408889634f;
  const bool other_is_less = lse > other_lse;
  const float most = other_is_less ? lse : other_lse, least = other_is_less ? other_lse : lse;
  if (lse == negative_infinity() && other_lse == negative_infinity()) return {0.0f, 0.0f, lse};
  const float ratio = ex2_approx_ftz((least - most) * kLog2E);  // 0 for -infinity
  const float larger = 1.0f / (1.0f + ratio), smaller = ratio * larger;
  return {other_is_less ? larger : smaller, other_is_less ? smaller : larger, most + log1pf(ratio)};
}

template <Element kElement>
__device__ __forceinline__ u32 mix_word(u32 word, u32 other_word, Combined by) {
  if constexpr (kElement == Element::kFloat) {
    return __float_as_uint(fmaf(__uint_as_float(word), by.weight, __uint_as_float(other_word) * by.other_weight));
  } else {
    const float2 x = cvt_f32_x2<kElement>(word), y = cvt_f32_x2<kElement>(other_word);
    return cvt_rn_x2<kElement>(fmaf(x.x, by.weight, y.x * by.other_weight),
                               fmaf(x.y, by.weight, y.y * by.other_weight));
  }
}

template <Element kElement, int kBytes>
__device__ __forceinline__ Chunk<kBytes> mix_chunk(Chunk<kBytes> x, Chunk<kBytes> y, Combined by) {
  if constexpr (kBytes == 16) {
    return make_uint4(mix_word<kElement>(x.x, y.x, by), mix_word<kElement>(x.y, y.y, by),
                      mix_word<kElement>(x.z, y.z, by), mix_word<kElement>(x.w, y.w, by));
  } else if constexpr (kBytes == 8) {
    return make_uint2(mix_word<kElement>(x.x, y.x, by), mix_word<kElement>(x.y, y.y, by));
  } else {
    return static_cast<Chunk<kBytes>>(mix_word<kElement>(x, y, by));  // 2 bytes: the upper half of the word is 0
  }
}

template <Element kElement, int kBytes>
__global__ void __launch_bounds__(kThreads) combine_rows(const __grid_constant__ CombineParams p) {
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  const i64 first_segment = static_cast<i64>(blockIdx.x) * p.block_segments;
  const u32 num_segments = segments_of_block(p.num_segments, p.block_segments);
  const u32 num_chunks = num_segments * p.head_chunks;
  float* const lse = p.lse + first_segment;
  const float* const other_lse = p.other_lse + first_segment;
  u8* const output = p.output + first_segment * p.head_chunks * kBytes;
  const u8* const other_output = p.other_output + first_segment * p.head_chunks * kBytes;
  for (u32 start = threadIdx.x; start < num_chunks; start += kThreads * kCombineBatch) {
    Chunk<kBytes> own[kCombineBatch], other[kCombineBatch];
    float own_lse[kCombineBatch], of_other[kCombineBatch];
#pragma unroll
    for (int b = 0; b < kCombineBatch; ++b) {
      const u32 chunk = start + b * kThreads;
      if (chunk >= num_chunks) break;
      own[b] = load_chunk<kBytes>(output + static_cast<i64>(chunk) * kBytes);
      other[b] = load_chunk<kBytes>(other_output + static_cast<i64>(chunk) * kBytes);
      own_lse[b] = lse[chunk / p.head_chunks], of_other[b] = other_lse[chunk / p.head_chunks];
    }
#pragma unroll
    for (int b = 0; b < kCombineBatch; ++b) {
      const u32 chunk = start + b * kThreads;
      if (chunk >= num_chunks) break;
      const Combined by = combine_lse(own_lse[b], of_other[b]);
      store_chunk<kBytes>(output + static_cast<i64>(chunk) * kBytes, mix_chunk<kElement, kBytes>(own[b], other[b], by));
    }
  }
  // A segment belongs to one block, all of whose threads have read L here: without the barrier some would read the new
  // one.
  __syncthreads();
  for (u32 i = threadIdx.x; i < num_segments; i += kThreads) lse[i] = combine_lse(lse[i], other_lse[i]).lse;
}
