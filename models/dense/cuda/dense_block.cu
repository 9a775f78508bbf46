// The non-attention layers between two attentions of a Graph Transformer, in one kernel; compute capability 9.0 only.
//
//   h1  = LayerNorm(h + attn_out Wout^T + bout)
//   h2  = LayerNorm(h1 + relu(h1 Wup^T + bup) Wdown^T + bdown)      -> h_next
//   qkv = h2 Wqkv^T, Wqkv of the next block                         -> qkv, if kHasNext
//
// Pointers and shapes: struct Params. kKeep, for training: stores the inputs of the gradient (dense_block_backward.cu),
// and supports dropout of hidden units.
//
// Accumulators, biases, residuals and norms are fp32; only operands of the next product are rounded to 16 bits, and
// with kKeep the inputs of the norms.
//
// Grid: at most one block per SM, in clusters of kCluster. Block: kConsumers + 1 warpgroups.
//   consumer   computes all steps for 64 rows per round; its rows stay in registers
//   producer   its first thread copies weight tiles by cp.async.bulk (dense_tiles.cuh); its other threads do nothing
//
// A weight tile has kDim * kSlice elements, in panels of 64, 32 or 16 k (dense_tiles.cuh). kSlice divides kDim,
// so that no tile is padded:
//   wide  [kDim outputs][kSlice k]   Wout: kDim / kSlice tiles; Wdown: one per slice of kSlice hidden units
//   tall  [kSlice outputs][kDim k]   Wup: one per slice of hidden units; Wqkv: one per slice of kSlice columns
// Order of use: out 0, ...; up 0, up 1, down 0, up 2, down 1, ..., down last; qkv 0, ...
//               with kSharedH1 up 0, down 0, up 1, down 1, ...
//
// Permutation of dimensions: in registers, lane t of a row has columns 8j + 2t and 8j + 2t + 1 of each n-tile j; in
// memory, 16 bytes are 8 neighbours. So column 32s + 8w + 2t + b of every product stands for dimension
// 32s + 8t + 2w + b: lane t has dimensions 32s + 8t to 32s + 8t + 7. The packed weights have their rows and columns in
// this order; hidden units and columns of qkv are permuted within their slice. 16 remaining columns are permuted among
// themselves, 4 neighbours in lane t (dense_rows.cuh):
//
//   dimension              0         32        64        96        128       160
//   kDim or kSlice = 80    | 8t ...  | 8t ...  | 4t |
//   kDim = 160             | 8t ...  | 8t ...  | 8t ...  | 8t ...  | 8t ...  |
//   its tiles of Wout      |           0            |           1            |   group 2 begins in 0, ends in 1
//
// Instances (SHAPES in models/dense/weights.py); shared memory in bytes, with kHasNext
//   kDim                     64           80           96           128          160          192          256
//   kSlice                   64           80           96           64           80           64           64
//   k of a panel             64           16           32           64           16           64           64
//   kConsumers               3            2            2            2            2            2            2
//   registers of a consumer  160          240          240          240          240          240          240
//   h1, A of up              registers                                           shared memory (kSharedH1)
//   kCluster                 1            1            1            1            2            2            2
//   resident tiles           8 x 8,192    8 x 12,800   8 x 18,432   6 x 16,384   1 x 25,600   0            0
//   stages                   0            0            0            5 x 16,384   5 x 25,600   6 x 24,576   4 x 32,768
//   h1, per consumer         0            0            0            0            2 x 20,480   2 x 24,576   2 x 32,768
//   vectors                  2,048        2,560        3,072        4,096        5,120        6,144        8,192
//   full barriers            8 x 8        8 x 8        8 x 8        11 x 8       6 x 8        6 x 8        4 x 8
//   empty barriers           0            0            0            5 x 8        5 x 8        6 x 8        4 x 8
//   total                    67,648       105,024      150,592      184,448      199,768      202,848      204,864
// Resident tiles are loaded once; stages are the ring for the other, streamed tiles. A full barrier belongs to a buffer
// (resident tile or stage), an empty barrier to a stage. With kCluster = 2 each block copies half of a tile to both.
//
// kSharedH1: a thread's 240 registers, about 20 of them for addresses, do not hold h1 beside the rest. At kDim = 256:
//   output projection   acc 128, attn_out 64           192; attn_out from shared memory, 16 at a time: 160
//   FFN                 acc 128, slice 32, hidden 16   176; h1 would be 64 more
//   QKV                 h2 64, two slices 64, h of the next rows 64, stored slice 16   208
// At kDim = 160, h1 in registers would make it acc 80, h1 40, two slices 80, hidden 20 to 40: ptxas spills.
// attn_out of the next rows is copied to where h1 was.
//
// Barriers
//   full[buffer]      1 arrival and the bytes of a tile, from the producer; consumers wait before they use the tile
//   empty[stage]      1 arrival per consumer warp of the cluster; producers wait before they refill the stage
//   bar 1 + consumer  128 threads, kSharedH1: h1 is written; h1 is no longer read
//   cluster           barriers are initialised; nobody arrives any more
// Consumers synchronise only through the ring, so LayerNorm of one overlaps wgmma of another; a ring of three stages
// would couple them too closely (kernels/NOTES.md).
//
// Timeline of a consumer's round. wgmma groups complete in order of issue; wait<n> leaves n in flight.
//
//   step         issue       wait   complete, release     meanwhile on the CUDA cores
//   out i        out i       <1>    out i-1               kSharedH1: attn_out for out i from shared memory
//                            <0>    out last              LayerNorm 1
//   FFN, h1 in registers; U slices of hidden units
//                up 0                                     acc += bdown
//   slice 0      up 1        <1>    up 0                  relu of slice 0 while up 1 runs
//                down 0
//   slice i      up i+1      <2>    down i-2, up i        relu of slice i while down i-1 and up i+1 run
//                down i
//   slice U-1                <1>    down U-3, up U-1      relu of slice U-1 while down U-2 runs
//                down U-1    <0>    down U-2, down U-1    LayerNorm 2
//   FFN, kSharedH1
//                up 0                                     acc += bdown
//   slice i                  <0>    up i                  relu of slice i; the other consumer has the tensor cores
//                down i
//                up i+1      <1>    down i
//   slice U-1                <0>    up U-1                relu of slice U-1
//                down U-1    <0>    down U-1              LayerNorm 2
//   QKV          qkv 0                                    store h_next, load attn_out and h of the next rows
//   slice i      qkv i+1     <1>    qkv i                 store slice i while qkv i+1 runs
//   last slice               <0>    qkv last              store it
//
//   h1 in registers   tensor cores  | up 0 | up 1   | down 0 | up 2   | down 1 | up 3   | down 2 | ...
//                     CUDA cores           | relu 0 |        | relu 1          | relu 2 |
//   kSharedH1         tensor cores  | up 0 |        | down 0 | up 1   |        | down 1 | up 2   |        | ...
//                     CUDA cores           | relu 0 |                 | relu 1 |                 | relu 2 |
//
// Order that must not change, marked [n] in the code here and in dense_consumer.cuh, and what breaks otherwise
//   [1]  mbarrier_init, both fences, then the barriers of block and cluster: an arrival or a copy could come before its
//        mbarrier exists.
//   [2]  griddepcontrol_wait before any load of attn_out or h: the previous kernel may still be writing them.
//   [3]  opaque: the compiler would compute descriptors and row addresses ahead, and kDim = 256 would spill registers.
//   [4]  acquire in the order of use (hidden_tall, hidden_wide and last of Traits; the packing in Python): producer and
//        consumer would wait for each other.
//   [5]  warpgroup_fence_operand, then wgmma_fence, between the last write of an operand register and the wgmma: the
//        tensor cores could read an old value.
//   [6]  warpgroup_fence_operand after wgmma_wait_group: if a read of acc moves ahead of the wait, ptxas serializes all
//        wgmma.
//   [7]  release after the wait that completes the tile's group: the producer would overwrite a tile that wgmma reads.
//   [8]  __syncwarp before stmatrix: orders the other lanes' loads of attn_out before stores to the same bytes.
//   [9]  fence_proxy_async_shared, then bar_sync, between stmatrix and wgmma: wgmma could read older bytes than h1.
//   [10] bar_sync before attn_out of the next rows overwrites h1: wgmma of another warp may still read it.
//   [11] Loads of the next rows before stores of qkv: loads wait behind stores (kernels/NOTES.md).
//   [12] __syncwarp between acquire and release if no wgmma converges the warp: lane 0 could advance the barrier by two
//        phases while another lane still polls for this one, and that lane would wait forever.
//   [13] Cluster barrier before exit: another block may still arrive at this block's barriers.
//   [14] setmaxnreg_dec in all warps of the producer: setmaxnreg_inc of the consumers waits for these registers.
//   [15] With a cluster, a block without rows waits for resident tiles too: it could exit while they arrive.
#include "common.cuh"
#include "dense_consumer.cuh"
#include "dense_rows.cuh"
#include "dense_tiles.cuh"
#include "dropout.cuh"
#include "ptx/bar_sync.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cvt.cuh"
#include "ptx/fence_proxy_async.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/opaque.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"

struct Params {
  const u16* attn_out;   // [num_rows][kDim]  16-bit
  const u16* h;          // [num_rows][kDim]  16-bit
  const char* weights;   // [kTiles][kDim * kSlice]  16-bit: tiles in the order of use, swizzled as in shared memory
  const float* vectors;  // [8 * kDim]  bout, norm 1 weight, bias, bup [2 * kDim], bdown, norm 2 weight, bias
  u16* h_next;           // [num_rows][kDim]  16-bit
  u16* qkv;              // [num_rows][3 * kDim]  16-bit; null without kHasNext
  // With kKeep, else null; 16-bit except the statistics:
  u16* h1;             // [num_rows][kDim]
  u16* hidden;         // [num_rows][2 * kDim]  relu(...), after dropout
  u16* sum1;           // [num_rows][kDim]  h + attn_out Wout^T + bout
  u16* sum2;           // [num_rows][kDim]  h1 + hidden Wdown^T + bdown
  float2* statistics;  // [2][num_rows]  mean and 1 / standard deviation of the rows of sum1 and of sum2
  DropoutParams dropout;  // for hidden units; threshold 0: no dropout
  int num_rows;
  float eps;  // for both norms
};

template <Element kElement, typename Traits, bool kKeep>
struct ForwardConsumer : DenseConsumer<kElement, Traits> {
  using Base = DenseConsumer<kElement, Traits>;
  using typename Base::Panel;
  using Base::acquire, Base::add_first_product, Base::finish_last, Base::issue_last, Base::issue_tall;
  using Base::issue_wide, Base::lane, Base::lane_vectors, Base::of_lane, Base::prefetch_rows, Base::release;
  using Base::rows_of, Base::slices, Base::tall_tiles, Base::warp, Base::warpgroup, Base::wide_tiles;
  static constexpr int kDim = Traits::kDim;
  static constexpr int kSlice = Traits::kSlice;
  static constexpr bool kSharedH1 = Traits::kSharedH1;
  static constexpr int kSlicesInFlight = kSharedH1 ? 1 : 2;  // in the FFN
  using Vectors = VectorOffsets<kDim>;

  const Params& p;
  const u32 smem_h1;
  const u32 lane_attn_out;  // offset of the lane's first 16 bytes of attn_out in smem_h1
  Loaded<kDim> loaded_attn_out, loaded_h;  // the next rows

  __device__ __forceinline__ ForwardConsumer(const Params& p, unsigned char* smem_bytes, int warpgroup)
      : Base(p.num_rows, smem_bytes, warpgroup),
        p(p),
        smem_h1(Base::smem + Traits::kH1 + warpgroup * Traits::kH1_bytes),
        lane_attn_out(warp * (kTileM * Panel::kRow_bytes) + lane * 16) {}

  // slice += h1 W^T, h1 in shared memory, W a tall tile.
  __device__ __forceinline__ void issue_tall_smem_h1(Acc<kSlice>& slice, const WeightTile& tile) {
    const u32 h1_desc = opaque(desc_low(smem_h1));  // [3]
#pragma unroll
    for (int step = 0; step < kDim / kTileK; ++step) {
      wgmma_m64nNk16_ss<kElement, kSlice>(slice, Panel::template step_desc<kWarpgroupM>(h1_desc, step),
                                          Panel::template step_desc<kSlice>(tile.desc, step), true);
    }
    wgmma_commit_group();
  }

  // kSharedH1: address of 16 bytes of the lane's attn_out, which lie among the h1 rows of its warp.
  __device__ __forceinline__ u32 smem_attn_out(int chunk) const {
    constexpr int kChunks = Traits::kH1Panel_bytes / 16 / kWarpgroupSize;  // per lane in a panel
    return opaque(smem_h1) + lane_attn_out + chunk / kChunks * Traits::kH1Panel_bytes +
           chunk % kChunks * (16 * kWarpSize);
  }

  // First chunk of wide tile i of Wout, the first in a group of dimensions that no tile before it needs.
  static __device__ constexpr int first_chunk(int i) { return 2 * divide_up(i * kSlice, kPermuteGroup); }

  // attn_out and h of a row tile to registers; with kSharedH1 attn_out to shared memory.
  __device__ __forceinline__ void load(int row_tile) {
    const Rows rows = rows_of(row_tile);
    if constexpr (kSharedH1) {
      const u16* const attn_out = of_lane(p.attn_out, kDim, rows);
#pragma unroll
      for (int chunk = 0; chunk < kDim / 16; ++chunk) {
        const int s = chunk / 2, r = chunk % 2;
        cp_async<16>(smem_attn_out(chunk), attn_out + 8 * r * kDim + kPermuteGroup * s, rows.in_range[r] - 1);
      }
      cp_async_commit_group();
    } else {
      load_rows(loaded_attn_out, of_lane(p.attn_out, kDim, rows), kDim, rows);
    }
    load_rows(loaded_h, of_lane(p.h, kDim, rows), kDim, rows);
  }

  // acc = h + bout + attn_out Wout^T
  __device__ __forceinline__ void out_projection(Acc<kDim>& acc) {
    Frag<kDim> frag_attn_out;
    unpack_loaded<kElement>(acc, loaded_h);
    if constexpr (!kSharedH1) to_frag(frag_attn_out, loaded_attn_out);
    add_vector(acc, lane_vectors + Vectors::kOutBias);
    if (kSharedH1) cp_async_wait_group<0>();  // a lane reads only its own copies
    add_first_product(acc, [&](int i) -> Frag<kSlice>& {
      if constexpr (kSharedH1) {
#pragma unroll
        for (int chunk = first_chunk(i); chunk < first_chunk(i + 1); ++chunk) {
          const int first = chunk / 2 * 8 + chunk % 2;
          const uint4 four = ld_shared_v4_b32(smem_attn_out(chunk));
          frag_attn_out[first] = four.x;
          frag_attn_out[first + 2] = four.y;
          frag_attn_out[first + 4] = four.z;
          frag_attn_out[first + 6] = four.w;
        }
      }
      return reinterpret_cast<Frag<kSlice>&>(frag_attn_out[i * kSlice / 4]);
    });
  }

  // LayerNorm. With kKeep acc is first rounded, as the backward pass reads it, and stored with its statistics.
  __device__ __forceinline__ void norm(Acc<kDim>& acc, int weight, int bias, const Rows& rows, u16* sum,
                                       float2* statistics) const {
    if constexpr (kKeep) {
      Frag<kDim> rounded;
      pack<kElement>(rounded, acc);
      store_rows(of_lane(sum, kDim, rows), rounded, kDim, rows);
      unpack<kElement>(acc, rounded);
    }
    const RowStatistics of_rows = layer_norm<kDim>(acc, lane_vectors + weight, lane_vectors + bias, p.eps);
    if (kKeep && lane % 4 == 0) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (rows.in_range[r]) statistics[rows.first + 8 * r] = make_float2(of_rows.mean[r], of_rows.scale[r]);
      }
    }
  }

  // h1, rounded, as A of the up projection: in frag_h1, with kSharedH1 in shared memory.
  __device__ __forceinline__ void store_h1(Frag<kDim>& frag_h1, const Acc<kDim>& acc) {
    if constexpr (kSharedH1) {
      __syncwarp();  // [8]
      const int row = lane % 8 + lane / 8 % 2 * 8;
      const u32 lane_row =
          opaque(smem_h1) + (warp * kTileM + row) * Panel::kRow_bytes + (lane / 16 ^ Panel::swizzle(row)) * 16;
#pragma unroll
      for (int j = 0; j < kDim / kTileN; j += 2) {  // columns 8j to 8j + 15
        u32 frag[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) frag[i] = cvt_rn_x2<kElement>(acc[4 * j + 2 * i], acc[4 * j + 2 * i + 1]);
        stmatrix_x4((lane_row ^ j % Panel::kChunks * 16) + j / Panel::kChunks * Traits::kH1Panel_bytes, frag);
      }
      fence_proxy_async_shared();  // [9]
      bar_sync<kWarpgroupSize>(1 + warpgroup);
    } else {
      pack<kElement>(frag_h1, acc);
      warpgroup_fence_operand(frag_h1);  // [5]
    }
  }

  // slice i = bup + h1 Wup^T
  __device__ __forceinline__ void issue_up(int i, const Frag<kDim>& frag_h1) {
    Acc<kSlice>& slice = slices[i % kSlicesInFlight];
    set_vector(slice, lane_vectors + Vectors::kUpBias + i * kSlice);
    warpgroup_fence_operand(slice);  // [5]
    tall_tiles[i % 2] = acquire(Traits::hidden_tall(i));
    wgmma_fence();
    if constexpr (kSharedH1) {
      issue_tall_smem_h1(slice, tall_tiles[i % 2]);
    } else {
      issue_tall(slice, frag_h1, tall_tiles[i % 2], true);
    }
  }

  // Dropout of slice i, in place; the mask depends on the row and the hidden unit.
  __device__ __forceinline__ void drop(int i, Acc<kSlice>& slice, const Rows& rows) const {
    const i64 seed = *p.dropout.seed;
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const u32 of_row = dropout_row(seed, static_cast<int>(rows.first) + 8 * r, 0);
#pragma unroll
      for (int j = 0; j < kSlice / kTileN; ++j) {
#pragma unroll
        for (int b = 0; b < 2; ++b) {  // dimension 32s + 8t + 2w + b, j = 4s + w
          const int unit = i * kSlice + j / 4 * kPermuteGroup + 8 * (lane % 4) + j % 4 * 2 + b;
          float& x = slice[4 * j + 2 * r + b];
          x = keeps(of_row, unit, p.dropout.threshold) ? x * p.dropout.rescale : 0.0f;
        }
      }
    }
  }

  // acc += relu(slice i) Wdown^T
  __device__ __forceinline__ void issue_down(int i, Acc<kDim>& acc, Frag<kSlice> (&frag_hidden)[kSlicesInFlight],
                                             const Rows& rows) {
    Frag<kSlice>& frag = frag_hidden[i % kSlicesInFlight];
    if (kKeep && p.dropout.threshold) drop(i, slices[i % kSlicesInFlight], rows);
    pack_relu<kElement>(frag, slices[i % kSlicesInFlight]);
    if (kKeep) store_rows(of_lane(p.hidden, 2 * kDim, rows) + i * kSlice, frag, 2 * kDim, rows);
    warpgroup_fence_operand(frag);  // [5]
    wide_tiles[i % 2] = acquire(Traits::hidden_wide(i));
    wgmma_fence();
    issue_wide(acc, frag, wide_tiles[i % 2]);
  }

  // acc = h1 + bdown + relu(h1 Wup^T + bup) Wdown^T; acc is h1 on entry.
  __device__ __forceinline__ void ffn(Acc<kDim>& acc, const Frag<kDim>& frag_h1, const Rows& rows) {
    constexpr int kSlices = Traits::kHiddenTiles;
    Frag<kSlice> frag_hidden[kSlicesInFlight];
    issue_up(0, frag_h1);
    add_vector(acc, lane_vectors + Vectors::kDownBias);
    warpgroup_fence_operand(acc);  // [5]
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      const bool last = i + 1 == kSlices;
      if constexpr (kSharedH1) {
        wgmma_wait_group<0>();
        warpgroup_fence_operand(slices[0]);  // [6]
        release(tall_tiles[i % 2]);          // [7]
        issue_down(i, acc, frag_hidden, rows);
        if (!last) {
          issue_up(i + 1, frag_h1);
          wgmma_wait_group<1>();
          release(wide_tiles[i % 2]);  // [7]
        }
      } else {
        if (!last) issue_up(i + 1, frag_h1);
        if (i == 0 || last) {
          wgmma_wait_group<1>();
        } else {
          wgmma_wait_group<2>();
        }
        if (i > 1) release(wide_tiles[i % 2]);   // [7]
        warpgroup_fence_operand(slices[i % 2]);  // [6]
        release(tall_tiles[i % 2]);              // [7]
        issue_down(i, acc, frag_hidden, rows);
      }
    }
    wgmma_wait_group<0>();
    warpgroup_fence_operand(acc);                      // [6]
    if (!kSharedH1) release(wide_tiles[kSlices % 2]);  // [7]
    release(wide_tiles[(kSlices - 1) % 2]);
  }

  // Stores h2 to h_next and h2 Wqkv^T to qkv; loads the next rows.
  __device__ __forceinline__ void next_qkv(Frag<kDim>& frag_h2, const Rows& rows, int next_row_tile) {
    if (Traits::kLastTiles) {
      warpgroup_fence_operand(frag_h2);  // [5]
      issue_last(0, frag_h2);
    }
    store_rows(of_lane(p.h_next, kDim, rows), frag_h2, kDim, rows);
    if (kSharedH1) bar_sync<kWarpgroupSize>(1 + warpgroup);  // [10]
    load(next_row_tile);                                     // [11]
    finish_last(frag_h2, p.qkv, rows);
  }

  __device__ __forceinline__ void run(int row_tile, int next_row_tile) {
    const Rows rows = rows_of(row_tile);
    prefetch_rows(next_row_tile, kDim, p.attn_out, p.h);
    Acc<kDim> acc;
    Frag<kDim> frag;
    out_projection(acc);
    norm(acc, Vectors::kNorm1Weight, Vectors::kNorm1Bias, rows, p.sum1, p.statistics);
    store_h1(frag, acc);
    if constexpr (kKeep) store_rows(of_lane(p.h1, kDim, rows), frag, kDim, rows);
    ffn(acc, frag, rows);
    norm(acc, Vectors::kNorm2Weight, Vectors::kNorm2Bias, rows, p.sum2, p.statistics + p.num_rows);
    pack<kElement>(frag, acc);
    next_qkv(frag, rows, next_row_tile);
  }

  __device__ __forceinline__ void finish() {}
};

template <int kDim, int kSlice, int kConsumers, bool kSharedH1, int kCluster, int kResident, int kStages, bool kHasNext>
using ForwardTraits =
    DenseBlockTraits<kDim, kSlice, kConsumers, kSharedH1, kCluster, kResident, kStages, 1, kHasNext ? 3 : 0, 8, 0>;

template <Element kElement, int kDim, int kSlice, int kConsumers, bool kSharedH1, int kCluster, int kResident,
          int kStages, bool kHasNext, bool kKeep>
__device__ KernelSizes dense_block_sizes = {
    ForwardTraits<kDim, kSlice, kConsumers, kSharedH1, kCluster, kResident, kStages, kHasNext>::kSmem_bytes, 0, 1, 0};

template <Element kElement, int kDim, int kSlice, int kConsumers, bool kSharedH1, int kCluster, int kResident,
          int kStages, bool kHasNext, bool kKeep>
__global__ void __cluster_dims__(kCluster) __launch_bounds__((kConsumers + 1) * kWarpgroupSize, 1)
    dense_block(const __grid_constant__ Params p) {
  using Traits = ForwardTraits<kDim, kSlice, kConsumers, kSharedH1, kCluster, kResident, kStages, kHasNext>;
  static_assert(Traits::max_streamed(kSharedH1 ? 2 : 4) <= kStages, "a consumer holds as many tiles at a time");
  static_assert(!kKeep || !kSharedH1 && kDim % kPermuteGroup == 0, "h1 in registers, whole groups of dimensions");
  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  run_dense_block<Traits, ForwardConsumer<kElement, Traits, kKeep>>(p, smem_bytes);
}
