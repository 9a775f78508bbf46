"""`formats/row_items.py` by two CUDA kernels, with the same bits."""

import struct
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..runtime.jit import get_kernel
from ..runtime.launch import launch_kernel
from .gpu_schedule import grid_of
from .row_items import SORT_SEGMENT, RowItems

PARTS_THREADS = 1024  # as in cuda/plan_rows.cu
SCALARS = struct.Struct("<2i")  # behind the pointers of struct Params


@dataclass(frozen=True)
class PlanRowsSpec:
    """A kernel of cuda/plan_rows.cu."""

    name: str

    source: ClassVar[str] = "plan_rows.cu"


PLAN_PARTS, PLAN_WHOLE_ROWS = PlanRowsSpec("plan_parts"), PlanRowsSpec("plan_whole_rows")


@dataclass(frozen=True, eq=False)
class QueuedRowItems:
    """Items in memory for the most that there can be, see `queue_row_items`.

    Attributes:
        most_items: [most items, 4] int32; most_parts: [most parts, 2] int32.
        part_edges: most edges of an item.
    """

    most_items: torch.Tensor
    most_parts: torch.Tensor
    part_edges: int

    def items(self, num_parts: int, num_whole: int) -> RowItems:
        """Copies without the unused memory; queued."""
        items, parts = self.most_items[: num_parts + num_whole], self.most_parts[:num_parts]
        return RowItems(items.clone(), parts.clone(), self.part_edges)


def queue_row_items(
    indptr: torch.Tensor,
    num_edges: int,
    row_ids: torch.Tensor | None,
    part_edges: int,
    numbers: torch.Tensor,
    plan_numbers: torch.Tensor | None = None,
) -> QueuedRowItems:
    """Queue the kernels of `make_row_items`.

    Args:
        indptr: [num_rows + 1] int64 contiguous, on a GPU; of a pattern with at least one row.
        num_edges: edges of the pattern, below 2^31.
        row_ids: [num_rows] int32, row of query and output of each row; None for rows in their own order.
        part_edges: most edges of an item, up to 2^23.
        numbers: [at least 2] int64, two are written: parts, and rows without parts.
        plan_numbers: [16] int64, by PlanNumber, of a pattern that is not checked yet: there are no items if it is
            damaged or not distinct.
    """
    num_rows, device = len(indptr) - 1, indptr.device
    # A row has one item, and another for each `part_edges` edges; only rows of more edges have parts.
    most_parts = 2 * (num_edges // part_edges)
    items = torch.empty((num_rows + num_edges // part_edges, 4), dtype=torch.int32, device=device)
    parts = torch.empty((most_parts, 2), dtype=torch.int32, device=device)
    whole_rows = torch.empty(num_rows, dtype=torch.int32, device=device)
    row_ids = None if row_ids is None else row_ids.to(device, torch.int32).contiguous()
    tensors = (items, parts, indptr, row_ids, whole_rows, numbers, plan_numbers)
    scalars = SCALARS.pack(num_rows, part_edges)
    launch_kernel(get_kernel(PLAN_PARTS, device.index), (1,), PARTS_THREADS, tensors, scalars)
    launch_kernel(
        get_kernel(PLAN_WHOLE_ROWS, device.index), grid_of(num_rows, SORT_SEGMENT), SORT_SEGMENT, tensors, scalars
    )
    return QueuedRowItems(items, parts, part_edges)


def make_gpu_row_items(indptr: torch.Tensor, num_edges: int, row_ids: torch.Tensor | None, part_edges: int) -> RowItems:
    """`make_row_items` by kernels on torch's current stream; arguments as for `queue_row_items`. Reads the sizes; the
    arrays are queued."""
    numbers = torch.empty(2, dtype=torch.int64, device=indptr.device)
    queued = queue_row_items(indptr, num_edges, row_ids, part_edges, numbers)
    return queued.items(*numbers.tolist())
