"""CSR and COO views of a graph without repeated edges, for backends that walk edges."""

from typing import Any

import torch

from .bsb import BSB
from .csr import CSRPattern, as_tensor


def distinct_csr(graph: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(indptr [num_rows + 1] int64, indices [nnz] int32) on `device`, columns ascending in each row, checked.

    Both are copies, which a plan may keep.
    """
    if isinstance(graph, CSRPattern):
        indptr, indices = (as_tensor(array).to(device) for array in (graph.indptr, graph.indices))
        if is_distinct(indptr, indices, graph.shape):
            return indptr.to(torch.int64, copy=True), indices.to(torch.int32, copy=True)
    # BSB sorts, drops repeated edges, and names what is wrong. It takes over 100 bytes an edge on the way back to CSR.
    bsb = graph.to(device) if isinstance(graph, BSB) else BSB.from_graph(graph, device=device)
    indptr, indices = bsb.to_csr()
    return indptr, indices.contiguous()


def is_distinct(indptr: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int]) -> bool:
    """Whether the arrays are CSR of this shape with strictly ascending columns in each row; False for damaged ones."""
    nnz = indices.numel()
    one_dimensional = indptr.dim() == indices.dim() == 1 and indptr.numel() == shape[0] + 1
    signed = {indptr.dtype, indices.dtype} <= {torch.int32, torch.int64}
    if not (one_dimensional and signed and nnz):
        return False
    if int(indptr[0]) != 0 or int(indptr[-1]) != nnz or bool((indptr[1:] < indptr[:-1]).any()):
        return False
    if int(indices.min()) < 0 or int(indices.max()) >= shape[1]:
        return False
    ascends = indices[1:] > indices[:-1]
    starts = indptr[1:-1]
    starts = starts[(starts > 0) & (starts < nnz)].long()  # first edges of rows, but for the very first
    ascends[starts - 1] = True
    return bool(ascends.all())


def rows_of_edges(indptr: torch.Tensor) -> torch.Tensor:
    """[nnz] int64: the row of each edge of a CSR pattern."""
    rows = torch.arange(indptr.numel() - 1, device=indptr.device)
    return torch.repeat_interleave(rows, indptr.diff())
