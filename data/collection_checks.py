"""Checks of the values in a collection's arrays (`data.graph_arrays`), read at once or in blocks of whole graphs."""

from pathlib import Path

import numpy as np


def as_integers(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    """Integers of any type as int64.

    Raises:
        ValueError: one of them is 2^63 or more.
    """
    if values.dtype == np.uint64 and values.size and values.max() >= 2**63:
        raise ValueError(f"{path}: {name} holds {values.max()}; integers below 2^63 are allowed")
    return values.astype(np.int64)


def as_floats(path: Path, name: str, values: np.ndarray) -> np.ndarray:
    """Floats of any type as float32.

    Raises:
        ValueError: a value is not finite in float32.
    """
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"{path}: {name} holds NaN, or numbers beyond float32; finite ones are needed")
    return values


def both_directions(
    path: Path, u: np.ndarray, v: np.ndarray, sizes: np.ndarray, edge_counts: np.ndarray, numbers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the block-diagonal A of undirected graphs, one graph after the other.

    Args:
        path: the file, for the message.
        u, v: [E] int64, ends of each edge, local to its graph.
        sizes, edge_counts: [B] int64, nodes and edges of each graph.
        numbers: [E] int64, place of each edge in the file, for the message.

    Returns:
        (row, col): [2 E] int64, possibly with duplicates. A self loop is there twice.

    Raises:
        ValueError: an edge has an end that its graph does not have.
    """
    limit = np.repeat(sizes, edge_counts)
    outside = np.flatnonzero((np.minimum(u, v) < 0) | (np.maximum(u, v) >= limit))
    if outside.size:
        bad = outside[0]
        raise ValueError(
            f"{path}: edge {numbers[bad]} joins {u[bad]} and {v[bad]} in a graph of {limit[bad]} nodes (ids from 0)"
        )
    first = np.repeat(np.cumsum(sizes) - sizes, edge_counts)
    u, v = u + first, v + first
    return np.concatenate([u, v]), np.concatenate([v, u])
