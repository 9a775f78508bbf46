"""`csr_unfused`: separate SDDMM, softmax and SpMM over CSR with torch's sparse routines (cuSPARSE on a GPU).

The baseline without fusion and tensor cores, in place of DGL, whose release has no CUDA. Scores and weights are
materialised in CSR. On a GPU `torch.sparse.sampled_addmm` is cusparseSDDMM and `torch.sparse.mm` is cusparseSpMM. Both
take float32 and float64 only, so 16-bit inputs are cast to float32 at each call. Heads run sequentially.

Both products are autograd functions whose gradients use the same two products. torch's own gradients would build dense
matrices on the CPU and transpose A at every call.
"""

import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch

from ..errors import UnsupportedGraphError
from ..graph.edges import canonical_csr, is_distinct, rows_of_edges
from ..terms.edge_data import BoundEdges, edge_products, transform_scores
from ..torch_side.once_differentiable import refuse_transforms
from .base import Backend, Call, InputSpec, dropout_factors
from .segments import Segments, SegmentSum, softmax


@dataclass(frozen=True, eq=False)
class CSR:
    """A: indptr [num_rows + 1], indices and row [nnz], int64. Repeated edges are separate entries; MKL supports them,
    cuSPARSE does not. With a backward pass also A^T, int64: column_offsets [num_cols + 1], column_rows [nnz] and
    column_edges [nnz], the index of each edge in `indices`."""

    indptr: torch.Tensor
    indices: torch.Tensor
    row: torch.Tensor
    shape: tuple[int, int]
    column_offsets: torch.Tensor | None = None
    column_rows: torch.Tensor | None = None
    column_edges: torch.Tensor | None = None

    def matrix(self, values: torch.Tensor) -> torch.Tensor:
        """[num_rows, num_cols] torch.sparse_csr with these values [nnz]."""
        return _sparse_csr(self.indptr, self.indices, values, self.shape)

    def transposed_matrix(self, values: torch.Tensor) -> torch.Tensor:
        """The transpose of `matrix`."""
        return _sparse_csr(self.column_offsets, self.column_rows, values[self.column_edges], self.shape[::-1])

    def with_transpose(self) -> "CSR":
        if self.column_offsets is not None:
            return self
        columns, edges = torch.sort(self.indices, stable=True)
        offsets = torch.searchsorted(columns, torch.arange(self.shape[1] + 1, device=columns.device))
        return replace(self, column_offsets=offsets, column_rows=self.row[edges], column_edges=edges)


def _sparse_csr(
    indptr: torch.Tensor, indices: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.filterwarnings(
            "ignore", "Sparse (CSR tensor support is in beta state|invariant checks are implicitly)"
        )
        return torch.sparse_csr_tensor(indptr, indices, values, shape, check_invariants=False)


class CSRUnfusedBackend(Backend):
    name = "csr_unfused"
    summary = "SDDMM, softmax and SpMM over CSR as separate torch calls, cuSPARSE on a GPU; float32 and float64"
    computes_in = torch.float32
    data_type = CSR
    head_by_head = True
    takes_edges = True
    takes_dropout = True
    traceable = False  # torch.compile supports neither torch's sparse products nor segment_reduce

    def unavailable(self, device: torch.device) -> str | None:
        if device.type not in ("cpu", "cuda"):
            return f"torch's sparse products run on the CPU and on CUDA, and these tensors are on {device}"
        if device.type == "cuda" and not torch.cuda.is_available():
            return "no NVIDIA GPU found, or this PyTorch has no CUDA"
        return None

    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> CSR:
        indptr, indices = canonical_csr(graph, device)
        if device.type == "cuda" and indices.numel() and not is_distinct(indptr, indices, graph.shape):
            raise UnsupportedGraphError(
                "unsupported: the graph repeats edges, which cuSPARSE does not add up; backend='scatter' counts each"
            )
        data = CSR(indptr, indices.long(), rows_of_edges(indptr), graph.shape)
        return data.with_transpose() if inputs.backward else data

    def attend(self, data: CSR, call: Call) -> torch.Tensor:
        refuse_transforms(self.name)
        query, key, value, scale, out_dtype, _, edges = call.without_halves()
        if torch.is_grad_enabled() and (key.requires_grad or value.requires_grad):
            data = data.with_transpose()
        pattern = data.matrix(query.new_zeros(data.indices.numel()))
        rows, factors = Segments(data.row, data.indptr, None), None
        if edges is not None and edges.dropout is not None:
            factors = dropout_factors(edges.dropout, data.row, data.indices, query)
        heads = []
        for head, (q, k, v) in enumerate(zip(query.unbind(1), key.unbind(1), value.unbind(1), strict=True)):
            score = _score(data, pattern, q, k, scale, edges, head)
            weight = softmax(score, rows)
            if factors is not None:
                weight = weight * factors[:, head]
            output = _WeightedSum.apply(weight, v, data, pattern, False)
            if edges is not None and edges.value_weight is not None:
                weighted = weight[:, None] * edges.features
                output = output + SegmentSum.apply(weighted, rows) @ edges.value_weight[head].t()
            heads.append(output)
        return torch.stack(heads, 1).to(out_dtype)


def _score(
    data: CSR,
    pattern: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    scale: float,
    edges: BoundEdges | None,
    head: int,
) -> torch.Tensor:
    """[nnz]: the score of each edge for one head; query, key: [N, d]."""

    def product(query: torch.Tensor) -> torch.Tensor:
        return _SampledProduct.apply(query, key, data, pattern, scale)

    if edges is not None and edges.additive_weight is not None:
        of_head = replace(edges, additive_weight=edges.additive_weight[head])
        keys = key[data.indices]
        if edges.key_weight is not None:
            keys = keys + edges.features @ edges.key_weight[head].t()
        score = edge_products(query[data.row], keys, of_head) * scale
    elif edges is None or edges.type_weight is edges.key_factor is None:
        score = product(query)
    elif edges.key_factor is not None:  # one product of all edges for each feature
        score = sum(
            product(query * weight) * edges.features[:, r] for r, weight in enumerate(edges.key_factor[:, head])
        )
    else:  # one product of all edges for each type
        score = query.new_zeros(data.row.numel())
        for kind, weight in enumerate(edges.type_weight[:, head]):
            score = torch.where(edges.types == kind, product(query * weight), score)
    if edges is None:
        return score
    if edges.key_weight is not None and edges.additive_weight is None:
        projected = query @ edges.key_weight[head] * scale  # [num_rows, r]
        score = score + (projected[data.row] * edges.features).sum(-1)
    return transform_scores(score, edges, lambda x: x[data.row], lambda x: x[data.indices], head)


class _SampledProduct(torch.autograd.Function):
    """scale * <query_i, key_j> of each edge [nnz]."""

    @staticmethod
    def forward(query: torch.Tensor, key: torch.Tensor, data: CSR, pattern: torch.Tensor, scale: float) -> torch.Tensor:
        if data.row.numel() > len(query) * len(key):  # repeated edges: sampled_addmm refuses nnz > rows * columns
            return scale * (query @ key.t())[data.row, data.indices]
        query, key = (each.as_subclass(torch.Tensor) for each in (query, key))  # no sparse tensor of their class
        # beta=0 leaves only the sampled product; cuSPARSE reads K as stored, transposed.
        return torch.sparse.sampled_addmm(pattern, query, key.t(), beta=0.0, alpha=scale).values()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        query, key, ctx.data, ctx.pattern, ctx.scale = inputs
        ctx.save_for_backward(query, key)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key = ctx.saved_tensors
        grad = grad * ctx.scale
        of_query, of_key = ctx.needs_input_grad[:2]
        return (
            _WeightedSum.apply(grad, key, ctx.data, ctx.pattern, False) if of_query else None,
            _WeightedSum.apply(grad, query, ctx.data, ctx.pattern, True) if of_key else None,
            *(None,) * 3,
        )


class _WeightedSum(torch.autograd.Function):
    """[rows, d]: sum over the edges of each row of weight [nnz] times value [N, d]; transposed: of each column."""

    @staticmethod
    def forward(
        weight: torch.Tensor, value: torch.Tensor, data: CSR, pattern: torch.Tensor, transposed: bool
    ) -> torch.Tensor:
        matrix = data.transposed_matrix(weight) if transposed else data.matrix(weight)
        return torch.sparse.mm(matrix, value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        weight, value, ctx.data, ctx.pattern, ctx.transposed = inputs
        ctx.save_for_backward(weight, value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        weight, value = ctx.saved_tensors
        ends = (value, grad) if ctx.transposed else (grad, value)
        of_weight, of_value = ctx.needs_input_grad[:2]
        return (
            _SampledProduct.apply(*ends, ctx.data, ctx.pattern, 1.0) if of_weight else None,
            _WeightedSum.apply(weight, grad, ctx.data, ctx.pattern, not ctx.transposed) if of_value else None,
            *(None,) * 3,
        )


BACKENDS = (CSRUnfusedBackend(),)
