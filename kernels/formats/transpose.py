"""The transpose of a CSR pattern, for the backward pass over columns."""

from dataclasses import dataclass

import torch

from .edges import rows_of_edges


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
    """The transpose of a CSR pattern whose rows and columns ascend. Does not wait for a GPU.

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
