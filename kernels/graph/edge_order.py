"""Edge order: maps the edges of a format to the caller's edges.

The caller's order depends on the graph: edge ids of a DGLGraph, columns of an edge_index, stored order of torch.sparse
tensors and SciPy CSR, entries of `tocoo()` for any other SciPy format.

In CSR order each row has first copies by ascending column, then second copies, and so on. Copies of an edge keep the
caller's order.
"""

from dataclasses import dataclass

import torch

from .csr import CSRPattern, as_tensor
from .edge_list import EdgeList
from .edges import csr_order, is_distinct, rows_of_edges


@dataclass(frozen=True, eq=False)
class EdgeOrder:
    """The caller's edges in CSR order.

    Attributes:
        edge_of_csr: [E] int32 or int64, the caller's edge index of each edge in CSR order.
    """

    edge_of_csr: torch.Tensor

    @property
    def num_edges(self) -> int:
        """E, repeated edges included."""
        return self.edge_of_csr.numel()


def edge_order(
    graph: CSRPattern | EdgeList,
    device: torch.device,
    sorted_edges: torch.Tensor | None = None,
) -> EdgeOrder:
    """The edge order of a valid graph, on `device`. Does not wait for a GPU if the graph is an edge list.

    Args:
        graph: a pattern with `edge_ids`, or with the caller's edges in stored order; or an edge list.
        sorted_edges: [E] int32, the stored index of each edge in CSR order, if known.

    Raises:
        ValueError: `edge_ids` is no permutation of 0 to E - 1.
    """
    edge_ids = None
    if isinstance(graph, CSRPattern) and graph.edge_ids is not None:
        edge_ids = as_tensor(graph.edge_ids).to(device).long()
        check_edge_ids(edge_ids, as_tensor(graph.indices).numel())
    if sorted_edges is not None:
        return EdgeOrder(sorted_edges if edge_ids is None else edge_ids[sorted_edges])
    if isinstance(graph, EdgeList):
        col, row = graph.edge_index.to(device).long()
        return EdgeOrder(csr_order(row, col, graph.shape[1]))
    indptr, col = (as_tensor(each).to(device).long() for each in (graph.indptr, graph.indices))
    if is_distinct(indptr, col, graph.shape):
        return EdgeOrder(torch.arange(len(col), device=device) if edge_ids is None else edge_ids.clone())
    row = rows_of_edges(indptr, col.numel())
    if edge_ids is not None:  # orders copies as the caller does, not as stored
        row, col = (torch.empty_like(each).scatter_(0, edge_ids, each) for each in (row, col))
    return EdgeOrder(csr_order(row, col, graph.shape[1]))


def check_edge_ids(edge_ids: torch.Tensor, num_edges: int) -> None:
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
