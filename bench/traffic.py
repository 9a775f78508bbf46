"""Bytes that sparse attention moves according to the gather model.

A kernel that works on 16 queries at a time gathers, for each row window, one K row and one V row per column with a
nonzero (paper, section "Sparse Format for Tensor Cores"). Rows are not reused across windows:

    gathered   = sum over windows (distinct columns) * 2 * d * (bytes of an element)    from L2 or memory
    compulsory = N * d * (bytes of an element of Q) + N * d * (bytes of an element of O)    from and to memory

with d the columns of all heads. Where G query heads share a KV head, gathered rows have the columns of the KV heads,
and a window is 16 / G queries with all heads of a group.

Padding of blocks, index arrays and columns gathered twice are left out: they belong to a kernel, not to the problem.
"""

import torch

from bench.baselines.bsb import BSB, PAPER_TILE
from fused3s.graph.csr import CSRPattern
from fused3s.graph.edges import rows_of_edges


def gathered_columns(pattern: CSRPattern, group: int = 1) -> int:
    """Number of distinct columns of each row window, summed over the windows; a row is `group` rows of a window."""
    if group > 1:
        pattern = _each_row_repeated(pattern, group)
    bsb = BSB.from_graph(pattern, PAPER_TILE)
    slots = bsb.tcb_row_offset.diff().long() * PAPER_TILE[1]
    starts_window = torch.zeros(bsb.col_sparse_to_dense.numel() + 1, dtype=torch.bool, device=bsb.device)
    starts_window[torch.cumsum(slots, 0) - slots] = True  # of an empty window: start of the next one, or the end
    # Ascending within a window; padding repeats the last column.
    differs = torch.ones_like(starts_window)
    differs[1:-1] = bsb.col_sparse_to_dense.diff() != 0
    return int((differs | starts_window)[:-1].sum())


def _each_row_repeated(pattern: CSRPattern, times: int) -> CSRPattern:
    """The pattern with every row `times` times, one behind the other."""
    counts = pattern.indptr.diff().repeat_interleave(times)
    indptr = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    row = rows_of_edges(indptr)
    place = torch.arange(len(row), device=row.device) - indptr[row] + pattern.indptr[row // times]
    return CSRPattern(indptr, pattern.indices[place], (len(counts), pattern.shape[1]))
