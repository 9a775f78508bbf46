// O = softmax(s) V edge by edge, for narrow heads on sparse graphs and for edge data; bound by the gathers of rows of K
// and V.
//
//   k_ij = w_ij * k_j + W a_ij                            elementwise; a_ij: features of the edge
//   w_ij = w[type_ij], or sum_r a_ijr w_r                 key_factor.cuh
//   v_ij = v_j + W' a_ij
//   s_ij = f(scale * <q_i, k_ij>)                         f: the score term (score_terms.cuh)
//          f(scale * <a, leaky_relu(q_i + k_ij)>)         additive_score.cuh
//
// tiles/forward.cu computes 16 x 16 scores per head of a KV tile, whatever the number of edges in it. With about 16
// edges per KV tile, heads of up to 32 dimensions take fewer instructions edge by edge.
//
// Grid (num_items / kGroupsPerBlock, head groups). Each lane group processes one item (lane_group.cuh).
//
// Features. <q_i, W a_ij> = <u_i, a_ij> with u_i = W^T q_i, and sum_j p_ij W' a_ij = W' s_i with s_i = sum_j p_ij a_ij:
// an edge costs 2 x 16 multiply-adds per head, and no tensor of edges has kDim columns. For most shapes the 16 features
// are distributed over the lanes of a head, and the kernels of feature_products.cu compute u before this kernel and add
// W' s after it. For 4 or 8 heads of 10 to 16 dimensions in a group this kernel computes all of it (pair_features.cuh).
// Wide features, of more than 16 columns: this kernel gets <u_i, a_ij> of each edge, and writes its score in the same
// place, from which features/wide_features.cu computes s.
//
// Order that must not change
//   [1]  Before griddepcontrol_wait only items and indices are read: the previous kernel may still write Q, K, V and
//        edge data, or read memory that this kernel writes.
//   [2]  V of a padding edge is 0, not only its weight: 0 * NaN is NaN.
//   [3]  A maximum of -infinity is never subtracted: a row without an edge so far would become NaN.
#include "edges/additive_score.cuh"
#include "common.cuh"
#include "dropout.cuh"
#include "elements.cuh"
#include "edges/key_factor.cuh"
#include "edges/lane_group.cuh"
#include "edges/pair_features.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "score/score_terms.cuh"

struct Params {
  const Item* items;        // [num_items]
  const int* indices;       // [nnz]  key of each edge
  const int2* parts;        // [num_parts]  first part of the row, and its number of parts
  const void* query;        // [num_rows][H][kDim]  kIn, any row and head stride, rows aligned to kLoad_bytes
  const void* key;          // [num_cols][H][kDim]  as query
  const void* value;        // [num_cols][H][kDim]  as query
  void* output;             // [num_rows][H][kDim]  contiguous; every element is written
  float* lse;               // [num_rows][H]  log of the sum of exp(scores), -infinity without an edge; may be null
  float* partial;           // [num_parts][num_groups][kPartial]
  int* semaphores;          // [num_parts][num_groups]  0 before and after; a row's first part has the semaphore
  const u8* types;          // [nnz]
  const void* type_weight;  // [num_types][H][kDim]  contiguous
  const void* features;     // [nnz][16]
  const float* projected;   // [H][num_rows][16]  u; without pairs
  void* feature_sums;       // [H][num_rows][16]  s, divided by the sum of the weights; without pairs
  const uint4* feature_weights;  // [H][W, then W'][32]  packed by pack_features.cu; with pairs
  float* edge_scores;           // [nnz][H]  wide features: <u, a> with W, then times kScoreUnit the score with W'
  const void* additive_weight;  // [H][kDim]  a of additive attention
  const void* key_factor;       // [num_factors][H][kDim]  contiguous; with additive attention W of k_ij
#include "score/score_term_pointers.cuh"
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
  float scale;           // times kProductUnit
#include "score/score_term_params.cuh"
};

template <Element kIn, int kDim, int kHeads, int kTerms>
struct ForwardGroup : LaneGroup<kIn, kDim, kHeads, may_pack(kTerms)> {
  using Base = LaneGroup<kIn, kDim, kHeads, may_pack(kTerms)>;
  static constexpr int kLanes = Base::kLanes, kLaneDims = Base::kLaneDims, kLaneFeatures = Base::kLaneFeatures;
  static constexpr int kOwn = Base::kOwn;
  static constexpr bool kHasFeatures = kTerms & (kKeyFeatures | kValueFeatures);
  static constexpr bool kHasPairs =  // pair_features.cuh
      kHasFeatures && !kIsWide<kIn> && kDim > 8 && kDim <= 16 && (kHeads == 8 || kHeads == 4);
  static constexpr bool kHasLaneFeatures = kHasFeatures && !kHasPairs;
  static constexpr bool kSumsPairs = kHasPairs && kTerms & kValueFeatures;
  static constexpr int kPackedSides = (kTerms & kKeyFeatures ? 1 : 0) + (kTerms & kValueFeatures ? 1 : 0);
  static constexpr bool kUsesKey = ScoreTerm<kIn, kTerms>::kUsesScore;  // else no row of K is read
  // Blocks per SM that __launch_bounds__ leaves registers for, without spills. float32 rows in flight take twice as
  // many.
  static constexpr bool kManyFeatures = kHasFeatures && kLaneFeatures > 8;
  static constexpr bool kIsLargest =
      kManyFeatures || (kIsWide<kIn> && adds_features(kTerms) && kArch > 1000) ||
      (kHasFeatures && kTerms & kTypes && (kLaneFeatures == 8 || kIsWide<kIn>)) ||
      (kHasFeatures && kTerms & kKeyFactor) ||
      (kTerms & (kWideKeys | kWideValues) && kTerms & kExpression && (kTerms & kTypes || kLaneDims > 8));
  static constexpr bool kIsLarge = kHasFeatures || kTerms & (kTypes | kAdditive | kKeyFactor) ||
                                   (kTerms & (kWideKeys | kWideValues) && kTerms & kExpression);
  static constexpr bool kTight = kArch != 900 && ScoreTerm<kIn, kTerms>::kEdgeValues > 1;
  static constexpr int kMinBlocks = kIsLargest                         ? 2
                                    : adds_features(kTerms) && kArch > 1000 ? 3
                                    : kIsWide<kIn>                     ? (kIsLarge ? 3 : 4)
                                    : kLaneDims > 12                   ? (kTerms & ~kDropout ? 3 : 4)
                                    : kHasPairs && !(kTerms & ~(kKeyFeatures | kValueFeatures | kDropout)) ? 5
                                    : kIsLarge                         ? 4
                                    : kLaneDims > 8                    ? (kTerms & ~kDropout ? 4 : 5)
                                    : kTerms && (kOwn > 1 || kDim % 4) ? 5
                                    : kTight                           ? 5
                                                                       : 6;
  // Floats of a lane in a partial, whole float4: O, maximum, sum, and s.
  static constexpr int kSums = kLaneDims + 2 + (kTerms & kValueFeatures ? kLaneFeatures : 0);
  static constexpr int kLanePartial = divide_up(kSums, 4) * 4;
  static constexpr int kPartial = kLanes * kLanePartial;

  // Lanes of pairs.
  using Pairs = PairLanes<kHeads>;
  __device__ static __forceinline__ int group(int lane) { return kHasPairs ? Pairs::group(lane) : Base::group(lane); }
  __device__ static __forceinline__ int in_group(int lane) {
    return kHasPairs ? Pairs::in_group(lane) : Base::in_group(lane);
  }
  __device__ static __forceinline__ int first_lane(int group) {
    return kHasPairs ? Pairs::first_lane(group) : Base::first_lane(group);
  }
  static constexpr int kCountStep = kHasPairs ? 2 : kLanes;  // step of most_of_warp
};

// Online softmax of a lane's head: O of the lane's dimensions and s of its features, before division by the sum.
template <Element kIn, int kLaneDims, int kLaneFeatures>
struct Softmax {
  float out[kLaneDims] = {};
  float features[kLaneFeatures] = {};
  float max = negative_infinity();  // times kScoreUnit
  float sum = 0.0f;
  float growth;  // factor of the last `grow`

  // Sets a new maximum and rescales; returns the shift of the exponents. [3]
  __device__ __forceinline__ float grow(float new_max) {
    const float shift = new_max == negative_infinity() ? 0.0f : new_max;
    growth = exp_score<kIn>(max - shift);
    max = new_max;
    sum *= growth;
#pragma unroll
    for (int i = 0; i < kLaneDims; ++i) out[i] *= growth;
#pragma unroll
    for (int i = 0; i < kLaneFeatures; ++i) features[i] *= growth;
    return shift;
  }

  // Partials: O, maximum, sum, and s where there is room for it.
  template <int kFloats>
  __device__ __forceinline__ void pack(float (&x)[kFloats]) const {
#pragma unroll
    for (int d = 0; d < kLaneDims; ++d) x[d] = out[d];
    x[kLaneDims] = max, x[kLaneDims + 1] = sum;
    if constexpr (kFloats >= kLaneDims + 2 + kLaneFeatures) {
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) x[kLaneDims + 2 + i] = features[i];
    }
  }
  template <int kFloats>
  __device__ __forceinline__ void add(const float (&x)[kFloats]) {
    const float shift = grow(fmaxf(max, x[kLaneDims]));
    const float factor = exp_score<kIn>(x[kLaneDims] - shift);
    sum = fmaf(factor, x[kLaneDims + 1], sum);
#pragma unroll
    for (int d = 0; d < kLaneDims; ++d) out[d] = fmaf(factor, x[d], out[d]);
    if constexpr (kFloats >= kLaneDims + 2 + kLaneFeatures) {
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) features[i] = fmaf(factor, x[kLaneDims + 2 + i], features[i]);
    }
  }
};

template <Element kIn, Element kOut, int kDim, int kHeads, int kTerms,
          typename Group = ForwardGroup<kIn, kDim, kHeads, kTerms>>
__device__ KernelSizes fused3s_edges_sizes = {0, Group::kPartial, Group::kMinBlocks, kWarps * Group::kGroups};

template <Element kIn, Element kOut, int kDim, int kHeads, int kTerms>
__global__ void __launch_bounds__(kWarps* kWarpSize, ForwardGroup<kIn, kDim, kHeads, kTerms>::kMinBlocks)
    fused3s_edges(const __grid_constant__ Params p) {
  using Group = ForwardGroup<kIn, kDim, kHeads, kTerms>;
  constexpr int kLaneDims = Group::kLaneDims, kLaneFeatures = Group::kLaneFeatures;
  constexpr int kOwn = Group::kOwn, kUnroll = Group::kUnroll;
  const LaneItem<Group> item(p.items, p.num_items);
  const int lane = item.lane, lane_of_head = item.lane_of_head, first_dim = item.first_dim;
  const int head = item.head, row = item.row, count = item.count;
  const int* indices = opaque_pointer(p.indices + item.first_edge);  // columns of this round
  const int rounds = most_of_warp<Group::kCountStep>(count);
  int next_key[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) next_key[i] = i < count ? __ldg(indices + i) : 0;
  griddepcontrol_wait();  // [1]
  griddepcontrol_launch_dependents();

  const bool has_head = head < p.num_heads;
  const int loaded_head = min(head, p.num_heads - 1);  // idle lanes load the last head, and store nothing
  const auto rows_of = [&](const void* tensor, i64 head_stride, int row_bytes) {
    return Group::rows_of(tensor, head_stride, row_bytes, loaded_head, first_dim);
  };
  const LaneRows query_rows = rows_of(p.query, p.query_head_stride, p.query_row_bytes);
  const LaneRows key = rows_of(p.key, p.key_head_stride, p.key_row_bytes);
  const LaneRows value = rows_of(p.value, p.value_head_stride, p.value_row_bytes);
  constexpr bool kScalesScores = kIsWide<kIn> || kTerms & kAdditive;  // else the query
  const float query_scale = kScalesScores ? 1.0f : p.scale, score_scale = kScalesScores ? p.scale : 1.0f;
  float query[kLaneDims];
  Group::unpack(query, Group::load(query_rows.row(row), first_dim, count > 0), first_dim);
#pragma unroll
  for (int d = 0; d < kLaneDims; ++d) query[d] *= query_scale;
  float additive[kLaneDims] = {};
  if constexpr (kTerms & kAdditive) {
    const i64 start = static_cast<i64>(loaded_head) * kDim + first_dim;
    Group::unpack(additive, Group::load(element_address<kIn>(p.additive_weight, start), first_dim, true), first_dim);
  }

  // Features of the lane: u and s of its head, from first_feature on.
  const int first_feature = lane_of_head * kLaneFeatures;
  const i64 feature_start = (static_cast<i64>(loaded_head) * p.num_rows + row) * kFeatures + first_feature;
  float projected[kLaneFeatures] = {};
  if constexpr (Group::kHasLaneFeatures && kTerms & kKeyFeatures) {
    if (count > 0 && first_feature < kFeatures) {
#pragma unroll
      for (int i = 0; i < kLaneFeatures; ++i) projected[i] = __ldg(p.projected + feature_start + i) * query_scale;
    }
  }

  PairFeatures<Group::kHasPairs, kIn, kHeads> pairs(p.features, lane, item.first_edge, count);
  constexpr i64 kHeadWeights = Group::kPackedSides * kWarpSize;
  const uint4* pair_weights = nullptr;  // weights of the group's first head
  if constexpr (Group::kHasPairs) {
    pair_weights = p.feature_weights + blockIdx.y * kHeads * kHeadWeights + lane;
    if constexpr (kTerms & kKeyFeatures) {
      u32 words[2][2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        const int owner = (lane & ~2) + 2 * i;
        const int pair_row = __shfl_sync(kFullWarp, row, owner), pair_count = __shfl_sync(kFullWarp, count, owner);
        const char* const source = element_address<kIn>(p.query, loaded_head * p.query_head_stride + lane % 4 * 4);
        const char* const of_pair = source + mul_wide_s32(pair_row, p.query_row_bytes);
        if constexpr (kDim % 4 == 0) {
          load_words<8>(words[i], of_pair, pair_count > 0 && lane % 4 * 4 < kDim);
        } else {
#pragma unroll
          for (int j = 0; j < 2; ++j) {
            load_words<4>(words[i] + j, of_pair + 4 * j, pair_count > 0 && lane % 4 * 4 + 2 * j < kDim);
          }
        }
      }
      pairs.project(words, query_scale, pair_weights, kHeadWeights);
    }
  }

  u32 of_row = 0;
  if constexpr (kTerms & kDropout) of_row = dropout_row(__ldg(p.dropout.seed), row, loaded_head);

  Softmax<kIn, kLaneDims, kTerms & kValueFeatures ? kLaneFeatures : 1> softmax;
  for (int first = 0; first < rounds; first += kUnroll) {
    const i64 first_edge = static_cast<i64>(item.first_edge) + first;
    typename Group::Words key_words[kUnroll], value_words[kUnroll];
    float features[kUnroll][kLaneFeatures];
    typename decltype(pairs)::Words pair_words;
    if constexpr (Group::kHasPairs) pair_words = pairs.load(first);
    int type[kUnroll], edge_key[kUnroll];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const bool exists = first + i < count;
      edge_key[i] = next_key[i];
      const int k = next_key[i];  // 0 for a padding edge
      if constexpr (Group::kUsesKey) key_words[i] = Group::load(key.row(k), first_dim, true);
      value_words[i] = Group::load(value.row(k), first_dim, exists);  // [2]
      if constexpr (Group::kHasLaneFeatures) {
        const i64 start = (first_edge + i) * kFeatures + first_feature;
        Group::load_features(features[i], element_address<kIn>(p.features, start),
                             exists && first_feature < kFeatures);
      }
      if constexpr (kTerms & kTypes) type[i] = exists ? __ldg(p.types + first_edge + i) : 0;
      next_key[i] = first + kUnroll + i < count ? __ldg(indices + kUnroll + i) : 0;
    }
    indices = opaque_pointer(indices + kUnroll);
    ScoreTerm<kIn, kTerms> terms[kOwn];
    float product[kOwn] = {};  // <u, a>, in one lane of the head, which also stores the score
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const int i = Group::own_edge(lane, j);
      if (first + i < count) terms[j].load_edge(p, first_edge + i, loaded_head);
      if constexpr (kTerms & kWideKeys) {
        const float* const source = p.edge_scores + (first_edge + i) * p.num_heads + loaded_head;
        if (first + i < count && lane_of_head < kUnroll / kOwn) product[j] = *source;
      }
      terms[j].load_column(p, Group::own(edge_key, lane, j), loaded_head);
    }
    float score[kUnroll], added[kAddedEdges][kLaneDims];
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if constexpr (!Group::kUsesKey) {
        score[i] = 0.0f;
        continue;
      }
      if constexpr (adds_features(kTerms)) {
        if (i % kAddedEdges == 0) {
          i64 edge[kAddedEdges];
          bool exists[kAddedEdges];
#pragma unroll
          for (int j = 0; j < kAddedEdges; ++j) {
            edge[j] = first_edge + i + j, exists[j] = first + i + j < count;
            Group::unpack(added[j], key_words[i + j], first_dim);
          }
          add_features<kIn, kDim, Group>(added, p, edge, exists, loaded_head, first_dim);
        }
        score[i] = additive_product(additive, query, added[i % kAddedEdges], p.additive_slope);
        continue;
      }
      float x[kLaneDims];
      Group::unpack(x, key_words[i], first_dim);
      if constexpr (kTerms & kTypes) {
        float weight[kLaneDims];
        const i64 type_head = static_cast<i64>(type[i]) * p.num_heads + loaded_head;
        const char* const address = element_address<kIn>(p.type_weight, type_head * kDim + first_dim);
        Group::unpack(weight, Group::load(address, first_dim, true), first_dim);
#pragma unroll
        for (int d = 0; d < kLaneDims; ++d) x[d] *= weight[d];
      }
      if constexpr (kTerms & kKeyFactor) {
        constexpr bool kManyFactors = kTerms & kWideFactors;
        if (first + i < count) {
          multiply_by_features<kIn, kDim, Group, kManyFactors>(x, p, first_edge + i, loaded_head, first_dim);
        }
      }
      if constexpr (kTerms & kAdditive) {
        score[i] = additive_product(additive, query, x, p.additive_slope);
      } else {
        score[i] = dot(query, x);
      }
      if constexpr (Group::kHasLaneFeatures && kTerms & kKeyFeatures) {
        score[i] = add_dot(score[i], projected, features[i]);
      }
      if constexpr (kTerms & kWideKeys) {
        score[i] = fmaf(query_scale, Group::of_own_edge(product, lane, i), score[i]);
      }
    }
    if constexpr (Group::kHasPairs && Group::kUsesKey && kTerms & kKeyFeatures) pairs.add_scores(score, pair_words);
    Group::sum_over_head(score, lane);
    float new_max = softmax.max;
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      const bool exists = first + Group::own_edge(lane, j) < count;
      terms[j].load_row(p, row, loaded_head);
      terms[j].load_head(p, loaded_head);
      const float transformed = terms[j].apply(score_scale * score[j], p) * kLackingUnit<kIn, kTerms>;
      score[j] = exists ? transformed : negative_infinity();
      if constexpr (kTerms & kWideValues) {
        const i64 edge = first_edge + Group::own_edge(lane, j);
        if (exists && has_head && lane_of_head < kUnroll / kOwn) p.edge_scores[edge * p.num_heads + head] = score[j];
      }
      new_max = fmaxf(new_max, score[j]);
    }
    if constexpr (kOwn == 1) {
      new_max = fmaxf(new_max, __shfl_xor_sync(kFullWarp, new_max, 1));
      new_max = fmaxf(new_max, __shfl_xor_sync(kFullWarp, new_max, 2));
    }
    const float shift = softmax.grow(new_max);
    if constexpr (Group::kSumsPairs) pairs.rescale(softmax.growth);
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
      unpack_words<kIn>(x, value_words[i].word);  // a packed group also adds other heads' dimensions, and stores none
      const float weight = Group::of_edge(score[kOwn == 1 ? 0 : i], lane, i);
      add_weighted(softmax.out, weight, x);
      if constexpr (Group::kHasLaneFeatures && kTerms & kValueFeatures) {
        add_weighted(softmax.features, weight, features[i]);
      }
    }
    if constexpr (Group::kSumsPairs) pairs.accumulate(score, pair_words);
  }
  if constexpr (kOwn == 1) {
    softmax.sum += __shfl_xor_sync(kFullWarp, softmax.sum, 1);
    softmax.sum += __shfl_xor_sync(kFullWarp, softmax.sum, 2);
  }

  bool writes = row >= 0 && has_head;
  if (__any_sync(kFullWarp, item.part >= 0)) {
    if constexpr (Group::kSumsPairs) pairs.to_pair(softmax.features, pairs.sums);
    const bool is_last = combine_parts<Group::kLanePartial>(softmax, item, p.parts, p.partial, p.semaphores);
    if constexpr (Group::kSumsPairs) pairs.from_pair(pairs.sums, softmax.features);
    writes = writes && (item.part < 0 || is_last);
  }
  __syncwarp();

  float inverse = softmax.sum == 0.0f ? 0.0f : 1.0f / softmax.sum;
  if constexpr (kTerms & kDropout) inverse *= p.dropout.rescale;
#pragma unroll
  for (int d = 0; d < kLaneDims; ++d) softmax.out[d] *= inverse;
  if constexpr (Group::kSumsPairs) {
    const uint4* const weights = pair_weights + (kTerms & kKeyFeatures ? kWarpSize : 0);
    pairs.add_to(softmax.out, inverse, weights, kHeadWeights);
  } else if constexpr (kTerms & kValueFeatures) {
    if (writes && first_feature < kFeatures) {
      Group::store_features(element_address<kIn>(p.feature_sums, feature_start), softmax.features, inverse);
    }
  }
  const i64 row_head = static_cast<i64>(row) * p.num_heads + head;
  Group::template store<kOut>(p.output, row_head * kDim, first_dim, writes, softmax.out);
  if (p.lse && writes && lane_of_head == 0) {
    const float log_sum = __log2f(softmax.sum) * (kScoreUnit<kIn> * kLn2);
    p.lse[row_head] = softmax.sum == 0.0f ? negative_infinity() : (softmax.max + log_sum) * (1.0f / kScoreUnit<kIn>);
  }
}
