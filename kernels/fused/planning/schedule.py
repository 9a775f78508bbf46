"""Schedules: the work items of cuda/tiles/forward.cu and cuda/tiles/backward.cu, built once per graph.

    row window   16 rows of A
    KV tile      16 gathered keys of a window and the bitmap of the 16 x 16 block: one k-step of SpMM
    work item    the consecutive KV tiles of one window that one warp processes
    split        a part of a window that one block processes (split-KV)
    partial      unnormalised O, row maxima and row sums of a split, until the splits are combined

Its number of KV tiles decides whether a window is processed by one warp, one block or several blocks:

    up to `warp_tiles`    kWarp    one work item: the warp writes the output
    up to `split_tiles`   kBlock   one work item per warp of a block: the block combines them and writes the output
    more                  >= 0     splits of at most `split_tiles`, one block each: the last block to arrive combines
                                   the partials in split order, so the bits are the same on every run

Example: 4 windows of 2, 9, 1 and 21 KV tiles, 4 warps a block, warp_tiles = 2, split_tiles = 12. Numbers are KV tiles.

    window   0     1                     2    3
    tiles    0-1 | 2 3 4 5 6 7 8 9 10  | 11 | 12 13 14 15 16 17 18 19 20 21 | 22 23 24 25 26 27 28 29 30 31 32

             warp 0   warp 1   warp 2   warp 3    window  split
    block 0  22-24    25-27    28-30    31-32     3       1        splits, and kBlock windows with more than warp_tiles
    block 1  12-14    15-16    17-19    20-21     3       0        a warp: most tiles first
    block 2   2-4      5-6      7-8      9-10     1       kBlock
    block 3   0-1     11       none     none      0, 2    kWarp    then the windows of one warp

kBlock windows with at most `warp_tiles` per warp come last: they are short and fill the gaps at the end. Windows of one
warp keep their natural order, since neighbours share keys in the cache, but are sorted by size within `sort_segment`:
a block occupies its SM until its longest warp is done, and mixed sizes would idle a fifth of the warp time. If all of
them run at once, neither matters, and each block gets large and small windows in snake order.

cuda/plan/plan_schedule.cu builds schedules and has the rule for `warp_tiles`, `split_tiles` and `sort_segment`, fitted
to measurements (kernels/NOTES.md): one warp processes windows up to a third larger than the seven-eighths quantile,
unless that exceeds its share of all tiles by too much; the limit is higher if all windows run at once and lower if they
run in waves. A graph that cannot fill the GPU shares even small windows. A split gets 1.5 times a block's share of one
head: the blocks of a head run together, and a longer split would finish last.
"""

from dataclasses import dataclass
from enum import IntEnum

from .gpu_csr import WINDOW_ROWS

TILE_KEYS = 16
TILE_WORDS = 24  # int32 words of struct KVTile: 16 keys, -1 past the last, and the bitmap of the 16 x 16 block
ITEM_WORDS = 56  # int32 words of struct WorkItem
# Constants of the rule in cuda/plan/plan_schedule.cu:
LEAST_SHARED_EDGES = 2 * TILE_KEYS + 1  # edges of a window shared by blocks: it has more than 2 KV tiles
LEAST_SPLIT_TILES, MOST_SPLIT_TILES = 32, 256


class ScheduleNumber(IntEnum):
    """Indices of the int64 numbers of a schedule; as in cuda/plan/plan_data.cuh."""

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
    """Inputs of a schedule besides the graph.

    Attributes:
        num_groups: number of head groups; each has its own blocks.
        warps: work items per block.
        resident_warps: work items that the GPU runs at once.
        of_transpose: whether it is a schedule of A^T.
    """

    num_groups: int
    warps: int
    resident_warps: int
    of_transpose: bool = False


def most_tiles_of(num_edges: int, num_rows: int) -> int:
    """Upper bound of the KV tiles: one per 16 edges, and one partly filled per window."""
    return num_edges // TILE_KEYS + windows_of(num_rows)


def windows_of(num_rows: int) -> int:
    return -(-num_rows // WINDOW_ROWS)


def most_shared_blocks(num_edges: int, num_rows: int) -> int:
    """Upper bound of the shared blocks: one per shared window, and one more per full split."""
    shared = min(windows_of(num_rows), num_edges // LEAST_SHARED_EDGES)
    return shared + num_edges // (LEAST_SPLIT_TILES * TILE_KEYS)


def most_blocks_of(num_edges: int, num_rows: int, warps: int) -> int:
    """Upper bound of the blocks: shared blocks, and one warp per other window."""
    shared = min(windows_of(num_rows), num_edges // LEAST_SHARED_EDGES)
    return most_shared_blocks(num_edges, num_rows) + -(-(windows_of(num_rows) - shared) // warps)


def most_splits_of(num_edges: int, num_rows: int, form: ScheduleForm) -> int:
    """Upper bound of the splits.

    Only a window with more than `split_tiles` KV tiles is split, into at most two splits per `split_tiles`.
    `split_tiles` is 1.5 times a block's share of all KV tiles, so all windows together have up to 4/3 of the blocks
    that run at once; it is at least 32 (windows with more than 512 edges) and at most 256.
    """
    split_edges = LEAST_SPLIT_TILES * TILE_KEYS
    of_edges = num_edges // (split_edges + 1) + num_edges // split_edges
    resident_blocks = -(-form.resident_warps // form.warps)
    of_share = max(
        resident_blocks * 4 * (LEAST_SPLIT_TILES + 1) // (3 * LEAST_SPLIT_TILES) + 2,  # `split_tiles` is rounded down
        2 * most_tiles_of(num_edges, num_rows) // MOST_SPLIT_TILES,
    )
    return min(of_edges, of_share)
