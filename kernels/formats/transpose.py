"""The transpose of a CSR pattern, for the backward pass over columns."""

from dataclasses import dataclass

import torch

from .edges import rows_of_edges


@dataclass(frozen=True, eq=False)
class TransposedCSR:
    """A^T of a pattern.

    Attributes:
        indptr: [num_cols + 1] int64.
        indices: [nnz] int32, row of A of each edge; in each column the rows ascend, then once more those of the edges
            that repeat one, and so on.
        edge: [nnz] int32, place of each edge in the CSR of A.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    edge: torch.Tensor


def transpose_csr(
    indptr: torch.Tensor, indices: torch.Tensor, num_cols: int, row_ids: torch.Tensor | None = None
) -> TransposedCSR:
    """The transpose of a CSR pattern in the order of `canonical_csr`. Does not wait for a GPU.

    Args:
        indptr: [num_rows + 1] int64.
        indices: [nnz] int32.
        row_ids: [num_rows] int32, row of A of each row of the pattern; None for rows in their own order.
    """
    rows = rows_of_edges(indptr, len(indices))
    if row_ids is None:  # rows ascend already
        columns, edge = torch.sort(indices, stable=True)
    else:
        rows = row_ids.to(rows.device).long()[rows]
        by_row = torch.sort(rows, stable=True).indices
        columns, order = torch.sort(indices[by_row], stable=True)
        edge = by_row[order]
    rows = rows[edge]
    starts = torch.ones(len(edge), dtype=torch.bool, device=edge.device)
    starts[1:] = (rows.diff() != 0) | (columns.diff() != 0)
    place = torch.arange(len(edge), device=edge.device)
    copy = place - torch.where(starts, place, 0).cummax(0).values  # neighbours repeat an edge
    by_copy = torch.sort(columns.long() * len(edge) + copy, stable=True).indices
    transposed = torch.searchsorted(columns, torch.arange(num_cols + 1, dtype=columns.dtype, device=columns.device))
    return TransposedCSR(transposed, rows[by_copy].int(), edge[by_copy].int())
