"""The transpose of a CSR pattern, for the backward pass over columns."""

from dataclasses import dataclass

import torch

from .edges import rows_of_edges


@dataclass(frozen=True, eq=False)
class TransposedCSR:
    """A^T of a pattern without repeated edges.

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
    """The transpose of a CSR pattern whose rows and columns ascend.

    Args:
        indptr: [num_rows + 1] int64.
        indices: [nnz] int32.
        row_ids: [num_rows] int32, row of A of each row of the pattern; None for rows in their own order.
    """
    edge = torch.sort(indices, stable=True).indices  # rows ascend in a column, since they do in CSR order
    counts = torch.bincount(indices, minlength=num_cols)
    transposed = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    rows = rows_of_edges(indptr)[edge]
    if row_ids is not None:
        rows = row_ids.to(rows.device)[rows]
    return TransposedCSR(transposed, rows.int(), edge.int())


def is_symmetric(indptr: torch.Tensor, indices: torch.Tensor, transposed: TransposedCSR) -> bool:
    """Whether A equals A^T. Waits for the GPU."""
    return torch.equal(indptr, transposed.indptr) and torch.equal(indices, transposed.indices)
