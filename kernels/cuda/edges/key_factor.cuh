// Features of an edge that multiply a row elementwise: k_ij = (sum_r a_ijr w_r) * k_j. Edge-by-edge kernels.
#pragma once
#include "edges/lane_group.cuh"

// x *= sum_r a_r w_r, for a lane's dimensions of a head from first_dim on. Members of `p`: key_factor
// [num_factors][H][kDim] and features [nnz][num_factors, rounded up to a multiple of 16], both kIn.
template <Element kIn, int kDim, typename Group, bool kManyFactors, int kDims, typename Params>
__device__ __forceinline__ void multiply_by_features(float (&x)[kDims], const Params& p, i64 edge, int head,
                                                     int first_dim) {
  float factor[kDims] = {};
  const i64 first_feature = edge * kFeatures * (kManyFactors ? divide_up(p.num_factors, kFeatures) : 1);
#pragma unroll 1
  for (int r = 0; r < p.num_factors; ++r) {
    const float feature = load_element<kIn>(element_address<kIn>(p.features, first_feature + r));
    const i64 start = (static_cast<i64>(r) * p.num_heads + head) * kDim + first_dim;
    float weight[kDims];
    Group::unpack(weight, Group::load(element_address<kIn>(p.key_factor, start), first_dim, true), first_dim);
#pragma unroll
    for (int d = 0; d < kDims; ++d) factor[d] = fmaf(feature, weight[d], factor[d]);
  }
#pragma unroll
  for (int d = 0; d < kDims; ++d) x[d] *= factor[d];
}
