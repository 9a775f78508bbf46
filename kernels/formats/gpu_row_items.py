"""`formats/row_items.py` by two CUDA kernels, with the same bits."""

import struct
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..runtime.jit import get_kernel
from ..runtime.launch import launch_kernel
from .gpu_plan import grid_of
from .row_items import SORT_SEGMENT, RowItems

PARTS_THREADS = 1024  # as in cuda/plan_rows.cu
SCALARS = struct.Struct("<2i")  # behind the pointers of struct Params


@dataclass(frozen=True)
class PlanRowsSpec:
    """A kernel of cuda/plan_rows.cu."""

    name: str

    source: ClassVar[str] = "plan_rows.cu"


PLAN_PARTS, PLAN_WHOLE_ROWS = PlanRowsSpec("plan_parts"), PlanRowsSpec("plan_whole_rows")


def make_gpu_row_items(indptr: torch.Tensor, num_edges: int, row_ids: torch.Tensor | None, part_edges: int) -> RowItems:
    """`make_row_items` by kernels on torch's current stream. The arrays are complete on the device when it returns.

    Args:
        indptr: [num_rows + 1] int64 contiguous, on a GPU; of a pattern with at least one row.
        num_edges: edges of the pattern, below 2^31.
        row_ids: [num_rows] int32, row of query and output of each row; None for rows in their own order.
        part_edges: most edges of an item, up to 2^23.
    """
    num_rows, device = len(indptr) - 1, indptr.device
    # A row has one item, and another for each `part_edges` edges; only rows of more edges have parts.
    most_parts = 2 * (num_edges // part_edges)
    items = torch.empty((num_rows + num_edges // part_edges, 4), dtype=torch.int32, device=device)
    parts = torch.empty((most_parts, 2), dtype=torch.int32, device=device)
    whole_rows = torch.empty(num_rows, dtype=torch.int32, device=device)
    numbers = torch.empty(2, dtype=torch.int64, device=device)
    row_ids = None if row_ids is None else row_ids.to(device, torch.int32).contiguous()
    tensors = (items, parts, indptr, row_ids, whole_rows, numbers)
    scalars = SCALARS.pack(num_rows, part_edges)
    launch_kernel(get_kernel(PLAN_PARTS, device.index), (1,), PARTS_THREADS, tensors, scalars)
    launch_kernel(
        get_kernel(PLAN_WHOLE_ROWS, device.index), grid_of(num_rows, SORT_SEGMENT), SORT_SEGMENT, tensors, scalars
    )
    num_parts, num_whole = numbers.tolist()
    items, parts = items[: num_parts + num_whole].clone(), parts[:num_parts].clone()  # no more memory than they need
    if device.type == "cuda":  # the kernel reads them before griddepcontrol.wait
        torch.cuda.current_stream(device).synchronize()
    return RowItems(items, parts, part_edges)
