// O = softmax(s) V edge by edge, for narrow heads on sparse graphs and for edge data; bound by the gathers of rows of K
// and V.
//
//   k_ij = w[type_ij] * k_j + W a_ij                      w: elementwise; a_ij: up to 16 features of the edge
//   v_ij = v_j + W' a_ij
//   s_ij = clamp(scale * m_ij * <q_i, k_ij> + b_ij)       score_terms.cuh: what of it an instance has
//
// fused3s.cu computes 16 x 16 scores for each head of a KV tile, whatever the number of edges in it. Where there are
// about 16, heads of up to 32 dimensions cost it more instructions than their edges one by one.
//
// Grid (num_items / kGroupsPerBlock, head groups). Each lane group takes one item (lane_group.cuh).
//
// Features. <q_i, W a_ij> = <u_i, a_ij> with u_i = W^T q_i, and sum_j p_ij W' a_ij = W' s_i with s_i = sum_j p_ij a_ij:
// an edge costs 2 x 16 products a head, and none of its tensors has kDim columns. The lanes of a head share out the 16
// features. The kernels of feature_products.cu make u in front, and add W' s behind.
//
// Order that must not change
//   [1]  Before griddepcontrol_wait only items and indices are read: the kernel in front may still write Q, K, V and
//        edge data, or read memory that this kernel writes.
//   [2]  V of an edge that does not exist is 0, not only its weight: 0 * NaN is NaN.
//   [3]  A maximum of -infinity is never subtracted: a row without an edge so far would become NaN.
#include "common.cuh"
#include "dropout.cuh"
#include "elements.cuh"
#include "lane_group.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "score_terms.cuh"

struct Params {
  const Item* items;        // [num_items]
  const int* indices;       // [nnz]  key of each edge
  const int2* parts;        // [num_parts]  first part of the row, and its number of parts
  const void* query;        // [num_rows][H][kDim]  kIn, any row and head stride, rows aligned to kLoad_bytes
  const void* key;           // [num_cols][H][kDim]  likewise
  const void* value;         // [num_cols][H][kDim]  likewise
  void* output;             // [num_rows][H][kDim]  contiguous; every element is written
  float* lse;               // [num_rows][H]  log of the sum of exp(scores), -infinity without an edge; may be null
  float* partial;           // [num_parts][num_groups][kPartial]
  int* semaphores;          // [num_parts][num_groups]  0 before and after; those of a row's first part count its parts
  const void* bias;          // [nnz][1 or H]
  const void* multiplier;    // [nnz][1 or H]
  const u8* types;          // [nnz]
  const void* type_weight;   // [num_types][H][kDim]  contiguous
  const void* features;      // [nnz][16]
  const float* projected;   // [H][num_rows][16]  u
  void* feature_sums;       // [H][num_rows][16]  s, divided by the sum of the weights
  DropoutParams dropout;
  i64 query_head_stride;    // elements
  i64 key_head_stride;
  i64 value_head_stride;
  int query_row_bytes;
  int key_row_bytes;
  int value_row_bytes;
  int num_rows;
  int num_items;
  int num_heads;
  int bias_heads;        // 1 or H
  int multiplier_heads;  // 1 or H
  float scale;           // times kScoreUnit
  float clamp;           // largest |s|, times kScoreUnit
};

template <Element kIn, int kDim, int kHeads, int kTerms>
struct ForwardGroup : LaneGroup<kIn, kDim, kHeads> {
  using Base = LaneGroup<kIn, kDim, kHeads>;
  static constexpr int kLanes = Base::kLanes, kLaneFeatures = Base::kLaneFeatures, kOwn = Base::kOwn;
  static constexpr bool kHasFeatures = kTerms & (kKeyFeatures | kValueFeatures);
  // Blocks of an SM that registers are left for; no spills. Rows of float32 in flight take twice as many.
  static constexpr bool kManyFeatures = kHasFeatures && kLaneFeatures > 8;
  static constexpr bool kIsLargest =
      kManyFeatures || (kHasFeatures && kTerms & kTypes && (kLaneFeatures == 8 || kIsWide<kIn>));
  static constexpr bool kIsLarge = kHasFeatures || kTerms & kTypes;
  static constexpr int kMinBlocks = kIsLargest                         ? 2
                                    : kIsWide<kIn>                     ? (kIsLarge ? 3 : 4)
                                    : kIsLarge                         ? 4
                                    : kTerms && (kOwn > 1 || kDim % 4) ? 5
                                                                       : 6;
  // Floats of a lane in a partial, whole float4: O, maximum, sum, and s.
  static constexpr int kLanePartial = divide_up(kLaneDims + 2 + (kTerms & kValueFeatures ? kLaneFeatures : 0), 4) * 4;
  static constexpr int kPartial = kLanes * kLanePartial;

  template <typename Softmax>
  __device__ static __forceinline__ void store_partial(float4* target, const Softmax& softmax) {
    float x[kLanePartial] = {};
#pragma unroll
    for (int d = 0; d < kLaneDims; ++d) x[d] = softmax.out[d];
    x[kLaneDims] = softmax.max, x[kLaneDims + 1] = softmax.sum;
    if constexpr (kTerms & kValueFeatures) {
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) x[kLaneDims + 2 + i] = softmax.features[i];
    }
#pragma unroll
    for (int i = 0; i < kLanePartial; i += 4) target[i / 4] = make_float4(x[i], x[i + 1], x[i + 2], x[i + 3]);
  }
  template <typename Softmax>
  __device__ static __forceinline__ void combine(Softmax& softmax, const float4* partial) {
    float x[kLanePartial];
#pragma unroll
    for (int i = 0; i < kLanePartial; i += 4) {
      const float4 four = partial[i / 4];
      x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
    }
    const float shift = softmax.grow(fmaxf(softmax.max, x[kLaneDims]));
    const float factor = exp_score<kIn>(x[kLaneDims] - shift);
    softmax.sum = fmaf(factor, x[kLaneDims + 1], softmax.sum);
#pragma unroll
    for (int d = 0; d < kLaneDims; ++d) softmax.out[d] = fmaf(factor, x[d], softmax.out[d]);
    if constexpr (kTerms & kValueFeatures) {
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) {
        softmax.features[i] = fmaf(factor, x[kLaneDims + 2 + i], softmax.features[i]);
      }
    }
  }
};

// The online softmax of a lane's head: O of its eight dimensions and s of its features, not yet divided by the sum.
template <Element kIn, int kLaneFeatures>
struct Softmax {
  float out[kLaneDims] = {};
  float features[kLaneFeatures] = {};
  float max = negative_infinity();  // times kScoreUnit
  float sum = 0.0f;

  // Takes over a new maximum; returns what weights are shifted by. [3]
  __device__ __forceinline__ float grow(float new_max) {
    const float shift = new_max == negative_infinity() ? 0.0f : new_max;
    const float factor = exp_score<kIn>(max - shift);
    max = new_max;
    sum *= factor;
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) out[i] *= factor;
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) features[i] *= factor;
    return shift;
  }
};

template <Element kIn, Element kOut, int kDim, int kHeads, int kTerms,
          typename Group = ForwardGroup<kIn, kDim, kHeads, kTerms>>
__device__ KernelSizes fused3s_edges_sizes = {0, Group::kPartial, Group::kMinBlocks, kWarps * Group::kGroups};

template <Element kIn, Element kOut, int kDim, int kHeads, int kTerms>
__global__ void __launch_bounds__(kWarps* kWarpSize, ForwardGroup<kIn, kDim, kHeads, kTerms>::kMinBlocks)
    fused3s_edges(const __grid_constant__ Params p) {
  using Group = ForwardGroup<kIn, kDim, kHeads, kTerms>;
  constexpr int kLaneFeatures = Group::kLaneFeatures, kOwn = Group::kOwn;
  constexpr int kHeadLanes = Group::kHeadLanes, kLanes = Group::kLanes;
  const int lane = threadIdx.x % kWarpSize;
  const int lane_of_group = lane % kLanes, part_of_head = lane % kHeadLanes;
  const int head = blockIdx.y * kHeads + lane_of_group / kHeadLanes;
  const int index = (blockIdx.x * kWarps + threadIdx.x / kWarpSize) * Group::kGroups + lane / kLanes;

  int4 item = make_int4(-1, 0, 0, -1);
  if (index < p.num_items) item = __ldg(reinterpret_cast<const int4*>(p.items) + index);
  const int row = item.x, count = item.z;
  const int* indices = opaque_pointer(p.indices + item.y);  // of the round
  const int rounds = most_of_warp<kLanes>(count);
  int next_key[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) next_key[i] = i < count ? __ldg(indices + i) : 0;
  griddepcontrol_wait();  // [1]
  griddepcontrol_launch_dependents();

  const bool has_head = head < p.num_heads;
  const int loaded_head = min(head, p.num_heads - 1);  // idle lanes load what others load, and store nothing
  const int first_dim = Group::first_dim(part_of_head);
  const auto rows_of = [&](const void* tensor, i64 head_stride, int row_bytes) {
    return LaneRows(element_address<kIn>(tensor, loaded_head * head_stride + first_dim), row_bytes);
  };
  const LaneRows query_rows = rows_of(p.query, p.query_head_stride, p.query_row_bytes);
  const LaneRows key = rows_of(p.key, p.key_head_stride, p.key_row_bytes);
  const LaneRows value = rows_of(p.value, p.value_head_stride, p.value_row_bytes);
  const float query_scale = kIsWide<kIn> ? 1.0f : p.scale, score_scale = kIsWide<kIn> ? p.scale : 1.0f;
  float query[kLaneDims];
  Group::unpack(query, Group::load(query_rows.row(row), part_of_head, count > 0));
#pragma unroll
  for (int d = 0; d < kLaneDims; ++d) query[d] *= query_scale;

  // Features of the lane: u and s of its head from first_feature on.
  const int first_feature = part_of_head * kLaneFeatures;
  const i64 feature_start = (static_cast<i64>(loaded_head) * p.num_rows + row) * kFeatures + first_feature;
  float projected[kLaneFeatures] = {};
  if constexpr (kTerms & kKeyFeatures) {
    if (count > 0 && first_feature < kFeatures) {
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) projected[i] = __ldg(p.projected + feature_start + i) * query_scale;
    }
  }

  u32 of_row = 0;
  if constexpr (kTerms & kDropout) of_row = dropout_row(__ldg(p.dropout.seed), row, loaded_head);

  Softmax<kIn, kTerms & kValueFeatures ? kLaneFeatures : 1> softmax;
  for (int first = 0; first < rounds; first += kUnroll) {
    const i64 first_edge = static_cast<i64>(item.y) + first;
    typename Group::Words key_words[kUnroll], value_words[kUnroll];
    float features[kUnroll][kLaneFeatures];
    int type[kUnroll], edge_key[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const bool exists = first + i < count;
      edge_key[i] = next_key[i];
      const int k = next_key[i];  // an edge that does not exist has key 0
      key_words[i] = Group::load(key.row(k), part_of_head, true);
      value_words[i] = Group::load(value.row(k), part_of_head, exists);  // [2]
      if constexpr (Group::kHasFeatures) {
        const i64 start = (first_edge + i) * kFeatures + first_feature;
        Group::load_features(features[i], element_address<kIn>(p.features, start),
                             exists && first_feature < kFeatures);
      }
      if constexpr (kTerms & kTypes) type[i] = exists ? __ldg(p.types + first_edge + i) : 0;
      next_key[i] = first + kUnroll + i < count ? __ldg(indices + kUnroll + i) : 0;
    }
    indices = opaque_pointer(indices + kUnroll);
    float bias[kOwn] = {}, multiplier[kOwn] = {};
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int i = Group::own_edge(lane, j);
      if (first + i >= count) continue;
      if constexpr (kTerms & kBias) bias[j] = edge_value<kIn>(p.bias, first_edge + i, p.bias_heads, loaded_head);
      if constexpr (kTerms & kMultiplier) {
        multiplier[j] = edge_value<kIn>(p.multiplier, first_edge + i, p.multiplier_heads, loaded_head);
      }
    }
    float score[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      float x[kLaneDims];
      Group::unpack(x, key_words[i]);
      if constexpr (kTerms & kTypes) {
        float weight[kLaneDims];
        const i64 start = (static_cast<i64>(type[i]) * p.num_heads + loaded_head) * kDim + first_dim;
        Group::unpack(weight, Group::load(element_address<kIn>(p.type_weight, start), part_of_head, true));
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d) x[d] *= weight[d];
      }
      score[i] = dot(query, x);
      if constexpr (kTerms & kKeyFeatures) score[i] = add_dot(score[i], projected, features[i]);
    }
    Group::sum_over_head(score, lane);
    float new_max = softmax.max;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const bool exists = first + Group::own_edge(lane, j) < count;
      const float transformed =
          transform_score<kTerms>(score_scale * score[j], bias[j], multiplier[j], p.clamp, kScoreUnit<kIn>);
      score[j] = exists ? transformed : negative_infinity();
      new_max = fmaxf(new_max, score[j]);
    }
    if constexpr (kOwn == 1) {
      new_max = fmaxf(new_max, __shfl_xor_sync(kFullWarp, new_max, 1));
      new_max = fmaxf(new_max, __shfl_xor_sync(kFullWarp, new_max, 2));
    }
    const float shift = softmax.grow(new_max);
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      score[j] = exp_score<kIn>(score[j] - shift);
      softmax.sum += score[j];
      if constexpr (kTerms & kDropout) {
        if (!keeps(of_row, Group::own(edge_key, lane, j), p.dropout.threshold)) score[j] = 0.0f;
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      float x[kLaneDims];
      Group::unpack(x, value_words[i]);
      const float weight = Group::of_edge(score[kOwn == 1 ? 0 : i], lane, i);
      add_weighted(softmax.out, weight, x);
      if constexpr (kTerms & kValueFeatures) add_weighted(softmax.features, weight, features[i]);
    }
  }
  if constexpr (kOwn == 1) {
    softmax.sum += __shfl_xor_sync(kFullWarp, softmax.sum, 1);
    softmax.sum += __shfl_xor_sync(kFullWarp, softmax.sum, 2);
  }

  bool writes = row >= 0 && has_head;
  if (__any_sync(kFullWarp, item.w >= 0)) {
    // Parts of a row: the last lane group to arrive combines them.
    const int2 parts = item.w >= 0 ? __ldg(p.parts + item.w) : make_int2(0, 0);
    const int lane_offset = lane_of_group * Group::kLanePartial;
    if (item.w >= 0) Group::store_partial(lane_partial(p.partial, item.w, Group::kPartial, lane_offset), softmax);
    const bool is_last = is_last_part(p.semaphores, item.w, parts, lane, lane_of_group);
    if (is_last) {
      softmax = {};
      for (int part = 0; part < parts.y; ++part) {
        Group::combine(softmax, lane_partial(p.partial, parts.x + part, Group::kPartial, lane_offset));
      }
    }
    writes = writes && (item.w < 0 || is_last);
  }
  __syncwarp();

  float inverse = softmax.sum == 0.0f ? 0.0f : 1.0f / softmax.sum;
  if constexpr (kTerms & kDropout) inverse *= p.dropout.rescale;
#pragma unroll
  for (int d = 0; d < kLaneDims; ++d) softmax.out[d] *= inverse;
  if constexpr (kTerms & kValueFeatures) {
    if (writes && first_feature < kFeatures) {
      Group::store_features(element_address<kIn>(p.feature_sums, feature_start), softmax.features, inverse);
    }
  }
  const i64 row_head = static_cast<i64>(row) * p.num_heads + head;
  Group::template store<kOut>(p.output, row_head * kDim, part_of_head, writes, softmax.out);
  if (p.lse && writes && part_of_head == 0) {
    const float log_sum = __log2f(softmax.sum) * (kScoreUnit<kIn> * kLn2);
    p.lse[row_head] = softmax.sum == 0.0f ? negative_infinity() : (softmax.max + log_sum) * (1.0f / kScoreUnit<kIn>);
  }
}
