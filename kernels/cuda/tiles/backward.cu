// Gradients of forward.cu on tensor cores, in two passes without atomics; bound by the gathers. P is computed again
// from the LSE of the forward pass.
//
//   S = Q K^T    P = exp(scale * S - LSE) where A has an edge, else 0    dP = dO V^T    delta_i = <dO_i, O_i> - dLSE_i
//   dS = P o (dP - delta)    dQ = scale * dS K    dK = scale * dS^T Q    dV = P^T dO
//
//   pass     kColumns   windows of        own rows   gathered rows        X, Y        computes
//   row      false      A, 16 rows        Q, dO      K, V                 S, dP       dQ; LSE and delta for the other
//   column   true       A^T, 16 columns   K, V       Q, dO, LSE, delta    S^T, dP^T   dK, dV
//
// Both passes are one template: X = own 0 * gathered 0^T, Y = own 1 * gathered 1^T, gradient 0 += dS gathered 0,
// gradient 1 += P gathered 1. With a score term f (score_terms.cuh) P = exp(f(scale * S) - LSE), dS is multiplied by f',
// and the gradients of values of rows, columns and heads are sums over gathered rows. The row pass stores those of
// values of edges (tile_edges.cuh). With dropout (dropout.cuh), P in dV and dP are masked and multiplied by rescale; P
// in dS is not.
//
// Schedule, KV tiles, work items and splits: as in forward.cu, over A and over A^T. The "keys" of a KV tile of A^T are
// 16 rows of A. For a symmetric A both schedules are the same arrays. Partials are plain sums (sum_splits.cuh).
// Pointers and shapes: struct BackwardParams.
//
// Grid (num_blocks, H), kWarps warps per block. A work item goes to a team of kDimWarps neighbouring warps; each warp
// has its share of the columns of gathered rows, own rows and accumulators. X and Y are sums over all columns: the
// warps add up their partial sums through shared memory (team.cuh), with one or two named barriers per KV tile.
//
// kIn: type of all matrices. float32 (kFloat, kTF32) differs in the fragments (window_fragments.cuh), in the layout of
// rows in a stage (pair_gather.cuh), and in rows past the last one of a KV tile, which are zeros [2].
//
// Shared memory                                                bytes at kDim 64   128         256, 16 bits
//                                                              float32            64          128
//   ring [kWarps][kStages]       RowPair: rows and statistics  4,224              8,320       8,320
//   records [kWarps][kRecords]   a KV tile                     128                128         128
//   TeamMemory [kTeams]          partial sums of X and Y       0                  0           8,192
//   values of edges [kWarps]     a matrix for each             1,024              1,024       1,024
//   per warp, without these                                    8,960              17,152      21,248
//
//   float32 at kDim 256: four warps per team, TeamMemory of 10,240 bytes, 19,712 bytes per warp
//
// Timeline of a warp (rules [R1] to [R4]: ring.cuh). Work item, records and groups are as in forward.cu; the window's
// own rows are the first tile in the ring.
//
//   group      copies                                                       complete
//   item       work item: KV tiles 0 and 1 to records 0 and 1               wait<0>, before the first gather
//   own        own rows to stage 1                                          wait<1> before the loop
//   0          rows of KV tile 0 to stage 0; KV tile 2 to record 2          wait<1> of iteration 0
//   1          rows of KV tile 1 to stage 1; KV tile 3 to record 3          wait<1> of iteration 1
//   i + 2      rows of KV tile i + 2 to stage i % 2; KV tile i + 4 to record i % 4
//
//   own rows       stage 1 to registers, while group 0 is in flight; then group 1 overwrites stage 1
//   iteration i    as in forward.cu: products, weights and accumulate read stage i % 2, weights reads record i % 4
//   kWarp          after the loop: gradients to stage 0, and from there to global memory in whole lines
//
// Order that must not change, marked [n] in the code, and what breaks otherwise
//   [1]  Before griddepcontrol_wait a block reads only work items, with their KV tiles, and row ids: the previous
//        kernel may still write the matrices, or read memory that this kernel writes.
//   [2]  Rows past the last one of a KV tile: 0 * NaN is NaN. 16 bits: they hold old data and are never read. float32:
//        the producer writes zeros, so that addresses need no minimum. Their statistics are read; the mask discards the
//        results.
//   [3]  round_to and store_partial after the loop: no copy is in flight, and no lane reads the ring.
//   [4]  __syncthreads before sum_block: it reads the partials of all warps.
#include "common.cuh"
#include "tiles/backward_params.cuh"
#include "tiles/gradient_window.cuh"
#include "tiles/pair_gather.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/griddepcontrol.cuh"
#include "ptx/ld_shared.cuh"
#include "tiles/ring.cuh"
#include "tiles/split_kv.cuh"
#include "tiles/sum_splits.cuh"
#include "tiles/team.cuh"

// Warps per SM that __launch_bounds__ leaves registers for, without spills. Twelve warps of 128 columns in 16 bits fit
// only compute capability 9.0.
template <Element kIn, int kDim, bool kColumns, int kDimWarps, int kTerms>
__device__ constexpr int max_backward_warps() {
  constexpr int kWidth = RowPair<kElement_bytes<kIn>, kDim, kDimWarps>::kWidth;
  constexpr bool kTightTerm =
      kArch != 900 || ScoreTerm<kIn, kTerms>::kRowSums + ScoreTerm<kIn, kTerms>::kColumnSums > 1 ||
      ScoreTerm<kIn, kTerms>::kEdgeValues > 0;
  constexpr int kColumnWarps = kArch == 900 ? 12 : 8;
  if (kTerms & kExpression) return kWidth > 64 ? 8 : kColumns ? kColumnWarps : kTightTerm ? 12 : 16;
  constexpr bool kFewTerms = kIn == Element::kTF32 && !kColumns && kArch < 1200;
  if (kIsWide<kIn>) return kWidth <= 16 ? 16 : kWidth <= 32 || kFewTerms ? 12 : 8;
  if (kWidth <= 64) return kColumns ? 12 : 16;
  if (kColumns || kDimWarps > 1) return 8;
  constexpr bool kTight = kArch != 900 || kTerms != 0;
  return kTight && kWidth > 112 ? 8 : 12;
}

// With several warps a team, TeamMemory<kDimWarps> of each team follows.
template <int kBytes, int kDim, int kDimWarps, int kWarps>
struct BackwardMemory {
  RowPair<kBytes, kDim, kDimWarps> ring[kWarps][kStages];  // after the loop: the sums of each warp, unless kWarp
  __align__(kRecords * kRecord_bytes) unsigned char records[kWarps][kRecords][kRecord_bytes];
};

// Sums of the gradients of a score term's values, for a row or column of the window.
template <Element kIn, bool kColumns, int kTerms>
constexpr int kNumValueSums = kColumns ? ScoreTerm<kIn, kTerms>::kColumnSums : ScoreTerm<kIn, kTerms>::kRowSums;

// Then the matrices of values of edges of each warp.
template <Element kIn, int kTerms>
constexpr int kEdgeValues_bytes = ScoreTerm<kIn, kTerms>::kEdgeValues * kTileValues * static_cast<int>(sizeof(float));

// With kNumValueSums a FragmentPair of each warp comes last.
template <Element kIn, int kDim, bool kColumns, int kDimWarps, int kWarps, int kTerms>
__device__ KernelSizes fused3s_backward_sizes = {
    static_cast<int>(sizeof(BackwardMemory<kElement_bytes<kIn>, kDim, kDimWarps, kWarps>) +
                     (kDimWarps > 1 ? kWarps / kDimWarps * sizeof(TeamMemory<kDimWarps>) : 0) +
                     kWarps * kEdgeValues_bytes<kIn, kTerms> +
                     (kNumValueSums<kIn, kColumns, kTerms> > 0 ? kWarps * sizeof(FragmentPair) : 0)),
    static_cast<int>(
        sizeof(GradientPartial<kDim, kColumns, kDimWarps, kNumValueSums<kIn, kColumns, kTerms>>) / sizeof(float)),
    max_backward_warps<kIn, kDim, kColumns, kDimWarps, kTerms>() / kWarps,
    kWarps / kDimWarps,  // work items
};

template <Element kIn, int kDim, bool kColumns, int kDimWarps, int kWarps, int kTerms>
__global__ void
__launch_bounds__(kWarps* kWarpSize, max_backward_warps<kIn, kDim, kColumns, kDimWarps, kTerms>() / kWarps)
    fused3s_backward(const __grid_constant__ BackwardParams p) {
  using S = RowPair<kElement_bytes<kIn>, kDim, kDimWarps>;
  using Window = GradientWindow<kIn, kDim, kColumns, kDimWarps, kTerms>;
  using Producer = PairGather<kIn, kDim, kDimWarps, kColumns>;
  using Shared = BackwardMemory<kElement_bytes<kIn>, kDim, kDimWarps, kWarps>;
  static_assert((kTerms & ~(kDropout | kExpression)) == 0, "the rest is edges/backward.cu's");
  static_assert(!(kIsWide<kIn> && Window::kTransforms), "so are score terms of float32");
  static_assert(sizeof(FragmentPair) * Window::Partial::kWarpPairs <= sizeof(Shared::ring[0]), "sums fit the ring");
  static_assert(alignof(Shared) >= sizeof(Shared::records[0]), "record addresses by ^ and &");

  extern __shared__ __align__(1024) uint4 smem[];
  Shared& shared = *reinterpret_cast<Shared*>(smem);
  const int warp = threadIdx.x / kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int team = warp / kDimWarps, dim_warp = warp % kDimWarps;
  const int first_column = dim_warp * S::kWidth;
  Ring<sizeof(S)> ring(shared.ring[warp], shared.records[warp]);

  ring.copy_item(p.work_items + blockIdx.x * (kWarps / kDimWarps) + team, lane);
  for (int stage = 0; stage < kStages; ++stage)
    zero_padding(shared.ring[warp][stage], first_column, lane);
  const Source query{p.query, p.query_head_stride, p.query_row_bytes};
  const Source key{p.key, p.key_head_stride, p.key_row_bytes};
  const Source value{p.value, p.value_head_stride, p.value_row_bytes};
  const Source grad_output{p.grad_output, p.grad_head_stride, p.grad_row_bytes};
  Producer gather(p, kColumns ? query : key, kColumns ? grad_output : value, dim_warp, lane);
  constexpr int kTeamsEnd = sizeof(Shared) + (kDimWarps > 1 ? kWarps / kDimWarps * sizeof(TeamMemory<kDimWarps>) : 0);
  const auto memory_at = [&](int offset) { return reinterpret_cast<unsigned char*>(smem) + offset; };
  Window window(p, lane, reinterpret_cast<float*>(memory_at(kTeamsEnd + warp * kEdgeValues_bytes<kIn, kTerms>)));
  const GradientTarget<kColumns> target(p);

  ring.wait_for_item();
  const uint4 range = ring.range();
  const int count = range.y, num_keys = range.w;
  // Row lane % 16 of the window; num_rows or more: no row.
  const int lane_row = static_cast<int>(range.z) < 0 ? target.rows.num_rows : target.rows.of(range.z, lane % kTileM);
  const bool has_row = count > 0 && lane_row < target.rows.num_rows;
  griddepcontrol_wait();  // [1]
  griddepcontrol_launch_dependents();
  gather.start(range.x, count);
  int rows[Producer::kRowsPerLane];
  gather.spread_rows(rows, has_row ? lane_row : -1);
  gather.own_rows(kColumns ? key : query, kColumns ? value : grad_output, rows, ring.stage_of(1));
  gather(0, ring.record_of(0), ring.stage_of(0));
  if constexpr (Window::kDrops) window.start_dropout(lane_row);
  if constexpr (Window::kTransforms) window.start_term(lane_row, ring.records, range.x, count);

  typename Producer::Pieces output;
  RowStats stats;
  const i64 row_head = static_cast<i64>(lane_row) * p.num_heads + blockIdx.y;
  if constexpr (!kColumns) {
    gather.load_rows(output, p.output, p.num_heads, rows);
    const float lse = has_row ? __ldg(p.lse + row_head) : negative_infinity();
    stats.negative_lse = lse == negative_infinity() ? lse : lse * -kLog2e;
  }
  ring.wait();
  const auto* const team_memory = reinterpret_cast<TeamMemory<kDimWarps>*>(&shared + 1) + team;
  const Team<kDimWarps> own_team(team_memory, dim_warp, lane, 1 + team);
  if constexpr (!kColumns) {
    stats.delta = gather.row_products(output, ring.stage_of(1));
    if constexpr (kDimWarps > 1) stats.delta = own_team.add_up(stats.delta);
    if (p.lse_gradient && has_row && stats.negative_lse != negative_infinity()) {
      stats.delta -= __ldg(p.lse_gradient + row_head);
    }
    window.set_stats(stats);
    // In a window shared by several teams, the first team writes the statistics.
    const uint4 split = ring.split();
    const bool is_first = static_cast<int>(split.x) == kWarp ||
                          (team == 0 && (static_cast<int>(split.x) == kBlock || split.x == split.y));
    if (has_row && is_first && dim_warp == 0 && lane < kTileM) p.row_stats[row_head] = stats;
  }
  window.load_own(ring.stage_of(1));
  __syncwarp();  // [R3]
  gather(1, ring.record_of(1), ring.stage_of(1));

  ring.start();
  for (int i = 0; i < count; ++i) {
    if constexpr (Window::kTransforms) window.load_edges();
    ring.wait();
    const u32 stage = ring.stage, record = ring.record;
    const int last_row = (i + 1 < count ? kTileKeys : num_keys) - 1;
    if constexpr (Window::kTransforms) window.advance_values(record, ring.next_record(), i + 1 < count);
    float score[2][4], grad_weight[2][4];
    window.products(score, grad_weight, stage, last_row);
    if constexpr (kDimWarps > 1) own_team.add_up(score, grad_weight, i);
    u32 weight[Window::kWeights], grad_score[Window::kWeights];
    window.weights(weight, grad_score, score, grad_weight, record, stage);
    if constexpr (Window::kTransforms) window.advance_edges(dim_warp == 0);
    window.accumulate(weight, grad_score, stage, last_row);
    ring.advance(gather, i);
  }

  const uint4 split = ring.split();
  const int number = ring.range().z;  // window
  if (static_cast<int>(split.x) == kWarp) {
    if (number < 0) return;
    window.round_to(ring.stages);  // [3]
    __syncwarp();
    const int row = target.rows.of(number, lane % kTileM);
    gather.spread_rows(rows, row < target.rows.num_rows ? row : -1);
#pragma unroll
    for (int i = 0; i < Window::kGrads; ++i) {
      gather.store_rows(i ? target.value_grad : target.score_grad, target.row_heads, rows, ring.stages, i);
    }
    if constexpr (Window::kValueSums > 0) {
      if (dim_warp == 0) window.store_values(target.rows, number);
    }
    return;
  }
  window.store_partial(reinterpret_cast<FragmentPair*>(shared.ring[warp]));  // [3]
  FragmentPair* const value_sums =
      reinterpret_cast<FragmentPair*>(memory_at(kTeamsEnd + kWarps * kEdgeValues_bytes<kIn, kTerms>));
  if constexpr (Window::kValueSums > 0) window.store_partial_values(value_sums[warp]);
  __syncthreads();  // [4]
  sum_block<kIn, kDim, kColumns, kDimWarps, kWarps, Window::kValueSums>(
      reinterpret_cast<const char*>(shared.ring), sizeof(shared.ring[0]), value_sums, p, split.x, split.y, split.z,
      number, warp, lane);
}
