"""The transpose of a CSR pattern, for the backward pass over columns."""

from dataclasses import dataclass

import torch

from .edges import is_distinct, rows_of_edges
from .gpu_reverse import find_reverse


@dataclass(frozen=True, eq=False)
class TransposedCSR:
    """A^T of a pattern.

    Attributes:
        indptr: [num_cols + 1] int64.
        indices: [nnz] int32, row of A of each edge; columns of A, then places in the CSR of A ascending.
        edge: [nnz] int32, place of each edge in the CSR of A.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    edge: torch.Tensor


def transpose_csr(
    indptr: torch.Tensor, indices: torch.Tensor, num_cols: int, row_ids: torch.Tensor | None = None
) -> TransposedCSR:
    """The transpose of a CSR pattern. Does not wait for a GPU.

    Args:
        indptr: [num_rows + 1] int64.
        indices: [nnz] int32.
        row_ids: [num_rows] int32, row of A of each row of the pattern; None for rows in their own order.
    """
    columns, edge = torch.sort(indices, stable=True)  # rows ascend in a column, since they do in CSR order
    transposed = torch.searchsorted(columns, torch.arange(num_cols + 1, dtype=columns.dtype, device=columns.device))
    rows = rows_of_edges(indptr, len(indices))[edge]
    if row_ids is not None:
        rows = row_ids.to(rows.device)[rows]
    return TransposedCSR(transposed, rows.int(), edge.int())


def find_transpose(
    indptr: torch.Tensor, indices: torch.Tensor, num_cols: int, row_ids: torch.Tensor | None = None
) -> tuple[TransposedCSR, bool]:
    """The transpose, and whether the pattern is symmetric; False with `row_ids`. Waits for a GPU.

    On a GPU a symmetric pattern without repeated edges and its transpose share arrays.

    Args:
        indptr, indices, row_ids: as for `transpose_csr`; contiguous.
    """
    may_be_symmetric = row_ids is None and len(indptr) == num_cols + 1
    if may_be_symmetric and indptr.is_cuda and is_distinct(indptr, indices, (num_cols, num_cols)):
        reverse = find_reverse(indptr, indices)
        if reverse is not None:
            return TransposedCSR(indptr, indices, reverse), True
        may_be_symmetric = False
    transposed = transpose_csr(indptr, indices, num_cols, row_ids)
    return transposed, may_be_symmetric and is_symmetric(indptr, indices, transposed)


def is_symmetric(indptr: torch.Tensor, indices: torch.Tensor, transposed: TransposedCSR) -> bool:
    """Whether A equals A^T."""
    return torch.equal(indptr, transposed.indptr) and torch.equal(indices, transposed.indices)
