"""CSR and COO forms of a graph, for backends that iterate over edges."""

from typing import Any

import torch

from .csr import as_tensor, check_csr, csr_pattern


def canonical_csr(graph: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Checked (indptr [num_rows + 1] int64, indices [nnz] int32) on `device`; copies, so a plan may keep them.

    Edges are in CSR order (`graph.edge_order`): in each row first copies by ascending column, then second copies, and
    so on.
    """
    pattern = csr_pattern(graph)
    indptr, indices = (as_tensor(array).to(device) for array in (pattern.indptr, pattern.indices))
    if not is_distinct(indptr, indices, pattern.shape):
        check_csr(indptr, indices, pattern.shape[1])
        row = rows_of_edges(indptr, indices.numel())
        indices = indices[csr_order(row, indices.long(), pattern.shape[1])]
    return indptr.to(torch.int64, copy=True), indices.to(torch.int32, copy=True)


def is_distinct(indptr: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int]) -> bool:
    """Whether the arrays are a valid CSR of this shape with strictly ascending columns in each row.

    Waits for a GPU once.
    """
    nnz = indices.numel()
    one_dimensional = indptr.dim() == indices.dim() == 1 and indptr.numel() == shape[0] + 1
    signed = {indptr.dtype, indices.dtype} <= {torch.int32, torch.int64}
    if not (one_dimensional and signed and nnz):
        return False
    starts_row = torch.zeros(nnz + 1, dtype=torch.bool, device=indices.device)
    starts_row[indptr.long().clamp(0, nnz)] = True
    is_csr = (indptr[0] == 0) & (indptr[-1] == nnz) & (indptr[1:] >= indptr[:-1]).all()
    in_range = (indices.min() >= 0) & (indices.max() < shape[1])
    return bool(is_csr & in_range & ((indices[1:] > indices[:-1]) | starts_row[1:nnz]).all())


def rows_of_edges(indptr: torch.Tensor, num_edges: int | None = None) -> torch.Tensor:
    """[nnz] int64: the row of each edge of a CSR pattern. Waits for a GPU unless `num_edges` is given."""
    rows = torch.arange(indptr.numel() - 1, device=indptr.device)
    return torch.repeat_interleave(rows, indptr.diff(), output_size=num_edges)


def csr_order(row: torch.Tensor, col: torch.Tensor, num_cols: int) -> torch.Tensor:
    """[E] int64: the permutation that sorts the edges (row, col), [E] int64 each, into CSR order. No wait for a GPU."""
    key, edge = torch.sort(row * num_cols + col, stable=True)  # below 2^62: both dimensions are below 2^31
    starts_run = torch.ones(len(key), dtype=torch.bool, device=key.device)
    starts_run[1:] = key[1:] != key[:-1]
    if not key.is_cuda and bool(starts_run.all()):
        return edge
    place = torch.arange(len(key), device=key.device)
    copy = place - torch.where(starts_run, place, 0).cummax(0).values
    by_copy = torch.sort(key // max(num_cols, 1) * len(key) + copy, stable=True).indices
    return edge[by_copy]
