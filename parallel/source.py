"""Graphs to partition, read in chunks so that the edges need not fit into memory."""

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from parallel.assignment import Edges

CHUNK_EDGES = 1 << 24


@dataclass(frozen=True, eq=False)
class GraphSource:
    """A square matrix A and the data of its rows.

    Attributes:
        num_nodes: N, rows and columns.
        edges: yields (row, column) of the edges in chunks of [E'] integers, in any order, repeated edges allowed; the
            same at every call.
        fingerprint: equal for equal graphs; a partition of another graph is refused.
        node_data: arrays of N rows, which may be memory-mapped: features, labels.
        row_ids: [n] integer ids of rows by name: train, valid and test.
        about: description of the graph for the ranks; JSON.
    """

    num_nodes: int
    edges: Callable[[], Edges]
    fingerprint: str
    node_data: Mapping[str, np.ndarray] = field(default_factory=dict)
    row_ids: Mapping[str, np.ndarray] = field(default_factory=dict)
    about: Mapping[str, Any] = field(default_factory=dict)


def source_from_csr(
    indptr: np.ndarray, indices: np.ndarray, *, fingerprint: str | None = None, **data: Any
) -> GraphSource:
    """A source for a graph in memory; rows are queries.

    Args:
        indptr: [N + 1] integers; indices: [nnz] integers below N.
        fingerprint: default: a hash of the arrays.
        data: node_data, row_ids and about of `GraphSource`.
    """
    indptr, indices = np.asarray(indptr), np.asarray(indices)

    def edges() -> Edges:
        for first in range(0, indices.size, CHUNK_EDGES):
            last = min(first + CHUNK_EDGES, indices.size)
            row = np.searchsorted(indptr, np.arange(first, last), side="right") - 1
            yield row, indices[first:last]

    if fingerprint is None:
        digest = hashlib.sha256(indptr.astype("<i8").tobytes())
        digest.update(indices.astype("<i8").tobytes())
        fingerprint = digest.hexdigest()[:16]
    return GraphSource(indptr.size - 1, edges, fingerprint, **data)


def source_from_edges(
    row: np.ndarray, col: np.ndarray, num_nodes: int, *, fingerprint: str, **data: Any
) -> GraphSource:
    """A source for (memory-mapped) arrays of queries and keys [E].

    Args:
        fingerprint: fingerprint of graph and data, given to avoid reading them for a hash.
        data: node_data, row_ids and about of `GraphSource`.
    """

    def edges() -> Edges:
        for first in range(0, row.shape[0], CHUNK_EDGES):
            chunk = slice(first, first + CHUNK_EDGES)
            yield np.asarray(row[chunk]), np.asarray(col[chunk])

    return GraphSource(num_nodes, edges, fingerprint, **data)


def hash_of_data(source: GraphSource) -> str:
    """A hash of node data and row ids. A mapped array is not read: the size and the time of its file stand for it."""
    digest = hashlib.sha256()
    for name, array in (*sorted(source.node_data.items()), *sorted(source.row_ids.items())):
        digest.update(f"{name} {array.dtype} {array.shape}".encode())
        if file := getattr(array, "filename", None):
            file = Path(file).stat()
            digest.update(f"{file.st_size} {file.st_mtime_ns}".encode())
        else:
            digest.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
    return digest.hexdigest()[:16]
