"""Inputs of the model: all tensors that a forward pass reads, taken from a DGLGraph once and moved to the device.

The forward pass does not touch the DGLGraph, which may be unable to leave the CPU (DGL 2 on PyPI has no CUDA).
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fused3s import BoundEdges
from fused3s.graph.csr import CSRPattern
from fused3s.graph.edge_order import EdgeOrder
from fused3s.terms.edge_data import scored_edges
from fused3s.terms.score_term import whole_expression


class Attention(Protocol):
    """Sparse attention over one graph, such as the plan that `fused3s.plan_attention(graph, ...)` returns.

    q, k, v: [N, H, head_dim], strided views with a contiguous last dimension. Returns [N, H, head_dim] in out_dtype;
    rows without in-edges are zero. options: `edges` and `dropout` of a plan, from models that have them.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, out_dtype: torch.dtype | None, **options: Any
    ) -> Tensor: ...


@dataclass(frozen=True)
class EdgeInputs:
    """The distinct edges of a graph in the order of the plan's format, so that a pass does not sort them.

    Attributes:
        features: [nnz, F] in the model's dtype, or [nnz, C] int64 for categorical columns.
        source, target: [nnz] int64, key and query of each edge.
        order: edge order of the plan.
    """

    features: Tensor
    source: Tensor
    target: Tensor
    order: EdgeOrder

    def bind_bias(self, bias: Tensor, clamp: float | None = None) -> BoundEdges:
        """A bias [nnz, H] and a clamp as the argument `edges` of the plan. Unlike `AttentionPlan.bind_edges` this
        neither checks nor waits, so a CUDA graph can capture it."""
        score = whole_expression(None, has_multiplier=False, has_bias=True, has_clamp=clamp is not None)
        numbers = () if clamp is None else (clamp,)
        return scored_edges(self.order, score, numbers, edge_values=bias.unsqueeze(2))


@dataclass(frozen=True)
class GraphInputs:
    """One graph, or a batch as one block-diagonal graph, on the device of the model.

    Attributes:
        features: [N, F] in the model's dtype, or [N, C] int64 for categorical columns.
        aligned_features: [N, F'], float features padded with zero columns to a multiple of 16 bytes; `features` is a
            view of it. None for categorical features.
        attention: attention over the edges of this graph.
        encoding: [N, k] Laplacian positional encoding in the model's dtype, or None.
        nodes: [N] int64, 0 .. N - 1: node ids, contiguous for each graph of the batch.
        graph_starts: [G] int64, first node of each graph.
        edges: edge inputs of models with edge features, else None.
        random_walk: [N, k] random-walk encoding in the model's dtype, or None.
        row_weights: as of `data.batches.GraphBatch`, for batch norm; None: no row is padding.
    """

    features: Tensor
    aligned_features: Tensor | None
    attention: Attention
    encoding: Tensor | None
    nodes: Tensor
    graph_starts: Tensor
    edges: EdgeInputs | None = None
    random_walk: Tensor | None = None
    row_weights: Tensor | None = None


def pattern_of(batch: Any) -> CSRPattern:
    """The adjacency pattern of a batch as of `GraphModel.prepare_batch`."""
    return CSRPattern(batch.indptr, batch.col, (len(batch.features),) * 2)


def checked_features(data: Any, name: str, rows: str) -> Tensor:
    """The checked "feat" of ndata or edata; raises a ValueError."""
    features = data.get("feat")
    if features is None or features.dim() != 2:
        got = "none" if features is None else f"shape {tuple(features.shape)}"
        raise ValueError(f'graph: {name}["feat"] of shape [{rows}, columns] is needed; got {got}')
    if not features.is_floating_point() and features.dtype != torch.int64:
        raise ValueError(f'graph: {name}["feat"] is {features.dtype}; floats or int64 (categorical) are needed')
    return features


def aligned_columns(matrix: Tensor) -> Tensor:
    """Pad [rows, columns] with zero columns to a multiple of 16 bytes; contiguous. No copy if nothing changes."""
    missing = -matrix.shape[1] % (16 // matrix.itemsize)
    return F.pad(matrix, (0, missing)) if missing else matrix.contiguous()
