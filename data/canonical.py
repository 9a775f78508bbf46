"""Canonical form of the edges of a binary A: every edge once, sorted by row, then column."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from data.graph import MAX_NODES, CsrGraph
from data.memory import LOADING_BYTES_PER_EDGE, LOADING_BYTES_PER_NODE, require_memory

MAX_INT32 = 2**31 - 1


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


def to_csr(
    row: np.ndarray,
    col: np.ndarray,
    num_nodes: int,
    origin: str,
    *,
    edata: Mapping[str, np.ndarray] | None = None,
    **contents: Any,
) -> CsrGraph:
    """The graph of these edges, of which repeated ones count once; self loops and directions are kept.

    Args:
        row, col: [E] int64, 0 <= row, col < num_nodes.
        num_nodes: N, below 2^31, so that row * N + col fits an int64.
        edata: arrays of E rows; the first one of equal edges counts.
        contents: further fields of `CsrGraph`.
    """
    listed, edata, key = row.size, edata or {}, row * num_nodes + col
    if not np.all(key[1:] > key[:-1]):  # published files are often in order: no sort needed
        if edata:
            order = np.argsort(key, kind="stable")
            key = key[order]
            is_first = np.concatenate([[True], key[1:] != key[:-1]])
            key, edata = key[is_first], {name: values[order[is_first]] for name, values in edata.items()}
        else:
            key = distinct(np, key)
        row, col = key // num_nodes, key % num_nodes
    ids = np.int32 if col.size <= MAX_INT32 else np.int64
    indptr = np.zeros(num_nodes + 1, ids)
    np.cumsum(np.bincount(row, minlength=num_nodes), out=indptr[1:])
    return CsrGraph(indptr, col.astype(ids), origin, listed - col.size, edata=edata, **contents)


def checked_graph(
    place: Path | str,
    row: np.ndarray,
    col: np.ndarray,
    num_nodes: int,
    *,
    both_directions: bool = False,
    edata: Mapping[str, np.ndarray] | None = None,
    **contents: Any,
) -> CsrGraph:
    """The graph of edges [E], after a check of their ids and of its size.

    Args:
        place: the file or folder, for messages, and the origin unless `contents` has one.
        both_directions: whether A gets both directions of each edge.
        edata: arrays of E rows.
        contents: further fields of `CsrGraph`.

    Raises:
        ValueError: an edge has an end outside 0 .. num_nodes - 1, an array has another number of rows, or there are too
            many nodes or none.
        MemoryError: the graph would not fit.
    """
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"{place}: num_nodes is {num_nodes}; 1 to {MAX_NODES} are allowed")
    check_rows(place, "edges", row.size, {"dst_li (the second column)": col, **(edata or {})})
    check_rows(place, "nodes", num_nodes, contents.get("ndata", {}))
    for end, ids in (("row (first column, src_li)", row), ("column (second column, dst_li)", col)):
        outside = np.flatnonzero((ids < 0) | (ids >= num_nodes))
        if outside.size:
            at = outside[0]
            raise ValueError(f"{place}: edge {at} has the {end} {ids[at]}; allowed are 0 to {num_nodes - 1}")
    num_edges = row.size * (2 if both_directions else 1)
    needed = num_nodes * LOADING_BYTES_PER_NODE + num_edges * LOADING_BYTES_PER_EDGE
    require_memory(f"{place}: num_nodes is {num_nodes:,}, with {num_edges:,} edges", needed)
    row, col = (np.ascontiguousarray(ids, np.int64) for ids in (row, col))
    if both_directions:
        row, col = np.concatenate([row, col]), np.concatenate([col, row])
        edata = {name: np.concatenate([values, values]) for name, values in (edata or {}).items()}
    return to_csr(row, col, num_nodes, contents.pop("origin", str(place)), edata=edata, **contents)


def check_rows(place: Path | str, kind: str, count: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Raise a ValueError if an array of nodes or edges, as `kind` says, has not `count` rows."""
    for name, values in arrays.items():
        if values.shape[:1] != (count,):
            raise ValueError(f"{place}: {name} of {kind} has shape {values.shape}; {count} rows are needed")


def with_self_loops(graph: CsrGraph) -> CsrGraph:
    """The graph with an edge from each node to itself; without edge data."""
    own = np.arange(graph.num_nodes)
    row, col = (np.concatenate([ids[graph.row != graph.col], own]) for ids in (graph.row, graph.col))
    looped = to_csr(row, col, graph.num_nodes, graph.origin)
    return replace(graph, indptr=looped.indptr, col=looped.col, edata={})
