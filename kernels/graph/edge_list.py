"""Edge lists of graphs: the edges in the caller's order, repeated ones included."""

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, eq=False)
class EdgeList:
    """The pattern of a sparse binary matrix A as a list of edges in any order; each entry is an edge.

    Attributes:
        edge_index: [2, E] int32 or int64 on any device. Row 0: keys, columns of A (sources of PyG and DGL); row 1:
            queries, rows of A (targets).
        shape: (num_rows, num_cols) of A.
        has_padding: whether pairs of -1 are no edges.
        origin: the caller's graph that this list was made of, which errors name; None for a list of the caller.
    """

    edge_index: torch.Tensor
    shape: tuple[int, int]
    has_padding: bool = False
    origin: Any = None

    @property
    def num_edges(self) -> int:
        """E, repeated edges and padding included."""
        return self.edge_index.shape[1]


def with_memory(graph: Any) -> Any:
    """The tensor that holds the ids of PyG's `EdgeIndex`, which has no memory of its own; any other graph as it is.

    Raises:
        TypeError: the graph is of another class of tensors without memory, such as a DTensor.
    """
    if not hasattr(graph, "__tensor_flatten__"):
        return graph
    if hasattr(graph, "as_tensor"):
        return graph.as_tensor()
    raise TypeError(f"graph: got a {type(graph).__name__}, which has no memory of its own; a torch.Tensor is needed")


def edges_from_torch(matrix: torch.Tensor) -> EdgeList:
    """Edges of a 2-D `torch.sparse_coo` or `torch.sparse_csc` tensor in stored order, on its device.

    Does not wait for a GPU. Every stored entry is an edge, whatever its value; a COO tensor need not be coalesced.

    Raises:
        ValueError: the offsets of a CSC tensor on the CPU are damaged.
    """
    if matrix.layout == torch.sparse_coo:
        return EdgeList(matrix._indices().flip(0), tuple(matrix.shape))  # `indices()` refuses repeated entries
    offsets, rows = matrix.ccol_indices(), matrix.row_indices()
    if not offsets.is_cuda:
        _check_offsets(offsets, rows.numel())
    place = torch.arange(rows.numel(), dtype=offsets.dtype, device=offsets.device)
    columns = torch.searchsorted(offsets[1:], place, right=True)
    return EdgeList(torch.stack([columns.to(rows.dtype), rows]), tuple(matrix.shape))


def check_ids(edges: EdgeList) -> None:
    """Raise a ValueError that names the row of edge_index with ids out of range. Waits for a GPU once."""
    if not edges.num_edges:
        return
    ids = edges.edge_index
    if edges.has_padding:
        ids = ids[:, (ids != -1).any(0)]
        if not ids.numel():
            return
    bounds = torch.stack(ids.aminmax(dim=1), 1).tolist()
    names = ("0 (sources)", edges.shape[1], "columns"), ("1 (targets)", edges.shape[0], "rows")
    for (low, high), (name, size, what) in zip(bounds, names, strict=True):
        if low < 0 or high >= size:
            raise ValueError(
                f"edge_index: row {name} holds ids from {low} to {high}; the graph of shape {edges.shape} has {size} "
                f"{what}, so that 0 to {size - 1} are allowed"
            )


def _check_offsets(offsets: torch.Tensor, num_edges: int) -> None:
    ascends = bool((offsets.diff() >= 0).all())
    if not (ascends and int(offsets[0]) == 0 and int(offsets[-1]) == num_edges):
        raise ValueError(
            f"graph: ccol_indices of the torch.sparse_csc tensor must ascend from 0 to {num_edges}, the number of its "
            f"row_indices; got {offsets.tolist() if len(offsets) < 10 else f'{offsets[:4].tolist()} ...'}"
        )
