"""The Binary Sparse Block (BSB) format of the paper's section "Sparse Format for Tensor Cores".

The rows of A are cut into row windows (RW) of r rows. Within a window the columns without a nonzero are dropped and the
rest, in ascending order, are cut into tensor core blocks (TCB) of c columns:

    A, window of r = 4 rows            compacted, c = 2        col_sparse_to_dense   bitmap[tcb, row] (bit = column)
    . x . . . x . .                    x x | . .               1 5 | 7 7             11 | 00
    . x . . . . . .         ->         x . | . .               padding repeats 7     01 | 00
    . . . . . . . x                    . . | x .                                     00 | 01
    . . . . . x . .                    . x | . .                                     10 | 00

A repeated edge counts as often as it occurs, but a bit holds one edge. The columns of second copies therefore follow
after all columns of the window, ascending, with the bits of the rows that have a second copy; then those of third
copies, and so on.

Rows are queries and columns are keys. For a DGLGraph the rows are destination nodes and the columns source nodes:
a node attends to the sources of its in-edges.
"""

from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fused3s.graph.csr import as_tensor, check_csr, csr_pattern
from fused3s.runtime.kernel_cache import import_cupy

from .bsb_build import build_bsb_arrays

Tile = tuple[int, int]
PAPER_TILE: Tile = (16, 8)  # m16n8k16: 16 queries by 8 keys


@dataclass(frozen=True, eq=False)
class BSB:
    """A sparse binary matrix in BSB format; immutable. Build it once per graph with one of the constructors below.

    Attributes:
        shape: (num_rows, num_cols): queries and keys.
        tile: (r, c): rows and columns of a TCB; the paper's kernel needs (16, 8).
        nnz: number of edges, repeated ones included.
        tcb_row_offset: [num_row_windows + 1] int32, first TCB of each row window (the paper's `tro`).
        col_sparse_to_dense: [num_tcbs * c] int32, original column of each slot (the paper's `sptd`). Slots that pad
            the last TCB of a window repeat the window's last column.
        bitmap: [num_tcbs, r, c / 8] uint8, bit j of byte b is column 8b + j of the TCB.
        row_window_order: [num_row_windows] int32, windows by decreasing TCB count, stable (row-window reordering).
    """

    shape: tuple[int, int]
    tile: Tile
    nnz: int
    tcb_row_offset: torch.Tensor
    col_sparse_to_dense: torch.Tensor
    bitmap: torch.Tensor
    row_window_order: torch.Tensor

    @classmethod
    def from_csr(cls, indptr: Any, indices: Any, num_cols: int | None = None, tile: Tile = PAPER_TILE) -> "BSB":
        """Build from CSR arrays of NumPy, CuPy or torch; the result lives on their device.

        Args:
            indptr: [num_rows + 1] int32 or int64.
            indices: [nnz] int32 or int64, unsorted and repeated columns allowed; each entry is an edge.
            num_cols: number of columns; None means a square matrix.
            tile: (r, c), r from 1 to 256 and c a multiple of 8 up to 256.

        Raises:
            ValueError: a shape, an offset or a column is wrong; the text names it.
            TypeError: the arrays, or the sizes of the tile, are not integers.
        """
        if not isinstance(tile, tuple) or [type(size) for size in tile] != [int, int]:
            raise TypeError(f"tile: got {tile!r}; two integers (r, c) are needed")
        r, c = tile
        if not (1 <= r <= 256 and 8 <= c <= 256 and c % 8 == 0):
            raise ValueError(f"tile: got {tile}; r from 1 to 256 and c a multiple of 8 up to 256 are allowed")
        xp, (indptr, indices) = array_module(indptr, indices)
        with _on_torch_stream(indptr):
            if num_cols is None:
                num_cols = indptr.size - 1
            check_csr(as_tensor(indptr), as_tensor(indices), num_cols)
            built = build_bsb_arrays(xp, indptr, indices, num_cols, tile)
            return cls(
                shape=(indptr.size - 1, num_cols),
                tile=(r, c),
                nnz=indices.size,
                tcb_row_offset=torch.from_dlpack(built.tcb_row_offset),
                col_sparse_to_dense=torch.from_dlpack(built.col_sparse_to_dense),
                bitmap=torch.from_dlpack(built.bitmap),
                row_window_order=torch.from_dlpack(built.row_window_order),
            )

    @classmethod
    def from_graph(cls, graph: Any, tile: Tile = PAPER_TILE, device: torch.device | None = None) -> "BSB":
        """Build from any graph that `csr_pattern` accepts, on `device` (default: the graph's device)."""
        pattern = csr_pattern(graph)
        indptr, indices = pattern.indptr, pattern.indices
        if device is not None:
            indptr, indices = as_tensor(indptr).to(device), as_tensor(indices).to(device)
        return cls.from_csr(indptr, indices, pattern.shape[1], tile)

    @property
    def device(self) -> torch.device:
        return self.bitmap.device

    @property
    def num_row_windows(self) -> int:
        return self.row_window_order.numel()

    @property
    def num_tcbs(self) -> int:
        return self.bitmap.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of the paper's three arrays: 4 (num_row_windows + 1) + 4 bc + brc / 8. The paper's format table counts
        N / r offsets, one fewer. `row_window_order` belongs to the schedule and does not count."""
        arrays = (self.tcb_row_offset, self.col_sparse_to_dense, self.bitmap)
        return sum(array.numel() * array.element_size() for array in arrays)

    def stats(self) -> dict[str, float]:
        """Columns of the paper's data set table, and the counts behind them.

        Returns:
            num_rows, num_cols, nnz, num_row_windows, num_tcbs; tcb_per_rw_mean and _cv over all row windows, empty ones
            included; nnz_per_tcb_mean and _cv over all TCBs. CV is the population standard deviation over the mean.
            The mean and the CV of an empty set are 0.
        """
        popcount = torch.tensor([value.bit_count() for value in range(256)], device=self.device)
        nnz_per_tcb = popcount[self.bitmap.flatten(1).long()].sum(1)
        tcb_mean, tcb_cv = _mean_cv(self.tcb_row_offset.diff())
        nnz_mean, nnz_cv = _mean_cv(nnz_per_tcb)
        return {
            "num_rows": self.shape[0],
            "num_cols": self.shape[1],
            "nnz": self.nnz,
            "num_row_windows": self.num_row_windows,
            "num_tcbs": self.num_tcbs,
            "tcb_per_rw_mean": tcb_mean,
            "tcb_per_rw_cv": tcb_cv,
            "nnz_per_tcb_mean": nnz_mean,
            "nnz_per_tcb_cv": nnz_cv,
        }


def array_module(*arrays: Any) -> tuple[Any, list[Any]]:
    """View NumPy, CuPy or torch integer arrays of one device as NumPy (CPU) or CuPy (GPU) arrays, without a copy.

    Returns:
        (xp, arrays): the module `numpy` or `cupy`, and its arrays.
    """
    views = []
    for array in arrays:
        if isinstance(array, torch.Tensor):
            array = array.detach()
            array = array.numpy() if array.device.type == "cpu" else import_cupy().from_dlpack(array.contiguous())
        elif not hasattr(array, "__cuda_array_interface__"):
            array = np.asarray(array)
        if array.dtype.kind not in "iu" and array.size:
            raise TypeError(f"indptr and indices: got dtype {array.dtype}; int32 and int64 are allowed")
        views.append(array)
    on_gpu = [hasattr(view, "__cuda_array_interface__") for view in views]
    if any(on_gpu) != all(on_gpu):
        raise ValueError("indptr and indices: one is on the CPU and one on a GPU; put both on one device")
    return (import_cupy() if on_gpu[0] else np), views


def _mean_cv(counts: torch.Tensor) -> tuple[float, float]:
    if counts.numel() == 0:
        return 0.0, 0.0
    counts = counts.double()
    mean = counts.mean().item()
    return mean, counts.std(correction=0).item() / mean if mean else 0.0


def _on_torch_stream(array: Any) -> ExitStack:
    """A context in which CuPy uses the array's device, torch's current stream and torch's memory; empty for NumPy."""
    stack = ExitStack()
    if hasattr(array, "__cuda_array_interface__"):
        cupy = import_cupy()
        device = array.device.id
        stack.enter_context(cupy.cuda.Device(device))
        stack.enter_context(cupy.cuda.Stream.from_external(torch.cuda.current_stream(device)))
        stack.enter_context(cupy.cuda.using_allocator(_torch_allocator))
    return stack


def _torch_allocator(num_bytes: int) -> Any:
    """CuPy memory from torch's caching allocator: two pools would starve each other."""
    cupy = import_cupy()
    block = torch.empty(max(num_bytes, 1), dtype=torch.uint8, device=torch.device("cuda", cupy.cuda.Device().id))
    memory = cupy.cuda.UnownedMemory(block.data_ptr(), block.numel(), block)
    return cupy.cuda.MemoryPointer(memory, 0)
