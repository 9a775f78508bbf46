"""The transpose of a symmetric CSR pattern by cuda/plan_reverse.cu, with the bits of `transpose_csr`.

A^T of a symmetric A has the arrays of A; the edge of its entry (j, i) is the place of (i, j) in A. One kernel finds
these places, and whether A is symmetric at all.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..runtime.jit import cpp_name, get_kernel
from ..runtime.launch import launch_kernel
from .gpu_schedule import PlanNumber, grid_of

THREADS, BLOCK_EDGES = 256, 1024  # of struct EdgeBlock in cuda/plan_data.cuh
MOST_EDGES = 2**31 - 1
SCALARS = struct.Struct("<qi4x")  # behind the pointers of struct Params


@dataclass(frozen=True)
class PlanReverseSpec:
    """One instance of `plan_reverse`; `wide_indices`: whether indices are int64."""

    wide_indices: bool

    source: ClassVar[str] = "plan_reverse.cu"

    @property
    def name(self) -> str:
        return cpp_name("plan_reverse", self.wide_indices)


PLAN_REVERSE = {wide: PlanReverseSpec(wide) for wide in (False, True)}


def queue_reverse(
    indptr: torch.Tensor, indices: torch.Tensor, numbers: torch.Tensor, reverse: torch.Tensor | None
) -> None:
    """Queue plan_reverse for a square pattern.

    Args:
        indptr: [num_rows + 1] int64 contiguous, on a GPU.
        indices: [nnz] int32 or int64 contiguous, up to MOST_EDGES; columns ascend strictly in each row, or IS_SYMMETRIC
            is 0.
        numbers: [16] int64, by PlanNumber, for `is_symmetric`; of a plan of the same pattern.
        reverse: [nnz] int32, filled with the place of the reverse of each edge if the pattern is symmetric.
    """
    if not indices.numel():
        return
    kernel = get_kernel(PLAN_REVERSE[indices.dtype == torch.int64], indptr.device.index)
    scalars = SCALARS.pack(indices.numel(), indptr.numel() - 1)
    grid = grid_of(indices.numel(), BLOCK_EDGES)
    launch_kernel(kernel, grid, THREADS, (indptr, indices, reverse, numbers), scalars)


def is_symmetric(numbers: Sequence[int]) -> bool:
    """Whether the pattern equals its transpose, from the numbers that `queue_reverse` left."""
    return bool(numbers[PlanNumber.IS_SYMMETRIC]) and numbers[PlanNumber.SURPLUS] == 0


def find_reverse(indptr: torch.Tensor, indices: torch.Tensor) -> torch.Tensor | None:
    """[nnz] int32, place of the reverse of each edge; None for a pattern that is not symmetric. Waits for the GPU.

    Args:
        indptr: [num_rows + 1] int64 contiguous, on a GPU.
        indices: [nnz] int32 contiguous, on the same GPU; columns below num_rows, ascending strictly in each row.
    """
    if indices.numel() > MOST_EDGES:
        return None
    numbers = torch.zeros(len(PlanNumber), dtype=torch.int64, device=indptr.device)
    numbers[PlanNumber.IS_SYMMETRIC] = 1
    reverse = torch.empty(indices.numel(), dtype=torch.int32, device=indptr.device)
    queue_reverse(indptr, indices, numbers, reverse)
    return reverse if is_symmetric(numbers.tolist()) else None
