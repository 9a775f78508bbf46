"""Partitions of a graph: METIS or ranges of rows assign its rows to ranks, and SciPy cuts out the part of each."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import scipy.sparse as sp

from data.memory import require_memory

METHODS = ("metis", "contiguous")
WINDOW_ROWS = 16  # contiguous parts begin at a row window
# Time of a row outside attention, in edges (kernels/NOTES.md). Without it one rank gets up to 1.8 times the mean number
# of rows.
EDGES_PER_ROW = 8
BYTES_PER_EDGE = 40  # of the matrix in both orders
METIS_BYTES_PER_EDGE = 120  # of the symmetric graph, METIS's own copies included
MAX_PARTS = 4096  # `Partition.halo` holds a number for each pair


class PartitionError(ValueError):
    """A graph cannot be divided, or its kept partition is damaged. The text says what to do."""


@dataclass(frozen=True)
class Partition:
    """Sizes of all parts.

    Attributes:
        method: one of METHODS.
        rows, interior, edges: [P] rows of each part, those without halo columns, and its edges.
        halo: [P, P] rows that part p receives from part q.
    """

    method: str
    rows: tuple[int, ...]
    interior: tuple[int, ...]
    edges: tuple[int, ...]
    halo: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, eq=False)
class Part:
    """The rows of one rank: first those without halo columns, then the boundary rows, each in the graph's order. So the
    rows that wait for the exchange are one slice of queries and outputs.

    Attributes:
        partition: sizes of all parts.
        rank: p, number of the part.
        matrix: [n, n + h] pattern of the rows: the columns of this part, then those of the halo; both ascend in a row.
        rows: [n] int64, number of each row in the graph.
        halo: [h] int64, number of each halo column in the graph, grouped by the rank that owns it.
        send_rows: [s] int64, local rows that other ranks need, grouped by rank.
    """

    partition: Partition
    rank: int
    matrix: sp.csr_array
    rows: np.ndarray
    halo: np.ndarray
    send_rows: np.ndarray

    @property
    def num_rows(self) -> int:
        return self.rows.size

    @property
    def num_interior(self) -> int:
        return self.partition.interior[self.rank]


def partition_graph(graph: Any, num_parts: int, method: str = "metis", owner: np.ndarray | None = None) -> list[Part]:
    """The parts of a graph.

    Args:
        graph: a square SciPy sparse matrix; rows are queries, stored entries are edges, and repeated ones count once.
        method: of `assign_rows`.
        owner: [N] the result of `assign_rows`, if it is known.

    Raises:
        ValueError, MemoryError: as `assign_rows`; also for an `owner` of other rows or parts.
    """
    matrix = _pattern(graph)
    num_nodes = matrix.shape[0]
    require_memory("partition: the matrix in two orders", matrix.nnz * BYTES_PER_EDGE)
    owner = assign_rows(matrix, num_parts, method) if owner is None else owner
    if owner.shape != (num_nodes,) or owner.dtype.kind != "i" or not np.isin(owner, np.arange(num_parts)).all():
        raise ValueError(
            f"owner: got {list(owner.shape)} {owner.dtype}; [{num_nodes}] integers from 0 to {num_parts - 1} are needed"
        )
    row = np.repeat(np.arange(num_nodes), np.diff(matrix.indptr))
    is_boundary = np.zeros(num_nodes, bool)
    is_boundary[row[owner[row] != owner[matrix.indices]]] = True
    order = np.lexsort((is_boundary, owner))  # stable: then in the graph's order
    matrix = matrix[order][:, order]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(owner, minlength=num_parts))])
    ranges = [slice(first, last) for first, last in pairwise(offsets)]
    halos = []
    for own in ranges:
        used = np.bincount(matrix[own].indices, minlength=num_nodes)
        used[own] = 0
        halos.append(np.flatnonzero(used))
    cuts = [np.searchsorted(halo, offsets) for halo in halos]  # a halo ascends, so it is grouped by owner
    partition = Partition(
        method,
        rows=tuple(np.diff(offsets).tolist()),
        interior=tuple(np.bincount(owner[~is_boundary], minlength=num_parts).tolist()),
        edges=tuple(np.diff(matrix.indptr[offsets]).tolist()),
        halo=tuple(tuple(np.diff(cut).tolist()) for cut in cuts),
    )
    parts = []
    for rank, own in enumerate(ranges):
        local = matrix[own][:, np.concatenate([np.arange(own.start, own.stop), halos[rank]])]
        local.sort_indices()
        wanted = [halo[cut[rank] : cut[rank + 1]] for halo, cut in zip(halos, cuts, strict=True)]
        parts.append(Part(partition, rank, local, order[own], order[halos[rank]], np.concatenate(wanted) - own.start))
    return parts


def assign_rows(graph: Any, num_parts: int, method: str) -> np.ndarray:
    """[N] int32, the part of each row; the same for the same graph on every run.

    Args:
        graph: as of `partition_graph`.
        method: "metis" (few edges between parts) or "contiguous" (ranges of rows). Both balance edges and rows.

    Raises:
        ValueError: an argument is wrong; a PartitionError: METIS is not installed, or cannot count the edges.
        MemoryError: METIS does not fit.
    """
    if method not in METHODS:
        raise ValueError(f"method: got {method!r}; allowed are {', '.join(METHODS)}")
    if not isinstance(num_parts, int) or not 1 <= num_parts <= MAX_PARTS:
        raise ValueError(f"num_parts: got {num_parts}; an integer from 1 to {MAX_PARTS} is needed")
    matrix = _pattern(graph)
    weights = np.diff(matrix.indptr).astype(np.int64) + EDGES_PER_ROW
    return _by_metis(matrix, weights, num_parts) if method == "metis" else _contiguous(weights, num_parts)


def _pattern(graph: Any) -> sp.csr_array:
    if not sp.issparse(graph) or graph.ndim != 2 or graph.shape[0] != graph.shape[1]:
        raise ValueError(f"graph: got {type(graph).__name__} of shape {graph.shape}; a square SciPy sparse matrix")
    graph = graph.tocsr()
    if graph.has_canonical_format and graph.dtype == bool:
        return graph
    arrays = np.ones(graph.nnz, bool), graph.indices.copy(), graph.indptr.copy()  # the next call changes them
    pattern = sp.csr_array(arrays, shape=graph.shape)
    pattern.sum_duplicates()
    return pattern


def _contiguous(weights: np.ndarray, num_parts: int) -> np.ndarray:
    """Parts of equal weight in the given order of the rows; empty ones if there are fewer row windows than parts."""
    total = np.cumsum(weights)
    targets = (total[-1] if total.size else 0) / num_parts * np.arange(1, num_parts)
    cuts = np.rint(np.searchsorted(total, targets) / WINDOW_ROWS).astype(np.int64) * WINDOW_ROWS
    return np.searchsorted(cuts, np.arange(weights.size), side="right").astype(np.int32)


def _by_metis(matrix: sp.csr_array, weights: np.ndarray, num_parts: int) -> np.ndarray:
    """Parts of equal weight with few edges between them. METIS gets the undirected graph without self-loops."""
    try:
        import pymetis
    except ImportError as error:
        raise PartitionError(
            "method: got 'metis' without pymetis: pip install pymetis, or take 'contiguous'"
        ) from error
    if num_parts == 1 or weights.size <= num_parts:
        return np.minimum(np.arange(weights.size, dtype=np.int32), num_parts - 1)
    require_memory("METIS (method 'contiguous' needs less)", matrix.nnz * METIS_BYTES_PER_EDGE)
    both = (matrix + matrix.T).tocoo()
    is_edge = both.row != both.col
    both = sp.csr_array((both.data[is_edge], (both.row[is_edge], both.col[is_edge])), shape=both.shape)
    most = np.iinfo(integer := pymetis.zero_copy_dtype()).max
    if both.nnz > most:
        raise PartitionError(f"method: got 'metis' for {both.nnz} edges; this pymetis takes {most}: take 'contiguous'")
    weights = np.maximum(weights // (1 + int(weights.sum()) // (most // 2)), 1).astype(integer)
    graph = pymetis.CSRAdjacency(both.indptr.astype(integer), both.indices.astype(integer))
    _, parts = pymetis.part_graph(num_parts, graph, vweights=weights, options=pymetis.Options(seed=0))
    return np.asarray(parts, dtype=np.int32)


def describe(partition: Partition) -> dict[str, str]:
    """Lines of a report."""

    def between(counts: Sequence[int]) -> str:
        return f"{min(counts):,} to {max(counts):,}"

    halo, rows, is_metis = [sum(counts) for counts in partition.halo], partition.rows, partition.method == "metis"
    boundary = [every - interior for every, interior in zip(rows, partition.interior, strict=True)]
    share = max(halo) / max(sum(rows), 1)
    return {
        "partition": "METIS" if is_metis else "contiguous rows (METIS cuts fewer edges, and needs pymetis)",
        "of each rank": f"{between(rows)} rows, {between(partition.edges)} edges",
        "boundary rows": f"{between(boundary)} of each rank use columns of other ranks",
        "halo columns": f"{between(halo)} of each rank, at most {share:.1%} of all rows",
    }
