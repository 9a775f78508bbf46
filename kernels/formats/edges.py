"""CSR and COO views of a graph without repeated edges, for backends that walk edges."""

from typing import Any

import torch

from .bsb import BSB


def distinct_csr(graph: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(indptr [num_rows + 1] int64, indices [nnz] int32) on `device`, columns ascending in each row, checked."""
    bsb = graph.to(device) if isinstance(graph, BSB) else BSB.from_graph(graph, device=device)
    indptr, indices = bsb.to_csr()
    return indptr, indices.contiguous()


def rows_of_edges(indptr: torch.Tensor) -> torch.Tensor:
    """[nnz] int64: the row of each edge of a CSR pattern."""
    rows = torch.arange(indptr.numel() - 1, device=indptr.device)
    return torch.repeat_interleave(rows, indptr.diff())
