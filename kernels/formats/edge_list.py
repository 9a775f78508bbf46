"""Edge lists of graphs: the edges in the caller's order, repeated ones included."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class EdgeList:
    """The pattern of a sparse binary matrix A as a list of its edges, in any order; each entry is an edge of its own.

    Attributes:
        edge_index: [2, E] int32 or int64 on any device. Row 0: keys, columns of A (sources of PyG and DGL); row 1:
            queries, rows of A (targets).
        shape: (num_rows, num_cols) of A.
    """

    edge_index: torch.Tensor
    shape: tuple[int, int]

    @property
    def num_edges(self) -> int:
        """E."""
        return self.edge_index.shape[1]


def check_edge_list(edges: EdgeList) -> None:
    """Raise for an edge list that is malformed, or has an id out of range; waits for a GPU.

    Raises:
        TypeError, ValueError: the text names the first edge, its ids and what is allowed.
    """
    check_edge_index(edges.edge_index)
    columns, rows = edges.edge_index
    num_rows, num_cols = edges.shape
    is_padding = (rows == -1) & (columns == -1)
    wrong = ((rows < 0) | (rows >= num_rows) | (columns < 0) | (columns >= num_cols)) & ~is_padding
    if bool(wrong.any()):
        raise bad_edge(edges, int(torch.nonzero(wrong)[0, 0]))


def check_edge_index(edge_index: torch.Tensor) -> None:
    """Raise for a tensor that is no edge list, without reading it."""
    if not isinstance(edge_index, torch.Tensor):
        raise TypeError(f"edge_index: got {type(edge_index).__name__}; a torch.Tensor [2, E] is needed")
    if edge_index.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"edge_index: got {edge_index.dtype}; torch.int32 and torch.int64 are allowed")
    if edge_index.dim() != 2 or edge_index.shape[0] != 2:
        raise ValueError(f"edge_index: got shape {tuple(edge_index.shape)}; [2, E] is needed: columns, then rows")


def bad_edge(edges: EdgeList, edge: int) -> ValueError:
    """The error of an edge with an id out of range."""
    column, row = edges.edge_index[:, edge].tolist()
    num_rows, num_cols = edges.shape
    return ValueError(
        f"edge_index: edge {edge} is ({column}, {row}); columns from 0 to {num_cols - 1} and rows from 0 to "
        f"{num_rows - 1} are allowed, and (-1, -1) for an edge that does not count"
    )
