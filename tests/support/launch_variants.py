"""Launches of the kernels over KV tiles that differ in schedule, order of events and inputs."""

from dataclasses import dataclass

from plan_oracle import SplitHeuristic

BY_TEAM = SplitHeuristic(warp_tiles=1000, split_tiles=1000, sort_segment=None)
BY_BLOCK = SplitHeuristic(warp_tiles=1, split_tiles=1000, sort_segment=4)
SPLIT = SplitHeuristic(warp_tiles=1, split_tiles=2, sort_segment=2)


@dataclass(frozen=True)
class Variant:
    """A launch: who takes the windows, in which order things happen, and what the inputs look like."""

    split: SplitHeuristic
    mode: str
    heads: int
    scale: float
    strided: bool = False
    reordered: bool = False
    with_lse: bool = True
