// What lies between two attentions of a Graph Transformer, in one kernel, for compute capability 9.0:
//
//   h1  = LayerNorm(h + attended Wout^T + bout)
//   h2  = LayerNorm(h1 + relu(h1 Wup^T + bup) Wdown^T + bdown)      -> h_next
//   qkv = h2 Wqkv^T, Wqkv of the next block                         -> qkv, if kNext
//
//   attended, h  [N][kDim]         16-bit
//   weights      [kTiles][tile]    16-bit, in the order of their use, each the image of its place in shared memory
//   vectors      [8 * kDim]        fp32: bout, norm 1's weight and bias, bup, bdown, norm 2's weight and bias
//   h_next       [N][kDim]         16-bit
//   qkv          [N][3 * kDim]     16-bit, null if not kNext
//
// Grid: at most one block an SM, in clusters of kCluster. Block: kConsumers warpgroups and one more, whose first thread
// is the producer. A consumer takes 64 rows through all of it in registers: products accumulate in fp32 on top of bias
// and residual, which are never rounded; norms are taken in fp32; only what is multiplied next is rounded to 16 bits.
//
// kSharedH1, for kDim = 256: there h1 as the first operand of the up projection lies in shared memory, since registers
// (240 a thread, 20 of them for addresses) do not hold everything that is live then:
//   output projection   accumulator 128, attended 64           192; attended from shared memory, 16 at a time: 160
//   FFN                 accumulator 128, slice 32, hidden 16   176; with h1 64 more
//   qkv                 h2 64, two slices 64, next h 64, written slice 16   208
// The next round's `attended` then waits where h1 was. Smaller kDim keep h1 in registers and two slices under way.
//
// kCluster: all weights of kDim = 256 are 1 MB for each 128 rows of a block. Two blocks therefore share what they read
// of L2: each copies half of every tile to both.
//
// The order of dimensions. In registers lane t of a row has columns 8j + 2t and 8j + 2t + 1 of every n-tile j, in memory
// 16 bytes, that is 8 neighbours, are best. So column 32s + 8w + 2t + b of every product stands for dimension
// 32s + 8t + 2w + b: lane t has dimensions 32s + 8t to 32s + 8t + 7. The weights are packed with rows and columns
// exchanged accordingly.
//
// Tiles of the weights, kDim * 64 elements each (8, 16, 32 KiB), K-major with the 128-byte swizzle:
//   wide  [kDim outputs][64 k]   of Wout and Wdown      kDim / 64 of Wout, one for each slice of 64 hidden units
//   tall  [64 outputs][kDim k]   of Wup and Wqkv        kDim / 64 panels; the slices of Wup, then of Wqkv
// in the order Wout...; up 0, up 1, down 0, up 2, down 1, ..., down last; qkv... With kSharedH1: up 0, down 0, up 1...
//
// Shared memory (bytes at kDim = 128 and 256, kNext):
//   kResident tiles        10 x 16384   0            loaded once
//   ring of kStages tiles   3 x 16384   4 x 32768    the other tiles, spread evenly over the order, pass through it
//   h1 of the consumers     0           2 x 32768    kSharedH1: 64 rows each, as a product's first operand
//   vectors                 8 x 128 x 4 8 x 256 x 4
//   full barriers          13 x 8       4 x 8        of each place: one arrival and the bytes of the copies
//   empty barriers          3 x 8       4 x 8        of each place of the ring: one arrival a warp of consumers
//
// The producer waits for an empty place of the ring, in all blocks of the cluster; a consumer for a full place. A
// consumer holds a place until the products that read it are over. Consumers are not synchronised with each other but
// by the ring, so that the norms of one run beside the products of another.
// The warps of a consumer meet after writing h1, and before its place is taken by the next `attended`. Rows of the next
// round are read while the last products of this one run. No block leaves before the others of its cluster are done with
// its barriers.
#include "mma.cuh"
#include "async_copy.cuh"
#include "overlap.cuh"
#include "hopper.cuh"
#include "dense_tiles.cuh"
#include "dense_rows.cuh"

constexpr int kPanelSteps = kPanelK / kTileK;
constexpr u32 kStepUnits = kStep_bytes / kPanelUnit_bytes;
constexpr int kProducerRegisters = 24;

__device__ constexpr int registers_of_consumer(int consumers) { return consumers == 2 ? 240 : 160; }

// x, but the compiler computes nothing from it ahead of time: what is cheap to make again must not take up registers
// through the whole loop.
template <typename T>
__device__ __forceinline__ T fresh(T x) {
  asm volatile("mov.b32 %0, %0;" : "+r"(x));
  return x;
}

template <Element kElement, int kDim, int kConsumers, bool kSharedH1, int kCluster, int kResident,
          int kStages, bool kNext>
__global__ void __cluster_dims__(kCluster) __launch_bounds__((kConsumers + 1) * kGroupSize, 1)
    dense_block(const u16* __restrict__ attended, const u16* __restrict__ h, const char* __restrict__ weights,
                const float* __restrict__ vectors, u16* __restrict__ h_next, u16* __restrict__ qkv, int num_rows,
                float eps) {
  using P = Plan<kDim, kConsumers, kSharedH1, kCluster, kResident, kStages, kNext>;

  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const u32 smem = shared_address(smem_bytes);
  float* const smem_vectors = reinterpret_cast<float*>(smem_bytes + P::kVectors);

  for (int i = threadIdx.x; i < 8 * kDim; i += blockDim.x) smem_vectors[i] = vectors[i];
  if (threadIdx.x == 0) {
    for (int place = 0; place < P::kPlaces; ++place) init_barrier(smem + P::kFull + place * sizeof(u64), 1);
    for (int stage = 0; stage < kStages; ++stage) {
      init_barrier(smem + P::kEmpty + stage * sizeof(u64), kCluster * kConsumers * kGroupWarps);
    }
    fence_barriers();
  }
  __syncthreads();
  if (kCluster > 1) sync_cluster();

  // Tile of 64 rows of a consumer: consumer 0 of every block first, so that few rows spread over all SMs. The blocks of
  // a cluster run as many rounds as its first one, which has the most.
  const int row_tiles = (num_rows + kGroupM - 1) / kGroupM;
  const int tiles_a_round = gridDim.x * kConsumers;
  const int cluster_start = blockIdx.x / kCluster * kCluster;
  const int rounds = (row_tiles - cluster_start + tiles_a_round - 1) / tiles_a_round;
  const int group = __shfl_sync(0xffffffffu, threadIdx.x / kGroupSize, 0);  // known to be the same in a warp

  if (group == kConsumers) {
    give_registers<kProducerRegisters>();
    if (threadIdx.x == kConsumers * kGroupSize) produce<P>(smem, weights, rounds);
    if (kCluster > 1) sync_cluster();
    return;
  }
  take_registers<registers_of_consumer(kConsumers)>();

  const int warp = threadIdx.x / kWarpSize % kGroupWarps;
  const int lane = threadIdx.x % kWarpSize;
  const int g = lane / 4;
  const int t = lane % 4;
  const float* const lane_vectors = smem_vectors + 8 * t;
  const float* const out_bias = lane_vectors;
  const float* const norm1_weight = lane_vectors + kDim;
  const float* const norm1_bias = lane_vectors + 2 * kDim;
  const float* const up_bias = lane_vectors + 3 * kDim;
  const float* const down_bias = lane_vectors + 5 * kDim;
  const float* const norm2_weight = lane_vectors + 6 * kDim;
  const float* const norm2_bias = lane_vectors + 7 * kDim;

  int round = 0;
  const auto acquire = [&](int tile) {
    const bool streamed = P::is_streamed(tile);
    const int place = P::place(tile);
    wait_barrier(smem + P::kFull + place * sizeof(u64), streamed ? P::parity(tile, round) : 0);
    return Tile{fresh(panel_word(smem) + place * (P::kTile_bytes / kPanelUnit_bytes)),
                streamed ? smem + P::kEmpty + (place - kResident) * static_cast<u32>(sizeof(u64)) : 0};
  };
  const auto arrive_empty = [&](u32 barrier) {
    if constexpr (kCluster == 1) {
      if (lane == 0) arrive(barrier);
    } else {
      if (lane < kCluster) arrive_at(barrier, lane);
    }
  };
  const auto release = [&](const Tile& tile) {
    if (tile.empty) arrive_empty(tile.empty);
  };
  const auto wide_product = [&](float (&d)[kDim / 2], const u32* a, const Tile& tile) {
#pragma unroll
    for (int step = 0; step < kPanelSteps; ++step) {
      start_product<kElement, kDim>(d, a + 4 * step, panel_descriptor(tile.word + step * kStepUnits), true);
    }
    commit_products();
  };
  const auto tall_step = [](u32 word, int step) {  // panels of 64 rows, of a tall tile as of h1
    return panel_descriptor(word + step / kPanelSteps * (kSlice * kPanelPitch_bytes / kPanelUnit_bytes) +
                            step % kPanelSteps * kStepUnits);
  };
  const auto tall_product = [&](float (&d)[kSlice / 2], const u32* a, const Tile& tile, bool add) {
#pragma unroll
    for (int step = 0; step < kDim / kTileK; ++step) {
      start_product<kElement, kSlice>(d, a + 4 * step, tall_step(tile.word, step), add || step > 0);
    }
    commit_products();
  };

  const u32 own_h1 = smem + P::kH1 + group * P::kH1_bytes;
  // `attended` of the next round waits where h1 was, each lane's 16-byte pieces among the rows of its warp.
  const auto waiting_piece = [&](int piece) {
    constexpr int kPieces = P::kH1Panel_bytes / 16 / kGroupSize;  // a lane's of a panel
    return fresh(own_h1) + warp * (kTileM * kPanelPitch_bytes) + lane * 16 + piece / kPieces * P::kH1Panel_bytes +
           piece % kPieces * (16 * kWarpSize);
  };
  Words<kDim> attended_words, h_words;
  const auto read_tile = [&](int row_tile) {
    const Rows rows(row_tile, warp, g, num_rows);
    const u16* const lane_attended = attended + rows.first * kDim + 8 * t;
    if constexpr (kSharedH1) {
#pragma unroll
      for (int piece = 0; piece < kDim / 16; ++piece) {
        const int s = piece / 2, r = piece % 2;
        copy_async(waiting_piece(piece), lane_attended + 8 * r * kDim + kBlockK * s, rows.in_range[r] - 1);
      }
      commit_copies();
    } else {
      read_rows(attended_words, lane_attended, kDim, rows);
    }
    read_rows(h_words, h + rows.first * kDim + 8 * t, kDim, rows);
  };

  const int first_tile = group * gridDim.x + blockIdx.x;
  wait_for_previous();  // which has written `attended`; only the weights are on their way before
  read_tile(first_tile);
  for (int tile_of_round = first_tile; tile_of_round < row_tiles; tile_of_round += tiles_a_round, ++round) {
    const int row_tile = fresh(tile_of_round);
    const int next_tile = row_tile + tiles_a_round;
    const Rows rows(row_tile, warp, g, num_rows);
    if (threadIdx.x % kGroupSize == 0 && next_tile < row_tiles) {
      const i64 start = static_cast<i64>(next_tile) * kGroupM;
      const u32 bytes = static_cast<u32>(min(static_cast<i64>(kGroupM), num_rows - start)) * (2 * kDim);
      prefetch_bulk(attended + start * kDim, bytes);
      prefetch_bulk(h + start * kDim, bytes);
    }

    // d = h + bout + attended Wout^T
    Floats<kDim> d;
#pragma unroll
    for (int i = 0; i < kDim / 4; ++i) {  // word 2j + r
      const float2 two = unpack<kElement>(h_words[i]);
      d[2 * i] = two.x;
      d[2 * i + 1] = two.y;
    }
    with_vector(d, out_bias, [](float x, float bias) { return x + bias; });
    pin(d);
    if (kSharedH1) wait_copies<0>();
    Tile out_tiles[2];
#pragma unroll
    for (int i = 0; i < P::kOutTiles; ++i) {
      if constexpr (kSharedH1) {
#pragma unroll
        for (int piece = 4 * i; piece < 4 * i + 4; ++piece) {
          const int first = piece / 2 * 8 + piece % 2;
          const uint4 four = load_shared(waiting_piece(piece));
          attended_words[first] = four.x;
          attended_words[first + 2] = four.y;
          attended_words[first + 4] = four.z;
          attended_words[first + 6] = four.w;
        }
      }
      u32(&words)[kPanelK / 4] = reinterpret_cast<u32(&)[kPanelK / 4]>(attended_words[i * kPanelK / 4]);
      pin(words);
      out_tiles[i % 2] = acquire(i);
      fence_products();
      wide_product(d, words, out_tiles[i % 2]);
      if (i > 0) {
        wait_products<1>();
        release(out_tiles[(i - 1) % 2]);
      }
    }
    wait_products<0>();
    pin(d);
    release(out_tiles[(P::kOutTiles - 1) % 2]);

    layer_norm<kDim>(d, norm1_weight, norm1_bias, eps);
    Words<kDim> normed;
    if constexpr (kSharedH1) {
      __syncwarp();  // of all lanes, `attended` has left
      const int row = lane % 8 + lane / 8 % 2 * 8;
      const u32 lane_row = fresh(own_h1) + (warp * kTileM + row) * kPanelPitch_bytes + (lane / 16 ^ row % 8) * 16;
#pragma unroll
      for (int j = 0; j < kDim / kTileN; j += 2) {  // columns 8j to 8j + 15
        store_matrices((lane_row ^ j % 8 * 16) + j / 8 * P::kH1Panel_bytes, pack<kElement>(d[4 * j], d[4 * j + 1]),
                       pack<kElement>(d[4 * j + 2], d[4 * j + 3]), pack<kElement>(d[4 * j + 4], d[4 * j + 5]),
                       pack<kElement>(d[4 * j + 6], d[4 * j + 7]));
      }
      fence_shared_writes();
      sync_group(group);
    } else {
      pack_all<kElement>(normed, d);
      pin(normed);
    }

    // d = h1 + bdown + relu(h1 Wup^T + bup) Wdown^T, a slice of hidden units after the other.
    constexpr int kBuffers = kSharedH1 ? 1 : 2;
    Floats<kSlice> slices[2];
    Words<kSlice> hidden[kBuffers];
    Tile tall_tiles[2], wide_tiles[2];
    const auto start_up = [&](int i) {
      Floats<kSlice>& slice = slices[i % kBuffers];
      set_vector(slice, up_bias + i * kSlice);
      pin(slice);
      tall_tiles[i % 2] = acquire(P::up(i));
      fence_products();
      if constexpr (kSharedH1) {
        const u32 h1_word = fresh(panel_word(own_h1));
#pragma unroll
        for (int step = 0; step < kDim / kTileK; ++step) {
          start_product<kElement>(slice, tall_step(h1_word, step), tall_step(tall_tiles[i % 2].word, step),
                                  true);
        }
        commit_products();
      } else {
        tall_product(slice, normed, tall_tiles[i % 2], true);
      }
    };
    const auto start_down = [&](int i) {
      const Floats<kSlice>& slice = slices[i % kBuffers];
      Words<kSlice>& words = hidden[i % kBuffers];
#pragma unroll
      for (int j = 0; j < kSlice / 4; ++j) words[j] = pack_relu<kElement>(slice[2 * j], slice[2 * j + 1]);
      pin(words);
      wide_tiles[i % 2] = acquire(P::down(i));
      fence_products();
      wide_product(d, words, wide_tiles[i % 2]);
    };
    start_up(0);
    with_vector(d, down_bias, [](float x, float bias) { return x + bias; });
    pin(d);
#pragma unroll
    for (int i = 0; i < P::kUpTiles; ++i) {
      const bool last = i + 1 == P::kUpTiles;
      if constexpr (kSharedH1) {
        wait_products<0>();
        pin(slices[0]);
        release(tall_tiles[i % 2]);
        start_down(i);
        if (!last) {
          start_up(i + 1);
          wait_products<1>();
          release(wide_tiles[i % 2]);
        }
      } else {  // while slice i is rounded, the tensor cores have down i - 1 and up i + 1
        if (!last) start_up(i + 1);
        if (i == 0 || last) {
          wait_products<1>();
        } else {
          wait_products<2>();
        }
        if (i > 1) release(wide_tiles[i % 2]);
        pin(slices[i % 2]);
        release(tall_tiles[i % 2]);
        start_down(i);
      }
    }
    wait_products<0>();
    pin(d);
    if (!kSharedH1) release(wide_tiles[P::kUpTiles % 2]);
    release(wide_tiles[(P::kUpTiles - 1) % 2]);

    layer_norm<kDim>(d, norm2_weight, norm2_bias, eps);
    pack_all<kElement>(normed, d);

    // q, k, v = h2 Wqkv^T, a slice of columns after the other: while one is rounded and written, the next is running.
    const auto start_qkv = [&](int i) {
      tall_tiles[i % 2] = acquire(P::qkv(i));
      fence_products();
      tall_product(slices[i % 2], normed, tall_tiles[i % 2], false);
    };
    if (kNext) {
      pin(normed);
      start_qkv(0);
    }
    write_rows(h_next + rows.first * kDim + 8 * t, normed, kDim, rows);
    if (kSharedH1) sync_group(group);  // of all warps, h1 is no longer read
    read_tile(next_tile);
#pragma unroll
    for (int i = 0; i < P::kQkvTiles; ++i) {
      if (i + 1 < P::kQkvTiles) {
        start_qkv(i + 1);
        wait_products<1>();
      } else {
        wait_products<0>();
      }
      pin(slices[i % 2]);
      release(tall_tiles[i % 2]);
      Words<kSlice> words;
      pack_all<kElement>(words, slices[i % 2]);
      write_rows(qkv + rows.first * (3 * kDim) + i * kSlice + 8 * t, words, 3 * kDim, rows);
    }
  }

  // A consumer without rows in the last round still empties the ring's places.
  for (; round < rounds; ++round) {
    for (int tile = 0; tile < P::kTiles; ++tile) {
      if (!P::is_streamed(tile)) continue;
      const Tile unused = acquire(tile);
      __syncwarp();
      release(unused);
    }
  }
  if (kCluster > 1) sync_cluster();  // no block leaves while another may still arrive at its barriers
}
