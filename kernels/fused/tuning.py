"""Constants fitted to measurements, by compute capability of the GPU (kernels/NOTES.md has the numbers).

The rule that distributes row windows over warps and blocks is in cuda/plan/plan_schedule.cu, in units of the warps that
the GPU runs at once.
"""

from dataclasses import dataclass

from ..runtime.device import GPULimits

# The same for all GPUs, since a call chooses its kernel without looking up its GPU:
GROUP_WIDTH = 64  # most columns of a head group; wider groups leave fewer warps on an SM
MOST_LANES = 16  # most lanes of a lane group, unless one head needs more; K and V of wider groups would leave L2
# Most columns of a float32 head per warp; wider heads go to teams of warps: the rings of few warps would fill an SM.
WARP_COLUMNS = 64
WARP_ROW_BYTES = 256  # backward pass: most bytes of a row per warp; wider heads go to teams of two or four warps

# The same for all GPUs, since they weigh time of the host; fitted on an H200:
CHECKED_EDGES = 1 << 14  # most edges of a graph on a GPU that is checked at once: it is planned as soon as it is queued
SETTLED_EDGES = 1 << 22  # fewest edges of one whose plan is cut to its exact size at once
CUT_PASSES = 16  # forward passes after which a plan is cut: in a loop over new graphs no layer's call should pay for it
COMPACTED_EDGES = 1 << 16  # fewest edges of a plan that is copied to exact sizes: a smaller copy frees too little

COUNTED_EDGES = 1 << 26  # fewest edges of a CSR whose plan waits for the GPU to save 16 bytes of memory per edge

MANY_BLOCKS = 4096  # shared blocks: above it (eight waves on an H200) locality matters more than the tail

ALWAYS, NEVER = float("inf"), 0


@dataclass(frozen=True)
class EdgeLimit:
    """When calls go edge by edge.

    Attributes:
        tile_edges: with fewer edges per KV tile on average, a call goes edge by edge.
        least_row_edges: with fewer edges per row on average, a call always uses KV tiles.
        uncounted_row_edges: with fewer edges per row, it goes edge by edge without a count of the KV tiles.
    """

    tile_edges: float
    least_row_edges: int = 0
    uncounted_row_edges: int = 16


EdgeLimits = tuple[tuple[int, EdgeLimit], ...]  # (most columns of a head, limit); wider heads never go edge by edge


@dataclass(frozen=True, eq=False)
class Tuning:
    """Constants of the kernels of `fused3s` for one compute capability.

    Attributes:
        warps: work items per block, forward pass over KV tiles.
        few_warps: the same for heads wider than `wide_dim` on graphs that fill the GPU: with four warps, the rings
            would leave one block per SM, or not fit.
        small_tiles_per_sm: graphs with fewer KV tiles per SM do not fill the GPU.
        teams: work items per block, backward pass over KV tiles.
        few_teams: the same for heads that several warps share: a block of eight would be alone on its SM.
        edge_warps: resident warps per SM of the edge-by-edge forward pass, about the limit by registers.
        least_part_edges, most_part_edges: edges per part of a long row, edge by edge.
        forward, with_terms, with_features: limits of the forward pass with several heads, without edge data; with score
            terms (the kernel over KV tiles then computes one head at a time or scatters values of edges); with features
            (narrow heads take about 9 warp instructions per edge, and 250 per KV tile of up to 16 edges).
        one_head, one_head_with_features: the same for one head.
        backward, backward_with_values: limits of the backward pass, without edge data and with values of edges.
    """

    warps: int = 4
    few_warps: int = 2
    wide_dim: int = 192
    small_tiles_per_sm: int = 12
    teams: int = 4
    few_teams: int = 2
    edge_warps: int = 24
    least_part_edges: int = 16
    most_part_edges: int = 64
    forward: EdgeLimits = (
        (8, EdgeLimit(48)),
        (16, EdgeLimit(36)),
        (32, EdgeLimit(20, least_row_edges=4, uncounted_row_edges=8)),
    )
    with_terms: EdgeLimits = (
        (32, EdgeLimit(96)),
        (256, EdgeLimit(20, least_row_edges=6, uncounted_row_edges=8)),
    )
    with_features: EdgeLimits = ((32, EdgeLimit(ALWAYS)),)
    one_head: EdgeLimits = ()
    one_head_with_features: EdgeLimits = ((32, EdgeLimit(24)),)
    backward: EdgeLimits = ((32, EdgeLimit(96)),)
    backward_with_values: EdgeLimits = ((32, EdgeLimit(96)), (256, EdgeLimit(48)))


SM90 = Tuning()
_BY_CAPABILITY = {(9, 0): SM90}


def tuning_for(gpu: GPULimits) -> Tuning:
    """The constants for a GPU; those of sm_90 if its compute capability was not measured."""
    return _BY_CAPABILITY.get(gpu.capability, SM90)
