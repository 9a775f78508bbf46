"""Row orders: rows of A that share columns are put into one row window, so that the kernel gathers fewer keys.

`graph.reorder.search` finds one. Columns keep their ids: A[perm, :] with `row_ids = perm` gives the caller's result
in the caller's order.
"""

from dataclasses import dataclass
from typing import Any

import torch

from ..csr import CSRPattern, as_tensor

METHODS = ("none", "communities", "auto")


@dataclass(frozen=True, eq=False)
class RowOrder:
    """An order of the rows of A, and its savings.

    Attributes:
        perm: [num_rows] int32 on the CPU, the row at each position; None for the natural order.
        method: "none" or "communities", the method that made `perm`.
        seconds: time of the search in seconds, without the compilation at the first call.
        columns_before, columns_after: gathered columns (distinct columns summed over all 16-row windows) in natural
            order and in `perm`.
        tiles_before, tiles_after: KV tiles (16 columns, rounded up per window) in natural order and in `perm`.
    """

    perm: torch.Tensor | None
    method: str
    seconds: float
    columns_before: int
    columns_after: int
    tiles_before: int
    tiles_after: int


def check_method(method: str) -> None:
    """Raise a ValueError unless `method` is one of METHODS."""
    if method not in METHODS:
        raise ValueError(f"reorder: got {method!r}; allowed are {', '.join(METHODS)}, and a permutation of the rows")


def permute_rows(pattern: CSRPattern, perm: Any) -> CSRPattern:
    """A[perm, :]: row i is row perm[i] of the valid pattern A; columns keep their ids and their order in a row.

    Args:
        pattern: on any device.
        perm: [num_rows] integers of torch, NumPy or CuPy, a permutation.

    Returns:
        A pattern of torch tensors on the device of `pattern`: indptr [num_rows + 1] int64, indices [nnz] of unchanged
        type, and edge_ids [nnz], the edge indices in `pattern`.

    Raises:
        ValueError: `perm` is no permutation of the rows; the text names the first wrong entry.
    """
    indptr, indices = as_tensor(pattern.indptr).long(), as_tensor(pattern.indices)
    perm = as_tensor(perm).to(indptr.device).long()
    check_permutation("perm", perm, indptr.numel() - 1)
    starts = indptr[perm]
    counts = indptr[perm + 1] - starts
    permuted = torch.nn.functional.pad(torch.cumsum(counts, 0), (1, 0))
    shift = torch.repeat_interleave(starts - permuted[:-1], counts, output_size=indices.numel())
    edge = shift + torch.arange(indices.numel(), device=indptr.device)
    edge_ids = edge if pattern.edge_ids is None else as_tensor(pattern.edge_ids)[edge]
    return CSRPattern(permuted, indices[edge], pattern.shape, edge_ids)


def check_permutation(name: str, perm: torch.Tensor, num_rows: int) -> None:
    """Raise a TypeError or ValueError unless `perm` has each number from 0 to num_rows - 1 once, as integers."""
    if perm.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name}: got {perm.dtype}; torch.int32 and torch.int64 are allowed")
    if perm.shape != (num_rows,):
        raise ValueError(f"{name}: got shape {tuple(perm.shape)}; [{num_rows}], the number of rows, is needed")
    outside = torch.nonzero((perm < 0) | (perm >= num_rows)).flatten()
    if outside.numel():
        at = int(outside[0])
        raise ValueError(f"{name}: entry {at} is {int(perm[at])}; allowed are 0 to {num_rows - 1}")
    repeated = torch.nonzero(torch.bincount(perm, minlength=num_rows) > 1).flatten()
    if repeated.numel():
        raise ValueError(f"{name}: row {int(repeated[0])} occurs more than once; every row must occur once")
