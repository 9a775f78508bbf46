// Products with wide edge features, of more than 16 columns; bound by the reads of the features. The attention kernels
// edge by edge know of them only one number per edge and head. u_i: what the weights make of a row of q or dO (a GEMM).
//
//   feature_products    x_ij  = <u_i, a_ij>                            before attention: W a_ij in <q_i, k_ij>, and
//                                                                      W' a_ij in <dO_i, v_ij>
//   feature_sums        s_i   = sum_j w_ij a_ij                        after it; W s_i or W' s_i is a GEMM
//   feature_gradients   da_ij = sum over sides and heads of w_ij u_i
//
// w_ij is given, or computed from a score: D_ij exp(score_ij - lse_i), D_ij as in edges/backward.cu. A side is a weight:
// W or W'; both sides share each read of a feature.
//
// A launch computes `columns` neighbouring columns, up to 128, four per lane; the lanes of a row form a group
// (edges/lane_group.cuh). Grid (num_items / kGroups / kWarps, head groups of kHeads); feature_gradients sums over all
// heads and has one head group. A round is kEdges edges of each lane group of a warp.
//
// feature_sums: each part of a row writes a partial, and the last to arrive adds them up in order, so that the bits are
// the same on every run.
#include "common.cuh"
#include "dropout.cuh"
#include "edges/lane_group.cuh"
#include "elements.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/st_shared.cuh"
#include "score/score_terms.cuh"

constexpr int kLaneColumns = 4;
constexpr int kEdges = 4;
constexpr int kMinBlocks = 4;  // per SM, without spills

// Arrays of two: sides. `features` and `gradient` begin at the first column of the launch.
struct Params {
  const Item* items;          // [num_items]
  const int* indices;         // [nnz]  column of A of each edge; for dropout
  const int2* parts;          // [num_parts]  first part of the row, and its number of parts
  const void* features;       // [nnz][feature_stride]  kIn, rows aligned to four elements
  const float* projected[2];  // [H][num_rows][columns]  u
  float* products[2];         // [nnz][H]  x
  const float* weights[2];    // [nnz][H], weight_stride apart  w, or scores times kScoreUnit
  const float* lse;           // [num_rows][H]  with scores
  void* sums[2];              // [H][num_rows][columns]  s, kIn; every element is written
  void* gradient;             // [nnz][feature_stride]  da, kIn
  float* partial;             // [num_parts][head groups][kLanes][kSides * kHeads * kLaneColumns]
  int* semaphores;            // [num_parts][head groups]  0 before and after; a row's first part has the semaphore
  DropoutParams dropout;      // with scores; a null seed: none
  int feature_stride;  // elements
  int weight_stride;
  int columns;         // a multiple of kLaneColumns
  int num_rows;
  int num_items;
  int num_heads;  // H
  int adds;       // 1: products are added to those of the columns before
};

// The lanes of a row, as in LaneGroup; `LaneItem::head` is the head group.
template <int kRowLanes>
struct FeatureLanes {
  static constexpr int kLanes = kRowLanes, kHeadLanes = kRowLanes, kGroupHeads = 1;
  static constexpr int kGroups = kWarpSize / kLanes;
  __device__ static __forceinline__ int group(int lane) { return lane / kLanes; }
  __device__ static __forceinline__ int in_group(int lane) { return lane % kLanes; }
  __device__ static __forceinline__ int first_lane(int group) { return group * kLanes; }
  __device__ static __forceinline__ int first_dim(int lane_of_group) { return lane_of_group * kLaneColumns; }
};

// The item and the columns of a lane, and its loads of features and of u.
template <Element kIn, int kLanes, int kHeads, int kSides>
struct FeatureRow {
  static constexpr int kWords = kLaneColumns * kElement_bytes<kIn> / 4;
  static constexpr int kValues = kEdges * kHeads;  // numbers of a round and a side: [kEdges][kHeads]
  static constexpr int kOwn = kValues > kLanes ? kValues / kLanes : 1;  // of a lane
  static_assert(kLanes % kHeads == 0, "a lane has the numbers of one head");

  const Params& p;
  const LaneItem<FeatureLanes<kLanes>> item;
  const int rounds;         // edges of the longest item of the warp
  const int lane_of_group;
  const bool has_columns;

  __device__ __forceinline__ FeatureRow(const Params& p)
      : p(p),
        item(p.items, p.num_items),
        rounds(most_of_warp<kLanes>(item.count)),
        lane_of_group(item.lane_of_group),
        has_columns(item.first_dim < p.columns) {}

  __device__ __forceinline__ i64 edge(int index) const { return static_cast<i64>(item.first_edge) + index; }

  // Loads the lane's columns of the edges of a round; 0 for padding edges.
  __device__ __forceinline__ void load_features(u32 (&words)[kEdges][kWords], int first) const {
#pragma unroll
    for (int i = 0; i < kEdges; ++i) {
      const char* const source = element_address<kIn>(p.features, edge(first + i) * p.feature_stride + item.first_dim);
      load_words<4 * kWords>(words[i], source, has_columns && first + i < item.count);
    }
  }

  // Address of the lane's columns of a row and head, in u or s.
  __device__ __forceinline__ i64 row_start(int head) const {
    return (static_cast<i64>(head) * p.num_rows + item.row) * p.columns + item.first_dim;
  }

  // Loads u of the heads from `first_head` on; 0 past the last head.
  __device__ __forceinline__ void load_projected(float (&u)[kSides][kHeads][kLaneColumns], int first_head) const {
#pragma unroll
    for (int side = 0; side < kSides; ++side) {
#pragma unroll
      for (int h = 0; h < kHeads; ++h) {
        const bool exists = has_columns && item.count > 0 && first_head + h < p.num_heads;
        u32 words[kLaneColumns];
        load_words<16>(words, p.projected[side] + row_start(first_head + h), exists);
        unpack_words<Element::kFloat>(u[side][h], words);
      }
    }
  }
};

// Sums each x[i] over the lanes of a group. Each step halves the values of a lane, down to one: a lane gets the sums of
// x[first_value(lane)] and the values after it, in x[0] and on; lanes from kCount on get what lane % kCount gets.
template <int kLanes, int kCount>
__device__ __forceinline__ void sum_over_lanes(float (&x)[kCount], int lane) {
  int count = kCount;
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    if (count > 1) {
      count /= 2;
      const bool is_upper = lane & distance;
#pragma unroll
      for (int i = 0; i < count; ++i) {
        const float lower = x[i], upper = x[count + i];
        x[i] = (is_upper ? upper : lower) + __shfl_xor_sync(kFullWarp, is_upper ? lower : upper, distance);
      }
    } else {
      x[0] += __shfl_xor_sync(kFullWarp, x[0], distance);
    }
  }
}
template <int kLanes, int kCount>
__device__ __forceinline__ int first_value(int lane) {
  int first = 0, count = kCount;
#pragma unroll
  for (int distance = 1; distance < kLanes; distance *= 2) {
    if (count == 1) break;
    count /= 2;
    first += lane & distance ? count : 0;
  }
  return first;
}

template <Element kIn, int kLanes, int kHeads, int kSides>
__device__ KernelSizes feature_products_sizes = {0, 0, kMinBlocks, kWarps * (kWarpSize / kLanes)};

template <Element kIn, int kLanes, int kHeads, int kSides>
__global__ void __launch_bounds__(kWarps* kWarpSize, kMinBlocks) feature_products(const __grid_constant__ Params p) {
  using Row = FeatureRow<kIn, kLanes, kHeads, kSides>;
  const Row row(p);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const int first_head = row.item.head * kHeads;
  const int first_own = first_value<kLanes, Row::kValues>(row.lane_of_group);
  float projected[kSides][kHeads][kLaneColumns];
  row.load_projected(projected, first_head);
  for (int first = 0; first < row.rounds; first += kEdges) {
    u32 words[kEdges][Row::kWords];
    row.load_features(words, first);
#pragma unroll
    for (int side = 0; side < kSides; ++side) {
      float values[Row::kValues];
#pragma unroll
      for (int i = 0; i < kEdges; ++i) {
        float x[kLaneColumns];
        unpack_words<kIn>(x, words[i]);
#pragma unroll
        for (int h = 0; h < kHeads; ++h) values[i * kHeads + h] = dot(projected[side][h], x);
      }
      sum_over_lanes<kLanes>(values, row.item.lane);
#pragma unroll
      for (int i = 0; i < Row::kOwn; ++i) {
        const int edge = first + (first_own + i) / kHeads, head = first_head + (first_own + i) % kHeads;
        if (row.lane_of_group >= Row::kValues || edge >= row.item.count || head >= p.num_heads) continue;
        float* const target = p.products[side] + row.edge(edge) * p.num_heads + head;
        *target = p.adds ? *target + values[i] : values[i];
      }
    }
  }
}

// Weights of a round in shared memory: [kGroups][kSides][kEdges][kHeads] of a warp.
template <Element kIn, int kLanes, int kHeads, int kSides, bool kHasScores>
struct RoundWeights {
  using Row = FeatureRow<kIn, kLanes, kHeads, kSides>;
  static constexpr int kGroupFloats = kSides * Row::kValues;
  static constexpr int kFloats = kWarpSize / kLanes * kGroupFloats;

  u32 address;  // of the lane group
  float lse = 0.0f;
  u32 of_row = 0;

  __device__ __forceinline__ RoundWeights(const Row& row, const float* smem)
      : address(shared_address(smem) + static_cast<u32>(sizeof(float)) *
                                           (threadIdx.x / kWarpSize * kFloats + row.item.lane / kLanes * kGroupFloats)) {}

  // Loads what the weights of head first_head + lane % kHeads need besides the scores.
  __device__ __forceinline__ void load_row(const Row& row, int first_head) {
    if constexpr (kHasScores) {
      const int head = min(first_head + row.lane_of_group % kHeads, row.p.num_heads - 1);
      if (row.item.count > 0) {
        lse = __ldg(row.p.lse + static_cast<i64>(row.item.row) * row.p.num_heads + head);
        lse = lse == negative_infinity() ? -lse : lse * kScoreUnit<kIn>;  // a row without weight
      }
      if (row.p.dropout.seed) of_row = dropout_row(__ldg(row.p.dropout.seed), row.item.row, head);
    }
  }

  // Stores the weights of a round; 0 for padding edges and past the last head. All lanes of the warp call it.
  __device__ __forceinline__ void load(const Row& row, int first, int first_head) const {
    const Params& p = row.p;
    const int head = first_head + row.lane_of_group % kHeads;
    float weights[kSides][Row::kOwn];
#pragma unroll
    for (int side = 0; side < kSides; ++side) {
#pragma unroll
      for (int i = 0; i < Row::kOwn; ++i) {
        const int index = first + (row.lane_of_group + i * kLanes) / kHeads;
        const bool exists =
            row.lane_of_group < Row::kValues && index < row.item.count && head < p.num_heads;
        const i64 place = (row.edge(index) * p.num_heads + head) * p.weight_stride;
        float x = exists ? __ldg(p.weights[side] + place) : 0.0f;
        if constexpr (kHasScores) {
          x = exists ? exp_score<kIn>(x - lse) : 0.0f;
          if (exists && p.dropout.seed) {
            x = keeps(of_row, __ldg(p.indices + row.edge(index)), p.dropout.threshold) ? x * p.dropout.rescale : 0.0f;
          }
        }
        weights[side][i] = x;
      }
    }
    __syncwarp();  // the weights of the round before were read
#pragma unroll
    for (int side = 0; side < kSides; ++side) {
#pragma unroll
      for (int i = 0; i < Row::kOwn; ++i) {
        const u32 place = side * Row::kValues + row.lane_of_group + i * kLanes;
        if (row.lane_of_group < Row::kValues) {
          st_shared_b32(address + static_cast<u32>(sizeof(float)) * place, __float_as_uint(weights[side][i]));
        }
      }
    }
    __syncwarp();
  }

  // Four weights of a side: edges and heads (4 * quad + i) / kHeads, (4 * quad + i) % kHeads.
  __device__ __forceinline__ void quad(float (&x)[4], int side, int quad) const {
    const u32 place = side * Row::kValues + 4 * quad;
    const uint4 words = ld_shared_v4_b32(address + static_cast<u32>(sizeof(float)) * place);
    x[0] = __uint_as_float(words.x), x[1] = __uint_as_float(words.y);
    x[2] = __uint_as_float(words.z), x[3] = __uint_as_float(words.w);
  }
};

template <Element kIn, int kLanes, int kHeads, int kSides, bool kHasScores>
__device__ KernelSizes feature_sums_sizes = {0, kLanes * kSides * kHeads * kLaneColumns, kMinBlocks,
                                             kWarps * (kWarpSize / kLanes)};

template <Element kIn, int kLanes, int kHeads, int kSides, bool kHasScores>
__global__ void __launch_bounds__(kWarps* kWarpSize, kMinBlocks) feature_sums(const __grid_constant__ Params p) {
  using Row = FeatureRow<kIn, kLanes, kHeads, kSides>;
  using Weights = RoundWeights<kIn, kLanes, kHeads, kSides, kHasScores>;
  constexpr int kQuads = kSides * kHeads, kBatch = kQuads < 4 ? kQuads : 4;
  __shared__ float4 smem_weights[kWarps * Weights::kFloats / 4];
  const Row row(p);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const int first_head = row.item.head * kHeads;
  Weights weights(row, reinterpret_cast<const float*>(smem_weights));
  weights.load_row(row, first_head);
  float sums[kQuads][kLaneColumns] = {};  // of side quad / kHeads and head quad % kHeads
  for (int first = 0; first < row.rounds; first += kEdges) {
    u32 words[kEdges][Row::kWords];
    row.load_features(words, first);
    weights.load(row, first, first_head);
#pragma unroll
    for (int side = 0; side < kSides; ++side) {
#pragma unroll
      for (int quad = 0; quad < Row::kValues / 4; ++quad) {
        float of_quad[4];
        weights.quad(of_quad, side, quad);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const int edge = (4 * quad + i) / kHeads, head = (4 * quad + i) % kHeads;
          float x[kLaneColumns];
          unpack_words<kIn>(x, words[edge]);
          add_weighted(sums[side * kHeads + head], of_quad[i], x);
        }
      }
    }
  }

  const int part = row.item.part;
  const auto store = [&](int quad, float4 sum) {
    const int head = first_head + quad % kHeads;
    if (!row.has_columns || head >= p.num_heads) return;
    const float values[kLaneColumns] = {sum.x, sum.y, sum.z, sum.w};
    store_elements<kIn>(element_address<kIn>(p.sums[quad / kHeads], row.row_start(head)), values);
  };
  const auto own_sum = [&](int quad) {
    return make_float4(sums[quad][0], sums[quad][1], sums[quad][2], sums[quad][3]);
  };
  if (row.item.row >= 0 && part < 0) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) store(quad, own_sum(quad));
  }
  if (!__any_sync(kFullWarp, part >= 0)) return;
  const auto partial = [&](int of_part) {
    return lane_partial(p.partial, of_part, 4 * kLanes * kQuads, 4 * row.lane_of_group * kQuads);
  };
  int2 parts = make_int2(0, 0);
  if (part >= 0) {
    parts = __ldg(p.parts + part);
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) partial(part)[quad] = own_sum(quad);
  }
  if (!is_last_part(p.semaphores, part, parts, row.item.first_lane, row.lane_of_group == 0)) return;
#pragma unroll 1
  for (int first = 0; first < kQuads; first += kBatch) {  // a few sums at a time, and several parts in flight
    float4 total[kBatch] = {};
#pragma unroll 4
    for (int i = 0; i < parts.y; ++i) {
#pragma unroll
      for (int j = 0; j < kBatch; ++j) {
        const float4 x = partial(parts.x + i)[first + j];
        total[j].x += x.x, total[j].y += x.y, total[j].z += x.z, total[j].w += x.w;
      }
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) store(first + j, total[j]);
  }
}

template <Element kIn, int kLanes, int kHeads, int kSides>
__device__ KernelSizes feature_gradients_sizes = {0, 0, kMinBlocks, kWarps * (kWarpSize / kLanes)};

template <Element kIn, int kLanes, int kHeads, int kSides>
__global__ void __launch_bounds__(kWarps* kWarpSize, kMinBlocks) feature_gradients(const __grid_constant__ Params p) {
  using Row = FeatureRow<kIn, kLanes, kHeads, kSides>;
  using Weights = RoundWeights<kIn, kLanes, kHeads, kSides, false>;
  __shared__ float4 smem_weights[kWarps * Weights::kFloats / 4];
  const Row row(p);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const Weights weights(row, reinterpret_cast<const float*>(smem_weights));
  float projected[kSides][kHeads][kLaneColumns];
  for (int first = 0; first < row.rounds; first += kEdges) {
    float sums[kEdges][kLaneColumns] = {};
    for (int first_head = 0; first_head < p.num_heads; first_head += kHeads) {
      if (first == 0 || p.num_heads > kHeads) row.load_projected(projected, first_head);
      weights.load(row, first, first_head);
#pragma unroll
      for (int side = 0; side < kSides; ++side) {
#pragma unroll
        for (int quad = 0; quad < Row::kValues / 4; ++quad) {
          float of_quad[4];
          weights.quad(of_quad, side, quad);
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            const int edge = (4 * quad + i) / kHeads, head = (4 * quad + i) % kHeads;
            add_weighted(sums[edge], of_quad[i], projected[side][head]);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kEdges; ++i) {
      if (!row.has_columns || first + i >= row.item.count) continue;
      char* const target = element_address<kIn>(p.gradient, row.edge(first + i) * p.feature_stride + row.item.first_dim);
      store_elements<kIn>(target, sums[i]);
    }
  }
}
