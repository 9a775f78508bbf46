"""CSR of a matrix and of its transpose, from an edge list or a CSR, by the kernels of cuda/plan_csr.cu.

The edges are in the order of `canonical_csr`. Nothing waits for the GPU: all sizes come from what the host knows, and
what only the GPU knows is in `numbers` (`PlanNumber`).
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

import torch

from ..fragments import WARP_SIZE
from ..runtime.jit import cpp_name, get_kernel
from ..runtime.launch import launch_kernel

WINDOW_ROWS = 16
MOST_EDGES = 2**31 - 1
MOST_IDS = 1 << 28  # a sort key holds two ids of edges and rows, or columns
MOST_ROWS = 1 << 30
# As in cuda/plan_csr.cu and cuda/plan_data.cuh:
EDGE_THREADS, BLOCK_EDGES = 256, 1024
SCAN_THREADS, SCAN_CHUNK, SCAN_BLOCKS = 1024, 4096, 128
SORT_WARPS, WARP_EDGES = 8, 512  # warps of a block, most edges of a window of one warp
SCALARS = struct.Struct("<2q4i")


class PlanNumber(IntEnum):
    """As in cuda/plan_data.cuh: int64 numbers of a plan."""

    BAD_OFFSET = 0
    BAD_EDGE = 1
    SCHEDULES = 8
    ROW_ITEMS = 56
    COUNTS = 64


@dataclass(frozen=True)
class PlanCSRSpec:
    """An instance of a kernel of cuda/plan_csr.cu."""

    name: str

    source: ClassVar[str] = "plan_csr.cu"


_specs = {
    (function, *arguments): PlanCSRSpec(cpp_name(function, *arguments))
    for function, count in (("plan_count", 2), ("plan_offsets", 1), ("plan_place", 1), ("plan_sort", 3))
    for arguments in ([bool(number >> bit & 1) for bit in range(count)] for number in range(1 << count))
}


@dataclass(frozen=True, eq=False)
class EdgeSource:
    """The edges of a graph as they are given, on a GPU.

    Attributes:
        ids: [2, E] int32 or int64, rows any number of elements apart: columns, then rows of A; or [E], the columns of a
            CSR.
        offsets: [num_rows + 1] int64 of a CSR; None for an edge list.
        may_end_early: whether a CSR may have fewer than E edges; those behind are padding.
    """

    ids: torch.Tensor
    offsets: torch.Tensor | None = None
    may_end_early: bool = False

    @property
    def num_edges(self) -> int:
        return self.ids.shape[-1]


@dataclass(frozen=True, eq=False)
class GPUCSR:
    """Arrays for the CSR of a matrix, and of its transpose.

    Attributes:
        numbers: [PlanNumber.COUNTS and more] int64: PlanNumbers, and scratch for counts behind them.
        offsets: [num_rows + 1] int64, and those of the transpose [num_cols + 1] behind them.
        indices: [num_edges] int32, column of each edge; 0 behind the last.
        edges: [num_edges] int32, number of each edge in the source; None: not wanted.
        column_indices, column_edges: [num_edges] int32, of the transpose the row of each edge and its place in the CSR;
            None: no transpose.
    """

    numbers: torch.Tensor
    offsets: torch.Tensor
    indices: torch.Tensor
    edges: torch.Tensor | None
    column_indices: torch.Tensor | None
    column_edges: torch.Tensor | None


def new_numbers(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    """Memory for `GPUCSR.numbers`."""
    return torch.empty(PlanNumber.COUNTS + (sum(shape) + 1) // 2, dtype=torch.int64, device=device)


def queue_csr(csr: GPUCSR, source: EdgeSource, shape: tuple[int, int], row_ids: torch.Tensor | None) -> None:
    """Fill the arrays, on torch's current stream.

    Args:
        source: up to as many edges as the arrays have room for, and at most MOST_EDGES.
        shape: (num_rows, num_cols), at least 1; num_rows up to MOST_IDS with a transpose, num_cols in any case.
        row_ids: [num_rows] int32, row that the transpose names for each row; None: the row itself.
    """
    (num_rows, num_cols), most_edges, num_edges = shape, csr.indices.numel(), source.num_edges
    device, wide, is_csr = csr.numbers.device, source.ids.dtype == torch.int64, source.offsets is not None
    transposes, index = csr.column_indices is not None, device.index
    csr.numbers.zero_()
    # Keys of the rows, of the columns, and scratch.
    keys = torch.empty((3 if transposes else 2, most_edges), dtype=torch.int64, device=device)
    row_keys, spare_keys, *column_keys = keys.unbind()
    tensors = (
        *(source.ids, source.offsets, csr.numbers, csr.offsets, row_keys, column_keys[0] if transposes else None),
        *(spare_keys, csr.indices, csr.edges, csr.column_indices, csr.column_edges, row_ids),
    )
    row_stride = 0 if is_csr else source.ids.stride(0)

    def launch(spec: PlanCSRSpec, grid: tuple[int, ...], threads: int, edges: int, block_windows: int = 0) -> None:
        scalars = SCALARS.pack(edges, row_stride, num_rows, num_cols, block_windows, source.may_end_early)
        launch_kernel(get_kernel(spec, index), grid, threads, tensors, scalars)

    if num_edges or is_csr:
        grid = grid_of(max(num_edges, num_rows + 1) if is_csr else num_edges, BLOCK_EDGES)
        launch(_specs["plan_count", wide, is_csr], grid, EDGE_THREADS, num_edges)
    most = max(shape) if transposes else num_rows
    grid = (min(SCAN_BLOCKS, most // SCAN_CHUNK + 1), 2 if transposes else 1)
    launch(_specs["plan_offsets", is_csr], grid, SCAN_THREADS, num_edges)
    if num_edges and not is_csr:
        launch(_specs["plan_place", wide], grid_of(num_edges, BLOCK_EDGES), EDGE_THREADS, num_edges)
    sorts = [(num_rows, _specs["plan_sort", wide, is_csr, False])]
    if transposes:  # from keys, whatever those were made from: one instance
        sorts.append((num_cols, _specs["plan_sort", False, False, True]))
    for rows, spec in sorts if most_edges else ():
        num_windows = -(-rows // WINDOW_ROWS)
        block_windows = SORT_WARPS if most_edges <= WARP_EDGES * num_windows else 1
        launch(spec, grid_of(num_windows, block_windows), SORT_WARPS * WARP_SIZE, most_edges, block_windows)


def grid_of(count: int, per_block: int) -> tuple[int]:
    """Grid of at least `count` / `per_block` blocks, at most a sixteenth more.

    Rounded, so that the graphs of a data set share launch configurations, which take longer to make than to use.
    """
    blocks = -(-count // per_block)
    step = 1 << max(0, blocks.bit_length() - 5)
    return (-(-blocks // step) * step,)
