// Gradients of forward.cu edge by edge, in a pass over the rows of A and one over its columns; bound by the
// gathers of two rows an edge in each. Both passes recompute the weights p from lse, but with edge data the pass over
// columns reads what the pass over rows found.
//
//   p_ij     = exp(f(scale * <q_i, k_ij>) - lse_i)           f: the score term; k_ij, v_ij as in forward.cu
//   g_ij     = D_ij <dO_i, v_ij>                             D_ij = keep_ij / (1 - rate) with dropout, else 1
//   ds_ij    = f' p_ij (g_ij - delta_i)                      delta_i = <dO_i, O_i> - dlse_i
//
//   dq_i     = scale * sum_j ds_ij k_ij = scale * (sum_j ds_ij w_ij * k_j + W t_i)
//   dk_j     = scale * sum_i ds_ij w_ij * q_i
//   dv_j     = sum_i D_ij p_ij dO_i
//   da_ij    = sum over heads of (scale * ds_ij u_i + D_ij p_ij u'_i)
//
//   u_i = W^T q_i           t_i = sum_j ds_ij a_ij           dW  = scale * sum_i q_i t_i^T
//   u'_i = W'^T dO_i        s_i = sum_j D_ij p_ij a_ij       dW' = sum_i dO_i s_i^T
//
// Of wide features the pass over rows gets <u_i, a_ij> and <u'_i, a_ij> of each edge (features/wide_features.cu).
//
// One template for both passes. A lane group (lane_group.cuh) processes a row of A, or of A^T:
//
//                    own rows      gathered rows   sums
//   over rows        q_i, dO_i     k_j, v_j        dq_i without W t_i; t_i; s_i
//   over columns     k_j, v_j      q_i, dO_i       dk_j; dv_j
//
// The pass over rows runs first. It writes lse_i * kScoreUnit and delta_i side by side, which the pass over columns
// gathers with each edge. With edge data it writes scale * ds_ij and D_ij p_ij in their place (edge_weights): as many
// bytes for the pass over columns to read, which then needs no score: no u_i or u'_i, 64 bytes each, and nothing of the
// edge but what multiplies k_j. The weights are also those of t, s and da.
//
// Grid (num_items / kGroupsPerBlock, head groups).
//
// Order that must not change
//   [1]  Before griddepcontrol_wait only items, indices and edges are read: the previous kernel may still write the
//        rest.
//   [2]  Both gathered rows of a padding edge are 0, not only its weights: 0 * NaN is NaN.
//   [3]  lse = -infinity (a row without weight) becomes +infinity: p is 0, and -infinity is not subtracted.
#include "edges/additive_score.cuh"
#include "common.cuh"
#include "dropout.cuh"
#include "elements.cuh"
#include "edges/key_factor.cuh"
#include "edges/lane_group.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/math.cuh"
#include "ptx/opaque.cuh"
#include "score/score_terms.cuh"

// Rows are rows of A in the pass over rows, and of A^T in the pass over columns. void tensors except O have type kIn.
struct Params {
  const Item* items;             // [num_items]
  const int* indices;            // [nnz]  gathered row of each edge
  const int* edges;              // [nnz]  index of each edge in edge data, in instances with kGivenWeights
  const int2* parts;             // [num_parts]  first part of the row, and its number of parts
  const void* own_first;         // [rows][H][kDim]  q or k, any row and head stride, rows aligned to kLoad_bytes
  const void* own_second;        // [rows][H][kDim]  dO or v, as own_first
  const void* gathered_first;    // [..][H][kDim]  k or q, as own_first
  const void* gathered_second;   // [..][H][kDim]  v or dO, as own_first
  const void* output;            // [num_rows][H][kDim]  O, contiguous; pass over rows
  const float* lse;              // [num_rows][H]  pass over rows
  const float* lse_gradient;     // [num_rows][H]  pass over rows; null for 0
  float2* row_state;             // [num_rows][H]  lse * kScoreUnit and delta; written over rows, read over columns
  float* edge_weights;           // [nnz][H][kWeights]  in place of row_state with edge data
  void* first_gradient;          // [rows][gradient_heads][kDim]  dq without W t, or dk; H heads of each row are written
  void* second_gradient;         // [rows][gradient_heads][kDim]  dv; H heads of each row; pass over columns
  float* partial;                // [num_parts][num_groups][kPartial]
  int* semaphores;               // [num_parts][num_groups]  0 before and after; a row's first part has the semaphore
  const u8* types;               // [nnz]
  const void* type_weight;       // [num_types][H][kDim]  contiguous
  const void* features;          // [nnz][16]
  const float* projected_query;  // [H][num_rows][16]  u
  const float* projected_grad;   // [H][num_rows][16]  u'
  const float* key_products;     // [nnz][H]  <u, a> of wide features
  const float* grad_products;    // [nnz][H]  <u', a>
  const void* additive_weight;   // [H][kDim]  a of additive attention
  const void* key_factor;        // [num_factors][H][kDim]  contiguous; with additive attention W of k_ij
#include "score/score_term_pointers.cuh"
  // Written in the pass over rows, by instances with their terms. Gradients may be null: not written.
  void* key_feature_sums;       // [H][num_rows][16]  scale * t
  void* value_feature_sums;     // [H][num_rows][16]  s
  // Gradients of the values of a score term; those of heads for each row. The pass over columns writes those of
  // columns, the pass over rows all others.
  float* row_value_gradients;     // [num_rows][H][n]
  float* head_value_gradients;    // [num_rows][H][n]
  float* edge_value_gradients;    // [nnz][H][n]
  float* column_value_gradients;  // [num_cols][H][n]
  float* additive_gradients;       // [num_rows][H][kDim]  of a, for each row
  u8* signs;                       // [nnz][num_groups][kLanes]  positive_dims of q_i + k_ij, for added_features.cu
  DropoutParams dropout;
  i64 own_first_head_stride;  // elements
  i64 own_second_head_stride;
  i64 gathered_first_head_stride;
  i64 gathered_second_head_stride;
  int own_first_row_bytes;
  int own_second_row_bytes;
  int gathered_first_row_bytes;
  int gathered_second_row_bytes;
  int num_rows;  // rows of A
  int num_items;
  int num_heads;         // H
  int gradient_heads;    // H, or more if the rows of a gradient also hold other columns
  float scale;
#include "score/score_term_params.cuh"
};

enum class Pass { kRows, kColumns };

// Two edges a round where lanes have more than 12 dimensions: both gathered rows of four would leave 8 warps on an SM.
template <Element kIn, int kDim, int kHeads, bool kMayPack>
using GradientLanes =
    LaneGroup<kIn, kDim, kHeads, kMayPack, LaneGroup<kIn, kDim, kHeads, kMayPack>::kLaneDims <= 12 ? 4 : 2>;

template <Element kIn, int kDim, int kHeads, int kTerms, Pass kPass>
struct BackwardGroup : GradientLanes<kIn, kDim, kHeads, may_pack(kTerms)> {
  using Base = GradientLanes<kIn, kDim, kHeads, may_pack(kTerms)>;
  static constexpr int kLaneDims = Base::kLaneDims;
  static constexpr bool kHasKeyFeatures = kTerms & kKeyFeatures, kHasValueFeatures = kTerms & kValueFeatures;
  static constexpr bool kHasFeatures = kHasKeyFeatures || kHasValueFeatures;
  using Term = ScoreTerm<kIn, kTerms>;
  static constexpr bool kHasEdgeData =  // of the pass over rows
      kHasFeatures || kTerms & (kTypes | kKeyFactor | kWideKeys | kWideValues) || Term::kEdgeValues > 0;
  static constexpr bool kIsGiven = kTerms & kGivenWeights;  // of the pass over columns
  // Weights of an edge and head: scale * ds, D p, and the gradients of the values of its column.
  static constexpr int kWeights = 2 + Term::kColumnSums, kWeightStep = power_of_two_in(kWeights, 4);
  // Sums of a lane: dq and t and s, or dk and dv.
  static constexpr int kSecond = kLaneDims;  // first of dv, or of t
  static constexpr int kThird = kSecond + (kHasKeyFeatures ? Base::kLaneFeatures : 0);  // first of s
  static constexpr bool kUsesScore = Term::kUsesScore;  // else q and k are not read, and their gradients are 0
  static constexpr int kValues = kPass == Pass::kColumns ? 2 * kLaneDims  // first of the values of score terms
                                                         : kThird + (kHasValueFeatures ? Base::kLaneFeatures : 0);
  static constexpr int kAdditiveSums = kValues + (kPass == Pass::kColumns ? Term::kColumnSums : Term::kRowSums);
  static constexpr bool kSumsAdditive = kPass == Pass::kRows && kTerms & kAdditive;
  static constexpr int kSums = kAdditiveSums + (kSumsAdditive ? kLaneDims : 0);
  static constexpr int kLanePartial = divide_up(kSums, 4) * 4;  // whole float4
  static constexpr int kPartial = Base::kLanes * kLanePartial;
  // Blocks per SM that __launch_bounds__ leaves registers for, without spills.
  static constexpr int kOtherTerms = kTerms & ~(kKeyFeatures | kValueFeatures | kDropout);
  static constexpr bool kHasWideFeatures = kTerms & (kWideKeys | kWideValues);
  static constexpr bool kIsLargest =
      (kHasWideFeatures && kTerms & (kTypes | kAdditive)) || (kIsWide<kIn> && adds_features(kTerms)) ||
      (kHasFeatures && (Base::kLaneFeatures > 8 || kTerms & kKeyFactor ||
                       (Base::kLaneFeatures == 8 && (kIsWide<kIn> || kOtherTerms || kDim % 4)) ||
                       (kIsWide<kIn> && ((kHasKeyFeatures && kHasValueFeatures) || kTerms & kTypes))));
  static constexpr bool kIsLarge = kHasFeatures || kTerms & (kTypes | kAdditive | kKeyFactor) ||
                                   Term::kRowValues + Term::kColumnValues > 4 ||
                                   (kHasWideFeatures && (kTerms & kExpression || (kArch >= 1000 && Base::kOwn > 1))) ||
                                   (kPass == Pass::kColumns ? kIsWide<kIn> || Base::kOwn == 1
                                                            : kIsWide<kIn> && kOtherTerms && Base::kOwn > 1);
  static constexpr bool kIsSmall = kPass == Pass::kRows && !kOtherTerms && kDim % 8 == 0 && !kIsWide<kIn>;
  static constexpr bool kIsCrowded = kLaneDims > 8 && (kPass == Pass::kColumns || kOtherTerms);
  static constexpr bool kScalesGiven = kTerms & (kTypes | kKeyFactor | kAdditive);
  static constexpr int kGivenBlocks =
      kIsWide<kIn> && adds_features(kTerms) && kArch != 900                     ? 2
      : kIsCrowded || kTerms & kKeyFactor || (kScalesGiven && kIsWide<kIn>)     ? 3
      : kScalesGiven || kIsWide<kIn> || kWeights > 2 || kArch >= 1000           ? 4
                                                                                : 5;
  static constexpr int kMinBlocks = kIsGiven                                           ? kGivenBlocks
                                    : kIsLargest || (kIsCrowded && kTerms & kAdditive) ? 2
                                    : kIsLarge || kIsCrowded                           ? 3
                                    : kIsSmall                                         ? 5
                                                                                       : 4;

  // Loads the lane's dimensions of O.
  template <Element kOut>
  __device__ static __forceinline__ void load_output(float (&x)[kLaneDims], const void* output, i64 head_start,
                                                     int first_dim, bool exists) {
    if constexpr (kOut == Element::kFloat && kIn != kOut) {
#pragma unroll
      for (int i = 0; i < kLaneDims; i += 2) {
        const float* const address = static_cast<const float*>(output) + head_start + first_dim + i;
        const bool is_first_own = exists && Base::is_own(first_dim, i);
        const bool is_second_own = exists && Base::is_own(first_dim, i + 1);
        const float2 pair = is_first_own || is_second_own ? __ldg(reinterpret_cast<const float2*>(address)) : float2{};
        x[i] = is_first_own ? pair.x : 0.0f, x[i + 1] = is_second_own ? pair.y : 0.0f;
      }
    } else {
      const void* const address = element_address<kOut>(output, head_start + first_dim);
      Base::unpack(x, Base::load(address, first_dim, exists), first_dim);
    }
  }

  // Stores kCount sums of gradients of values, from kFirst on, if they are wanted. row_head: row * H + head.
  template <int kFirst, int kCount>
  __device__ static __forceinline__ void store_sums(float* gradients, i64 row_head, const float (&sums)[kSums]) {
    if (kCount == 0 || !gradients) return;
#pragma unroll
    for (int i = 0; i < kCount; ++i) gradients[row_head * kCount + i] = sums[kValues + kFirst + i];
  }

  // Loads or stores the weights of an edge and head.
  __device__ static __forceinline__ void load_weights(float (&x)[kWeights], const void* address, bool exists) {
    u32 words[kWeights];
#pragma unroll
    for (int i = 0; i < kWeights; i += kWeightStep) {
      load_words<4 * kWeightStep>(words + i, static_cast<const float*>(address) + i, exists);
    }
    unpack_words<Element::kFloat>(x, words);
  }
  __device__ static __forceinline__ void store_weights(float* target, const float (&x)[kWeights]) {
#pragma unroll
    for (int i = 0; i < kWeights; i += kWeightStep) {
      float step[kWeightStep];
#pragma unroll
      for (int j = 0; j < kWeightStep; ++j) step[j] = x[i + j];
      store_elements<Element::kFloat>(target + i, step);
    }
  }

  // x *= the weight of the edge's type, at `address`.
  __device__ static __forceinline__ void weigh(float (&x)[kLaneDims], const void* address, int first_dim) {
    float weight[kLaneDims];
    Base::unpack(weight, Base::load(address, first_dim, true), first_dim);
#pragma unroll
    for (int d = 0; d < kLaneDims; ++d) x[d] *= weight[d];
  }

  // Loads kLaneFeatures elements of u or u' from an aligned address; 0 unless `exists`.
  __device__ static __forceinline__ void load_projected(float (&x)[Base::kLaneFeatures], const float* address,
                                                        bool exists) {
    constexpr int kCount = Base::kLaneFeatures;
    if constexpr (kCount >= 4) {
#pragma unroll
      for (int i = 0; i < kCount; i += 4) {
        const float4 four = exists ? __ldg(reinterpret_cast<const float4*>(address + i)) : float4{};
        x[i] = four.x, x[i + 1] = four.y, x[i + 2] = four.z, x[i + 3] = four.w;
      }
    } else {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] = exists ? __ldg(address + i) : 0.0f;
    }
  }
};

// Sums of a lane, for combine_parts.
template <int kSums>
struct LaneSums {
  float value[kSums] = {};

  template <int kFloats>
  __device__ __forceinline__ void pack(float (&x)[kFloats]) const {
#pragma unroll
    for (int i = 0; i < kSums; ++i) x[i] = value[i];
  }
  template <int kFloats>
  __device__ __forceinline__ void add(const float (&x)[kFloats]) {
#pragma unroll
    for (int i = 0; i < kSums; ++i) value[i] += x[i];
  }
};

template <Element kIn, Element kOut, int kDim, int kHeads, int kTerms, Pass kPass>
__device__ __forceinline__ void edge_gradients(const Params& p) {
  using Group = BackwardGroup<kIn, kDim, kHeads, kTerms, kPass>;
  constexpr bool kOverRows = kPass == Pass::kRows, kIsGiven = Group::kIsGiven;
  constexpr int kLaneDims = Group::kLaneDims, kLaneFeatures = Group::kLaneFeatures, kOwn = Group::kOwn;
  constexpr int kUnroll = Group::kUnroll, kHeadLanes = Group::kHeadLanes, kBatch = kUnroll / kOwn;
  const LaneItem<Group> item(p.items, p.num_items);
  const int lane = item.lane, lane_of_head = item.lane_of_head, first_dim = item.first_dim;
  const int head = item.head, row = item.row, count = item.count;
  const int* indices = opaque_pointer(p.indices + item.first_edge);  // columns of this round
  const int* const edges = p.edges + item.first_edge;
  const int rounds = most_of_warp<Group::kLanes>(count);
  int next_index[kUnroll], next_edge[kUnroll];
#pragma unroll
  for (int i = 0; i < kUnroll; ++i) {
    next_index[i] = i < count ? __ldg(indices + i) : 0;
    if constexpr (kIsGiven) next_edge[i] = i < count ? __ldg(edges + i) : 0;
  }
  griddepcontrol_wait();  // [1]
  griddepcontrol_launch_dependents();

  const bool has_head = head < p.num_heads;
  const int loaded_head = min(head, p.num_heads - 1);  // idle lanes load the last head, and store nothing
  const i64 row_head = static_cast<i64>(row) * p.num_heads + loaded_head;
  const auto rows_of = [&](const void* tensor, i64 head_stride, int row_bytes) {
    return Group::rows_of(tensor, head_stride, row_bytes, loaded_head, first_dim);
  };
  const LaneRows gathered_first = rows_of(p.gathered_first, p.gathered_first_head_stride, p.gathered_first_row_bytes);
  const LaneRows gathered_second =
      rows_of(p.gathered_second, p.gathered_second_head_stride, p.gathered_second_row_bytes);
  float own_first[kLaneDims], own_second[kLaneDims];
  {
    const LaneRows first = rows_of(p.own_first, p.own_first_head_stride, p.own_first_row_bytes);
    const LaneRows second = rows_of(p.own_second, p.own_second_head_stride, p.own_second_row_bytes);
    Group::unpack(own_first, Group::load(first.row(row), first_dim, count > 0), first_dim);
    Group::unpack(own_second, Group::load(second.row(row), first_dim, count > 0), first_dim);
  }
  constexpr bool kScalesScores = kIsWide<kIn> || kTerms & kAdditive;  // else the own rows
  const float product_scale = p.scale * kProductUnit<kIn, kTerms>;
  const float own_scale = kScalesScores ? 1.0f : product_scale, score_scale = kScalesScores ? product_scale : 1.0f;
  float additive[kLaneDims] = {};
  if constexpr (kTerms & kAdditive) {
    const i64 start = static_cast<i64>(loaded_head) * kDim + first_dim;
    Group::unpack(additive, Group::load(element_address<kIn>(p.additive_weight, start), first_dim, true), first_dim);
  }
#pragma unroll
  for (int d = 0; d < kLaneDims; ++d) own_first[d] *= own_scale;

  float row_lse = 0.0f, row_delta = 0.0f;  // lse times kScoreUnit
  if constexpr (kOverRows) {
    float output[kLaneDims];
    Group::template load_output<kOut>(output, p.output, row_head * kDim, first_dim, count > 0);
    row_delta = dot(own_second, output);
#pragma unroll
    for (int distance = 1; distance < kHeadLanes; distance *= 2) {
      row_delta += __shfl_xor_sync(kFullWarp, row_delta, distance);
    }
    row_lse = count > 0 ? __ldg(p.lse + row_head) : negative_infinity();
    if (p.lse_gradient && row_lse != negative_infinity()) row_delta -= __ldg(p.lse_gradient + row_head);
    row_lse = row_lse == negative_infinity() ? -negative_infinity() : row_lse * kScoreUnit<kIn>;  // [3]
  }

  // Features of the lane, from first_feature on.
  const int first_feature = lane_of_head * kLaneFeatures;
  const bool has_features = first_feature < kFeatures;
  const i64 projected_head = static_cast<i64>(loaded_head) * p.num_rows;
  float query_features[kLaneFeatures], grad_features[kLaneFeatures];
  if constexpr (kOverRows && Group::kHasFeatures) {
    const i64 start = (projected_head + row) * kFeatures + first_feature;
    const bool exists = count > 0 && has_features;
    if constexpr (Group::kHasKeyFeatures) Group::load_projected(query_features, p.projected_query + start, exists);
    if constexpr (Group::kHasValueFeatures) Group::load_projected(grad_features, p.projected_grad + start, exists);
  }

  i64 seed = 0;
  u32 of_row = 0;
  if constexpr (kTerms & kDropout) {
    seed = __ldg(p.dropout.seed);
    if constexpr (kOverRows) of_row = dropout_row(seed, row, loaded_head);
  }

  // Weights of each edge, or the LSE and delta of each row, from the pass over rows.
  const char* const written = opaque_pointer(
      kIsGiven ? reinterpret_cast<const char*>(p.edge_weights + loaded_head * Group::kWeights)
               : reinterpret_cast<const char*>(p.row_state + loaded_head));
  const int written_bytes =
      p.num_heads * static_cast<int>(kIsGiven ? Group::kWeights * sizeof(float) : sizeof(float2));
  const void* const type_weight =
      element_address<kIn>(p.type_weight, loaded_head * kDim + first_dim);
  const i64 type_stride = static_cast<i64>(p.num_heads) * kDim;
  LaneSums<Group::kSums> lane_sums;
  float (&sums)[Group::kSums] = lane_sums.value;
  for (int first = 0; first < rounds; first += kUnroll) {
    typename Group::Words first_words[kUnroll], second_words[kUnroll];
    float features[kUnroll][kLaneFeatures], given[kUnroll][Group::kWeights];
    int gathered[kUnroll], type[kUnroll];
    i64 edge[kUnroll];
    // On sm_100 and newer an address of each edge in each array would stay in registers throughout the loop.
    constexpr bool kKeepsAddresses = kArch < 1000 || !Group::kHasEdgeData;
    const int start = kKeepsAddresses ? first : opaque(first);
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      const bool exists = first + i < count;
      gathered[i] = next_index[i];
      edge[i] = kOverRows ? static_cast<i64>(item.first_edge) + start + i : next_edge[i];
      if constexpr (kIsGiven) {
        Group::load_weights(given[i], written + mul_wide_s32(next_edge[i], written_bytes), exists);
      }
      if constexpr (Group::kUsesScore) {
        first_words[i] = Group::load(gathered_first.row(gathered[i]), first_dim, exists);  // [2]
      }
      second_words[i] = Group::load(gathered_second.row(gathered[i]), first_dim, exists);
      if constexpr (Group::kHasFeatures) {
        const i64 start = edge[i] * kFeatures + first_feature;
        Group::load_features(features[i], element_address<kIn>(p.features, start), exists && has_features);
      }
      if constexpr (kTerms & kTypes) type[i] = exists ? __ldg(p.types + edge[i]) : 0;
      const int next = first + kUnroll + i;
      next_index[i] = next < count ? __ldg(indices + kUnroll + i) : 0;
      if constexpr (kIsGiven) next_edge[i] = next < count ? __ldg(edges + next) : 0;
    }
    indices = opaque_pointer(indices + kUnroll);
    typename Group::Term terms[kOwn];
    float lse[kOwn], delta[kOwn], key_product[kOwn] = {}, value_product[kOwn] = {};  // of one lane of the head
    if constexpr (!kIsGiven) {
#pragma unroll
      for (int j = 0; j < kOwn; ++j) {
        const bool exists = first + Group::own_edge(lane, j) < count;
        const i64 e = Group::own(edge, lane, j);
        lse[j] = row_lse, delta[j] = row_delta;
        if (exists) terms[j].load_edge(p, e, loaded_head);
        if (exists && lane_of_head < kBatch) {
          if constexpr (kTerms & kWideKeys) key_product[j] = __ldg(p.key_products + e * p.num_heads + loaded_head);
          if constexpr (kTerms & kWideValues) value_product[j] = __ldg(p.grad_products + e * p.num_heads + loaded_head);
        }
        if constexpr (!kOverRows) {
          const char* const address = written + mul_wide_s32(Group::own(gathered, lane, j), written_bytes);
          const float2 state = exists ? __ldg(reinterpret_cast<const float2*>(address)) : make_float2(0.0f, 0.0f);
          lse[j] = state.x, delta[j] = state.y;
        }
      }
    }

    // One batch at a time: only its edges are in registers as floats. Each lane computes the weight of one edge of a
    // batch, its own edge.
    float added[kAddedEdges][kLaneDims];
#pragma unroll
    for (int j = 0; j < kOwn; ++j) {
      float x[kBatch][kLaneDims], y[kBatch][kLaneDims];
      float product[kBatch], grad_product[kBatch];  // <q, k> (16 bits: times scale * kScoreUnit); <dO, v>
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = j * kBatch + b;
        product[b] = 0.0f;
        if constexpr (Group::kUsesScore) {
          Group::unpack(x[b], first_words[i], first_dim);
          if constexpr (adds_features(kTerms)) {
            if (i % kAddedEdges == 0) {
              i64 added_edge[kAddedEdges];
              bool exists[kAddedEdges];
#pragma unroll
              for (int n = 0; n < kAddedEdges; ++n) {
                added_edge[n] = edge[i + n], exists[n] = first + i + n < count;
                Group::unpack(added[n], first_words[i + n], first_dim);
              }
              add_features<kIn, kDim, Group>(added, p, added_edge, exists, loaded_head, first_dim);
            }
#pragma unroll
            for (int d = 0; d < kLaneDims; ++d) x[b][d] = added[i % kAddedEdges][d];
          }
          if constexpr (kTerms & kTypes) {
            Group::weigh(x[b], element_address<kIn>(type_weight, type[i] * type_stride), first_dim);
          }
          if constexpr (kTerms & kKeyFactor && !(kTerms & kAdditive)) {
            constexpr bool kManyFactors = kTerms & kWideFactors;
            if (first + i < count) {
              multiply_by_features<kIn, kDim, Group, kManyFactors>(x[b], p, edge[i], loaded_head, first_dim);
            }
          }
          if constexpr (kTerms & kAdditive) {
            product[b] = additive_product(additive, own_first, x[b], p.additive_slope);
          } else {
            product[b] = dot(own_first, x[b]);
          }
        }
        Group::unpack(y[b], second_words[i], first_dim);
        grad_product[b] = dot(own_second, y[b]);
        if constexpr (Group::kHasFeatures) {
          if constexpr (Group::kHasKeyFeatures) {
            if constexpr (kIsWide<kIn>) {
              product[b] = add_dot(product[b], query_features, features[i]);
            } else {
              product[b] = fmaf(own_scale, dot(query_features, features[i]), product[b]);
            }
          }
          if constexpr (Group::kHasValueFeatures) grad_product[b] += dot(grad_features, features[i]);
        }
        if constexpr (Group::kUsesScore && kTerms & kWideKeys) {
          product[b] = fmaf(own_scale, Group::of_own_edge(key_product, lane, i), product[b]);
        }
        if constexpr (kTerms & kWideValues) grad_product[b] += Group::of_own_edge(value_product, lane, i);
      }
      float score_weight = 0.0f, value_weight = 0.0f;
      if constexpr (!kIsGiven) {
        Group::sum_over_head(product, lane);
        Group::sum_over_head(grad_product, lane);

        const bool exists = first + Group::own_edge(lane, j) < count;
        const int own_gathered = Group::own(gathered, lane, j);
        const int query_row = kOverRows ? row : own_gathered, key_row = kOverRows ? own_gathered : row;
        terms[j].load_row(p, query_row, loaded_head);
        terms[j].load_column(p, key_row, loaded_head);
        terms[j].load_head(p, loaded_head);
        const float score = terms[j].apply(score_scale * product[0], p) * kLackingUnit<kIn, kTerms>;
        const float weight = exists ? exp_score<kIn>(score - lse[j]) : 0.0f;
        float kept = 1.0f;
        if constexpr (kTerms & kDropout) {
          const u32 hash = kOverRows ? of_row : dropout_row(seed, query_row, loaded_head);
          kept = keeps(hash, key_row, p.dropout.threshold) ? p.dropout.rescale : 0.0f;
        }
        const float score_gradient = weight * fmaf(kept, grad_product[0], -delta[j]);
        score_weight = terms[j].gradient(score_gradient, p);
        if constexpr (kOverRows) {
          terms[j].template add_row_sums<Group::kValues>(sums);
        } else {
          terms[j].template add_column_sums<Group::kValues>(sums);
        }
        value_weight = weight * kept;
        if constexpr (kOverRows && Group::kHasEdgeData) {
          if (exists && has_head && lane_of_head < kBatch) {
            const i64 at = Group::own(edge, lane, j) * p.num_heads + head;
            terms[j].store_edge_gradients(p, at);
            float weights[Group::kWeights] = {p.scale * score_weight, value_weight};
#pragma unroll
            for (int i = 2; i < Group::kWeights; ++i) weights[i] = terms[j].gradients.column[i - 2];
            Group::store_weights(p.edge_weights + at * Group::kWeights, weights);
          }
        }
      }
#pragma unroll
      for (int b = 0; b < kBatch; ++b) {
        const int i = j * kBatch + b;
        const float first_weight = kIsGiven ? given[i][0] : Group::of_edge(score_weight, lane, b);
        if constexpr (Group::kUsesScore && kTerms & kAdditive) {
          constexpr int kOfWeight = Group::kSumsAdditive ? Group::kAdditiveSums : 0;
          add_additive_gradients<kOfWeight>(sums, first_weight, additive, own_first, x[b], p.additive_slope);
          if constexpr (kOverRows && adds_features(kTerms)) {
            if (p.signs && first + i < count && has_head) {
              const i64 at = (edge[i] * gridDim.y + blockIdx.y) * Group::kLanes + item.lane_of_group;
              p.signs[at] = positive_dims(own_first, x[b]);
            }
          }
        } else if constexpr (Group::kUsesScore) {
          add_weighted(sums, first_weight, x[b]);
        }
        if constexpr (kOverRows && Group::kHasKeyFeatures) {
          add_weighted<Group::kSecond>(sums, first_weight, features[i]);
        }
        if constexpr (kOverRows && Group::kHasValueFeatures) {
          add_weighted<Group::kThird>(sums, Group::of_edge(value_weight, lane, b), features[i]);
        }
        if constexpr (!kOverRows) {
          const float second_weight = kIsGiven ? given[i][1] : Group::of_edge(value_weight, lane, b);
          add_weighted<Group::kSecond>(sums, second_weight, y[b]);
        }
        if constexpr (kIsGiven) {
#pragma unroll
          for (int n = 2; n < Group::kWeights; ++n) sums[Group::kValues + n - 2] += given[i][n];
        }
      }
    }
  }

  if constexpr (kOwn == 1 && !kIsGiven) {  // each lane of a quad has the gradients of its own edges' values
#pragma unroll
    for (int i = Group::kValues; i < Group::kAdditiveSums; ++i) {
      sums[i] += __shfl_xor_sync(kFullWarp, sums[i], 1);
      sums[i] += __shfl_xor_sync(kFullWarp, sums[i], 2);
    }
  }
  bool writes = row >= 0 && has_head;
  if (__any_sync(kFullWarp, item.part >= 0)) {
    const bool is_last = combine_parts<Group::kLanePartial>(lane_sums, item, p.parts, p.partial, p.semaphores);
    writes = writes && (item.part < 0 || is_last);
  }
  __syncwarp();

  float gradient[kLaneDims];
#pragma unroll
  for (int d = 0; d < kLaneDims; ++d) gradient[d] = kIsGiven ? sums[d] : p.scale * sums[d];
  const i64 gradient_start = (static_cast<i64>(row) * p.gradient_heads + loaded_head) * kDim;
  Group::template store<kIn>(p.first_gradient, gradient_start, first_dim, writes, gradient);
  if constexpr (!kOverRows) {
#pragma unroll
    for (int d = 0; d < kLaneDims; ++d) gradient[d] = sums[Group::kSecond + d];
    Group::template store<kIn>(p.second_gradient, gradient_start, first_dim, writes, gradient);
    if (writes && lane_of_head == 0) {
      Group::template store_sums<0, Group::Term::kColumnSums>(p.column_value_gradients, row_head, sums);
    }
  } else {
    if (writes && lane_of_head == 0) {
      constexpr int kOfRows = Group::Term::kRowValues;
      if constexpr (!Group::kHasEdgeData) p.row_state[row_head] = make_float2(row_lse, row_delta);
      Group::template store_sums<0, kOfRows>(p.row_value_gradients, row_head, sums);
      Group::template store_sums<kOfRows, Group::Term::kRowSums - kOfRows>(p.head_value_gradients, row_head, sums);
    }
    if constexpr (Group::kSumsAdditive) {
#pragma unroll
      for (int d = 0; d < kLaneDims; ++d) gradient[d] = p.scale * sums[Group::kAdditiveSums + d];
      const bool is_wanted = writes && p.additive_gradients;
      Group::template store<Element::kFloat>(p.additive_gradients, row_head * kDim, first_dim, is_wanted, gradient);
    }
    if constexpr (Group::kHasFeatures) {
      const i64 start = (projected_head + row) * kFeatures + first_feature;
      if (writes && has_features) {
        float of_features[kLaneFeatures];
        if constexpr (Group::kHasKeyFeatures) {
#pragma unroll
          for (int i = 0; i < kLaneFeatures; ++i) of_features[i] = sums[Group::kSecond + i];
          Group::store_features(element_address<kIn>(p.key_feature_sums, start), of_features, p.scale);
        }
        if constexpr (Group::kHasValueFeatures) {
#pragma unroll
          for (int i = 0; i < kLaneFeatures; ++i) of_features[i] = sums[Group::kThird + i];
          Group::store_features(element_address<kIn>(p.value_feature_sums, start), of_features, 1.0f);
        }
      }
    }
  }
}

template <Element kIn, Element kOut, int kDim, int kHeads, int kTerms,
          typename Group = BackwardGroup<kIn, kDim, kHeads, kTerms, Pass::kRows>>
__device__ KernelSizes gradients_over_rows_sizes = {0, Group::kPartial, Group::kMinBlocks, kWarps * Group::kGroups};
template <Element kIn, int kDim, int kHeads, int kTerms,
          typename Group = BackwardGroup<kIn, kDim, kHeads, kTerms, Pass::kColumns>>
__device__ KernelSizes gradients_over_columns_sizes = {0, Group::kPartial, Group::kMinBlocks, kWarps * Group::kGroups};

template <Element kIn, Element kOut, int kDim, int kHeads, int kTerms>
__global__ void __launch_bounds__(kWarps* kWarpSize, BackwardGroup<kIn, kDim, kHeads, kTerms, Pass::kRows>::kMinBlocks)
    gradients_over_rows(const __grid_constant__ Params p) {
  edge_gradients<kIn, kOut, kDim, kHeads, kTerms, Pass::kRows>(p);
}

template <Element kIn, int kDim, int kHeads, int kTerms>
__global__ void
__launch_bounds__(kWarps* kWarpSize, BackwardGroup<kIn, kDim, kHeads, kTerms, Pass::kColumns>::kMinBlocks)
    gradients_over_columns(const __grid_constant__ Params p) {
  edge_gradients<kIn, kIn, kDim, kHeads, kTerms, Pass::kColumns>(p);
}

struct FeatureParams {
  const Item* items;             // [num_items]  of the rows of A
  const float* edge_weights;     // [nnz][H][num_weights]  scale * ds, D p, ..
  const float* projected_query;  // [H][num_rows][16]  u, or null
  const float* projected_grad;   // [H][num_rows][16]  u', or null
  void* gradient;                // [nnz][16]  da; every element is written
  int num_rows;
  int num_items;
  int num_heads;
  int num_weights;
};

// da. Each quad of lanes processes an item, each lane four features.
template <Element kIn>
__global__ void __launch_bounds__(kWarps* kWarpSize) gradients_of_features(const __grid_constant__ FeatureParams p) {
  constexpr int kUnroll = 4, kLaneFeatures = 4, kQuadLanes = kFeatures / kLaneFeatures;
  const int thread = blockIdx.x * kWarps * kWarpSize + threadIdx.x;
  const int first_feature = thread % kQuadLanes * kLaneFeatures;
  int4 item = make_int4(-1, 0, 0, -1);
  if (thread / kQuadLanes < p.num_items) item = __ldg(reinterpret_cast<const int4*>(p.items) + thread / kQuadLanes);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const int row = item.x, count = item.z;
  const int edge_floats = p.num_heads * p.num_weights;
  for (int first = 0; first < count; first += kUnroll) {
    const i64 first_edge = static_cast<i64>(item.y) + first;
    float sums[kUnroll][kLaneFeatures] = {};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float* const projected = half == 0 ? p.projected_query : p.projected_grad;
      const float* const weights = p.edge_weights + first_edge * edge_floats + half;
      if (!projected) continue;
#pragma unroll 2
      for (int head = 0; head < p.num_heads; ++head) {
        const i64 start = (static_cast<i64>(head) * p.num_rows + row) * kFeatures + first_feature;
        const float4 four = __ldg(reinterpret_cast<const float4*>(projected + start));
        const float of_row[kLaneFeatures] = {four.x, four.y, four.z, four.w};
#pragma unroll
        for (int i = 0; i < kUnroll; ++i) {
          const int place = i * edge_floats + head * p.num_weights;
          const float weight = first + i < count ? __ldg(weights + place) : 0.0f;
          add_weighted(sums[i], weight, of_row);
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kUnroll; ++i) {
      if (first + i >= count) continue;
      store_elements<kIn>(element_address<kIn>(p.gradient, (first_edge + i) * kFeatures + first_feature), sums[i]);
    }
  }
}
