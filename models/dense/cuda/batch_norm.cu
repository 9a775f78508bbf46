// Residual with batch norm in training, and its gradient. All are bound by memory.
//
//   batch_norm_statistics  s = x + y; mean and variance of the columns of s over the real rows; running statistics
//   batch_norm             O = (s - mean) / sqrt(variance + epsilon) * weight + bias
//   batch_norm_sums        column sums of dO * norm(s) and of dO: gradients of weight and bias
//   batch_norm_gradient    dS = (dO - w (sum(dO) + norm(s) sum(dO norm(s)))) * weight / sqrt(variance + epsilon)
//
// A batch may end with padding: w = 1 / r for the r real rows and 0 for padding, which is normalised as well and has no
// part in the statistics.
//
// The blocks of a sum stride over the rows (row_lanes.cuh), each thread with the sums of its columns in registers. They
// write partials, which the last-arriving block merges in a fixed order: the same bits on every run. Means and squared
// deviations are merged as in Chan, Golub and LeVeque (1983), from the mean of the first part.
#include "ptx/atom.cuh"
#include "ptx/griddepcontrol.cuh"
#include "row_lanes.cuh"

struct StatisticsParams {
  const u16* residual;       // [num_rows][kColumns]  x
  const u16* addend;         // [num_rows][kColumns]  y; null: zero
  const float* row_weights;  // [num_rows]  w; null: all rows are real
  u16* sum;                  // [num_rows][kColumns]  s; null: not stored
  float* partial;            // [gridDim.x][2 * kColumns + 4]  means, squared deviations, number of real rows, padding
  float* statistics;         // [2][kColumns]  mean and variance
  float* running_mean;       // [kColumns]  read and written
  float* running_variance;   // [kColumns]  read and written
  i64* num_batches;          // [1]  read and written
  int* semaphore;            // 0 before and after
  int num_rows;
  float momentum;
};

struct NormParams {
  const u16* residual;    // [num_rows][kColumns]  x
  const u16* addend;      // [num_rows][kColumns]  y; null: zero
  const float* mean;      // [kColumns]
  const float* variance;  // [kColumns]
  const float* weight;    // [kColumns]
  const float* bias;      // [kColumns]
  u16* output;            // [num_rows][kColumns]  O
  int num_rows;
  float epsilon;
};

struct GradientParams {
  const u16* first_grad;     // [num_rows][kColumns]  dO is the sum of both
  const u16* second_grad;    // [num_rows][kColumns]  null: zero
  const u16* sum;            // [num_rows][kColumns]  s
  const float* statistics;   // [2][kColumns]  mean and variance
  const float* row_weights;  // [num_rows]  w; null: all rows are real; read by batch_norm_gradient
  const float* weight;       // [kColumns]  read by batch_norm_gradient
  float* partial;            // [gridDim.x][2][kColumns]  of batch_norm_sums
  float* total;              // [2][kColumns]  written by batch_norm_sums
  u16* sum_grad;             // [num_rows][kColumns]  dS, written by batch_norm_gradient
  int* semaphore;            // 0 before and after
  int num_rows;
  float epsilon;
};

constexpr int kBatch = 2;  // rows per lane with loads in flight, if a row has one chunk per lane
constexpr int kInFlight = 16;  // partials that a thread of the last-arriving block loads at a time

template <int kColumns>
struct Columns : RowLanes<kColumns> {
  using Lanes = RowLanes<kColumns>;
  static constexpr int kRows = Lanes::kOfLane == 1 ? kBatch : 1;
  static constexpr int kAcross = kColumns < kThreads ? kColumns : kThreads;  // columns that the threads merge at a time
  static constexpr int kSlices = kThreads / kAcross;                          // threads per column

  __device__ static __forceinline__ void load_floats(float (&values)[kChunk], const float* vector, int i) {
#pragma unroll
    for (int j = 0; j < kChunk; j += 4) {
      const uint4 words =
          Lanes::has(i) ? ld_global_nc_v4_b32(vector + kChunk * Lanes::chunk(i) + j) : make_uint4(0, 0, 0, 0);
      values[j] = __uint_as_float(words.x), values[j + 1] = __uint_as_float(words.y);
      values[j + 2] = __uint_as_float(words.z), values[j + 3] = __uint_as_float(words.w);
    }
  }

  // Calls f(column, whether this thread writes it) for all columns in rounds that all threads of the block take part in.
  template <class Function>
  __device__ static __forceinline__ void for_each_column(const Function& f) {
    for (int first = 0; first < kColumns; first += kAcross) {
      const int column = first + threadIdx.x % kAcross;
      f(min(column, kColumns - 1), threadIdx.x < kAcross && column < kColumns);
    }
  }

  // The n-th row of the thread in a tile of kRows * kBlockRows.
  __device__ static __forceinline__ int row_of(int tile, int n) {
    return (tile * kRows + n) * Lanes::kBlockRows + Lanes::row();
  }
};

// Sums of the `kSums` terms that terms(n, each) writes, over n = 0 .. count - 1, in every thread of the column: its
// slices share out the n, and kInFlight loads of a thread wait together. All threads of the block take part.
template <int kColumns, int kSums, class Terms>
__device__ __forceinline__ void sum_over_slices(float (&totals)[kSums], int count, float (&of_slices)[kSums][kThreads],
                                                const Terms& terms) {
  using C = Columns<kColumns>;
  const int slice = threadIdx.x / C::kAcross;
  float own[kSums] = {};
  if (slice < C::kSlices) {
    for (int first = slice; first < count; first += kInFlight * C::kSlices) {
#pragma unroll
      for (int n = 0; n < kInFlight; ++n) {
        const int part = first + n * C::kSlices;
        float each[kSums];
        terms(min(part, count - 1), each);
#pragma unroll
        for (int i = 0; i < kSums; ++i) own[i] += part < count ? each[i] : 0.0f;
      }
    }
  }
  __syncthreads();  // the last sums were read
#pragma unroll
  for (int i = 0; i < kSums; ++i) of_slices[i][threadIdx.x] = own[i];
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kSums; ++i) {
    totals[i] = 0.0f;
#pragma unroll
    for (int n = 0; n < C::kSlices; ++n) totals[i] += of_slices[i][n * C::kAcross + threadIdx.x % C::kAcross];
  }
}

// Count, mean and squared deviations of a part of the rows in one column.
struct Moments {
  float count, mean, squares;
};

// Mean and squared deviations of parts 0 .. num_parts - 1, `count` rows in all. The first part with rows must be part 0:
// deviations are taken from its mean, which makes the cancellation at most that of `num_parts` equal parts.
template <int kColumns, class Part>
__device__ __forceinline__ Moments merge_parts(int num_parts, float count, float (&of_slices)[2][kThreads],
                                               const Part& part) {
  const float shift = part(0).mean;
  float totals[2];
  sum_over_slices<kColumns>(totals, num_parts, of_slices, [&](int n, float(&each)[2]) {
    const Moments of_part = part(n);
    const float distance = of_part.mean - shift;
    each[0] = of_part.count * distance;
    each[1] = of_part.squares + each[0] * distance;
  });
  const float offset = totals[0] / fmaxf(count, 1.0f);
  return {count, shift + offset, fmaxf(totals[1] - totals[0] * offset, 0.0f)};
}

// Whether this block is the last-arriving one, which then sees the partials of all.
__device__ __forceinline__ bool arrive_is_last(int* semaphore) {
  __shared__ int before[1];
  __syncthreads();  // orders the other threads' writes before the release
  if (threadIdx.x == 0) before[0] = atom_inc_acq_rel_gpu(semaphore, gridDim.x - 1);
  __syncthreads();  // orders the reads of the partials after the acquire
  return before[0] == gridDim.x - 1;
}

template <Element kElement, int kColumns>
__global__ void __launch_bounds__(kThreads) batch_norm_statistics(const __grid_constant__ StatisticsParams p) {
  using C = Columns<kColumns>;
  constexpr int kOfLane = C::kOfLane, kRows = C::kRows;
  float count = 0.0f, mean[kOfLane][kChunk] = {}, squares[kOfLane][kChunk] = {};
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  for (int tile = blockIdx.x; C::row_of(tile, 0) - C::row() < p.num_rows; tile += gridDim.x) {
    uint4 first[kRows][kOfLane], second[kRows][kOfLane];
    bool is_real[kRows];
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int row = C::row_of(tile, n);
      const bool exists = row < p.num_rows;
      is_real[n] = exists && (!p.row_weights || __ldg(p.row_weights + row) > 0.0f);
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        first[n][i] = C::load(p.residual, row, i, exists);
        second[n][i] = C::load(p.addend, row, i, exists && p.addend);
      }
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int row = C::row_of(tile, n);
      count += is_real[n];
      const float share = is_real[n] ? 1.0f / count : 0.0f;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        float values[kChunk], addend[kChunk];
        unpack<kElement>(values, first[n][i]);
        unpack<kElement>(addend, second[n][i]);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) values[j] += addend[j];
        const uint4 rounded = pack<kElement>(values);
        if (row < p.num_rows && p.sum) C::store(p.sum, row, i, rounded);
        unpack<kElement>(values, rounded);  // the statistics are those of the rounded sum
        if (!is_real[n]) continue;
#pragma unroll
        for (int j = 0; j < kChunk; ++j) {
          const float distance = values[j] - mean[i][j];
          mean[i][j] += distance * share;
          squares[i][j] += distance * (values[j] - mean[i][j]);
        }
      }
    }
  }

  // Merge the rows of the block, then the blocks.
  __shared__ float row_means[C::kBlockRows * kColumns];
  __shared__ float row_squares[C::kBlockRows * kColumns];
  __shared__ float row_counts[C::kBlockRows];
  __shared__ float of_slices[2][kThreads];
  if (C::chunk(0) == 0) row_counts[C::row()] = count;
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) {
    if (!C::has(i)) continue;
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      const int place = C::row() * kColumns + kChunk * C::chunk(i) + j;
      row_means[place] = mean[i][j], row_squares[place] = squares[i][j];
    }
  }
  __syncthreads();
  constexpr int kPartial = 2 * kColumns + 4;
  float* const of_block = p.partial + static_cast<i64>(blockIdx.x) * kPartial;
  float block_count = 0.0f;
#pragma unroll 8
  for (int row = 0; row < C::kBlockRows; ++row) block_count += row_counts[row];
  if (threadIdx.x == 0) of_block[2 * kColumns] = block_count;
  C::for_each_column([&](int column, bool writes) {
    const Moments of_rows = merge_parts<kColumns>(C::kBlockRows, block_count, of_slices, [&](int row) -> Moments {
      return {row_counts[row], row_means[row * kColumns + column], row_squares[row * kColumns + column]};
    });
    if (writes) of_block[column] = of_rows.mean, of_block[kColumns + column] = of_rows.squares;
  });
  if (!arrive_is_last(p.semaphore)) return;

  if (threadIdx.x == 0) ++*p.num_batches;
  const float num_real = p.row_weights ? rintf(1.0f / p.row_weights[0]) : p.num_rows;
  C::for_each_column([&](int column, bool writes) {
    const Moments found = merge_parts<kColumns>(gridDim.x, num_real, of_slices, [&](int n) -> Moments {
      const float* const partial = p.partial + static_cast<i64>(n) * kPartial;
      return {partial[2 * kColumns], partial[column], partial[kColumns + column]};
    });
    if (!writes) return;
    p.statistics[column] = found.mean;
    p.statistics[kColumns + column] = found.squares / num_real;
    const float unbiased = found.squares / fmaxf(num_real - 1.0f, 1.0f);
    p.running_mean[column] += p.momentum * (found.mean - p.running_mean[column]);
    p.running_variance[column] += p.momentum * (unbiased - p.running_variance[column]);
  });
}

template <Element kElement, int kColumns>
__device__ KernelSizes batch_norm_sizes = {0, 0, 0, RowLanes<kColumns>::kBlockRows};

template <Element kElement, int kColumns>
__global__ void __launch_bounds__(kThreads) batch_norm(const __grid_constant__ NormParams p) {
  using C = Columns<kColumns>;
  const int row = blockIdx.x * C::kBlockRows + C::row();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (row >= p.num_rows) return;
#pragma unroll
  for (int i = 0; i < C::kOfLane; ++i) {
    float values[kChunk], addend[kChunk], mean[kChunk], variance[kChunk], weight[kChunk], bias[kChunk];
    unpack<kElement>(values, C::load(p.residual, row, i, true));
    unpack<kElement>(addend, C::load(p.addend, row, i, p.addend));
    C::load_floats(mean, p.mean, i);
    C::load_floats(variance, p.variance, i);
    C::load_floats(weight, p.weight, i);
    C::load_floats(bias, p.bias, i);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      values[j] = (values[j] + addend[j] - mean[j]) * rsqrtf(variance[j] + p.epsilon) * weight[j] + bias[j];
    }
    C::store(p.output, row, i, pack<kElement>(values));
  }
}

// dO and norm(s) of a chunk.
template <Element kElement>
__device__ __forceinline__ void unpack_gradient(float (&grad)[kChunk], float (&normed)[kChunk], uint4 first,
                                                uint4 second, uint4 sum, const float (&mean)[kChunk],
                                                const float (&inverse)[kChunk]) {
  float other[kChunk];
  unpack<kElement>(grad, first);
  unpack<kElement>(other, second);
  unpack<kElement>(normed, sum);
#pragma unroll
  for (int j = 0; j < kChunk; ++j) {
    grad[j] += other[j];
    normed[j] = (normed[j] - mean[j]) * inverse[j];
  }
}

template <int kColumns>
__device__ __forceinline__ void load_statistics(float (&mean)[kChunk], float (&inverse)[kChunk],
                                                const GradientParams& p, int i) {
  Columns<kColumns>::load_floats(mean, p.statistics, i);
  Columns<kColumns>::load_floats(inverse, p.statistics + kColumns, i);
#pragma unroll
  for (int j = 0; j < kChunk; ++j) inverse[j] = rsqrtf(inverse[j] + p.epsilon);
}

template <Element kElement, int kColumns>
__global__ void __launch_bounds__(kThreads) batch_norm_sums(const __grid_constant__ GradientParams p) {
  using C = Columns<kColumns>;
  constexpr int kOfLane = C::kOfLane, kRows = C::kRows;
  float sums[2][kOfLane][kChunk] = {}, mean[kOfLane][kChunk], inverse[kOfLane][kChunk];
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
#pragma unroll
  for (int i = 0; i < kOfLane; ++i) load_statistics<kColumns>(mean[i], inverse[i], p, i);
  for (int tile = blockIdx.x; C::row_of(tile, 0) - C::row() < p.num_rows; tile += gridDim.x) {
    uint4 first[kRows][kOfLane], second[kRows][kOfLane], sum[kRows][kOfLane];
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
      const int row = C::row_of(tile, n);
      const bool exists = row < p.num_rows;
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        first[n][i] = C::load(p.first_grad, row, i, exists);
        second[n][i] = C::load(p.second_grad, row, i, exists && p.second_grad);
        sum[n][i] = C::load(p.sum, row, i, exists);
      }
    }
#pragma unroll
    for (int n = 0; n < kRows; ++n) {
#pragma unroll
      for (int i = 0; i < kOfLane; ++i) {
        float grad[kChunk], normed[kChunk];  // past the last row dO is 0
        unpack_gradient<kElement>(grad, normed, first[n][i], second[n][i], sum[n][i], mean[i], inverse[i]);
#pragma unroll
        for (int j = 0; j < kChunk; ++j) sums[0][i][j] += grad[j] * normed[j], sums[1][i][j] += grad[j];
      }
    }
  }
  store_column_sums<kColumns, 2>(sums, p.partial + static_cast<i64>(blockIdx.x) * 2 * kColumns);
  if (!arrive_is_last(p.semaphore)) return;
  __shared__ float of_slices[2][kThreads];
  C::for_each_column([&](int column, bool writes) {
    float totals[2];
    sum_over_slices<kColumns>(totals, gridDim.x, of_slices, [&](int n, float(&each)[2]) {
      const float* const partial = p.partial + static_cast<i64>(n) * 2 * kColumns + column;
      each[0] = partial[0], each[1] = partial[kColumns];
    });
    if (writes) p.total[column] = totals[0], p.total[kColumns + column] = totals[1];
  });
}

template <Element kElement, int kColumns>
__device__ KernelSizes batch_norm_gradient_sizes = {0, 0, 0, RowLanes<kColumns>::kBlockRows};

template <Element kElement, int kColumns>
__global__ void __launch_bounds__(kThreads) batch_norm_gradient(const __grid_constant__ GradientParams p) {
  using C = Columns<kColumns>;
  const int row = blockIdx.x * C::kBlockRows + C::row();
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (row >= p.num_rows) return;
  const float share = p.row_weights ? __ldg(p.row_weights + row) : 1.0f / p.num_rows;
#pragma unroll
  for (int i = 0; i < C::kOfLane; ++i) {
    float mean[kChunk], inverse[kChunk], weight[kChunk], of_weight[kChunk], of_bias[kChunk];
    float grad[kChunk], normed[kChunk];
    load_statistics<kColumns>(mean, inverse, p, i);
    C::load_floats(weight, p.weight, i);
    C::load_floats(of_weight, p.total, i);
    C::load_floats(of_bias, p.total + kColumns, i);
    unpack_gradient<kElement>(grad, normed, C::load(p.first_grad, row, i, true),
                              C::load(p.second_grad, row, i, p.second_grad), C::load(p.sum, row, i, true), mean, inverse);
#pragma unroll
    for (int j = 0; j < kChunk; ++j) {
      grad[j] = (grad[j] - share * (of_bias[j] + normed[j] * of_weight[j])) * inverse[j] * weight[j];
    }
    C::store(p.sum_grad, row, i, pack<kElement>(grad));
  }
}
