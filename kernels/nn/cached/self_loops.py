"""Self-loops of an edge_index and of its features, as PyG's layers add them."""

from typing import NamedTuple

import torch
from torch import Tensor

from .tensor_memo import TensorMemo

FILLS = {"add": "sum", "mean": "mean", "min": "amin", "max": "amax", "mul": "prod"}  # names of torch's reductions
LAYOUTS = (torch.strided, torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)
_looped = TensorMemo()  # edge_index -> {number of loops: _Looped}, so that its plan is cached, too


def check_fill_value(fill_value: float | Tensor | str) -> None:
    """Raise a ValueError for the name of an unknown reduction."""
    if isinstance(fill_value, str) and fill_value not in FILLS:
        raise ValueError(f"fill_value: got {fill_value!r}; a number, a tensor or one of {', '.join(FILLS)} is needed")


class _Looped(NamedTuple):
    """Edges with self-loops.

    Attributes:
        edges: [2, K + num_nodes], the edges without self-loops, then the loops.
        kept: [K] int64, the caller's edges that are no self-loops.
    """

    edges: Tensor
    kept: Tensor


def edges_with_self_loops(edge_index: Tensor, num_nodes: int, *, cache: bool = True) -> Tensor:
    """[2, E']: the edges without self-loops, in their order, then a loop for each of the first `num_nodes` nodes.

    Args:
        edge_index: [2, E] sources and targets, or a torch.sparse tensor whose rows are the targets.
        cache: return the same tensor again while `edge_index` lives unchanged.
    """
    return _with_loops(edge_index, num_nodes, cache).edges


def features_with_self_loops(
    features: Tensor, edge_index: Tensor, num_nodes: int, fill_value: float | Tensor | str, *, cache: bool = True
) -> Tensor:
    """[E', r]: features of `edges_with_self_loops`; those of a loop are `fill_value`, or a reduction of the features of
    the node's in-edges, by name. Waits for a GPU only if the edges are new."""
    edges, kept = _with_loops(edge_index, num_nodes, cache)
    features, columns = features.index_select(0, kept), features.shape[1]
    if not isinstance(fill_value, str):
        fill = torch.as_tensor(fill_value, dtype=features.dtype, device=features.device)
        return torch.cat([features, fill.expand(num_nodes, columns)])
    # One row more, for targets without a loop.
    target = edges[1, : kept.shape[0]].long().clamp(max=num_nodes)[:, None].expand(-1, columns)
    start = features.new_full((num_nodes + 1, columns), 1.0 if fill_value == "mul" else 0.0)
    reduced = start.scatter_reduce(0, target, features, FILLS[fill_value], include_self=fill_value in ("add", "mul"))
    return torch.cat([features, reduced[:num_nodes]])


def _with_loops(edge_index: Tensor, num_nodes: int, cache: bool) -> _Looped:
    results = _looped.results(edge_index) if cache else {}
    looped = results.get(num_nodes)
    if looped is None:
        edges = edge_list(edge_index)
        loops = torch.arange(num_nodes, dtype=edges.dtype, device=edges.device).expand(2, -1)
        kept = (edges[0] != edges[1]).nonzero().squeeze(1)
        looped = results[num_nodes] = _Looped(torch.cat([edges.index_select(1, kept), loops], 1), kept)
    return looped


def is_sparse(edge_index: Tensor) -> bool:
    """Whether this is a torch.sparse tensor; raises a TypeError unless it is a graph."""
    check_graph(edge_index)
    return edge_index.layout != torch.strided


def edge_list(edge_index: Tensor) -> Tensor:
    """[2, E] of an edge_index, or of a torch.sparse tensor whose rows are the targets."""
    if edge_index.layout == torch.strided:
        return edge_index
    return edge_index.to_sparse_coo()._indices().flip(0)


def check_graph(edge_index: Tensor) -> None:
    """Raise a TypeError unless this is a dense tensor, or a torch.sparse tensor as an adj_t."""
    if not isinstance(edge_index, Tensor) or edge_index.layout not in LAYOUTS:
        raise TypeError(
            f"edge_index: got {type(edge_index).__name__}; an edge_index [2, E], or an adj_t as torch.sparse CSR, CSC "
            "or COO tensor, is needed; TransformerConv and AGNNConv also take an AttentionPlan"
        )
