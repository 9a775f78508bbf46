"""Bytes that a sparse attention kernel moves at least, and its arithmetic: the yardsticks of the roofline.

A kernel that works on 16 queries at a time gathers, for each row window of 16 rows, the K row and the V row of each
column in which the window has a nonzero (paper, section "Sparse Format for Tensor Cores"):

    gathered   = sum over windows (distinct columns) * 2 * d * (bytes of an element)    from L2 or memory
    compulsory = N * d * (bytes of an element of Q) + N * d * (bytes of an element of O)    from and to memory
    FLOP       = 4 * d * nnz * H: a multiplication and an addition an edge and dimension, in Q K^T and in P V

Padding of blocks, index arrays and columns gathered twice are a kernel's own and not in these numbers. FLOP counts
edges and not slots of blocks, for every kernel.
"""

import torch

import kernels
from kernels.formats.bsb import PAPER_TILE
from kernels.formats.csr import CSRPattern


def gathered_columns(pattern: CSRPattern) -> int:
    """Distinct columns of each 16-row window, summed over the windows."""
    bsb = kernels.BSB.from_graph(pattern, PAPER_TILE)
    slots = bsb.tcb_row_offset.diff().long() * PAPER_TILE[1]
    starts_window = torch.zeros(bsb.col_sparse_to_dense.numel() + 1, dtype=torch.bool, device=bsb.device)
    starts_window[torch.cumsum(slots, 0) - slots] = True  # an empty window names the next one's start, or the end
    # Ascending within a window; slots that pad it repeat the last column.
    differs = torch.ones_like(starts_window)
    differs[1:-1] = bsb.col_sparse_to_dense.diff() != 0
    return int((differs | starts_window)[:-1].sum())


def gathered_bytes(columns: int, dim: int, dtype: torch.dtype) -> int:
    return 2 * columns * dim * dtype.itemsize


def compulsory_bytes(num_rows: int, dim: int, dtype: torch.dtype, out_dtype: torch.dtype) -> int:
    return num_rows * dim * (dtype.itemsize + out_dtype.itemsize)


def flop(nnz: int, dim: int, heads: int = 1) -> int:
    return 4 * dim * nnz * heads
