"""Constants that were fitted to measurements, by the compute capability of the GPU (kernels/NOTES.md has the numbers).

The rule that shares the windows of a graph out to warps and blocks is in cuda/plan_schedule.cu, where it runs.
"""

from dataclasses import dataclass

from .runtime.device import GPULimits

# A call chooses its kernel without asking which GPU it runs on, and in the way of its plan: these hold for all GPUs.
GROUP_WIDTH = 64  # most columns of a head group: wider ones leave fewer warps on an SM
MOST_LANES = 16  # of a lane group, unless one head needs more: K and V of wider groups would leave L2

ALWAYS, NEVER = float("inf"), 0


@dataclass(frozen=True)
class EdgeLimit:
    """Which calls go edge by edge.

    Attributes:
        tile_edges: edges of a KV tile below which they do.
        least_row_edges: edges of a row below which no call does.
        uncounted_row_edges: edges of a row below which all other calls do, without a count of the KV tiles.
    """

    tile_edges: float
    least_row_edges: int = 0
    uncounted_row_edges: int = 16


EdgeLimits = tuple[tuple[int, EdgeLimit], ...]  # by the widest heads that each is for; wider ones never go edge by edge


@dataclass(frozen=True, eq=False)
class Tuning:
    """Constants of the kernels of `fused3s` on one kind of GPU.

    Attributes:
        warps: work items of a block of the forward pass over KV tiles.
        few_warps: the same for heads wider than `wide_dim`, where the graph has work for all SMs: the rings of four
            warps leave a block alone on its SM, or do not fit it at all.
        small_tiles_per_sm: a graph with fewer KV tiles cannot give every warp of the GPU one.
        teams: work items of a block of the backward pass over KV tiles.
        few_teams: the same for heads that several warps share: a block of eight is alone on its SM.
        edge_warps: warps of the forward pass edge by edge on an SM, about what the registers allow.
        least_part_edges, most_part_edges: of a part of a long row, edge by edge.
        forward, with_terms, with_features: limits of the forward pass with several heads: without edge data; with
            terms, as the kernel over KV tiles then computes one head at a time; and with features, where narrow heads
            take about 9 instructions of a warp for an edge, and 250 for a KV tile of up to 16 edges.
        one_head, one_head_with_features: the same with one head.
        backward: limits of the backward pass.
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


SM90 = Tuning()
_BY_CAPABILITY = {(9, 0): SM90}


def tuning_for(gpu: GPULimits) -> Tuning:
    """The constants for a GPU; those of sm_90 where it was never measured."""
    return _BY_CAPABILITY.get(gpu.capability, SM90)
