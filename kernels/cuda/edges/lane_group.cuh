// Lane group of the edge-by-edge kernels: the lanes that process one row of A, or of A^T, for kHeads neighbouring
// heads, 8 dimensions per lane. Lanes per head are a power of two; lanes past kDim idle.
//
//   kDim = 16, kHeads = 4     lane of the group   0     1     2     3     4     5     6     7
//                             head                0     0     1     1     2     2     3     3
//                             dimensions          0-7   8-15  0-7   8-15  0-7   8-15  0-7   8-15
//
// Packed: a 16-bit head of at most 14 dimensions whose size is no multiple of 16 bytes gets one lane; not with edge
// features, for lack of registers. Heads lie side by side, so a head may start inside of an aligned block of
// kLoad_bytes: its lane loads all blocks that it touches, zeroes the dimensions of its neighbours, and stores the blocks
// that end in it.
//
//   kDim = 13, kHeads = 4     lane = head         0     1      2      3
//                             elements of a row   0-15  12-27  24-39  36-51
//                             of the head         0-12  13-25  26-38  39-51
//
// A lane group processes one item: a row, or a part of a long row. A round is kUnroll edges of each lane group of a
// warp; the group with the most edges sets the number of rounds. Each part of a row writes a partial to global memory;
// the last group to arrive combines them in order, so that the bits are the same on every run.
#pragma once
#include "common.cuh"
#include "elements.cuh"
#include "ptx/atom.cuh"
#include "ptx/cvt.cuh"
#include "ptx/mul_wide.cuh"
#include "ptx/opaque_pointer.cuh"

constexpr int kWarps = 4;
constexpr int kFeatures = 16;  // features of an edge, zero past the last

struct __align__(16) Item {
  int row;    // -1: none
  int first;  // edge
  int count;  // edges
  int part;   // part of a split row; -1: a whole row
};

__device__ constexpr int next_power_of_two(int x) { return x <= 1 ? 1 : 2 * next_power_of_two((x + 1) / 2); }
// The largest power of two that divides x, at most `most`.
__device__ constexpr int power_of_two_in(int x, int most) { return (x & -x) < most ? x & -x : most; }

// Rows of a tensor, from the first dimension of a lane on. The pointer is opaque, so that the address of a row costs
// one instruction: else the compiler adds head and lane to each row again.
struct LaneRows {
  const char* first;
  int row_bytes;

  __device__ __forceinline__ LaneRows(const void* first, int row_bytes)
      : first(opaque_pointer(static_cast<const char*>(first))), row_bytes(row_bytes) {}
  __device__ __forceinline__ const void* row(int row) const { return first + mul_wide_s32(row, row_bytes); }
};

template <Element kIn, int kDim, int kHeads, bool kMayPack, int kRoundEdges = 4>
struct LaneGroup {
  static constexpr int kUnroll = kRoundEdges;
  static constexpr int kGroupHeads = kHeads;
  static constexpr int kBytes = kElement_bytes<kIn>;
  static constexpr bool kIsPacked = kMayPack && !kIsWide<kIn> && kDim < 15 && (kDim % 2 || (kDim > 8 && kDim % 8));
  static_assert(kDim <= 256 && (kIsPacked ? kDim > 1 && kHeads * kDim % 2 == 0 : kDim % 2 == 0),
                "pairs of elements; other head dimensions are padded by the caller");
  // Loads of a lane. In a packed group up to kMostBefore elements of the first block belong to the head before.
  static constexpr int kLoad_bytes = kIsPacked ? kBytes * power_of_two_in(kHeads * kDim, 4)
                                               : power_of_two_in(kDim * kBytes, 16);
  static constexpr int kLoadDims = kLoad_bytes / kBytes;
  static constexpr int kMostBefore = kIsPacked ? kLoadDims - power_of_two_in(kDim, kLoadDims) : 0;
  static constexpr int kLaneDims = kIsPacked ? divide_up(kMostBefore + kDim, kLoadDims) * kLoadDims : 8;
  static constexpr int kLoads = kLaneDims / kLoadDims;
  static constexpr int kHeadLanes = kIsPacked ? 1 : next_power_of_two(divide_up(kDim, kLaneDims));
  static constexpr int kLanes = kHeads * kHeadLanes;
  static constexpr int kGroups = kWarpSize / kLanes;  // lane groups per warp
  static_assert(kWarpSize % kLanes == 0, "lane groups of a warp");
  __device__ static __forceinline__ int group(int lane) { return lane / kLanes; }
  __device__ static __forceinline__ int in_group(int lane) { return lane % kLanes; }
  __device__ static __forceinline__ int first_lane(int group) { return group * kLanes; }
  // Strides in dimensions: between lanes, and between the loads of a lane.
  static constexpr int kLaneStep = kIsWide<kIn> ? kLoadDims : kLaneDims;
  static constexpr int kLoadStep = kIsWide<kIn> ? kHeadLanes * kLoadDims : kLoadDims;
  static constexpr int kLaneFeatures = kHeadLanes >= kFeatures ? 1 : kFeatures / kHeadLanes;
  // Own edges of a lane: edges of a round whose scores the lane transforms. With four lanes per head or more, one edge
  // per lane of a quad; else each lane does all of them.
  static constexpr int kOwn = kHeadLanes >= kUnroll ? 1 : kUnroll;

  // Sums each x[i] over the lanes of a head. kOwn = 1: x[0] becomes the sum of x[own_edge(lane, 0)]; each step halves
  // the values per lane, which halves the shuffles. Else every lane gets all sums.
  template <int kCount>
  __device__ static __forceinline__ void sum_over_head(float (&x)[kCount], int lane) {
    if constexpr (kOwn == 1) {
      static_assert(kCount == 4, "two halvings");
#pragma unroll
      for (int i = 0; i < 2; ++i) x[i] = kept(x[i], x[2 + i], lane, 1);
      x[0] = kept(x[0], x[1], lane, 2);
#pragma unroll
      for (int distance = 4; distance < kHeadLanes; distance *= 2) x[0] += __shfl_xor_sync(kFullWarp, x[0], distance);
    } else {
#pragma unroll
      for (int distance = 1; distance < kHeadLanes; distance *= 2) {
#pragma unroll
        for (int i = 0; i < kCount; ++i) x[i] += __shfl_xor_sync(kFullWarp, x[i], distance);
      }
    }
  }
  // The sum over two lanes of `lower` for the lower lane, of `upper` for the upper one.
  __device__ static __forceinline__ float kept(float lower, float upper, int lane, int distance) {
    const bool is_upper = lane & distance;
    return (is_upper ? upper : lower) + __shfl_xor_sync(kFullWarp, is_upper ? lower : upper, distance);
  }
  // Own edge j of a lane, and the lane of a quad whose own edge is i.
  __device__ static __forceinline__ int own_edge(int lane, int j) {
    return kOwn == 1 ? lane % 2 * 2 + lane / 2 % 2 : j;
  }
  __device__ static constexpr int lane_of_edge(int i) { return i / 2 + i % 2 * 2; }
  // x[own_edge(lane, j)], without an index into registers.
  template <typename T>
  __device__ static __forceinline__ T own(const T (&x)[kUnroll], int lane, int j) {
    if constexpr (kOwn == 1) {
      const T lower = lane & 2 ? x[1] : x[0], upper = lane & 2 ? x[3] : x[2];
      return lane & 1 ? upper : lower;
    } else {
      return x[j];
    }
  }
  // x[j] for own edge i = own_edge(lane, j), else 0.
  template <int kCount>
  __device__ static __forceinline__ float of_own_edge(const float (&x)[kCount], int lane, int i) {
    return kOwn == 1 ? (own_edge(lane, 0) == i ? x[0] : 0.0f) : x[i % kCount];
  }
  // kOwn = 1: x of the lane whose own edge is i; else x.
  __device__ static __forceinline__ float of_edge(float x, int lane, int i) {
    return kOwn == 1 ? __shfl_sync(kFullWarp, x, lane / 4 * 4 + lane_of_edge(i)) : x;
  }

  // A lane's dimensions in memory: x[kLoadDims * load + j] is dimension first_dim + kLoadStep * load + j of its head.
  // In a packed group first_dim is -kMostBefore to 0: the dimensions before 0 and from kDim on are of other heads.
  struct Words {
    u32 word[kLaneDims * kBytes / 4];
  };
  __device__ static __forceinline__ int first_dim(int lane_of_group) {
    if constexpr (kIsPacked) return -(lane_of_group * kDim % kLoadDims);
    return lane_of_group % kHeadLanes * kLaneStep;
  }
  // Whether a load has dimensions of the head, and whether x[i] (of 16 bits) is one; a compile-time true if so for all
  // lanes.
  __device__ static __forceinline__ bool is_inside(int first_dim, int load) {
    return kLaneStep * (kHeadLanes - 1) + kLoadStep * load < kDim || first_dim + kLoadStep * load < kDim;
  }
  __device__ static __forceinline__ bool is_own(int first_dim, int i) {
    return (i >= kMostBefore && kLaneStep * (kHeadLanes - 1) + i < kDim) ||
           static_cast<u32>(first_dim + i) < static_cast<u32>(kDim);
  }

  // Rows of a tensor [..][H][kDim] with any head and row stride, from the first dimension of a lane on.
  __device__ static __forceinline__ LaneRows rows_of(const void* tensor, i64 head_stride, int row_bytes, int head,
                                                     int first_dim) {
    return LaneRows(element_address<kIn>(tensor, head * head_stride + first_dim), row_bytes);
  }

  // Loads the dimensions of a lane from the address of its first one; 0 past kDim; all 0 unless `exists`.
  __device__ static __forceinline__ Words load(const void* address, int first_dim, bool exists) {
    Words x;
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      const char* const source = static_cast<const char*>(address) + kLoadStep * kBytes * i;
      load_words<kLoad_bytes>(x.word + kLoad_bytes / 4 * i, source, exists && is_inside(first_dim, i));
    }
    return x;
  }

  // 0 for the dimensions of other heads in a packed group, whatever they are: 0 * NaN is NaN.
  __device__ static __forceinline__ void unpack(float (&x)[kLaneDims], Words words, int first_dim) {
    if constexpr (kIsPacked) {
#pragma unroll
      for (int i = 0; i < kLaneDims; i += 2) {
        words.word[i / 2] &= (is_own(first_dim, i) ? 0xffffu : 0) | (is_own(first_dim, i + 1) ? 0xffff0000u : 0);
      }
    }
    unpack_words<kIn>(x, words.word);
  }

  // Loads kLaneFeatures features of an edge from an aligned address; 0 unless `exists`.
  __device__ static __forceinline__ void load_features(float (&x)[kLaneFeatures], const void* address, bool exists) {
    constexpr int kCount_bytes = kLaneFeatures * kBytes;
    if constexpr (kCount_bytes < 4) {
      x[0] = exists ? load_element<kIn>(address) : 0.0f;
    } else {
      constexpr int kStep_bytes = kCount_bytes < 16 ? kCount_bytes : 16;
      u32 words[kCount_bytes / 4];
#pragma unroll
      for (int i = 0; i < kCount_bytes; i += kStep_bytes) {
        load_words<kStep_bytes>(words + i / 4, static_cast<const char*>(address) + i, exists);
      }
      unpack_words<kIn>(x, words);
    }
  }
  // Stores kLaneFeatures features of a row, times `factor`, as elements of kIn to an aligned address.
  __device__ static __forceinline__ void store_features(void* target, const float (&x)[kLaneFeatures], float factor) {
    float products[kLaneFeatures];
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) products[i] = x[i] * factor;
    store_elements<kIn>(target, products);
  }

  // Stores the lane's dimensions to a row of contiguous heads, if `exists`. All lanes of a warp call it.
  template <Element kOut>
  __device__ static __forceinline__ void store(void* output, i64 head_start, int first_dim, bool exists,
                                               const float (&x)[kLaneDims]) {
    float whole[kLaneDims];  // with the dimensions of the next head, whose lane does not store its first block
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) {
      whole[i] = x[i];
      if (i < kDim || !kMostBefore) continue;
      const float next = __shfl_sync(kFullWarp, x[i % kLoadDims], threadIdx.x + 1);
      if (!is_own(first_dim, i)) whole[i] = next;
    }
#pragma unroll
    for (int i = 0; i < kLoads; ++i) {
      if (!exists || !is_inside(first_dim, i) || (kMostBefore && i == 0 && first_dim < 0)) continue;
      float values[kLoadDims];
#pragma unroll
      for (int j = 0; j < kLoadDims; ++j) values[j] = whole[kLoadDims * i + j];
      const i64 start = head_start + first_dim + kLoadStep * i;
      store_elements<kOut>(static_cast<char*>(output) + start * kElement_bytes<kOut>, values);
    }
  }
};

// A lane and the item of its lane group.
template <typename Group>
struct LaneItem {
  const int lane;                         // lane of the warp
  const int lane_of_group, lane_of_head;  // number in the group, and in the head
  const int first_lane;                   // first lane of the group
  const int first_dim;                    // LaneGroup::first_dim
  const int head;                         // first head in the tensors; the last group may have heads past the last
  int row;                                // -1: no item
  int first_edge, count;
  int part;  // part of a split row; -1: a whole row

  __device__ __forceinline__ LaneItem(const Item* items, int num_items)
      : lane(threadIdx.x % kWarpSize),
        lane_of_group(Group::in_group(lane)),
        lane_of_head(lane % Group::kHeadLanes),
        first_lane(Group::first_lane(Group::group(lane))),
        first_dim(Group::first_dim(lane_of_group)),
        head(blockIdx.y * Group::kGroupHeads + lane_of_group / Group::kHeadLanes) {
    const int index = (blockIdx.x * kWarps + threadIdx.x / kWarpSize) * Group::kGroups + Group::group(lane);
    int4 item = make_int4(-1, 0, 0, -1);
    if (index < num_items) item = __ldg(reinterpret_cast<const int4*>(items) + index);
    row = item.x, first_edge = item.y, count = item.z, part = item.w;
  }
};

// Whether a lane group is the last part of its row to arrive. All lanes of a warp call it, after they stored their
// partials; the last group may read the partials of the others.
//   item_part    -1: a whole row
//   parts        first part of the row, and number of parts
//   semaphores   [num_parts][num_groups]  0 before and after; the semaphore of a row's first part counts its parts
__device__ __forceinline__ bool is_last_part(int* semaphores, int item_part, int2 parts, int first_lane,
                                             bool is_first) {
  __syncwarp();  // orders the other lanes' writes before the release
  int before = 0;
  if (item_part >= 0 && is_first) {
    before = atom_inc_acq_rel_gpu(semaphores + static_cast<i64>(parts.x) * gridDim.y + blockIdx.y, parts.y - 1);
  }
  before = __shfl_sync(kFullWarp, before, first_lane);
  __syncwarp();  // a shuffle orders no memory: orders the reads after the acquire
  return item_part >= 0 && before == parts.y - 1;
}

// Floats of a lane in the partial of a part; `partial`: [num_parts][num_groups][partial_floats].
__device__ __forceinline__ float4* lane_partial(float* partial, int part, int partial_floats, int lane_offset) {
  return reinterpret_cast<float4*>(partial + (static_cast<i64>(part) * gridDim.y + blockIdx.y) * partial_floats +
                                   lane_offset);
}

// Combines the parts of split rows; all lanes of a warp call it. Each lane group with a part stores its sums; the last
// group of a row to arrive adds up the parts of the row in their order. Returns whether the group was the last.
//   sums        of a lane: sums.pack(float (&)[kFloats]); sums = {}; sums.add(const float (&)[kFloats])
//   parts       [num_parts]  first part of the row, and number of parts
//   partial     [num_parts][num_groups][kLanes][kFloats]
//   semaphores  [num_parts][num_groups]  0 before and after; the semaphore of a row's first part counts its parts
template <int kFloats, typename Group, typename Sums>
__device__ __forceinline__ bool combine_parts(Sums& sums, const LaneItem<Group>& item, const int2* parts,
                                              float* partial, int* semaphores) {
  static_assert(kFloats % 4 == 0, "whole float4");
  constexpr int kPartial = Group::kLanes * kFloats;
  const int2 row_parts = item.part >= 0 ? __ldg(parts + item.part) : make_int2(0, 0);
  const int lane_offset = item.lane_of_group * kFloats;
  if (item.part >= 0) {
    float4* const target = lane_partial(partial, item.part, kPartial, lane_offset);
    float x[kFloats] = {};
    sums.pack(x);
#pragma unroll
    for (int i = 0; i < kFloats; i += 4) target[i / 4] = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
  const bool is_last =
      is_last_part(semaphores, item.part, row_parts, item.first_lane, item.lane_of_group == 0);
  if (is_last) {
    sums = {};
    for (int part = 0; part < row_parts.y; ++part) {
      const float4* const source = lane_partial(partial, row_parts.x + part, kPartial, lane_offset);
      float x[kFloats];
#pragma unroll
      for (int i = 0; i < kFloats; i += 4) {
        const float4 four = source[i / 4];
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
      }
      sums.add(x);
    }
  }
  return is_last;
}

template <int kCount>
__device__ __forceinline__ float dot(const float (&x)[kCount], const float (&y)[kCount]) {
  float sum = x[0] * y[0];
#pragma unroll
  for (int i = 1; i < kCount; ++i) sum = fmaf(x[i], y[i], sum);
  return sum;
}
template <int kCount>
__device__ __forceinline__ float add_dot(float sum, const float (&x)[kCount], const float (&y)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) sum = fmaf(x[i], y[i], sum);
  return sum;
}

// total[kFirst + i] += weight * x[i]
template <int kFirst = 0, int kTotal, int kCount>
__device__ __forceinline__ void add_weighted(float (&total)[kTotal], float weight, const float (&x)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) total[kFirst + i] = fmaf(weight, x[i], total[kFirst + i]);
}

// Largest number of edges of an item of the warp, from one lane in each `kStep`.
template <int kStep>
__device__ __forceinline__ int most_of_warp(int count) {
#pragma unroll
  for (int distance = kStep; distance < kWarpSize; distance *= 2) {
    count = max(count, __shfl_xor_sync(kFullWarp, count, distance));
  }
  return count;
}
