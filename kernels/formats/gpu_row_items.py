"""`formats/row_items.py` by two CUDA kernels, with the same bits and, behind them, items without work."""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..runtime.jit import get_kernel
from ..runtime.launch import launch_kernel
from .gpu_csr import SCAN_BLOCKS, SCAN_CHUNK, grid_of
from .row_items import SORT_SEGMENT, RowItems

PARTS_THREADS = 1024  # as in cuda/plan_rows.cu
SCALARS = struct.Struct("<5i4x")  # behind the pointers of struct Params


@dataclass(frozen=True)
class PlanRowsSpec:
    """A kernel of cuda/plan_rows.cu."""

    name: str

    source: ClassVar[str] = "plan_rows.cu"


PLAN_PARTS, PLAN_WHOLE_ROWS = PlanRowsSpec("plan_parts"), PlanRowsSpec("plan_whole_rows")


def most_items_of(num_edges: int, num_rows: int, part_edges: int) -> int:
    """Most items: one for each row, and another for each `part_edges` edges."""
    return num_rows + num_edges // part_edges


def most_parts_of(num_edges: int, part_edges: int) -> int:
    """Most parts: a row with more than `part_edges` edges has at most two for as many of them."""
    return 2 * (num_edges // part_edges)


def queue_row_items(
    work: Sequence[RowItems],
    offsets: Sequence[torch.Tensor],
    row_ids: torch.Tensor | None,
    numbers: torch.Tensor,
) -> None:
    """Fill the items of a matrix, and of its transpose where `work` has two, on torch's current stream.

    Args:
        work: for as many items and parts as there can be (`most_items_of`, `most_parts_of`).
        offsets: [num_rows + 1] int64 of each; at least one row.
        row_ids: [num_rows] int32, row of query and output of each row of the matrix; None for rows in their own order.
        numbers: `GPUCSR.numbers`; parts, and rows without parts, are written.
    """
    device, count = numbers.device, len(work)
    num_rows = [len(each) - 1 for each in offsets]
    whole_rows = torch.empty(sum(num_rows), dtype=torch.int32, device=device).split_with_sizes(num_rows)
    none = (None,) * (2 - count)
    tensors = (
        *(*(each.items for each in work), *none),
        *(*(each.parts for each in work), *none),
        *(*offsets, *none, row_ids, *whole_rows, *none, numbers),
    )
    zeros = [0] * (2 - count)
    most_items = [len(each.items) for each in work]
    scalars = SCALARS.pack(*num_rows, *zeros, *most_items, *zeros, work[0].part_edges)
    grid = (min(SCAN_BLOCKS, -(-max(num_rows) // SCAN_CHUNK)), count)
    launch_kernel(get_kernel(PLAN_PARTS, device.index), grid, PARTS_THREADS, tensors, scalars)
    grid = (*grid_of(max(most_items), SORT_SEGMENT), count)
    launch_kernel(get_kernel(PLAN_WHOLE_ROWS, device.index), grid, SORT_SEGMENT, tensors, scalars)
