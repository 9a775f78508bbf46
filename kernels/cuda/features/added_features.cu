// Gradients of features of edges inside of additive attention, s_ij = <a, leaky_relu(z_ij)> with z_ij = q_i + k_j + W a_ij.
//
//   g_ij  = scale * ds_ij * leaky_relu'(z_ij)     [H][kDim], never stored
//   dW    = a * sum over edges of g_ij a_ij^T     [H][kDim][num_features]
//   da_ij = sum over heads of W^T (a * g_ij)      [num_features]
//
// The pass over rows of edges/backward.cu stores scale * ds_ij, a number for each head, and whether z_ij is positive, a
// bit for each dimension. Both are read in the order of the edges: no row of q or k is gathered again.
//
// Grid (blocks of edges, head groups, steps of kStep features). A lane group (lane_group.cuh) processes an edge at a time;
// each warp has a contiguous range of edges, and writes a partial sum of dW of its own, so that the bits are the same on
// every run.
#include "common.cuh"
#include "edges/lane_group.cuh"
#include "elements.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int kStep = 8;    // features of a block
constexpr int kUnroll = 2;  // edges of a lane group in flight

struct Params {
  const void* features;         // [num_edges][feature_columns]  kIn, 0 from num_features on
  const void* key_factor;       // [num_features][H][kDim]  kIn, W with its columns first; contiguous
  const void* additive_weight;  // [H][kDim]  kIn, a
  const float* edge_weights;    // [num_edges][H][num_weights]  scale * ds, ..
  const u8* signs;              // [num_edges][num_groups][kLanes]  bit d: z is positive in dimension d of the lane
  float* weight_gradient;       // [warps][num_features][H][kDim]  a part of dW for each warp, contiguous
  void* feature_gradient;       // [num_groups][num_edges][feature_columns]  kOut, a part of da for each head group
  int num_edges;
  int warp_edges;       // edges of a warp
  int num_heads;        // H
  int num_weights;
  int num_features;
  int feature_columns;  // a multiple of 16
  float slope;
};

// Sums each x[i] over the lanes of a group. Each step halves the values of a lane; returns the first value that x[0] and
// on then are.
template <typename Group>
__device__ __forceinline__ int sum_over_group(float (&x)[kStep], int lane) {
  int count = kStep, first = 0;
#pragma unroll
  for (int distance = 1; distance < Group::kLanes; distance *= 2) {
    if (count > 1) {
      count /= 2;
      if (lane & distance) first += count;
#pragma unroll
      for (int i = 0; i < kStep / 2; ++i) {
        if (i < count) x[i] = Group::kept(x[i], x[count + i], lane, distance);
      }
    } else {
      x[0] += __shfl_xor_sync(kFullWarp, x[0], distance);
    }
  }
  return first;
}

// kOfWeight: dW is wanted; kOfFeatures: da.
template <Element kIn, Element kOut, int kDim, int kHeads, bool kOfWeight, bool kOfFeatures>
__device__ KernelSizes gradients_of_added_features_sizes = {0, 0, kOfWeight && kOfFeatures ? 2 : 4, kWarps};

template <Element kIn, Element kOut, int kDim, int kHeads, bool kOfWeight, bool kOfFeatures>
__global__ void __launch_bounds__(kWarps* kWarpSize, kOfWeight && kOfFeatures ? 2 : 4)
    gradients_of_added_features(const __grid_constant__ Params p) {
  using Group = LaneGroup<kIn, kDim, kHeads, false>;
  constexpr int kLaneDims = Group::kLaneDims, kLanes = Group::kLanes;
  const int lane = threadIdx.x % kWarpSize, warp = blockIdx.x * kWarps + threadIdx.x / kWarpSize;
  const int group = Group::group(lane), lane_of_group = Group::in_group(lane), first_dim = Group::first_dim(lane_of_group);
  const int head = blockIdx.y * kHeads + lane_of_group / Group::kHeadLanes;
  const bool has_head = head < p.num_heads;
  const int loaded_head = min(head, p.num_heads - 1), first_feature = blockIdx.z * kStep;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  float additive[kLaneDims];
  const auto load_row = [&](float (&x)[kLaneDims], const void* tensor, int row) {
    const i64 start = (static_cast<i64>(row) * p.num_heads + loaded_head) * kDim + first_dim;
    Group::unpack(x, Group::load(element_address<kIn>(tensor, start), first_dim, has_head), first_dim);
  };
  load_row(additive, p.additive_weight, 0);
  float weight[kStep][kLaneDims] = {}, sums[kStep][kLaneDims] = {};  // a W, and dW / a
  if constexpr (kOfFeatures) {
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
      if (first_feature + i >= p.num_features) continue;
      load_row(weight[i], p.key_factor, first_feature + i);
#pragma unroll
      for (int d = 0; d < kLaneDims; ++d) weight[i][d] *= additive[d];
    }
  }

  const i64 first_edge = static_cast<i64>(warp) * p.warp_edges;
  const int count = static_cast<int>(min(static_cast<i64>(p.warp_edges), p.num_edges - first_edge));
  for (int first = 0; first < count; first += kUnroll * Group::kGroups) {
    float of_head[kUnroll], features[kUnroll][kStep];
    u32 positive[kUnroll];
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      const int number = first + j * Group::kGroups + group;
      const i64 edge = first_edge + number;
      const bool exists = number < count;
      of_head[j] = exists && has_head ? __ldg(p.edge_weights + (edge * p.num_heads + loaded_head) * p.num_weights) : 0.0f;
      positive[j] = exists ? __ldg(p.signs + (edge * gridDim.y + blockIdx.y) * kLanes + lane_of_group) : 0;
      if constexpr (kOfWeight) {
        constexpr int kBytes = kStep * kElement_bytes<kIn>;
        const char* const source = element_address<kIn>(p.features, edge * p.feature_columns + first_feature);
        u32 words[kBytes / 4];
#pragma unroll
        for (int i = 0; i < kBytes; i += 16) load_words<16>(words + i / 4, source + i, exists);
        unpack_words<kIn>(features[j], words);
      }
    }
#pragma unroll
    for (int j = 0; j < kUnroll; ++j) {
      float gradient[kLaneDims], of_edge[kStep] = {};
#pragma unroll
      for (int d = 0; d < kLaneDims; ++d) gradient[d] = positive[j] >> d & 1 ? of_head[j] : of_head[j] * p.slope;
#pragma unroll
      for (int i = 0; i < kStep; ++i) {
        if constexpr (kOfWeight) add_weighted(sums[i], features[j][i], gradient);
        if constexpr (kOfFeatures) of_edge[i] = dot(weight[i], gradient);
      }
      if constexpr (kOfFeatures) {
        constexpr int kLeft = kLanes < kStep ? kStep / kLanes : 1;  // features of a lane
        const int own = sum_over_group<Group>(of_edge, lane);
        const int number = first + j * Group::kGroups + group;
        if (number < count && lane_of_group < kStep) {
          float found[kLeft];
#pragma unroll
          for (int i = 0; i < kLeft; ++i) found[i] = of_edge[i];
          const i64 edge = static_cast<i64>(blockIdx.y) * p.num_edges + first_edge + number;
          const i64 start = edge * p.feature_columns + first_feature + own;
          store_elements<kOut>(static_cast<char*>(p.feature_gradient) + start * kElement_bytes<kOut>, found);
        }
      }
    }
  }
  if constexpr (kOfWeight) {
#pragma unroll
    for (int i = 0; i < kStep; ++i) {
#pragma unroll
      for (int d = 0; d < kLaneDims; ++d) {
#pragma unroll
        for (int distance = kLanes; distance < kWarpSize; distance *= 2) {
          sums[i][d] += __shfl_xor_sync(kFullWarp, sums[i][d], distance);
        }
        sums[i][d] *= additive[d];
      }
      const bool writes = group == 0 && has_head && first_feature + i < p.num_features;
      const i64 row = static_cast<i64>(warp) * p.num_features + first_feature + i;
      const i64 start = (row * p.num_heads + loaded_head) * kDim;
      Group::template store<Element::kFloat>(p.weight_gradient, start, first_dim, writes, sums[i]);
    }
  }
}
