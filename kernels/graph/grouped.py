"""The graph of a plan whose rows are the query heads of each KV head: A kron ones(G, 1), as an edge list.

Row i * G + g has the edges of query i, for member g of each group of G query heads. A window of 16 rows then holds
16 / G queries, and K and V are gathered once for G heads. Nothing here waits for a GPU, except a check of `edge_ids`.
"""

from typing import Any

import torch

from .csr import MAX_DIM, CSRPattern, as_tensor, check_csr
from .edge_list import EdgeList, check_ids
from .edge_order import check_edge_ids
from .edges import canonical_csr
from .key_lists import KeyLists


def grouped_edges(graph: CSRPattern | EdgeList, size: int) -> EdgeList:
    """The edges of A kron ones(size, 1): edge e * size + g is edge e of the caller for member g.

    A graph on the CPU is checked; errors in one on a GPU leave ids out of range in the result.

    Raises:
        ValueError: the graph on the CPU is malformed, or there are too many rows.
    """
    edges = _edges_of(graph)
    num_rows, num_cols = edges.shape
    if size * (num_rows + 1) > MAX_DIM:
        raise ValueError(
            f"graph: got {num_rows} rows for {size} query heads of each KV head; up to {MAX_DIM // size - 1} rows are "
            "allowed"
        )
    if not edges.edge_index.is_cuda:
        check_graph(edges, edges.edge_index.device)
    ids = grouped_ids(edges.edge_index, num_rows, size)
    origin = graph if edges.origin is None else edges.origin
    return EdgeList(ids, (num_rows * size, num_cols), edges.has_padding, origin)


def grouped_ids(edge_index: torch.Tensor, num_rows: int, size: int) -> torch.Tensor:
    """[2, E * size] of an edge_index [2, E] of its type; ids out of range stay so, and pairs of -1 too."""
    col, row = edge_index
    row = row.clamp(max=num_rows)[:, None]  # no overflow
    member = torch.arange(size, dtype=row.dtype, device=row.device)
    rows = torch.where(row < 0, row, row * size + member)
    return torch.stack([col[:, None].expand_as(rows), rows]).flatten(1)


def grouped_rows(perm: torch.Tensor, size: int) -> torch.Tensor:
    """[num_rows * size] of the type of `perm`: an order of the rows in which the heads of a query stay together."""
    return (perm[:, None] * size + torch.arange(size, dtype=perm.dtype, device=perm.device)).flatten()


def check_graph(graph: Any, device: torch.device) -> None:
    """Raise the ValueError for the first wrong entry of the caller's graph. Waits for a GPU."""
    if isinstance(graph, EdgeList):
        if isinstance(graph.origin, KeyLists):
            lists = graph.origin
            lists.check(graph.shape[1] // lists.num_lists)
        elif graph.origin is not None:
            check_graph(graph.origin, device)
        else:
            check_ids(graph)
    else:
        canonical_csr(graph, device)


def _edges_of(graph: CSRPattern | EdgeList) -> EdgeList:
    """The edges of a graph in the caller's order; those of a damaged CSR on a GPU have rows of -2."""
    if isinstance(graph, EdgeList):
        return graph
    indptr, indices = as_tensor(graph.indptr), as_tensor(graph.indices)
    num_edges, num_rows = indices.numel(), graph.shape[0]
    if not indices.is_cuda:
        check_csr(indptr, indices, graph.shape[1])
    indptr = indptr.long()
    place = torch.arange(num_edges, device=indices.device)
    row = torch.searchsorted(indptr[1:].contiguous(), place, right=True)
    is_right = (indptr[0] == 0) & (indptr[-1] == num_edges) & (indptr.diff() >= 0).all()
    row = torch.where(is_right, row, -2)
    edge_index = torch.stack([indices.long(), row])
    if graph.edge_ids is not None:
        edge_ids = as_tensor(graph.edge_ids).to(indices.device).long()
        check_edge_ids(edge_ids, num_edges)
        edge_index = torch.empty_like(edge_index).index_copy_(1, edge_ids, edge_index)
    return EdgeList(edge_index, (num_rows, graph.shape[1]))
