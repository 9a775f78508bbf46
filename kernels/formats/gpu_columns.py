"""The transpose of a CSR pattern for the planning kernels, which take the edges of a row in any order.

`transpose_csr` gives the edges of each column in order and their places; this one does neither, and needs no sort.
"""

import struct
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..runtime.jit import cpp_name, get_kernel
from ..runtime.launch import launch_kernel
from .gpu_reverse import BLOCK_EDGES, THREADS
from .gpu_schedule import grid_of

SCALARS = struct.Struct("<qi4x")  # behind the pointers of struct Params


@dataclass(frozen=True)
class PlanColumnsSpec:
    """One instance of cuda/plan_columns.cu.

    Attributes:
        wide_indices: whether indices are int64.
        counts: whether it counts the edges of the columns, or writes their rows.
    """

    wide_indices: bool
    counts: bool

    source: ClassVar[str] = "plan_columns.cu"

    @property
    def name(self) -> str:
        return cpp_name("plan_columns", self.wide_indices, self.counts)


COUNT_COLUMNS = {wide: PlanColumnsSpec(wide, counts=True) for wide in (False, True)}
WRITE_ROWS = {wide: PlanColumnsSpec(wide, counts=False) for wide in (False, True)}


def rows_by_column(
    indptr: torch.Tensor, indices: torch.Tensor, num_cols: int, row_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """(indptr [num_cols + 1] int64, indices [nnz] int32) of A^T; the rows of a column are in no certain order. Queued.

    Args:
        indptr: [num_rows + 1] int64 contiguous, on a GPU.
        indices: [nnz] int32 or int64 contiguous, checked, below 2^31 of them.
        row_ids: [num_rows] int32, row of A of each row of the pattern; None for rows in their own order.
    """
    device, wide, num_edges = indptr.device, indices.dtype == torch.int64, indices.numel()
    counts = torch.zeros(num_cols + 1, dtype=torch.int32, device=device)
    rows = torch.empty(num_edges, dtype=torch.int32, device=device)
    grid, scalars = grid_of(num_edges, BLOCK_EDGES), SCALARS.pack(num_edges, len(indptr) - 1)
    if num_edges:
        count = get_kernel(COUNT_COLUMNS[wide], device.index)
        launch_kernel(count, grid, THREADS, (counts, indptr, indices, None, None), scalars)
    offsets = counts.cumsum(0)
    if num_edges:
        write, next_place = get_kernel(WRITE_ROWS[wide], device.index), offsets[:-1].int()
        launch_kernel(write, grid, THREADS, (next_place, indptr, indices, row_ids, rows), scalars)
    return offsets, rows
