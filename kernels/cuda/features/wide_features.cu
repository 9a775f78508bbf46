// Products with wide edge features, of more than 16 columns. The attention kernels edge by edge know of them only one
// number per edge and head. u_i: what the weights make of a row of q or dO (a GEMM).
//
//   feature_products    x_ij  = <u_i, a_ij>                            before attention: W a_ij in <q_i, k_ij>, and
//                                                                      W' a_ij in <dO_i, v_ij>
//   feature_sums        s_i   = sum_j w_ij a_ij                        after it; W s_i or W' s_i is a GEMM
//   feature_gradients   da_ij = sum over channels of w_ij u_i
//
// w_ij is given, or computed from a score: D_ij exp(score_ij - lse_i), D_ij as in edges/backward.cu. A side is a
// weight, W or W'. A channel is a head of a side; channels are the heads of the first side, then those of the second.
//
// A launch computes `columns` neighbouring columns. Grid (num_items / kWarps, num_channels / kTiles / 8), and of
// feature_gradients (num_items / kWarps, columns / kColumns). A warp has one item: a row, or a part of a long row.
// All three are products on tensor cores, mma.m16n8k8 in TF32 (tiles/tf32.cuh); the edges of a row lie side by side. A
// lane has kLaneColumns neighbouring columns; with g = lane / 4 and t = lane % 4, by step of 16 or 32 columns:
//
//                        A                            B                          C
//   feature_products     a  [16 edges, 8 columns]     u  [8 columns, channel]    x  [edge, channel]
//                        edges g, g+8; columns 4t..   columns 4t..; channel g    edges g, g+8; channels 2t, 2t+1
//   feature_sums         a  [16 columns, 8 edges]     w  [8 edges, channel]      s  [column, channel]
//                        columns 4g..; edges t, t+4   edges t, t+4; channel g    columns 4g..; channels 2t, 2t+1
//   feature_gradients    w  [16 edges, 8 channels]    u  [8 channels, column]    da [edge, column]
//                        edges g, g+8;                channels t, t+4;           edges g, g+8;
//                        channels t, t+4              columns 4g..               columns 8t..
//
// u and w have two terms; features of 16 bits have one, which is exact. An infinite number acts as a NaN.
//
// feature_sums: each part of a row writes a partial, and the last to arrive adds them up in order, so that the bits are
// the same on every run.
#include "common.cuh"
#include "dropout.cuh"
#include "edges/lane_group.cuh"
#include "elements.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/mma_tf32.cuh"
#include "ptx/opaque.cuh"
#include "score/score_terms.cuh"
#include "tiles/tf32.cuh"
#include "warp.cuh"

constexpr int kLaneColumns = 4;
constexpr int kStepK = 8;  // of mma.m16n8k8
template <Element kIn, int kColumns, int kTiles>
constexpr int kMinBlocks = kColumns * kTiles * kElement_bytes<kIn> > 256 ? 3 : 4;  // per SM, without spills

// Arrays of two: sides. `features` and `gradient` begin at the first column of the launch.
struct Params {
  const Item* items;          // [num_items]
  const int* indices;         // [nnz]  column of A of each edge; for dropout
  const int2* parts;          // [num_parts]  first part of the row, and its number of parts
  const void* features;       // [nnz][feature_stride]  kIn, rows aligned to four elements
  const float* projected[2];  // [H][num_rows][columns]  u
  float* products[2];         // [nnz][H]  x
  const float* weights[2];    // [nnz][H], weight_stride apart  w, or scores times kScoreUnit
  const float* lse;           // [num_rows][H]  with scores; null: w are given
  void* sums[2];              // [H][num_rows][columns]  s, kIn; every element is written
  void* gradient;             // [nnz][feature_stride]  da, kIn
  float* partial;             // [num_parts][gridDim.y][kWarpSize][partial floats of a lane]
  int* semaphores;            // [num_parts][gridDim.y]  0 before and after; a row's first part has the semaphore
  DropoutParams dropout;      // with scores; a null seed: none
  int feature_stride;  // elements
  int weight_stride;
  int columns;         // a multiple of kLaneColumns
  int num_rows;
  int num_items;
  int num_heads;     // H
  int num_channels;  // H, or 2 H
  int adds;          // 1: products are added to those of the columns before
};

// The lanes of a row for LaneItem: a warp.
struct WarpLanes {
  static constexpr int kLanes = kWarpSize, kHeadLanes = kWarpSize, kGroupHeads = 1, kGroups = 1;
  __device__ static __forceinline__ int group(int) { return 0; }
  __device__ static __forceinline__ int in_group(int lane) { return lane; }
  __device__ static __forceinline__ int first_lane(int) { return 0; }
  __device__ static __forceinline__ int first_dim(int) { return 0; }
};

struct Channel {
  int side, head;
  bool exists;

  __device__ __forceinline__ Channel(const Params& p, int channel)
      : side(channel >= p.num_heads), head(channel - side * p.num_heads), exists(channel < p.num_channels) {}
};

// A warp, its item, and the loads of a lane.
template <Element kIn>
struct FeatureWarp {
  static constexpr int kWords = kLaneColumns * kElement_bytes<kIn> / 4;

  const Params& p;
  const LaneItem<WarpLanes> item;
  const int count;  // edges of the item
  const int g, t;

  __device__ __forceinline__ FeatureWarp(const Params& p)
      : p(p), item(p.items, p.num_items), count(warp_uniform(item.count)), g(item.lane / 4), t(item.lane % 4) {}

  __device__ __forceinline__ i64 edge(int index) const { return static_cast<i64>(item.first_edge) + index; }

  // Loads features of an edge from `column` on; 0 past the last edge or column.
  __device__ __forceinline__ void load_features(u32 (&words)[kWords], int index, int column) const {
    const char* const source = element_address<kIn>(p.features, edge(index) * p.feature_stride + column);
    load_words<4 * kWords>(words, source, index < count && column < p.columns);
  }

  // Element of the row in u or s.
  __device__ __forceinline__ i64 row_element(int head, int column) const {
    return (static_cast<i64>(head) * p.num_rows + item.row) * p.columns + column;
  }

  // Loads u from `column` on; 0 past the last channel or column.
  __device__ __forceinline__ void load_projected(u32 (&u)[kLaneColumns], const Channel& channel, int column) const {
    const bool exists = channel.exists && column < p.columns && count > 0;
    load_words<16>(u, p.projected[channel.side] + row_element(channel.head, column), exists);
  }

  // w of an edge, or its score; 0 past the last edge or channel.
  __device__ __forceinline__ float load_weight(const Channel& channel, int index) const {
    const bool exists = channel.exists && index < count;
    const i64 place = (edge(index) * p.num_heads + channel.head) * p.weight_stride;
    return exists ? __ldg(p.weights[channel.side] + place) : 0.0f;
  }
};

// sum + small += A B. kA: type of A's elements. Tensor cores truncate when they add: a float32 product starts at 0, and
// an addition rounds it into the sum, which would be too small by several ulp otherwise.
template <Element kA>
__device__ __forceinline__ void mma_terms(float (&sum)[4], float (&small)[4], const float (&a)[4], u32 b0, u32 b1) {
  u32 high[4], low[4], b[2], b_low[2];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    high[i] = __float_as_uint(a[i]);
    if constexpr (kIsWide<kA>) tf32_split(high[i], high[i], low[i]);
  }
  tf32_split(b0, b[0], b_low[0]);
  tf32_split(b1, b[1], b_low[1]);
  mma_m16n8k8_tf32(small, high[0], high[1], high[2], high[3], b_low[0], b_low[1]);
  if constexpr (kIsWide<kA>) mma_m16n8k8_tf32(small, low[0], low[1], low[2], low[3], b[0], b[1]);
  mma_m16n8k8_tf32(sum, high[0], high[1], high[2], high[3], b[0], b[1]);
}

template <Element kIn, int kColumns, int kTiles>
__device__ KernelSizes feature_products_sizes = {0, 0, kMinBlocks<kIn, kColumns, kTiles>, kWarps};

template <Element kIn, int kColumns, int kTiles>
__global__ void __launch_bounds__(kWarps* kWarpSize, kMinBlocks<kIn, kColumns, kTiles>)
    feature_products(const __grid_constant__ Params p) {
  constexpr int kSteps = kColumns / (4 * kLaneColumns);
  const FeatureWarp<kIn> warp(p);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const int first_channel = blockIdx.y * kTiles * kTileN, first_column = kLaneColumns * warp.t;
  u32 projected[kTiles][kSteps][kLaneColumns];
#pragma unroll
  for (int tile = 0; tile < kTiles; ++tile) {
    const Channel channel(p, first_channel + kTileN * tile + warp.g);
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      warp.load_projected(projected[tile][step], channel, 4 * kLaneColumns * step + first_column);
    }
  }
  for (int first = 0; first < warp.count; first += kTileM) {
    u32 words[2][kSteps][FeatureWarp<kIn>::kWords];
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        warp.load_features(words[half][step], first + warp.g + 8 * half, 4 * kLaneColumns * step + first_column);
      }
    }
    float sum[kTiles][4] = {}, small[kTiles][4] = {};
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float x[2][kLaneColumns];
      unpack_words<kIn>(x[0], words[0][step]);
      unpack_words<kIn>(x[1], words[1][step]);
#pragma unroll
      for (int i = 0; i < kLaneColumns; i += 2) {
        const float a[4] = {x[0][i], x[1][i], x[0][i + 1], x[1][i + 1]};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          const u32(&u)[kLaneColumns] = projected[tile][step];
          const u32 u0 = opaque(u[i]), u1 = opaque(u[i + 1]);  // terms in no registers
          if constexpr (kIsWide<kIn>) {
            float product[4] = {};
            mma_terms<kIn>(product, product, a, u0, u1);
#pragma unroll
            for (int j = 0; j < 4; ++j) sum[tile][j] += product[j];
          } else {
            mma_terms<kIn>(sum[tile], small[tile], a, u0, u1);
          }
        }
      }
    }
#pragma unroll
    for (int i = 0; i < kTiles * 4; ++i) {
      const Channel channel(p, first_channel + kTileN * (i / 4) + 2 * warp.t + i % 2);
      const int index = first + warp.g + 8 * (i / 2 % 2);
      if (!channel.exists || index >= warp.count) continue;
      float* const target = p.products[channel.side] + warp.edge(index) * p.num_heads + channel.head;
      const float product = sum[i / 4][i % 4] + small[i / 4][i % 4];
      *target = p.adds ? *target + product : product;
    }
  }
}

// D exp(score - lse) of a channel from its scores, or weights as they are given.
template <Element kIn>
struct ChannelWeights {
  Channel channel;
  float lse = 0.0f;
  u32 of_row = 0;

  __device__ __forceinline__ ChannelWeights(const FeatureWarp<kIn>& warp, int index) : channel(warp.p, index) {
    const Params& p = warp.p;
    if (!p.lse || !channel.exists || warp.count == 0) return;
    lse = __ldg(p.lse + static_cast<i64>(warp.item.row) * p.num_heads + channel.head);
    lse = lse == negative_infinity() ? -lse : lse * kScoreUnit<kIn>;  // a row without weight
    if (p.dropout.seed) of_row = dropout_row(__ldg(p.dropout.seed), warp.item.row, channel.head);
  }

  // 0 past the last edge or channel.
  __device__ __forceinline__ float load(const FeatureWarp<kIn>& warp, int index) const {
    const Params& p = warp.p;
    const float x = warp.load_weight(channel, index);
    if (!p.lse || !channel.exists || index >= warp.count) return x;
    const float weight = exp_score<kIn>(x - lse);
    if (!p.dropout.seed) return weight;
    return keeps(of_row, __ldg(p.indices + warp.edge(index)), p.dropout.threshold) ? weight * p.dropout.rescale : 0.0f;
  }
};

template <Element kIn, int kColumns, int kTiles>
__device__ KernelSizes feature_sums_sizes = {0, kTiles * kTileN * kColumns, kMinBlocks<kIn, kColumns, kTiles>, kWarps};

template <Element kIn, int kColumns, int kTiles>
__global__ void __launch_bounds__(kWarps* kWarpSize, kMinBlocks<kIn, kColumns, kTiles>)
    feature_sums(const __grid_constant__ Params p) {
  constexpr int kSteps = kColumns / (8 * kLaneColumns), kQuads = kTiles * kSteps * 2, kBatch = 2;
  const FeatureWarp<kIn> warp(p);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  const int first_channel = blockIdx.y * kTiles * kTileN, first_column = kLaneColumns * warp.g;
  const auto weights_of = [&](int tile) {
    return ChannelWeights<kIn>(warp, first_channel + kTileN * tile + warp.g);
  };
  const ChannelWeights<kIn> weights[2] = {weights_of(0), weights_of(kTiles - 1)};  // with one tile twice the same
  float sums[kQuads][kLaneColumns] = {};  // of tile quad / 2 / kSteps, step quad / 2 % kSteps, channel 2t + quad % 2
  for (int first = 0; first < warp.count; first += kStepK) {
    u32 words[2][kSteps][FeatureWarp<kIn>::kWords];
    u32 w[kTiles][2];
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll
      for (int tile = 0; tile < kTiles; ++tile) {
        w[tile][half] = __float_as_uint(weights[tile].load(warp, first + warp.t + 4 * half));
      }
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        warp.load_features(words[half][step], first + warp.t + 4 * half, 8 * kLaneColumns * step + first_column);
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
      float x[2][kLaneColumns];
      unpack_words<kIn>(x[0], words[0][step]);
      unpack_words<kIn>(x[1], words[1][step]);
#pragma unroll
      for (int i = 0; i < kLaneColumns; i += 2) {
        const float a[4] = {x[0][i], x[0][i + 1], x[1][i], x[1][i + 1]};
#pragma unroll
        for (int tile = 0; tile < kTiles; ++tile) {
          float sum[4] = {};
          mma_terms<kIn>(sum, sum, a, w[tile][0], w[tile][1]);
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[(tile * kSteps + step) * 2 + j % 2][i + j / 2] += sum[j];
        }
      }
    }
  }

  const int part = warp.item.part;
  const auto store = [&](int quad, float4 sum) {
    const Channel channel(p, first_channel + kTileN * (quad / 2 / kSteps) + 2 * warp.t + quad % 2);
    const int column = 8 * kLaneColumns * (quad / 2 % kSteps) + first_column;
    if (!channel.exists || column >= p.columns) return;
    const float values[kLaneColumns] = {sum.x, sum.y, sum.z, sum.w};
    store_elements<kIn>(element_address<kIn>(p.sums[channel.side], warp.row_element(channel.head, column)), values);
  };
  const auto own_sum = [&](int quad) {
    return make_float4(sums[quad][0], sums[quad][1], sums[quad][2], sums[quad][3]);
  };
  if (warp.item.row < 0) return;
  if (part < 0) {
#pragma unroll
    for (int quad = 0; quad < kQuads; ++quad) store(quad, own_sum(quad));
    return;
  }
  const auto partial = [&](int of_part) {
    return lane_partial(p.partial, of_part, 4 * kWarpSize * kQuads, 4 * warp.item.lane * kQuads);
  };
  const int2 parts = __ldg(p.parts + part);
#pragma unroll
  for (int quad = 0; quad < kQuads; ++quad) partial(part)[quad] = own_sum(quad);
  if (!is_last_part(p.semaphores, part, parts, 0, warp.item.lane == 0)) return;
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

template <Element kIn, int kColumns>
__device__ KernelSizes feature_gradients_sizes = {0, 0, kMinBlocks<kIn, kColumns, 2>, kWarps};

template <Element kIn, int kColumns>
__global__ void __launch_bounds__(kWarps* kWarpSize, kMinBlocks<kIn, kColumns, 2>)
    feature_gradients(const __grid_constant__ Params p) {
  constexpr int kSteps = kColumns / (8 * kLaneColumns);
  const int first_column = blockIdx.y * kColumns;
  const FeatureWarp<kIn> warp(p);
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  for (int first = 0; first < warp.count; first += kTileM) {
    float sums[kSteps][kLaneColumns][4] = {};
    for (int first_channel = 0; first_channel < p.num_channels; first_channel += kStepK) {
      const Channel channels[2] = {Channel(p, first_channel + warp.t), Channel(p, first_channel + warp.t + 4)};
      float w[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) w[i] = warp.load_weight(channels[i / 2], first + warp.g + 8 * (i % 2));
#pragma unroll
      for (int step = 0; step < kSteps; ++step) {
        u32 u[2][kLaneColumns];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          warp.load_projected(u[half], channels[half], first_column + kLaneColumns * (8 * step + warp.g));
        }
#pragma unroll
        for (int i = 0; i < kLaneColumns; ++i) {
          float sum[4] = {};
          mma_terms<Element::kFloat>(sum, sum, w, u[0][i], u[1][i]);
#pragma unroll
          for (int j = 0; j < 4; ++j) sums[step][i][j] += sum[j];
        }
      }
    }
#pragma unroll
    for (int step = 0; step < kSteps; ++step) {
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const int index = first + warp.g + 8 * (j / 2);
        const int column = first_column + kLaneColumns * (8 * step + 2 * warp.t + j % 2);
        if (index >= warp.count || column >= p.columns) continue;
        const float values[kLaneColumns] = {sums[step][0][j], sums[step][1][j], sums[step][2][j], sums[step][3][j]};
        store_elements<kIn>(element_address<kIn>(p.gradient, warp.edge(index) * p.feature_stride + column), values);
      }
    }
  }
}
