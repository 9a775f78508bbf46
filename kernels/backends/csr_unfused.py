"""`csr_unfused`: SDDMM, softmax and SpMM one after the other over CSR with torch's sparse routines, cuSPARSE on a GPU.

The cost of message passing without fusion and tensor cores: the baseline where DGL has no CUDA. S and the weights are
materialised in CSR. On a GPU `torch.sparse.sampled_addmm` is cusparseSDDMM and `torch.sparse.mm` is
cusparseSpMM; both take float32 and float64, so 16-bit inputs are converted to float32 at each call. Heads run one after
the other.
"""

import warnings
from dataclasses import dataclass
from typing import Any

import torch

from ..edge_data import EdgeTerms
from ..formats.edges import distinct_csr, rows_of_edges
from .base import Backend, InputSpec


@dataclass(frozen=True, eq=False)
class CSR:
    """A without repeated edges: indptr [num_rows + 1], indices and row [nnz], int64."""

    indptr: torch.Tensor
    indices: torch.Tensor
    row: torch.Tensor
    shape: tuple[int, int]

    def matrix(self, values: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_cols] torch.sparse_csr with these values [nnz]."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Sparse CSR tensor support is in beta state")
            return torch.sparse_csr_tensor(self.indptr, self.indices, values, self.shape, check_invariants=False)


class CSRUnfusedBackend(Backend):
    name = "csr_unfused"
    summary = "SDDMM, softmax and SpMM over CSR as separate torch calls, cuSPARSE on a GPU; float32 and float64"
    data_type = CSR
    takes_edges = True

    def unavailable(self, device: torch.device) -> str | None:
        if device.type not in ("cpu", "cuda"):
            return f"torch's sparse products run on the CPU and on CUDA, and these tensors are on {device}"
        if device.type == "cuda" and not torch.cuda.is_available():
            return "no NVIDIA GPU found, or this PyTorch has no CUDA"
        return None

    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> CSR:
        indptr, indices = distinct_csr(graph, device)
        return CSR(indptr, indices.long(), rows_of_edges(indptr), graph.shape)

    def attend(
        self,
        data: CSR,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        out_dtype: torch.dtype,
        lse: torch.Tensor | None = None,
        edges: EdgeTerms | None = None,
    ) -> torch.Tensor:
        if query.dtype.itemsize == 2:
            query, key, value = query.float(), key.float(), value.float()
            edges = None if edges is None else edges.to(torch.float32)
        pattern = data.matrix(query.new_zeros(data.indices.numel()))
        heads = []
        for head, (q, k, v) in enumerate(zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)):
            score = _score(data, pattern, q, k, scale, edges, head)
            weight = _softmax(score, data.indptr, data.row)
            output = torch.sparse.mm(data.matrix(weight), v)
            if edges is not None and edges.value_weight is not None:
                weighted = weight[:, None] * edges.features
                summed = torch.segment_reduce(weighted, "sum", offsets=data.indptr, unsafe=True)  # [num_rows, r]
                output = output + summed @ edges.value_weight[head].t()
            heads.append(output)
        return torch.stack(heads, 1).to(out_dtype)


def _score(
    data: CSR,
    pattern: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    edges: EdgeTerms | None,
    head: int,
) -> torch.Tensor:
    """[nnz]: the score of each edge for one head; query, key: [N, d]."""

    def product(query: torch.Tensor) -> torch.Tensor:
        # beta=0 leaves only the sampled product; cuSPARSE reads K as stored, transposed.
        return torch.sparse.sampled_addmm(pattern, query, key.t(), beta=0.0, alpha=scale).values()

    if edges is None or edges.type_weight is None:
        score = product(query)
    else:  # one product of all edges for each type
        score = query.new_zeros(data.row.numel())
        for kind, weight in enumerate(edges.type_weight[:, head]):
            score = torch.where(edges.types == kind, product(query * weight), score)
    if edges is None:
        return score
    if edges.key_weight is not None:
        projected = query @ edges.key_weight[head] * scale  # [num_rows, r]
        score = score + (projected[data.row] * edges.features).sum(-1)
    if edges.multiplier is not None:
        score = score * _of_head(edges.multiplier, head)
    if edges.bias is not None:
        score = score + _of_head(edges.bias, head)
    return score if edges.clamp is None else score.clamp(-edges.clamp, edges.clamp)


def _of_head(tensor: torch.Tensor, head: int) -> torch.Tensor:
    """[nnz] of [nnz, H], or of [nnz, 1] that all heads share."""
    return tensor[:, head if tensor.shape[1] > 1 else 0]


def _softmax(score: torch.Tensor, indptr: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    """Softmax over each row's run of `score` [nnz]; a row with only -inf scores gets zeros."""
    maximum = torch.segment_reduce(score, "max", offsets=indptr, unsafe=True)
    maximum = torch.where(maximum == -torch.inf, 0.0, maximum)
    weight = torch.exp(score - maximum[row])
    total = torch.segment_reduce(weight, "sum", offsets=indptr, unsafe=True)
    return weight / torch.where(total == 0, 1.0, total)[row]
