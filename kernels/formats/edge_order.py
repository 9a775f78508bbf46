"""Edge identity: which of the caller's edges each distinct edge of A is.

The caller numbers the edges of a graph as its format does: a DGLGraph by edge ids, torch.sparse_csr and SciPy CSR by
stored order, every other SciPy format by the entries of its COO form, a BSB by its `to_csr`. Repeated edges are one
edge of A; the first of them, the one with the lowest number, stands for it.
"""

from dataclasses import dataclass

import torch

from .bsb import BSB
from .csr import CSRPattern, as_tensor
from .edges import is_distinct, rows_of_edges


@dataclass(frozen=True, eq=False)
class EdgeOrder:
    """The caller's edges in CSR order.

    Attributes:
        num_edges: E, the entries of the graph, repeated ones included.
        num_self_loops: entries (i, i), repeated ones included.
        edge_of_csr: [nnz] int64, the caller's edge of each distinct edge; rows, then columns ascending.
    """

    num_edges: int
    num_self_loops: int
    edge_of_csr: torch.Tensor


def edge_order(graph: BSB | CSRPattern, device: torch.device, perm: torch.Tensor | None = None) -> EdgeOrder:
    """The edge order of a valid graph, on `device`.

    Args:
        graph: a BSB, or a pattern; its `edge_ids` number the caller's edges, without them its stored order does.
        perm: [num_rows] int32; row i of `graph` is row perm[i] of the caller's matrix, as after `permute_rows`. Only
            the count of self loops depends on it.

    Raises:
        ValueError: `edge_ids` does not hold every number from 0 to E - 1 once.
    """
    indptr, indices = graph.to_csr() if isinstance(graph, BSB) else (graph.indptr, graph.indices)
    indptr, indices = as_tensor(indptr).to(device).long(), as_tensor(indices).to(device)
    num_edges = indices.numel()
    row = rows_of_edges(indptr, num_edges)
    own = row if perm is None else perm.to(device)[row]
    num_self_loops = int((own == indices).sum())

    edge_ids = None if isinstance(graph, BSB) else graph.edge_ids
    if edge_ids is not None:
        edge_ids = as_tensor(edge_ids).to(device).long()
        _check_edge_ids(edge_ids, num_edges)
    if is_distinct(indptr, indices, graph.shape):
        edge_of_csr = torch.arange(num_edges, device=device) if edge_ids is None else edge_ids.clone()
        return EdgeOrder(num_edges, num_self_loops, edge_of_csr)

    key = row * graph.shape[1] + indices  # below 2^62: both dimensions are below 2^31
    if edge_ids is not None:
        key = torch.empty_like(key).scatter_(0, edge_ids, key)
    # `key` is in the caller's order now: after a stable sort the first of a run is the first of the repeated edges.
    key, edge = torch.sort(key, stable=True)
    starts_run = torch.ones(num_edges, dtype=torch.bool, device=device)
    starts_run[1:] = key[1:] != key[:-1]
    return EdgeOrder(num_edges, num_self_loops, edge[starts_run])


def _check_edge_ids(edge_ids: torch.Tensor, num_edges: int) -> None:
    if edge_ids.shape != (num_edges,):
        raise ValueError(f"edge_ids: got shape {tuple(edge_ids.shape)}; [{num_edges}], the number of edges, is needed")
    occurs = torch.zeros(num_edges, dtype=torch.bool, device=edge_ids.device)
    occurs[edge_ids.clamp(0, max(0, num_edges - 1))] = True
    if bool(((edge_ids >= 0) & (edge_ids < num_edges) & occurs).all()):  # one wait for a GPU
        return
    wrong = torch.nonzero((edge_ids < 0) | (edge_ids >= num_edges)).flatten()
    if wrong.numel():
        at = int(wrong[0])
        raise ValueError(f"edge_ids: entry {at} is {int(edge_ids[at])}; allowed are 0 to {num_edges - 1}, each once")
    repeated = torch.nonzero(torch.bincount(edge_ids, minlength=num_edges) > 1).flatten()
    raise ValueError(f"edge_ids: {int(repeated[0])} occurs more than once; every edge must occur once")
