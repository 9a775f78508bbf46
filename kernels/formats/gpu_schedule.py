"""What schedules depend on besides the graph, and their sizes from bounds that the host knows."""

from dataclasses import dataclass
from enum import IntEnum

import torch

from .gpu_csr import WINDOW_ROWS
from .schedule import TILE_KEYS, Schedule, SplitHeuristic, make_schedule

# Of SplitHeuristic.of, for a graph with rows:
LEAST_SHARED_EDGES = 2 * TILE_KEYS + 1  # of a window that blocks share: it has more than 2 KV tiles
LEAST_SPLIT_TILES, MOST_SPLIT_TILES = 32, 256


class ScheduleNumber(IntEnum):
    """As in cuda/plan_data.cuh: int64 numbers of a schedule."""

    NUM_TILES = 0
    NUM_BLOCKS = 1
    NUM_SPLITS = 2
    WARP_WINDOWS = 3
    SPLIT_WINDOWS = 4
    WARP_TILES = 5
    SPLIT_TILES = 6
    SEGMENT = 7
    LEADING_BLOCKS = 8
    SHARED_BLOCKS = 9


SCHEDULE_NUMBERS = 16


@dataclass(frozen=True)
class BlockShape:
    """Warps of a block, and warps that the GPU runs at once."""

    warps: int
    resident_warps: int


@dataclass(frozen=True)
class ScheduleInputs:
    """What a schedule depends on besides the graph.

    Attributes:
        num_groups: head groups, each with its own blocks.
        small_tiles: below so many KV tiles, of all head groups together, a graph is small.
        small, large: blocks of a small and of another graph.
    """

    num_groups: int
    small_tiles: int
    small: BlockShape
    large: BlockShape

    @classmethod
    def of_one_shape(cls, num_groups: int, shape: BlockShape) -> "ScheduleInputs":
        """Blocks of one shape for graphs of any size."""
        return cls(num_groups, 0, shape, shape)

    def shape(self, most_tiles: int) -> BlockShape:
        """Blocks of a graph with up to `most_tiles` KV tiles (`most_tiles_of`): the host knows no other number."""
        return self.small if self.num_groups * most_tiles < self.small_tiles else self.large

    def schedule_by_torch(self, kv_tiles: torch.Tensor, tile_offset: torch.Tensor, most_tiles: int) -> Schedule:
        """`make_schedule` for these inputs, on any device."""
        shape = self.shape(most_tiles)
        heuristic = SplitHeuristic.of(tile_offset.diff(), shape.warps, shape.resident_warps, self.num_groups)
        return make_schedule(kv_tiles, tile_offset, shape.warps, heuristic)


def most_tiles_of(num_edges: int, num_rows: int) -> int:
    """Most KV tiles of a matrix: in each window one may be partly filled."""
    return num_edges // TILE_KEYS + windows_of(num_rows)


def windows_of(num_rows: int) -> int:
    return -(-num_rows // WINDOW_ROWS)


def most_shared_blocks(num_edges: int, num_rows: int) -> int:
    """Most blocks of windows that blocks share: one for each, and one more for each full split."""
    shared = min(windows_of(num_rows), num_edges // LEAST_SHARED_EDGES)
    return shared + num_edges // (LEAST_SPLIT_TILES * TILE_KEYS)


def most_blocks_of(num_edges: int, num_rows: int, warps: int) -> int:
    """Most blocks of a schedule: of shared windows, and of the other windows, a warp for each."""
    shared = min(windows_of(num_rows), num_edges // LEAST_SHARED_EDGES)
    return most_shared_blocks(num_edges, num_rows) + -(-(windows_of(num_rows) - shared) // warps)


def most_splits_of(num_edges: int, num_rows: int, shape: BlockShape) -> int:
    """Most splits of a schedule.

    A window has several only with more than `split_tiles` KV tiles, and then at most two for as many of them. These
    are 1.5 times a block's share of all KV tiles, so that all windows have up to 4/3 of the blocks that run at once;
    but at least 32, for windows with more than 512 edges, and at most 256.
    """
    split_edges = LEAST_SPLIT_TILES * TILE_KEYS
    of_edges = num_edges // (split_edges + 1) + num_edges // split_edges
    resident_blocks = -(-shape.resident_warps // shape.warps)
    of_share = max(
        resident_blocks * 4 * (LEAST_SPLIT_TILES + 1) // (3 * LEAST_SPLIT_TILES) + 2,  # `split_tiles` is rounded down
        2 * most_tiles_of(num_edges, num_rows) // MOST_SPLIT_TILES,
    )
    return min(of_edges, of_share)
