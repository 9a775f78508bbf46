// The layers of a training step without matrix products: residual with LayerNorm, its gradient, the gradient of ReLU,
// and the column sums for gradients of biases and norms. All are bound by memory.
//
//   residual_norm            s = x + y, O = norm(s) * weight + bias          stores s and the statistics of its rows
//   residual_norm_backward   dS from dO; column sums of dO * norm(s), dO, dS  (weight, bias, bias of the layer before)
//   relu_backward            dA <- dA * [A > 0] * rescale; its column sums; or the column sums alone
//   sum_partials             column sums of the blocks' partials
//
// The blocks of the backward kernels stride over the rows, each thread with the sums of its columns in registers. Each
// block writes a row of `partial`, in which the sums of several launches lie side by side, and sum_partials adds them
// in the order of the blocks: the same bits on every run. Lanes hold rows as in row_lanes.cuh.
#include "ptx/griddepcontrol.cuh"
#include "row_lanes.cuh"

constexpr int kNormBatch = 2;       // rows per lane with loads in flight, if a row has one chunk per lane
constexpr int kReluBatch = 4;
constexpr int kSumColumns = 32;     // columns per block of sum_partials
constexpr int kSumSlices = 32;      // threads per column

struct NormParams {
  const u16* residual;  // [num_rows][kColumns]  x
  const u16* addend;    // [num_rows][kColumns]  y
  const u16* weight;    // [kColumns]
  const u16* bias;      // [kColumns]
  u16* output;          // [num_rows][kColumns]  O
  u16* sum;             // [num_rows][kColumns]  s; may be null
  float2* statistics;   // [num_rows]  mean and 1 / standard deviation of s; may be null
  int num_rows;
  float epsilon;
};

struct NormGradientParams {
  const u16* first_grad;     // [num_rows][kColumns]  dO is the sum of both
  const u16* second_grad;    // [num_rows][kColumns]  null: zero
  const u16* sum;            // [num_rows][kColumns]  s
  const float2* statistics;  // [num_rows]
  const u16* weight;         // [kColumns]
  u16* sum_grad;             // [num_rows][kColumns]  dS
  float* partial;            // [gridDim.x][partial_columns]  from first_column on: of the weight, bias and dS
  int num_rows;
  int partial_columns;
  int first_column;
};

struct ReluGradientParams {
  u16* grad;              // [num_rows][kColumns]  dA, read and written
  const u16* activation;  // [num_rows][kColumns]  A, after dropout; null: dA is not changed
  float* partial;         // [gridDim.x][partial_columns]  from first_column on
  int num_rows;
  int partial_columns;
  int first_column;
  float rescale;  // 1 / (1 - rate) of the dropout after ReLU
};

struct SumParams {
  const float* partial;  // [num_partials][num_columns]
  u16* total;            // [num_columns]
  int num_partials;
  int num_columns;
};

template <Element kElement, int kColumns>
__device__ KernelSizes residual_norm_sizes = {0, 0, 0, RowLanes<kColumns>::kBlockRows};

template <Element kElement, int kColumns>
__global__ void __launch_bounds__(kThreads) residual_norm(const __grid_constant__ NormParams p) {
  using Lanes = RowLanes<kColumns>;
  const int row = blockIdx.x * Lanes::kBlockRows + Lanes::row();
  const bool exists = row < p.num_rows;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();

  float values[Lanes::kOfLane][kChunk];
  float total = 0.0f;
#pragma unroll
  for (int i = 0; i < Lanes::kOfLane; ++i) {
    float addend[kChunk];
    unpack<kElement>(values[i], Lanes::load(p.residual, row, i, exists));
    unpack<kElement>(addend, Lanes::load(p.addend, row, i, exists));
#pragma unroll
    for (int j = 0; j < kChunk; ++j) values[i][j] += addend[j];
    const uint4 rounded = pack<kElement>(values[i]);
    if (exists && p.sum) Lanes::store(p.sum, row, i, rounded);
    unpack<kElement>(values[i], rounded);  // the backward pass reads the rounded sum
#pragma unroll
    for (int j = 0; j < kChunk; ++j) total += values[i][j];
  }
  const float mean = Lanes::add_lanes(total) / kColumns;
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < Lanes::kOfLane; ++i) {
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      values[i][j] -= mean;
      if (Lanes::has(i)) squares += values[i][j] * values[i][j];
    }
  }
  const float inverse = rsqrtf(Lanes::add_lanes(squares) / kColumns + p.epsilon);
  if (!exists) return;
#pragma unroll
  for (int i = 0; i < Lanes::kOfLane; ++i) {
    float weight[kChunk], bias[kChunk];
    unpack<kElement>(weight, Lanes::load_vector(p.weight, i));
    unpack<kElement>(bias, Lanes::load_vector(p.bias, i));
#pragma unroll
    for (int j = 0; j < kChunk; ++j) values[i][j] = values[i][j] * inverse * weight[j] + bias[j];
    Lanes::store(p.output, row, i, pack<kElement>(values[i]));
  }
  if (p.statistics && Lanes::chunk(0) == 0) p.statistics[row] = make_float2(mean, inverse);
}

template <Element kElement, int kColumns>
__global__ void __launch_bounds__(kThreads) residual_norm_backward(const __grid_constant__ NormGradientParams p) {
  using Lanes = RowLanes<kColumns>;
  constexpr int kOfLane = Lanes::kOfLane, kRows = kOfLane == 1 ? kNormBatch : 1;
  float sums[3][kOfLane][kChunk] = {};  // for the weight, the bias and dS
  float weight[kOfLane][kChunk];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) unpack<kElement>(weight[i], Lanes::load_vector(p.weight, i));

  // All lanes of a warp run the same number of rounds: they take part in shuffles.
  for (int tile = blockIdx.x; tile * kRows * Lanes::kBlockRows < p.num_rows; tile += gridDim.x) {
    uint4 first[kRows][kOfLane], second[kRows][kOfLane], sum[kRows][kOfLane];
    float2 statistics[kRows];
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int row = (tile * kRows + n) * Lanes::kBlockRows + Lanes::row();
      const bool exists = row < p.num_rows;
      statistics[n] = exists ? __ldg(p.statistics + row) : make_float2(0.0f, 0.0f);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        first[n][i] = Lanes::load(p.first_grad, row, i, exists);
        second[n][i] = Lanes::load(p.second_grad, row, i, exists && p.second_grad);
        sum[n][i] = Lanes::load(p.sum, row, i, exists);
      }
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int row = (tile * kRows + n) * Lanes::kBlockRows + Lanes::row();
      const float mean = statistics[n].x, inverse = statistics[n].y;
      float grad[kOfLane][kChunk], normed[kOfLane][kChunk];  // then dO * weight
      float total = 0.0f, product = 0.0f;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        float other[kChunk];
        unpack<kElement>(grad[i], first[n][i]);
        unpack<kElement>(other, second[n][i]);
        unpack<kElement>(normed[i], sum[n][i]);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
          grad[i][j] += other[j];
          normed[i][j] = (normed[i][j] - mean) * inverse;
          sums[0][i][j] += grad[i][j] * normed[i][j];
          sums[1][i][j] += grad[i][j];
          grad[i][j] *= weight[i][j];
          total += grad[i][j];
          product += grad[i][j] * normed[i][j];
        }
      }
      const float mean_grad = Lanes::add_lanes(total) / kColumns, mean_product = Lanes::add_lanes(product) / kColumns;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
          grad[i][j] = (grad[i][j] - mean_grad - normed[i][j] * mean_product) * inverse;  // 0 past the last row
          sums[2][i][j] += grad[i][j];
        }
        if (row < p.num_rows) Lanes::store(p.sum_grad, row, i, pack<kElement>(grad[i]));
      }
    }
  }
  store_column_sums<kColumns, 3>(sums, p.partial + static_cast<i64>(blockIdx.x) * p.partial_columns + p.first_column);
}

template <Element kElement, int kColumns>
__global__ void __launch_bounds__(kThreads) relu_backward(const __grid_constant__ ReluGradientParams p) {
  using Lanes = RowLanes<kColumns>;
  constexpr int kOfLane = Lanes::kOfLane, kRows = kOfLane == 1 ? kReluBatch : 1;
  const bool has_activation = p.activation;
  float sums[1][kOfLane][kChunk] = {};
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  for (int tile = blockIdx.x; tile * kRows * Lanes::kBlockRows < p.num_rows; tile += gridDim.x) {
    uint4 grads[kRows][kOfLane], activations[kRows][kOfLane];
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int row = (tile * kRows + n) * Lanes::kBlockRows + Lanes::row();
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        grads[n][i] = Lanes::load(p.grad, row, i, row < p.num_rows);
        activations[n][i] = Lanes::load(p.activation, row, i, has_activation && row < p.num_rows);
      }
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int row = (tile * kRows + n) * Lanes::kBlockRows + Lanes::row();
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        float grad[kChunk], activation[kChunk];
        unpack<kElement>(grad, grads[n][i]);
        unpack<kElement>(activation, activations[n][i]);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
          if (has_activation) grad[j] = activation[j] > 0.0f ? grad[j] * p.rescale : 0.0f;
          sums[0][i][j] += grad[j];
        }
        if (has_activation && row < p.num_rows) Lanes::store(p.grad, row, i, pack<kElement>(grad));
      }
    }
  }
  store_column_sums<kColumns, 1>(sums, p.partial + static_cast<i64>(blockIdx.x) * p.partial_columns + p.first_column);
}

template <Element kElement>
__global__ void __launch_bounds__(kSumColumns* kSumSlices) sum_partials(const __grid_constant__ SumParams p) {
  __shared__ float of_slices[kSumSlices][kSumColumns];
  const int slice = threadIdx.x / kSumColumns, column = blockIdx.x * kSumColumns + threadIdx.x % kSumColumns;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  float total = 0.0f;
  if (column < p.num_columns) {
#pragma unroll 8
    for (int n = slice; n < p.num_partials; n += kSumSlices) {
      total += p.partial[static_cast<i64>(n) * p.num_columns + column];
    }
  }
  of_slices[slice][threadIdx.x % kSumColumns] = total;
  __syncthreads();
  if (slice || column >= p.num_columns) return;
#pragma unroll
  for (int n = 1; n < kSumSlices; ++n) total += of_slices[n][threadIdx.x];
  p.total[column] = static_cast<u16>(cvt_rn_x2<kElement>(total, 0.0f));
}
