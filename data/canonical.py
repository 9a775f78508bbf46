"""Canonical form of the edges of a binary A: every edge once, sorted by row, then column."""

import hashlib
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

import numpy as np

from data.errors import RectangularGraphError
from data.graph import Contents, CsrGraph, RawGraph

MAX_INT32 = 2**31 - 1
HASHED_AT_A_TIME = 1 << 22  # ids converted to int64 at a time: 32 MiB


def distinct(xp: Any, keys: Any) -> Any:
    """The keys in ascending order, each once; `keys` is sorted in place.

    `numpy.unique` hashes, which takes ten times as long for millions of mostly different keys.

    Args:
        xp: `numpy` or `cupy`.
        keys: [n] int64.
    """
    keys.sort()
    first = xp.ones(keys.size, dtype=bool)
    first[1:] = keys[1:] != keys[:-1]
    return keys[first]


def canonical_edges(row: np.ndarray, col: np.ndarray, num_nodes: int) -> tuple[np.ndarray, np.ndarray, int]:
    """Remove duplicate edges and sort. Self loops and directions are kept.

    Args:
        row: [E] int64, 0 <= row < num_nodes.
        col: [E] int64, 0 <= col < num_nodes.
        num_nodes: N, below 2^31, so that row * N + col fits an int64.

    Returns:
        (row, col, removed): two [nnz] int64 arrays and the number of removed duplicates.
    """
    key = row * num_nodes + col
    if np.all(key[1:] > key[:-1]):  # already canonical, as published files are: no sort needed
        return row, col, 0
    unique = distinct(np, key)
    return unique // num_nodes, unique % num_nodes, key.size - unique.size


def first_of_each(row: np.ndarray, col: np.ndarray, num_nodes: int) -> np.ndarray:
    """[nnz] int64: for each edge of `canonical_edges` the first of the given edges that is the same."""
    key = row * num_nodes + col
    order = np.argsort(key, kind="stable")
    key = key[order]
    return order[np.r_[True, key[1:] != key[:-1]][: key.size]]


def edge_hash(row: np.ndarray, col: np.ndarray, num_nodes: int) -> str:
    """First 16 hexadecimal digits of the SHA-256 of N and the canonical edge list, the same on every machine."""
    digest = hashlib.sha256(str(num_nodes).encode())
    for ids in (row, col):
        for part in _slices(ids.size):
            digest.update(np.ascontiguousarray(ids[part], dtype="<i8"))
    return digest.hexdigest()[:16]


def csr_hash(indptr: np.ndarray, col: np.ndarray) -> str:
    """`edge_hash` of a matrix in CSR, without an array of its rows."""
    num_nodes = indptr.size - 1
    digest = hashlib.sha256(str(num_nodes).encode())
    for part in _slices(num_nodes):
        rows = np.arange(part.start, part.stop, dtype="<i8")
        digest.update(np.repeat(rows, np.diff(indptr[part.start : part.stop + 1])))
    for part in _slices(col.size):
        digest.update(np.ascontiguousarray(col[part], dtype="<i8"))
    return digest.hexdigest()[:16]


def _slices(size: int) -> Iterator[slice]:
    for first in range(0, size, HASHED_AT_A_TIME):
        yield slice(first, min(first + HASHED_AT_A_TIME, size))


def with_self_loops(graph: RawGraph | CsrGraph) -> RawGraph:
    """The graph with an edge from each node to itself; without edge data.

    Raises:
        RectangularGraphError: the keys are other nodes than the queries.
    """
    if isinstance(graph, CsrGraph) and graph.num_keys is not None:
        raise RectangularGraphError(f"{graph.origin}: self_loops: got True, and its keys are not its queries")
    own = np.arange(graph.num_nodes, dtype=np.int64)
    is_loop = graph.row == graph.col
    row, col = (np.concatenate([ids[~is_loop].astype(np.int64, copy=False), own]) for ids in (graph.row, graph.col))
    contents = {each.name: getattr(graph, each.name) for each in fields(Contents)} | {"edata": {}}
    return RawGraph(row=row, col=col, num_nodes=graph.num_nodes, origin=graph.origin, **contents)


def to_csr(graph: RawGraph | CsrGraph) -> CsrGraph:
    """The canonical form of a graph; a CsrGraph, such as a kept surrogate, is returned unchanged."""
    if isinstance(graph, CsrGraph):
        return graph
    edata = {}
    if graph.edata:
        kept = first_of_each(graph.row, graph.col, graph.num_nodes)
        edata = {key: values[kept] for key, values in graph.edata.items()}
    row, col, removed = canonical_edges(graph.row, graph.col, graph.num_nodes)
    ids = np.int32 if col.size <= MAX_INT32 else np.int64
    indptr = np.zeros(graph.num_nodes + 1, ids)
    np.cumsum(np.bincount(row, minlength=graph.num_nodes), out=indptr[1:])
    contents = {each.name: getattr(graph, each.name) for each in fields(Contents)} | {"edata": edata}
    sha256 = edge_hash(row, col, graph.num_nodes)
    return CsrGraph(indptr, col.astype(ids), sha256, graph.origin, removed, **contents)
