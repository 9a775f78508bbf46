// The non-attention layers between two attentions of a Graph Transformer, in one kernel; compute capability 9.0 only.
//
//   h1  = LayerNorm(h + attn_out Wout^T + bout)
//   h2  = LayerNorm(h1 + relu(h1 Wup^T + bup) Wdown^T + bdown)      -> h_next
//   qkv = h2 Wqkv^T, Wqkv of the next block                         -> qkv, if kHasNext
//
// Pointers and shapes: struct Params.
//
// Accumulators, biases, residuals and norms are fp32; only operands of the next product are rounded to 16 bits.
//
// Grid: at most one block per SM, in clusters of kCluster. Block: kConsumers + 1 warpgroups.
//   consumer   takes 64 rows per round through all steps; its rows stay in registers
//   producer   its first thread copies weight tiles with bulk copies (dense_tiles.cuh); its other threads do nothing
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
// this order; hidden units and columns of qkv are permuted within their slice. 16 columns that are left at the end are
// permuted among themselves, lane t with 4 neighbours (dense_rows.cuh):
//
//   dimension              0         32        64        96        128       160
//   kDim or kSlice = 80    | 8t ...  | 8t ...  | 4t |
//   kDim = 160             | 8t ...  | 8t ...  | 8t ...  | 8t ...  | 8t ...  |
//   its tiles of Wout      |           0            |           1            |   group 2 begins in 0, ends in 1
//
// Instances (SHAPES in kernels/dense_block.py); shared memory in bytes, with kHasNext
//   kDim                     64           80           96           128          160          192          256
//   kSlice                   64           80           96           64           80           64           64
//   k of a panel             64           16           32           64           16           64           64
//   kConsumers               3            2            2            2            2            2            2
//   registers of a consumer  160          240          240          240          240          240          240
//   h1, A of up              registers                                           shared memory (kSharedH1)
//   kCluster                 1            1            1            1            2            2            2
//   resident tiles           8 x 8,192    8 x 12,800   8 x 18,432   10 x 16,384  1 x 25,600   0            0
//   stages                   0            0            0            3 x 16,384   5 x 25,600   6 x 24,576   4 x 32,768
//   h1, per consumer         0            0            0            0            2 x 20,480   2 x 24,576   2 x 32,768
//   vectors                  2,048        2,560        3,072        4,096        5,120        6,144        8,192
//   full barriers            8 x 8        8 x 8        8 x 8        13 x 8       6 x 8        6 x 8        4 x 8
//   empty barriers           0            0            0            3 x 8        5 x 8        6 x 8        4 x 8
//   total                    67,648       105,024      150,592      217,216      199,768      202,848      204,864
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
// Consumers meet only through the ring, so LayerNorm of one runs beside wgmma of another.
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
// Order that must not change, marked [n] in the code, and what breaks otherwise
//   [1]  mbarrier_init, both fences, then the barriers of block and cluster: an arrival or a copy could come before its
//        mbarrier exists.
//   [2]  griddepcontrol_wait before any load of attn_out or h: the kernel in front may still be writing them.
//   [3]  opaque: the compiler would compute descriptors and row addresses ahead, and kDim = 256 would spill registers.
//   [4]  acquire in the order of use (Traits::up, down, qkv; the packing in Python): producer and consumer would wait
//        for each other.
//   [5]  warpgroup_fence_operand, then wgmma_fence, between the last write of an operand register and the wgmma: the
//        tensor cores could read an old value.
//   [6]  warpgroup_fence_operand after wgmma_wait_group: a read of acc that moves ahead of the wait makes ptxas run all
//        wgmma one by one ("serialized").
//   [7]  release after the wait that completes the tile's group: the producer would overwrite a tile that wgmma reads.
//   [8]  __syncwarp before stmatrix: orders the other lanes' loads of attn_out before stores to the same bytes.
//   [9]  fence_proxy_async_shared, then bar_sync, between stmatrix and wgmma: wgmma could read older bytes than h1.
//   [10] bar_sync before attn_out of the next rows overwrites h1: wgmma of another warp may still read it.
//   [11] Loads of the next rows before stores of qkv: loads wait behind stores, 2 to 14 % slower.
//   [12] __syncwarp between acquire and release where no wgmma holds the warp together: lane 0 could let the barrier go
//        on by two phases while another lane still polls for this one, and that lane would wait for ever.
//   [13] Cluster barrier before exit: another block may still arrive at this block's barriers.
//   [14] setmaxnreg_dec in all warps of the producer: setmaxnreg_inc of the consumers waits for these registers.
//   [15] With a cluster, a block without rows waits for resident tiles too: it could exit while they arrive.
#include "common.cuh"
#include "dense_rows.cuh"
#include "dense_tiles.cuh"
#include "ptx/bar_sync.cuh"
#include "ptx/cluster.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/cp_async_bulk.cuh"
#include "ptx/cvt.cuh"
#include "ptx/fence_proxy_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_shared.cuh"
#include "ptx/mbarrier.cuh"
#include "ptx/opaque.cuh"
#include "ptx/setmaxnreg.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "warp.cuh"

struct Params {
  const u16* attn_out;   // [num_rows][kDim]  16-bit
  const u16* h;          // [num_rows][kDim]  16-bit
  const char* weights;   // [kTiles][kDim * kSlice]  16-bit: tiles in the order of use, swizzled as in shared memory
  const float* vectors;  // [8 * kDim]  bout, norm 1 weight, bias, bup [2 * kDim], bdown, norm 2 weight, bias
  u16* h_next;           // [num_rows][kDim]  16-bit
  u16* qkv;              // [num_rows][3 * kDim]  16-bit; null without kHasNext
  int num_rows;
  float eps;  // of both norms
};

// The steps of a consumer warpgroup. In registers: acc, accumulators [64][kDim]; slices, accumulators [64][kSlice] of
// tall tiles; frag_..., 16-bit operands.
template <Element kElement, typename Traits>
struct Consumer {
  using Panel = typename Traits::Panel;
  static constexpr int kDim = Traits::kDim;
  static constexpr int kSlice = Traits::kSlice;
  static constexpr bool kSharedH1 = Traits::kSharedH1;
  static constexpr int kSlicesInFlight = kSharedH1 ? 1 : 2;  // of the FFN

  const Params& p;
  const u32 smem;
  const int warpgroup, warp, lane;
  const float* const lane_vectors;  // in shared memory, + 8t
  const u32 smem_h1;
  const u32 lane_attn_out;  // offset of the lane's first 16 bytes of attn_out in smem_h1
  int round = 0;
  Frag<kDim> frag_attn_out, frag_h;  // of the rows that come next
  Acc<kSlice> slices[2];
  WeightTile wide_tiles[2], tall_tiles[2];  // in use

  __device__ __forceinline__ Consumer(const Params& p, u32 smem, const float* smem_vectors, int warpgroup)
      : p(p),
        smem(smem),
        warpgroup(warpgroup),
        warp(threadIdx.x / kWarpSize % kWarpgroupWarps),
        lane(threadIdx.x % kWarpSize),
        lane_vectors(smem_vectors + 8 * (lane % 4)),
        smem_h1(smem + Traits::kH1 + warpgroup * Traits::kH1_bytes),
        lane_attn_out(warp * (kTileM * Panel::kRow_bytes) + lane * 16) {}

  __device__ __forceinline__ Rows rows_of(int row_tile) const {
    return Rows(row_tile, warp * kTileM + lane / 4, p.num_rows);
  }
  // The lane's first element of a row: dimension 8t.
  __device__ __forceinline__ i64 lane_offset(const Rows& rows, int pitch) const {
    return rows.first * pitch + 8 * (lane % 4);
  }

  // [4]
  __device__ __forceinline__ WeightTile acquire(int tile) const { return acquire_tile<Traits>(smem, tile, round); }
  __device__ __forceinline__ void release(const WeightTile& tile) const { release_tile<Traits>(tile, lane); }

  // acc += frag W^T, W a wide tile; frag holds its k.
  __device__ __forceinline__ void issue_wide(Acc<kDim>& acc, const u32* frag, const WeightTile& tile) {
#pragma unroll
    for (int step = 0; step < kSlice / kTileK; ++step) {
      wgmma_m64nNk16_rs<kElement, kDim>(acc, frag + 4 * step, Panel::template step_desc<kDim>(tile.desc, step), true);
    }
    wgmma_commit_group();
  }

  // slice = frag W^T (+ slice), W a tall tile.
  __device__ __forceinline__ void issue_tall(Acc<kSlice>& slice, const Frag<kDim>& frag, const WeightTile& tile,
                                             bool accumulate) {
#pragma unroll
    for (int step = 0; step < kDim / kTileK; ++step) {
      wgmma_m64nNk16_rs<kElement, kSlice>(slice, frag + 4 * step, Panel::template step_desc<kSlice>(tile.desc, step),
                                          accumulate || step > 0);
    }
    wgmma_commit_group();
  }

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
    constexpr int kChunks = Traits::kH1Panel_bytes / 16 / kWarpgroupSize;  // of a lane in a panel
    return opaque(smem_h1) + lane_attn_out + chunk / kChunks * Traits::kH1Panel_bytes +
           chunk % kChunks * (16 * kWarpSize);
  }

  // First chunk of wide tile i of Wout, the first in a group of dimensions that no tile before it needs.
  static __device__ constexpr int first_chunk(int i) { return 2 * divide_up(i * kSlice, kPermuteGroup); }

  // attn_out and h of a row tile to registers; with kSharedH1 attn_out to shared memory.
  __device__ __forceinline__ void load(int row_tile) {
    const Rows rows = rows_of(row_tile);
    const u16* const attn_out = p.attn_out + lane_offset(rows, kDim);
    if constexpr (kSharedH1) {
#pragma unroll
      for (int chunk = 0; chunk < kDim / 16; ++chunk) {
        const int s = chunk / 2, r = chunk % 2;
        cp_async<16>(smem_attn_out(chunk), attn_out + 8 * r * kDim + kPermuteGroup * s, rows.in_range[r] - 1);
      }
      cp_async_commit_group();
    } else {
      load_rows(frag_attn_out, attn_out, kDim, rows);
    }
    load_rows(frag_h, p.h + lane_offset(rows, kDim), kDim, rows);
  }

  // acc = h + bout + attn_out Wout^T
  __device__ __forceinline__ void out_projection(Acc<kDim>& acc) {
    unpack<kElement>(acc, frag_h);
    add_vector(acc, lane_vectors + Traits::kOutBias);
    warpgroup_fence_operand(acc);             // [5]
    if (kSharedH1) cp_async_wait_group<0>();  // a lane reads what it copied itself
#pragma unroll
    for (int i = 0; i < Traits::kOutTiles; ++i) {
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
      Frag<kSlice>& frag = reinterpret_cast<Frag<kSlice>&>(frag_attn_out[i * kSlice / 4]);
      warpgroup_fence_operand(frag);  // [5]
      wide_tiles[i % 2] = acquire(i);
      wgmma_fence();
      issue_wide(acc, frag, wide_tiles[i % 2]);
      if (i > 0) {
        wgmma_wait_group<1>();
        release(wide_tiles[(i - 1) % 2]);  // [7]
      }
    }
    wgmma_wait_group<0>();
    warpgroup_fence_operand(acc);  // [6]
    release(wide_tiles[(Traits::kOutTiles - 1) % 2]);
  }

  __device__ __forceinline__ void norm(Acc<kDim>& acc, int weight, int bias) const {
    layer_norm<kDim>(acc, lane_vectors + weight, lane_vectors + bias, p.eps);
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
    set_vector(slice, lane_vectors + Traits::kUpBias + i * kSlice);
    warpgroup_fence_operand(slice);  // [5]
    tall_tiles[i % 2] = acquire(Traits::up(i));
    wgmma_fence();
    if constexpr (kSharedH1) {
      issue_tall_smem_h1(slice, tall_tiles[i % 2]);
    } else {
      issue_tall(slice, frag_h1, tall_tiles[i % 2], true);
    }
  }

  // acc += relu(slice i) Wdown^T
  __device__ __forceinline__ void issue_down(int i, Acc<kDim>& acc, Frag<kSlice> (&frag_hidden)[kSlicesInFlight]) {
    Frag<kSlice>& frag = frag_hidden[i % kSlicesInFlight];
    pack_relu<kElement>(frag, slices[i % kSlicesInFlight]);
    warpgroup_fence_operand(frag);  // [5]
    wide_tiles[i % 2] = acquire(Traits::down(i));
    wgmma_fence();
    issue_wide(acc, frag, wide_tiles[i % 2]);
  }

  // acc = h1 + bdown + relu(h1 Wup^T + bup) Wdown^T; acc comes as h1.
  __device__ __forceinline__ void ffn(Acc<kDim>& acc, const Frag<kDim>& frag_h1) {
    constexpr int kSlices = Traits::kUpTiles;
    Frag<kSlice> frag_hidden[kSlicesInFlight];
    issue_up(0, frag_h1);
    add_vector(acc, lane_vectors + Traits::kDownBias);
    warpgroup_fence_operand(acc);  // [5]
#pragma unroll
    for (int i = 0; i < kSlices; ++i) {
      const bool last = i + 1 == kSlices;
      if constexpr (kSharedH1) {
        wgmma_wait_group<0>();
        warpgroup_fence_operand(slices[0]);  // [6]
        release(tall_tiles[i % 2]);          // [7]
        issue_down(i, acc, frag_hidden);
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
        issue_down(i, acc, frag_hidden);
      }
    }
    wgmma_wait_group<0>();
    warpgroup_fence_operand(acc);                      // [6]
    if (!kSharedH1) release(wide_tiles[kSlices % 2]);  // [7]
    release(wide_tiles[(kSlices - 1) % 2]);
  }

  // slice i = h2 Wqkv^T
  __device__ __forceinline__ void issue_qkv(int i, const Frag<kDim>& frag_h2) {
    tall_tiles[i % 2] = acquire(Traits::qkv(i));
    wgmma_fence();
    issue_tall(slices[i % 2], frag_h2, tall_tiles[i % 2], false);
  }

  // Stores h2 to h_next and h2 Wqkv^T to qkv; loads the next rows.
  __device__ __forceinline__ void next_qkv(Frag<kDim>& frag_h2, const Rows& rows, int next_row_tile) {
    if (Traits::kQkvTiles) {
      warpgroup_fence_operand(frag_h2);  // [5]
      issue_qkv(0, frag_h2);
    }
    store_rows(p.h_next + lane_offset(rows, kDim), frag_h2, kDim, rows);
    if (kSharedH1) bar_sync<kWarpgroupSize>(1 + warpgroup);  // [10]
    load(next_row_tile);                                     // [11]
#pragma unroll
    for (int i = 0; i < Traits::kQkvTiles; ++i) {
      if (i + 1 < Traits::kQkvTiles) {
        issue_qkv(i + 1, frag_h2);
        wgmma_wait_group<1>();
      } else {
        wgmma_wait_group<0>();
      }
      warpgroup_fence_operand(slices[i % 2]);  // [6]
      release(tall_tiles[i % 2]);              // [7]
      Frag<kSlice> frag;
      pack<kElement>(frag, slices[i % 2]);
      store_rows(p.qkv + lane_offset(rows, 3 * kDim) + i * kSlice, frag, 3 * kDim, rows);
    }
  }

  // A round without rows: gives every streamed tile back unused.
  __device__ __forceinline__ void drain() {
    for (int tile = 0; tile < Traits::kTiles; ++tile) {
      if (Traits::kCluster == 1 && !Traits::is_streamed(tile)) continue;  // [15]
      const WeightTile unused = acquire(tile);
      __syncwarp();  // [12]
      release(unused);
    }
  }

  // Next rows into L2 while this round runs.
  __device__ __forceinline__ void prefetch(int row_tile) const {
    const i64 start = static_cast<i64>(row_tile) * kWarpgroupM;
    const u32 bytes = static_cast<u32>(min(static_cast<i64>(kWarpgroupM), p.num_rows - start)) * (2 * kDim);
    cp_async_bulk_prefetch_L2(p.attn_out + start * kDim, bytes);
    cp_async_bulk_prefetch_L2(p.h + start * kDim, bytes);
  }
};

template <Element kElement, int kDim, int kSlice, int kConsumers, bool kSharedH1, int kCluster, int kResident,
          int kStages, bool kHasNext>
__global__ void __cluster_dims__(kCluster) __launch_bounds__((kConsumers + 1) * kWarpgroupSize, 1)
    dense_block(const __grid_constant__ Params p) {
  using Traits = DenseBlockTraits<kDim, kSlice, kConsumers, kSharedH1, kCluster, kResident, kStages, kHasNext>;
  static_assert(Traits::max_streamed(kSharedH1 ? 2 : 4) <= kStages, "a consumer holds as many tiles at a time");

  extern __shared__ __align__(1024) unsigned char smem_bytes[];
  const u32 smem = shared_address(smem_bytes);
  float* const smem_vectors = reinterpret_cast<float*>(smem_bytes + Traits::kVectors);

  for (int i = threadIdx.x; i < 8 * kDim; i += blockDim.x) smem_vectors[i] = p.vectors[i];
  if (threadIdx.x == 0) {
    for (int buffer = 0; buffer < Traits::kBuffers; ++buffer) mbarrier_init(smem + Traits::full(buffer), 1);
    for (int stage = 0; stage < kStages; ++stage) {
      mbarrier_init(smem + Traits::empty(kResident + stage), kCluster * kConsumers * kWarpgroupWarps);
    }
    fence_mbarrier_init();  // [1]
    fence_proxy_async_shared();
  }
  __syncthreads();
  if (kCluster > 1) barrier_cluster_sync();

  // Row tiles go to consumer 0 of every block first, so that few rows spread over all SMs. All blocks of a cluster run
  // the rounds of its first block, which has the most.
  const int row_tiles = (p.num_rows + kWarpgroupM - 1) / kWarpgroupM;
  const int tiles_per_round = gridDim.x * kConsumers;
  const int cluster_start = blockIdx.x / kCluster * kCluster;
  const int rounds = (row_tiles - cluster_start + tiles_per_round - 1) / tiles_per_round;
  const int warpgroup = warp_uniform(threadIdx.x / kWarpgroupSize);

  if (warpgroup == kConsumers) {
    setmaxnreg_dec<kProducerRegisters>();  // [14]
    if (threadIdx.x == kConsumers * kWarpgroupSize) produce<Traits>(smem, p.weights, rounds);
    if (kCluster > 1) barrier_cluster_sync();  // [13]
    return;
  }
  setmaxnreg_inc<Traits::kConsumerRegisters>();

  Consumer<kElement, Traits> consumer(p, smem, smem_vectors, warpgroup);
  const int first_tile = warpgroup * gridDim.x + blockIdx.x;
  griddepcontrol_wait();  // [2]
  griddepcontrol_launch_dependents();
  consumer.load(first_tile);
  for (int tile = first_tile; tile < row_tiles; tile += tiles_per_round, ++consumer.round) {
    const int row_tile = opaque(tile);  // [3]
    const int next_row_tile = row_tile + tiles_per_round;
    const Rows rows = consumer.rows_of(row_tile);
    if (threadIdx.x % kWarpgroupSize == 0 && next_row_tile < row_tiles) consumer.prefetch(next_row_tile);

    Acc<kDim> acc;
    Frag<kDim> frag;
    consumer.out_projection(acc);
    consumer.norm(acc, Traits::kNorm1Weight, Traits::kNorm1Bias);
    consumer.store_h1(frag, acc);
    consumer.ffn(acc, frag);
    consumer.norm(acc, Traits::kNorm2Weight, Traits::kNorm2Bias);
    pack<kElement>(frag, acc);
    consumer.next_qkv(frag, rows, next_row_tile);
  }
  if constexpr (Traits::kStreamed > 0) {
    for (; consumer.round < rounds; ++consumer.round) consumer.drain();
  }
  if (kCluster > 1) barrier_cluster_sync();  // [13]
}
