"""The one place that decides what the edge list of a binary A is: every edge once, sorted by row, then column."""

import hashlib

import numpy as np


def canonical_edges(row: np.ndarray, col: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Remove duplicate edges and sort. Self loops and the direction stay as they are.

    Args:
        row: [E] int64, 0 <= row < num_nodes.
        col: [E] int64, 0 <= col < num_nodes.
        num_nodes: N, below 2^31, so that row * N + col fits an int64.

    Returns:
        (row, col, removed): two [nnz] int64 arrays and how many duplicates were removed.
    """
    key = row * num_nodes + col
    if np.all(key[1:] > key[:-1]):  # canonical already, as in published files: spares the sort
        return row, col, 0
    unique = np.unique(key)
    return unique // num_nodes, unique % num_nodes, key.size - unique.size


def edge_hash(row: np.ndarray, col: np.ndarray, num_nodes: int) -> str:
    """First 16 hexadecimal digits of the SHA-256 of N and the canonical edge list, the same on every machine."""
    digest = hashlib.sha256(str(num_nodes).encode())
    for ids in (row, col):
        digest.update(np.ascontiguousarray(ids, dtype="<i8"))
    return digest.hexdigest()[:16]
