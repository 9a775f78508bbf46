// Packs the weights of low-rank edge features into B fragments, one 16-byte load per lane; zero past dim and past the
// last feature. A thread packs one word. Grid (blocks of the words of a head, H). A null weight has no words.
// g = lane / 4, t = lane % 4.
//
// pack_features, for tile_features.cuh. Layout of each head, with pairs = divide_up(dim, 32) and
// slices = divide_up(dim, 16):
//
//   W    [pairs][2 n-tiles][32 lanes][4 words]   word w: dimensions 32 pair + 8t + 2w (+ 1), feature 8 n + g;
//                                                the order of dimensions of Q and K (row_window.cuh)
//   W'   [slices][32 lanes][4 words]             word w: dimension 16 slice + 8 (w / 2) + g, features 2t + 8 (w % 2)
//                                                (+ 1)
//
// pack_pair_features, for pair_features.cuh and heads of up to 16. Layout of each head, with n = w / 2:
//
//   W    [32 lanes][4 words]   word w: dimensions 4t + 2 (w % 2) (+ 1), feature 4 (g / 2) + 2n + g % 2
//   W'   [32 lanes][4 words]   word w: dimension 8 (g / 2 % 2) + 4 (g / 4) + 2n + g % 2, features 4t + 2 (w % 2) (+ 1)
#include "common.cuh"
#include "ptx/griddepcontrol.cuh"

constexpr int kPackThreads = 256;
constexpr int kLaneWords = 4;

struct Params {
  u32* packed;              // [H][key_words + value_words]
  const u16* key_weight;    // [H][dim][num_features]  W, contiguous
  const u16* value_weight;  // [H][dim][num_features]  W', contiguous
  int dim;
  int num_features;  // 1 to 16
  int key_words;     // 0 without W
  int value_words;   // 0 without W'
};

__device__ __forceinline__ u32 load_weight(const u16* weight, const Params& p, int d, int feature) {
  return d < p.dim && feature < p.num_features ? __ldg(weight + d * p.num_features + feature) : 0;
}

// Stores word `index` of a head: dimensions d and d + step_d, features f and f + 1 - step_d.
__device__ __forceinline__ void store_word(const Params& p, const u16* weight, int index, int d, int f, int step_d) {
  const u16* const of_head = weight + static_cast<i64>(blockIdx.y) * p.dim * p.num_features;
  const u32 low = load_weight(of_head, p, d, f), high = load_weight(of_head, p, d + step_d, f + 1 - step_d);
  p.packed[static_cast<i64>(blockIdx.y) * (p.key_words + p.value_words) + index] = low | high << 16;
}

__global__ void __launch_bounds__(kPackThreads) pack_features(const __grid_constant__ Params p) {
  const int index = blockIdx.x * kPackThreads + threadIdx.x;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (index >= p.key_words + p.value_words) return;
  const bool is_key = index < p.key_words;
  const int local = is_key ? index : index - p.key_words;
  const int word = local % kLaneWords, lane = local / kLaneWords % kWarpSize;
  const int block = local / (kLaneWords * kWarpSize), g = lane / 4, t = lane % 4;
  if (is_key) {
    store_word(p, p.key_weight, index, 32 * (block / 2) + 8 * t + 2 * word, kTileN * (block % 2) + g, 1);
  } else {
    store_word(p, p.value_weight, index, 16 * block + 8 * (word / 2) + g, 2 * t + 8 * (word % 2), 0);
  }
}

__global__ void __launch_bounds__(kPackThreads) pack_pair_features(const __grid_constant__ Params p) {
  const int index = blockIdx.x * kPackThreads + threadIdx.x;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (index >= p.key_words + p.value_words) return;
  const int word = index % kLaneWords, lane = index / kLaneWords % kWarpSize, g = lane / 4, t = lane % 4;
  const int column = 2 * (word / 2) + g % 2, two = 4 * t + 2 * (word % 2);
  if (index < p.key_words) {
    store_word(p, p.key_weight, index, two, 4 * (g / 2) + column, 1);
  } else {
    store_word(p, p.value_weight, index, 8 * (g / 2 % 2) + 4 * (g / 4) + column, two, 0);
  }
}
