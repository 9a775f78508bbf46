"""Checks that every reader of graph files shares."""

from pathlib import Path

import numpy as np

from data.graph import MAX_NODES, RawGraph
from data.memory import LOADING_BYTES_PER_EDGE, LOADING_BYTES_PER_NODE, require_memory


def check_size(path: Path, name: str, num_nodes: int, num_edges: int) -> None:
    """Raise a ValueError or MemoryError for a graph that is none, or would not fit; `name` says where the file states
    its nodes."""
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"{path}: {name} is {num_nodes}; 1 to {MAX_NODES} are allowed")
    require_memory(
        f"{path}: {name} is {num_nodes:,}, with {num_edges:,} edges",
        num_nodes * LOADING_BYTES_PER_NODE + num_edges * LOADING_BYTES_PER_EDGE,
    )


def check_square(path: Path, rows: int, columns: int) -> None:
    """Raise a ValueError for a matrix that is no adjacency matrix."""
    if rows != columns:
        raise ValueError(f"{path}: the matrix is {rows} x {columns}; a graph needs a square one")


def checked_graph(
    path: Path,
    row: np.ndarray,
    col: np.ndarray,
    num_nodes: int,
    ndata: dict[str, np.ndarray] | None = None,
    edata: dict[str, np.ndarray] | None = None,
) -> RawGraph:
    """The graph of a file, after a check of its ids [E] int64.

    Raises:
        ValueError: an edge has an end outside 0 .. num_nodes - 1.
    """
    for end, ids in (("row (first column, src_li)", row), ("column (second column, dst_li)", col)):
        outside = np.flatnonzero((ids < 0) | (ids >= num_nodes))
        if outside.size:
            at = outside[0]
            raise ValueError(f"{path}: edge {at} has the {end} {ids[at]}; allowed are 0 to {num_nodes - 1}")
    return RawGraph(row, col, num_nodes, str(path), ndata=ndata or {}, edata=edata or {})
