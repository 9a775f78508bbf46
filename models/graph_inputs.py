"""Inputs of the model: all tensors that a forward pass reads, taken from a DGLGraph once and moved to the device.

The forward pass does not touch the DGLGraph, which may be unable to leave the CPU (DGL on PyPI has no CUDA).
"""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from fused3s import AttentionPlan, BoundEdges
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


def prepare_graph(
    graph: Any,
    attention: Attention,
    *,
    pos_enc: int,
    device: torch.device,
    dtype: torch.dtype,
    random_walk: int = 0,
    edge_features: bool = False,
) -> GraphInputs:
    """Make the inputs of the model from a DGLGraph.

    Args:
        graph: a homogeneous DGLGraph, single or `dgl.batch`ed, with node features in ndata["feat"]: float32 [N, F] or
            int64 [N, C].
        attention: attention over this graph, on `device`.
        pos_enc: number of eigenvectors in the positional encoding.
        random_walk: columns of ndata["random_walk"], the random-walk encoding; 0: it is not read.
        edge_features: whether to take edata["feat"], float32 [E, F] or int64 [E, C]. `attention` must be a plan made
            with edge_data=True.

    Raises:
        ValueError: "feat" is missing, not two-dimensional, or of another dtype, or "random_walk" is missing or of
            another shape; the plan keeps no edge order.
    """
    sizes = graph.batch_num_nodes().cpu()
    batch = SimpleNamespace(
        features=node_features_of(graph),
        edge_features=edge_features_of(graph) if edge_features else None,
        random_walk=random_walk_of(graph, random_walk) if random_walk else None,
        graph_starts=(sizes.cumsum(0) - sizes).to(device),
        row_weights=None,
    )
    read = {"random_walk": random_walk, "edge_features": edge_features}
    ends = graph.edges() if pos_enc or edge_features else ()
    return prepare_batch(batch, attention, pos_enc=pos_enc, device=device, dtype=dtype, ends=ends, **read)


def pattern_of(batch: Any) -> CSRPattern:
    """The adjacency pattern of a batch as in `prepare_batch`."""
    return CSRPattern(batch.indptr, batch.col, (len(batch.features),) * 2)


def prepare_batch(
    batch: Any,
    attention: Attention,
    *,
    pos_enc: int,
    device: torch.device,
    dtype: torch.dtype,
    random_walk: int = 0,
    edge_features: bool = False,
    ends: tuple[Tensor, ...] | None = None,
) -> GraphInputs:
    """As `prepare_graph`, from tensors on `device` instead of a DGLGraph. Does not check; waits for the GPU only with
    pos_enc.

    Args:
        batch: with indptr [N + 1] int64 and col [nnz] of the distinct edges; features [N, F] float or [N, C] codes of
            any integer type, in the model's range; edge_features [nnz, F] float or [nnz, C] codes, or None;
            graph_starts [G] int64; random_walk [N, k] or None; row_weights [N] float32 or None. Entries of col after
            indptr[-1] are padding.
        attention: attention over the same edges.
        ends: source (key) and destination (query) of each row of edge_features; None for the order of indptr and col.
    """
    if ends is None and (pos_enc or edge_features):
        edges = torch.arange(len(batch.col), device=device)
        ends = batch.col, torch.searchsorted(batch.indptr[1:], edges, right=True)
    features, aligned, encoding = batch.features, None, None
    if features.is_floating_point():
        aligned = aligned_columns(features.to(dtype)).to(device)
        features = aligned[:, : features.shape[1]]
    if pos_enc:
        source, destination = (nodes.cpu().numpy() for nodes in ends)
        from models.laplacian import laplacian_encoding  # on use: it needs SciPy

        vectors = laplacian_encoding(source, destination, len(features), pos_enc)
        encoding = torch.from_numpy(vectors).to(device, dtype)
    return GraphInputs(
        features=features if aligned is not None else features.to(device, torch.int64),
        aligned_features=aligned,
        attention=attention,
        encoding=encoding,
        nodes=torch.arange(len(features), device=device),
        graph_starts=batch.graph_starts,
        edges=_edge_inputs(batch.edge_features, ends, attention, device, dtype) if edge_features else None,
        random_walk=batch.random_walk.to(device, dtype) if random_walk else None,
        row_weights=batch.row_weights,
    )


def node_features_of(graph: Any) -> Tensor:
    """The checked ndata["feat"]; raises a ValueError."""
    return _features(graph.ndata, "ndata", "nodes")


def edge_features_of(graph: Any) -> Tensor:
    """The checked edata["feat"]; raises a ValueError."""
    return _features(graph.edata, "edata", "edges")


def random_walk_of(graph: Any, steps: int) -> Tensor:
    """The checked ndata["random_walk"] [N, steps]; raises a ValueError."""
    found = graph.ndata.get("random_walk")
    if found is None or found.shape[1:] != (steps,):
        got = "none" if found is None else f"shape {tuple(found.shape)}"
        raise ValueError(
            f'graph: ndata["random_walk"] of shape [nodes, {steps}] is needed; got {got}: '
            f"data.load(..., random_walk={steps}) gives it"
        )
    return found


def _features(data: Any, name: str, rows: str) -> Tensor:
    """The checked "feat" of ndata or edata."""
    features = data.get("feat")
    if features is None or features.dim() != 2:
        got = "none" if features is None else f"shape {tuple(features.shape)}"
        raise ValueError(f'graph: {name}["feat"] of shape [{rows}, columns] is needed; got {got}')
    if not features.is_floating_point() and features.dtype != torch.int64:
        raise ValueError(f'graph: {name}["feat"] is {features.dtype}; floats or int64 (categorical) are needed')
    return features


def _edge_inputs(
    features: Tensor, ends: tuple[Tensor, ...], plan: Attention, device: torch.device, dtype: torch.dtype
) -> EdgeInputs:
    if not isinstance(plan, AttentionPlan) or plan.edge_order is None:
        raise ValueError(
            "attention: a model with edge features needs a plan that keeps the order of the edges: "
            "fused3s.plan_attention(graph, ..., edge_data=True)"
        )
    edge = plan.edge_order.edge_of_csr
    source, target = (nodes.to(device).long()[edge] for nodes in ends)
    features = features.to(device, dtype if features.is_floating_point() else torch.int64)
    return EdgeInputs(features[edge], source, target, plan.edge_order)


def aligned_columns(matrix: Tensor) -> Tensor:
    """Pad [rows, columns] with zero columns to a multiple of 16 bytes; contiguous. No copy if nothing changes."""
    missing = -matrix.shape[1] % (16 // matrix.itemsize)
    return F.pad(matrix, (0, missing)) if missing else matrix.contiguous()
