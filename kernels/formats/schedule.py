"""Schedules: the work of the warps of cuda/fused3s.cu and of the teams of cuda/fused3s_backward.cu, made once a graph.

    row window   16 rows of A
    KV tile      16 gathered keys of a window and the bitmap of the 16 x 16 block: one k-step of SpMM
    work item    the consecutive KV tiles of one window that one warp takes
    split        a part of a window that one block takes (split-KV)
    partial      unnormalised O, row maxima and row sums of a split, until the splits are combined

A window goes to one warp, to one block, or to several blocks, by its number of KV tiles:

    up to `warp_tiles`    kWarp    one work item: the warp writes the output
    up to `split_tiles`   kBlock   a work item for each warp of a block: the block combines them and writes the output
    more                  >= 0     splits of at most `split_tiles`, a block each: the last block to arrive combines the
                                   partials in the order of the splits, so the bits are the same on every run

Example: 4 windows of 2, 9, 1 and 21 KV tiles, 4 warps a block, warp_tiles = 2, split_tiles = 12. Numbers are KV tiles.

    window   0     1                     2    3
    tiles    0-1 | 2 3 4 5 6 7 8 9 10  | 11 | 12 13 14 15 16 17 18 19 20 21 | 22 23 24 25 26 27 28 29 30 31 32

             warp 0   warp 1   warp 2   warp 3    window  split
    block 0  22-24    25-27    28-30    31-32     3       1        splits, and kBlock windows with more than warp_tiles
    block 1  12-14    15-16    17-19    20-21     3       0        a warp: most tiles first
    block 2   2-4      5-6      7-8      9-10     1       kBlock
    block 3   0-1     11       none     none      0, 2    kWarp    then the windows of one warp

kBlock windows with at most `warp_tiles` a warp come last: they are short and fill the gaps at the end. Windows of one
warp keep their natural order, since neighbours find common keys in the cache, but are sorted by size within
`sort_segment`: a block holds its SM until its longest warp is done, and mixed sizes leave a fifth of the warps' time
unused. Where all of them run at once neither matters, and each block gets large and small ones.

cuda/plan_schedule.cu makes schedules, and holds the rule that gives `warp_tiles`, `split_tiles` and `sort_segment`, as
fitted to the measurements in kernels/NOTES.md:

One warp takes windows up to a third larger than the seven-eighths quantile, unless that is much beside its share of all
tiles: the limit is higher where all windows run at once and lower where they run in waves. A graph that cannot fill the
GPU shares even small windows. A split gets half more than a block's share of one head: the blocks of a head run
together, and a longer split would be their last.
"""

from dataclasses import dataclass
from enum import IntEnum

from .gpu_csr import WINDOW_ROWS

TILE_KEYS = 16
TILE_WORDS = 24  # int32 words of struct KVTile: 16 keys, -1 past the last, and the bitmap of the 16 x 16 block
ITEM_WORDS = 56  # of struct WorkItem
MANY_BLOCKS = 4096  # blocks of shared windows, eight waves: neighbours matter more than the last of them
# Of the rule in cuda/plan_schedule.cu:
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
class ScheduleForm:
    """What a schedule depends on besides the graph.

    Attributes:
        num_groups: head groups, each with its own blocks.
        warps: work items of a block.
        resident_warps: work items that the GPU runs at once.
        of_transpose: whether it is one of A^T.
    """

    num_groups: int
    warps: int
    resident_warps: int
    of_transpose: bool = False


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


def most_splits_of(num_edges: int, num_rows: int, form: ScheduleForm) -> int:
    """Most splits of a schedule.

    A window has several only with more than `split_tiles` KV tiles, and then at most two for as many of them. These
    are 1.5 times a block's share of all KV tiles, so that all windows have up to 4/3 of the blocks that run at once;
    but at least 32, for windows with more than 512 edges, and at most 256.
    """
    split_edges = LEAST_SPLIT_TILES * TILE_KEYS
    of_edges = num_edges // (split_edges + 1) + num_edges // split_edges
    resident_blocks = -(-form.resident_warps // form.warps)
    of_share = max(
        resident_blocks * 4 * (LEAST_SPLIT_TILES + 1) // (3 * LEAST_SPLIT_TILES) + 2,  # `split_tiles` is rounded down
        2 * most_tiles_of(num_edges, num_rows) // MOST_SPLIT_TILES,
    )
    return min(of_edges, of_share)
