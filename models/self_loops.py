"""Self-loops of an edge_index and of its features, as PyG's layers add them."""

import torch
from torch import Tensor

from models.tensor_memo import TensorMemo

FILLS = {"add": "sum", "mean": "mean", "min": "amin", "max": "amax", "mul": "prod"}  # names of torch's reductions
LAYOUTS = (torch.strided, torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)
_looped = TensorMemo()  # edge_index -> {number of loops: the same with loops}, so that its plan is cached, too


def check_fill_value(fill_value: float | Tensor | str) -> None:
    """Raise a ValueError for the name of an unknown reduction."""
    if isinstance(fill_value, str) and fill_value not in FILLS:
        raise ValueError(f"fill_value: got {fill_value!r}; a number, a tensor or one of {', '.join(FILLS)} is needed")


def edges_with_self_loops(edge_index: Tensor, num_nodes: int, *, cache: bool = True) -> Tensor:
    """[2, E']: the edges without self-loops, in their order, then a loop for each of the first `num_nodes` nodes.

    Args:
        edge_index: [2, E] sources and targets, or a torch.sparse tensor whose rows are the targets.
        cache: return the same tensor again while `edge_index` lives unchanged.

    Raises:
        TypeError: edge_index is no such tensor.
    """
    check_graph(edge_index)
    results = _looped.results(edge_index) if cache else {}
    looped = results.get(num_nodes)
    if looped is None:
        edges = edge_list(edge_index)
        loops = torch.arange(num_nodes, dtype=edges.dtype, device=edges.device).expand(2, -1)
        looped = results[num_nodes] = torch.cat([edges[:, edges[0] != edges[1]], loops], 1)
    return looped


def features_with_self_loops(
    features: Tensor, edge_index: Tensor, num_nodes: int, fill_value: float | Tensor | str
) -> Tensor:
    """[E', r]: features of `edges_with_self_loops`; those of a loop are `fill_value`, or a reduction of the features of
    the node's in-edges, by name."""
    edges = edge_list(edge_index)
    is_kept = edges[0] != edges[1]
    features, target = features[is_kept], edges[1, is_kept]
    shape = num_nodes, features.shape[1]
    if not isinstance(fill_value, str):
        fill = torch.as_tensor(fill_value, dtype=features.dtype, device=features.device)
        return torch.cat([features, fill.expand(shape)])
    has_loop = target < num_nodes
    index = target[has_loop].long()[:, None].expand(-1, shape[1])
    start = features.new_full(shape, 1.0 if fill_value == "mul" else 0.0)
    reduced = start.scatter_reduce(
        0, index, features[has_loop], FILLS[fill_value], include_self=fill_value in ("add", "mul")
    )
    return torch.cat([features, reduced])


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
            "or COO tensor, is needed; FusedTransformerConv and FusedAGNNConv also take an AttentionPlan"
        )
