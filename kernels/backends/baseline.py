"""What the baseline back ends share: their views of a graph, and a kernel instance."""

from dataclasses import dataclass
from typing import Any

import torch

from ..formats.bsb import BSB
from ..runtime.jit import cpp_name


@dataclass(frozen=True)
class KernelInstance:
    """One instance of a kernel template: `arguments` are its template arguments, in the source's order."""

    source: str
    function: str
    arguments: tuple[torch.dtype | bool | int, ...]

    @property
    def name(self) -> str:
        return cpp_name(self.function, *self.arguments)


def csr_without_duplicates(graph: Any, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """(indptr [num_rows + 1] int64, indices [nnz] int32) on `device`, columns ascending in each row, checked."""
    bsb = graph.to(device) if isinstance(graph, BSB) else BSB.from_graph(graph, device=device)
    indptr, indices = bsb.to_csr()
    return indptr, indices.contiguous()


def rows_of_edges(indptr: torch.Tensor) -> torch.Tensor:
    """[nnz] int64: the row of each edge of a CSR pattern."""
    rows = torch.arange(indptr.numel() - 1, device=indptr.device)
    return torch.repeat_interleave(rows, indptr.diff())
