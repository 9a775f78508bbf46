"""CSR and COO forms of a graph, for backends that iterate over edges."""

from typing import Any

import torch

from .bsb import BSB
from .csr import CSRPattern, as_tensor


def canonical_csr(graph: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Checked (indptr [num_rows + 1] int64, indices [nnz] int32) on `device`; copies, so a plan may keep them.

    Edges are in CSR order (`formats.edge_order`): in each row first copies by ascending column, then second copies, and
    so on.
    """
    if isinstance(graph, CSRPattern):
        indptr, indices = (as_tensor(array).to(device) for array in (graph.indptr, graph.indices))
        if is_distinct(indptr, indices, graph.shape):
            return indptr.to(torch.int64, copy=True), indices.to(torch.int32, copy=True)
    # BSB sorts and checks. The way back to CSR takes over 100 bytes per edge.
    bsb = graph.to(device) if isinstance(graph, BSB) else BSB.from_graph(graph, device=device)
    indptr, indices = bsb.to_csr()
    return indptr, indices.contiguous()


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
