// O = softmax(scale * Q K^T masked by A) V on tensor cores; bound by the gathers of rows of K and V.
//
// The schedule (fused/planning/schedule.py) lists A as KV tiles: 16 gathered keys of a row window and the bitmap of
// the 16 x 16 block. A KV tile is one k-step of SpMM and the unit of the cp.async ring. Pointers and shapes: struct
// Params.
//
// Grid (num_blocks, head groups), kWarps warps per block. A block computes the heads of a group one after the other
// (head_group.cuh); with features, or several values of a score term, a group is one head. A window goes to one warp, to
// one block, or to several blocks (WorkItem::split):
//   kWarp    one work item: the warp writes the output; no block barrier
//   kBlock   a work item for each warp of a block: the block combines them and writes the output
//   >= 0     splits, a block each (split-KV): the last block to arrive combines the partials in the order of the
//            splits, so the bits are the same on every run
//
// Each warp copies K and V by cp.async into its ring (ring.cuh). Q, scores, E and O stay in registers. A KV tile with
// fewer than 16 keys copies only those.
//
// Elements. 16 bits: RowWindow (row_window.cuh), mma.m16n8k16. float32: FloatRowWindow (float_row_window.cuh),
// mma.m16n8k8 in TF32, with three terms or one per product. The layout of a row of K or V in bytes does not depend on
// the type of its elements; chunks below are 16 bytes.
//
// Teams. A float32 head of more than 64 columns would leave few warps on an SM. Its work items go to teams of kDimWarps
// neighbouring warps, each with whole slices of the columns of Q, K, V and O. A score is a sum over all columns: the
// warps add up their partial scores through shared memory, with one named barrier per KV tile. "A warp" above is then a
// team; each of its warps has its own copy of the records.
//
// Shared memory: struct SharedMemory            bytes at 16 bits, kDim 64   128      256      float32, 64 columns
//   ring [kWarps][kStages]    Stage: key, value  2,048 each                 4,096    8,192    4,096 each
//   records [kWarps][kRecords]    a KV tile      128                        128      128      128
//   partial scores, with teams                   0                          0        0        1,024, in two buffers
//   per warp                                     8,704                      16,896   33,280   16,896; 18,944 in a team
//   values of edges (tile_edges.cuh): a 16 x 16 matrix of float for each and each head, 1,024 bytes per warp
//   edge features, struct TileFeaturesMemory: 3,232 bytes per warp at kDim 64 and 256, 2,224 at 128
//
// Swizzle of K: one head, and float32. 16-bit head groups use the swizzle of V, for ldmatrix. A phase of ld.shared.v4
// is eight lanes: rows g = 2i and 2i + 1, chunks 4p to 4p + 3 of both. Odd rows swap their 64-byte halves, so that a
// phase covers all 32 banks. If a row is an odd number of 64 bytes, rows alternate between the halves without a swap.
//
//   banks     0-3  4-7  8-11 12-15 16-19 20-23 24-27 28-31
//   row 0      0    1    2    3     4     5     6     7       chunk; phase of p = 0: chunks 0 to 3 of rows 0 and 1
//   row 1      4    5    6    7     0     1     2     3
//
// Swizzle of V. A phase of ldmatrix is one chunk of eight rows. Chunk c of row n lies at c ^ (n % 8), so that a phase
// covers all banks and 128-byte lines stay whole (ptx/cp_async.cuh). Shorter rows: kPeriod, kSpread.
//
//   banks     0-3  4-7  8-11 12-15 16-19 20-23 24-27 28-31
//   row 0      0    1    2    3     4     5     6     7
//   row 1      1    0    3    2     5     4     7     6
//   row 2      2    3    0    1     6     7     4     5
//   ...
//   row 7      7    6    5    4     3     2     1     0
//
// Swizzle of V in float32. ld.shared.b32 reads 8 columns, two chunks, of rows 2t (or 2t + 1): chunk c of row n lies at
// c ^ 2 (n / 2 % 4), so that the four rows cover all banks. Rows are whole 128-byte lines. K of heads that share slices
// (up to 8 columns) is read by ld.shared.v2, two chunks of rows g to g + 3: c ^ 2 (n % 4).
//
// Timeline of a warp (rules [R1] to [R4]: ring.cuh). cp.async groups complete in order; wait<n> leaves the latest n in
// flight.
//
//   group      copies                                                       complete
//   item       work item: KV tiles 0 and 1 to records 0 and 1               wait<0>, before the first gather
//   0          K, V of KV tile 0 to stage 0; KV tile 2 to record 2          wait<1> of iteration 0
//   1          K, V of KV tile 1 to stage 1; KV tile 3 to record 3          wait<1> of iteration 1
//   i + 2      K, V of KV tile i + 2 to stage i % 2; KV tile i + 4 to record i % 4
//   With edge features each iteration first commits one more group, the features of KV tile i + 1; it is older than
//   group i + 2.
//
//   iteration i    reads                                  in flight        then overwritten
//   wait<1>                                               group i + 1
//   scores         K in stage i % 2; with teams, partial_scores i % 2
//   mask           bitmap in record i % 4
//   accumulate     V in stage i % 2
//   gather i + 2   keys in record (i + 2) % 4             + group i + 2    stage i % 2, record i % 4
//
// Order that must not change, marked [n] in the code, and what breaks otherwise
//   [1]  Before griddepcontrol_wait a block reads only work items, with their KV tiles, and row ids: the previous
//        kernel may still write Q, K and V, or read memory that this kernel writes.
//   [2]  V rows past the last key hold old data, and 0 * NaN is NaN. 16 bits: they are never read. float32: rows that
//        no earlier KV tile fills are zeroed; a NaN of an earlier KV tile is already in the window's rows.
//   [3]  A maximum of -infinity is never subtracted: a row without an edge so far would become NaN.
//   [4]  store_partial after the loop: no copy is in flight, and no lane reads the ring. A partial overwrites the rings
//        of the whole team: the barrier waits for its other warps.
//   [5]  __syncthreads before combine_block: it reads the partials of all warps.
//   [6]  The ^ with sign_bits is needed even if they are 0: with plain copies the compiler repeats the moves before
//        every mma.
//   [7]  Dropout after accumulate_sums, which counts every edge, and before both products with the kept weights.
//
// Choices; measurements are in kernels/NOTES.md
//   V swizzled in 128-byte lines, cp.async.cg   half the L2 requests of padded rows
//   two stages                                  a third one costs a block per SM
//   registers for 16 warps per SM at kDim = 64  20 warps would recompute addresses
//   work item with two KV tiles                 one latency fewer before the first gather
//   sums by an mma with ones                    half the error: E as rounded adds up to 1
//   scale in the exponent, its sign in Q        fewer instructions per KV tile
//   programmatic dependent launch               the launch latency is hidden
#include "common.cuh"
#include "tiles/float_row_window.cuh"
#include "tiles/forward_params.cuh"
#include "tiles/gather.cuh"
#include "tiles/head_group.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_shared.cuh"
#include "tiles/ring.cuh"
#include "tiles/row_window.cuh"
#include "tiles/score_mask.cuh"
#include "tiles/split_kv.cuh"
#include "tiles/tile_dropout.cuh"
#include "tiles/tile_features.cuh"
#include "tiles/tile_terms.cuh"
#include "tiles/window_epilogue.cuh"

// Warps per SM that __launch_bounds__ leaves registers for, without spills. One step fewer with features and score
// terms, or if shared memory is the limit. float32: at most the warps that shared memory has room for.
template <Element kIn, int kDim, int kHeads, int kTerms = 0>
__device__ constexpr int max_warps() {
  constexpr int kWidth = HeadGroup<kDim, kHeads>::kWidth;
  constexpr int kMediumWarps = kArch == 900 || kArch / 100 == 10 ? 12 : 8;
  if (kIsWide<kIn>) return kWidth <= 32 ? 16 : kWidth <= 64 ? kMediumWarps : 8;
  constexpr bool kHasValues = ScoreTerm<kIn, kTerms>::kEdgeValues > 0;
  if (kHasValues && kHeads > 1) return kHeads > 4 && kDim % 8 ? 8 : 12;
  if (kHeads > 4 && kTerms & kExpression) return 12;
  constexpr bool kFewer = kHasFeatures<kTerms> && ((kTerms & kExpression) != 0 ||
                                                   (kWidth > 64 && !TileFeaturesMemory<kDim>::kScratchInKey));
  return kWidth <= (kFewer ? 0 : 64) ? 16 : kWidth <= (kFewer ? 64 : 128) ? 12 : 8;
}

// kDim: columns of a head per warp.
template <int kDim, int kHeads, int kWarps, int kBytes = 2>
struct SharedMemory {
  Stage<kDim, kHeads, kBytes> ring[kWarps][kStages];  // after the loop: the partial of each warp, unless kWarp
  unsigned char records[kWarps][kRecords][kRecord_bytes];
};

// With teams: partial scores follow.
template <int kDim, int kWarps, int kDimWarps>
struct SharedMemoryOfTeams : SharedMemory<kDim, 1, kWarps, sizeof(float)> {
  PartialScores partial_scores[kWarps / kDimWarps][2][kDimWarps];  // [team][KV tile % 2][warp of the team]
};

// With edge data: the values of edges follow.
template <int kDim, int kHeads, int kWarps, int kTerms>
struct SharedMemoryOfTerms : SharedMemory<kDim, kHeads, kWarps> {
  TileTermsMemory<kTerms, kHeads> terms[kWarps];
};
// With edge features: their buffers follow.
template <int kDim, int kHeads, int kWarps, int kTerms>
struct SharedMemoryOfFeatures : SharedMemoryOfTerms<kDim, kHeads, kWarps, kTerms> {
  TileFeaturesMemory<kDim> features[kWarps];
};

// std::conditional.
template <bool kCondition, typename Then, typename Else>
struct Choose {
  using Type = Then;
};
template <typename Then, typename Else>
struct Choose<false, Then, Else> {
  using Type = Else;
};

template <Element kIn, int kDim, int kHeads, int kWarps, int kTerms, int kDimWarps>
__device__ constexpr int shared_bytes() {
  constexpr int kWidth = columns_of_warp<kDim, kDimWarps>();
  if constexpr (kDimWarps > 1) {
    return sizeof(SharedMemoryOfTeams<kWidth, kWarps, kDimWarps>);
  } else if constexpr (kIsWide<kIn>) {
    return sizeof(SharedMemory<kWidth, kHeads, kWarps, sizeof(float)>);
  } else if constexpr (kHasFeatures<kTerms>) {
    return sizeof(SharedMemoryOfFeatures<kDim, kHeads, kWarps, kTerms>);
  } else if constexpr (kTerms != 0) {
    return sizeof(SharedMemoryOfTerms<kDim, kHeads, kWarps, kTerms>);
  } else {
    return sizeof(SharedMemory<kDim, kHeads, kWarps>);
  }
}

template <Element kIn, Element kOut, int kDim, int kHeads, int kWarps, int kTerms, int kDimWarps = 1>
__device__ KernelSizes fused3s_sizes = {
    shared_bytes<kIn, kDim, kHeads, kWarps, kTerms, kDimWarps>(),
    static_cast<int>(sizeof(Partial<kDim, kHeads>) / sizeof(float)),
    max_warps<kIn, columns_of_warp<kDim, kDimWarps>(), kHeads, kTerms>() / kWarps,
    kWarps / kDimWarps,  // work items
};

template <Element kIn, Element kOut, int kDim, int kHeads, int kWarps, int kTerms, int kDimWarps = 1>
__global__ void __launch_bounds__(kWarps* kWarpSize,
                                  max_warps<kIn, columns_of_warp<kDim, kDimWarps>(), kHeads, kTerms>() / kWarps)
    fused3s(const __grid_constant__ Params p) {
  constexpr bool kWide = kIsWide<kIn>;
  constexpr int kBytes = kElement_bytes<kIn>;
  constexpr int kWidth = columns_of_warp<kDim, kDimWarps>();
  constexpr int kTeams = kWarps / kDimWarps;
  using S = Stage<kWidth, kHeads, kBytes>;
  using Rows =
      typename Choose<kWide, FloatRowWindow<kIn, kDim, kHeads, kDimWarps>,
                      RowWindow<kIn, kDim, kHeads, kTerms & kValueFeatures ? kFeatures / kTileN : 0>>::Type;
  using Shared = SharedMemory<kWidth, kHeads, kWarps, kBytes>;
  using BlockPartial = Partial<kDim, kHeads>;
  using Terms = TileTerms<kIn, kTerms, kDim, kHeads>;
  static_assert(kHeads == 1 || (kTerms & ~kExpression) == 0, "head groups take a score term alone");
  static_assert(!kWide || (kTerms & ~kDropout) == 0, "other edge data of float32 inputs are edges/forward.cu's");
  static_assert(kDimWarps == 1 || (kWide && kHeads == 1), "teams share one head of float32");
  static_assert(kWarps % kDimWarps == 0 && kTeams < 16, "whole teams, a named barrier each");
  static_assert((kTerms & kTypes) == 0, "types are edges/forward.cu's");
  constexpr bool kTransforms = kTerms & kExpression;
  // Whether rows and number of keys are read again where they are needed: frees registers in the loop. Not on sm_90,
  // whose code was measured without.
  constexpr bool kRereadsItem = kArch != 900 && kTerms != 0 && kWidth > 192;
  static_assert(sizeof(BlockPartial) <= kDimWarps * sizeof(Shared::ring[0]), "a partial fits the rings of a team");
  static_assert(sizeof(Shared::ring) % sizeof(Shared::records[0]) == 0, "record addresses by ^ and &");

  extern __shared__ __align__(1024) uint4 smem[];
  Shared& shared = *reinterpret_cast<Shared*>(smem);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int team = warp / kDimWarps, dim_warp = warp % kDimWarps;
  Ring<sizeof(S)> ring(shared.ring[warp], shared.records[warp]);

  ring.copy_item(p.work_items + blockIdx.x * kTeams + team, lane);
  for (int stage = 0; stage < kStages; ++stage) {
    zero_padding(shared.ring[warp][stage], heads_of_group<kHeads>(p),
                 kDimWarps > 1 ? max(0, min(kWidth, kDim - kWidth * dim_warp)) : kDim, lane);
  }
  Gather<kDim, kHeads, kBytes, kWidth> gather(p, lane, kWidth * dim_warp);
  Rows rows(lane, kTransforms ? kLackingUnit<kIn, kTerms> : p.product_scale);  // `Terms::apply` scales the products
  const WindowRows window_rows{p.row_ids, p.num_rows};

  ring.wait_for_item();
  const uint4 range = ring.range();
  int row[2];  // rows of Q and O, for rows g and g + 8 of the window; num_rows or more: no row
  const auto load_rows = [&](int window) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      row[half] = window < 0 ? p.num_rows : window_rows.of(window, 8 * half + rows.g);
    }
  };
  load_rows(range.z);
  griddepcontrol_wait();  // [1]
  griddepcontrol_launch_dependents();
  const int count = kHasFeatures<kTerms> ? warp_uniform(range.y) : range.y, num_keys = range.w;
  gather.start(range.x, count);
  if constexpr (kWide) {
    if (count == 1 || count == 2) zero_missing_values(shared.ring[warp][count - 1], num_keys, lane);  // [2]
  }
  using TermsMemory = SharedMemoryOfTerms<kDim, kHeads, kWarps, kTerms>;
  Terms terms(p, lane, reinterpret_cast<TermsMemory*>(smem)->terms[kTerms ? warp : 0]);
  if constexpr (kTransforms) {
    const int window = static_cast<int>(range.z);
    terms.start(range.x, count, window < 0 ? p.num_rows : window_rows.of(window, lane % kTileM), ring.records);
  }
  using FeaturesMemory = SharedMemoryOfFeatures<kDim, kHeads, kWarps, kTerms>;
  TileFeatures<kIn, kDim, kTerms> features(
      p, lane, reinterpret_cast<FeaturesMemory*>(smem)->features[kHasFeatures<kTerms> ? warp : 0]);
  if constexpr (kHasFeatures<kTerms>) features.start(ring.records, count);
#pragma unroll
  for (int i = 0; i < kStages; ++i) gather(i, ring.record_of(i), ring.stage_of(i));
  rows.load_query(p, row, count > 0);
  if constexpr (kTerms & kKeyFeatures) features.project(rows.frag_query);
  TileDropout dropout;
  if constexpr (kTerms & kDropout) dropout.start(p, row);

  ring.start();
  for (int i = 0; i < count; ++i) {
    if constexpr (kTransforms && Rows::kFolded) terms.load_edges();
    ring.wait();
    const u32 stage = ring.stage, record = ring.record;
    if constexpr (kTransforms) {
      if constexpr (!Rows::kFolded) terms.scatter_edges();
      terms.advance_columns(record, ring.next_record(), i + 1 < count);
    }
    if constexpr (kHasFeatures<kTerms>) features.prefetch(i, count);
    [[maybe_unused]] const auto key = reinterpret_cast<unsigned char*>(smem) + (stage - shared_address(smem));
    float limit[2][4];
    if constexpr (Rows::kFolded) load_mask(limit, record, rows.g, rows.t);
#pragma unroll
    for (int batch = 0; batch < Rows::kBatches; ++batch) {
      float score[Rows::kBatch][2][4];
      rows.scores(score, batch, stage);
      if constexpr (kDimWarps > 1) {
        using TeamsMemory = SharedMemoryOfTeams<kWidth, kWarps, kDimWarps>;
        const auto& partial_scores = reinterpret_cast<TeamsMemory*>(smem)->partial_scores[team];
        rows.sum_over_team(score[0], shared_address(partial_scores) + i % 2 * sizeof(partial_scores[0]), 1 + team);
      }
      if constexpr (Rows::kFolded) {
        if constexpr (kTransforms && Terms::Term::kEdgeValues > 0) {
          if (batch == 0) {
            terms.scatter_edges();
            __syncwarp();  // the other lanes' values
          }
        }
        if constexpr (kTransforms) terms.apply(score, batch, rows.g, rows.t);
#pragma unroll
        for (int e = 0; e < 8 * Rows::kBatch; ++e) {
          float& x = score[e / 8][e / 4 % 2][e % 4];
          x = fminf(x, limit[e / 4 % 2][e % 4]);  // a NaN score becomes +infinity, which is NaN after the softmax
        }
      } else {
        if constexpr (kTerms & kKeyFeatures) features.add_scores(score[0], i, key);
        if constexpr (kTransforms) {
          __syncwarp();  // the other lanes' values
          terms.apply(score, batch, rows.g, rows.t);
        }
        mask_scores(score[0], record, rows.g, rows.t);
      }
      if constexpr (kWide) {
        float rescale[2];
        rows.online_softmax(score[0], rescale, batch);
        if constexpr (kTerms & kDropout) dropout.apply(score[0], record, rows.t);
        rows.accumulate(score[0], rescale, batch, stage);
      } else {
        u32 prob[Rows::kBatch][4];
        rows.online_softmax(prob, score, batch);
        rows.accumulate_sums(prob, batch);
        if constexpr (kTerms & kDropout) dropout.apply(prob[0], record, rows.t);  // [7]
        if constexpr (kTerms & kValueFeatures) features.accumulate(rows.out, prob[0], i, key);
        if constexpr (kHasFeatures<kTerms>) features.advance();
        const int keys = i + 1 < count ? kTileKeys : kRereadsItem ? static_cast<int>(ring.range().w) : num_keys;
        rows.accumulate(prob, batch, stage, keys - 1);
      }
    }
    ring.advance(gather, i);
  }

  // Else the loop stores its opaque `lane` to local memory for each KV tile.
  if constexpr (kRereadsItem && kTerms & kKeyFeatures && kArch >= 1000) features.lane = threadIdx.x % kWarpSize;
  if constexpr (kTerms & kValueFeatures) features.add_to_output(rows.out, rows.sum[0]);
  if constexpr (kTerms & kDropout) scale_output(rows, p.dropout.rescale);

  const uint4 split = ring.split();
  if (static_cast<int>(split.x) == kWarp) {
    if constexpr (kHasFeatures<kTerms> || kRereadsItem) load_rows(ring.window());
    store_output<kDim, kHeads, kOut>(rows, p, row);
    return;
  }
  if constexpr (kDimWarps > 1) bar_sync<kDimWarps * kWarpSize>(1 + team);  // [4]
  store_partial(rows, *reinterpret_cast<BlockPartial*>(shared.ring[warp - dim_warp]));  // [4]
  const int window = ring.range().z;
  __syncthreads();  // [5]
  combine_block<kDim, kHeads, kWarps, kTeams, kOut>(
      reinterpret_cast<const char*>(shared.ring), kDimWarps * sizeof(shared.ring[0]),
      static_cast<BlockPartial*>(p.partial), p.semaphores, split.x, split.y, split.z, p.output, p.lse, p.num_heads,
      window_rows, window, warp, lane);
}
