// Packs the weights of low-rank edge features for tile_features.cuh: B fragments, one 16-byte load per lane.
//
// Layout of each head, with pairs = divide_up(dim, 32) and slices = divide_up(dim, 16), zero past dim and past the last
// feature; g = lane / 4, t = lane % 4:
//
//   W    [pairs][2 n-tiles][32 lanes][4 words]   word w: dimensions 32 pair + 8t + 2w (+ 1), feature 8 n + g;
//                                                the order of dimensions of Q and K (row_window.cuh)
//   W'   [slices][32 lanes][4 words]             word w: dimension 16 slice + 8 (w / 2) + g, features 2t + 8 (w % 2)
//                                                (+ 1)
//
// A thread packs one word. Grid (blocks of the words of a head, H). A null weight has no words.
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

__global__ void __launch_bounds__(kPackThreads) pack_features(const __grid_constant__ Params p) {
  const int index = blockIdx.x * kPackThreads + threadIdx.x;
  griddepcontrol_wait();
  griddepcontrol_launch_dependents();
  if (index >= p.key_words + p.value_words) return;
  const i64 head_start = static_cast<i64>(blockIdx.y) * p.dim * p.num_features;
  const bool is_key = index < p.key_words;
  const int local = is_key ? index : index - p.key_words;
  const int word = local % kLaneWords, lane = local / kLaneWords % kWarpSize;
  const int block = local / (kLaneWords * kWarpSize), g = lane / 4, t = lane % 4;
  u32 low, high;
  if (is_key) {
    const int d = 32 * (block / 2) + 8 * t + 2 * word, feature = kTileN * (block % 2) + g;
    low = load_weight(p.key_weight + head_start, p, d, feature);
    high = load_weight(p.key_weight + head_start, p, d + 1, feature);
  } else {
    const int d = 16 * block + 8 * (word / 2) + g, feature = 2 * t + 8 * (word % 2);
    low = load_weight(p.value_weight + head_start, p, d, feature);
    high = load_weight(p.value_weight + head_start, p, d, feature + 1);
  }
  p.packed[static_cast<i64>(blockIdx.y) * (p.key_words + p.value_words) + index] = low | high << 16;
}
