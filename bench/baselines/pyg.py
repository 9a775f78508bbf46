"""`pyg`: PyTorch Geometric's message passing with its softmax, as `torch_geometric.nn.TransformerConv` does it.

The steps of TransformerConv between its projections: gather Q by target and K, V by source, score, softmax over each
target's edges, scatter-add of the weighted V. TransformerConv itself cannot be used, since it holds the projections and
fixes the scale; the layer here calls the same routines of PyG. Q, K, V and the message of every edge are materialised,
which runs out of memory on large graphs.

The inputs' type is kept. Softmax divides by its sum plus 1e-16, which changes nothing: the sum is at least 1. Dropout
is torch's, as in PyG, with masks of torch's generator: to compute those of the other backends from the seed of the call
takes many torch calls, which are not part of PyG's time.
"""

import importlib.util
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, Optional

import torch

from fused3s.backends.base import Backend, Call, InputSpec
from fused3s.graph.edges import canonical_csr, rows_of_edges
from fused3s.terms.edge_data import BoundEdges, edge_products, multiplied_keys, transform_scores


@dataclass(frozen=True, eq=False)
class EdgeIndex:
    """Edges from keys (sources) to queries (targets), sorted by target: [2, nnz] int64."""

    edge_index: torch.Tensor


class PyGBackend(Backend):
    name = "pyg"
    summary = "PyTorch Geometric's message passing, as its TransformerConv does it; any device"
    computes_in = torch.float32
    data_type = EdgeIndex
    takes_edges = True
    takes_dropout = True

    def unavailable(self, device: torch.device) -> str | None:
        if importlib.util.find_spec("torch_geometric") is None:
            return "the package torch_geometric is not installed"
        return None

    @cached_property
    def layer(self) -> torch.nn.Module:
        return _attention_layer()

    def build(self, graph: Any, device: torch.device, inputs: InputSpec, perm: torch.Tensor | None = None) -> EdgeIndex:
        indptr, indices = canonical_csr(graph, device)
        _ = self.layer  # made here: torch.compile cannot trace the definition of a class
        return EdgeIndex(torch.stack([indices.long(), rows_of_edges(indptr)]))

    def attend(self, data: EdgeIndex, call: Call) -> torch.Tensor:
        query, key, value, scale, out_dtype, _, edges = call
        size = (key.shape[0], query.shape[0])
        return self.layer(data.edge_index, size, query, key, value, scale, edges).to(out_dtype)


@cache
def _attention_layer() -> torch.nn.Module:
    """TransformerConv's message, without its projections; the class needs torch_geometric, which may be missing."""
    from torch_geometric.nn import MessagePassing
    from torch_geometric.utils import softmax

    class TransformerMessage(MessagePassing):
        def __init__(self) -> None:
            super().__init__(aggr="add", node_dim=0)

        def forward(
            self,
            edge_index: torch.Tensor,
            size: tuple[int, int],
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            scale: float,
            edges: BoundEdges | None,
        ) -> torch.Tensor:
            inputs = {"query": query, "key": key, "value": value, "scale": scale, "edges": edges}
            return self.propagate(edge_index, size=size, **inputs)

        def message(
            self,
            query_i: torch.Tensor,
            key_j: torch.Tensor,
            value_j: torch.Tensor,
            scale: float,
            edges: Optional[BoundEdges],  # noqa: UP045 (PyG reads the annotations, and not this `X | None`)
            index: torch.Tensor,
            ptr: Optional[torch.Tensor],  # noqa: UP045
            size_i: Optional[int],  # noqa: UP045
            edge_index_j: torch.Tensor,
        ) -> torch.Tensor:
            if edges is None:
                score = (query_i * key_j).sum(dim=-1) * scale
                return value_j * softmax(score, index, ptr, size_i)[..., None]

            key_j = multiplied_keys(key_j, edges)
            if edges.key_weight is not None:
                key_j = key_j + torch.einsum("er,hdr->ehd", edges.features, edges.key_weight)
            if edges.value_weight is not None:
                value_j = value_j + torch.einsum("er,hdr->ehd", edges.features, edges.value_weight)
            score = edge_products(query_i, key_j, edges) * scale
            if edges.score is None:
                weight = softmax(score, index, ptr, size_i)
            else:
                score = transform_scores(score, edges, lambda x: x[index], lambda x: x[edge_index_j])
                # PyG's softmax and its gradient make NaN of a row with only -inf.
                hidden = score == -torch.inf
                score = score.masked_fill(hidden, torch.finfo(score.dtype).min)
                weight = softmax(score, index, ptr, size_i).masked_fill(hidden, 0.0)
            if edges.dropout is not None:
                weight = torch.nn.functional.dropout(weight, edges.dropout.rate)
            return value_j * weight[..., None]

    return TransformerMessage()


BACKENDS = (PyGBackend(),)
