"""Sizes of the parts of a partitioned graph: counted in its files, scaled to a larger graph, or of random columns."""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from parallel import load_part, load_partition

WINDOW_ROWS = 16
ROWS_AT_A_TIME = 1 << 16  # a multiple of WINDOW_ROWS
RANDOM = "random"  # partition of a graph whose columns are uniformly random


@dataclass(frozen=True)
class PartSize:
    """One rank's part, as `parallel.plan_part_attention` computes it: own columns, then halo columns.

    Attributes:
        rows: n.
        boundary_rows: rows with halo columns; they come last.
        own_edges, halo_edges: edges to own columns and to halo columns.
        own_gathered, halo_gathered: distinct columns of each row window, summed over the windows (`bench.traffic`).
        halo: [P] rows that it receives from each rank.
    """

    rows: int
    boundary_rows: int
    own_edges: int
    halo_edges: int
    own_gathered: int
    halo_gathered: int
    halo: tuple[int, ...]

    @property
    def edges(self) -> int:
        return self.own_edges + self.halo_edges

    @property
    def gathered(self) -> int:
        return self.own_gathered + self.halo_gathered


@dataclass(frozen=True)
class GraphSize:
    """A graph and its partition.

    Attributes:
        dataset, sha256, source: as in `bench.records`; "none" for a graph that was not loaded.
        partition: method, and the graph that it was made of where that is another one.
        basis: where the sizes are from, in words.
        parts: one a rank.
    """

    dataset: str
    sha256: str
    source: str
    nodes: int
    edges: int
    partition: str
    basis: str
    parts: tuple[PartSize, ...]

    @property
    def ranks(self) -> int:
        return len(self.parts)

    @property
    def gathered(self) -> int:
        """Distinct columns of each row window of the whole graph, in the partition's order of the rows."""
        return sum(part.gathered for part in self.parts)


def count_whole(indptr: np.ndarray, indices: np.ndarray) -> PartSize:
    """Sizes of a graph on one rank, from its CSR arrays."""
    edges, gathered = gathered_columns(indptr, indices, 0, indptr.size - 1)
    return PartSize(indptr.size - 1, 0, edges, 0, gathered, 0, (0,))


def count_parts(folder: Path) -> tuple[PartSize, ...]:
    """Sizes of a finished partition; a part at a time is read, and its edges in blocks of rows.

    Raises:
        PartitionError: `folder` holds no finished partition.
    """
    partition = load_partition(folder)
    found = []
    for rank in range(partition.num_parts):
        part = load_part(folder, rank=rank)
        own = gathered_columns(part.indptr, part.indices, 0, part.num_rows, own_below=part.num_rows)
        halo = gathered_columns(part.indptr, part.indices, part.num_interior, part.num_rows, own_from=part.num_rows)
        found.append(
            PartSize(
                rows=part.num_rows,
                boundary_rows=part.num_rows - part.num_interior,
                own_edges=own[0],
                halo_edges=halo[0],
                own_gathered=own[1],
                halo_gathered=halo[1],
                halo=partition.halo[rank],
            )
        )
    return tuple(found)


def gathered_columns(
    indptr: np.ndarray,
    indices: np.ndarray,
    first_row: int,
    num_rows: int,
    *,
    own_from: int = 0,
    own_below: int = np.iinfo(np.int64).max,
) -> tuple[int, int]:
    """Edges, and distinct columns of each row window summed over the windows; `bench.traffic` in blocks of rows.

    Args:
        indptr, indices: CSR arrays, which may be memory-mapped.
        first_row: first row of the first window.
        num_rows: rows of the CSR arrays.
        own_from, own_below: the columns that count.
    """
    edges = columns = 0
    for row in range(first_row, num_rows, ROWS_AT_A_TIME):
        last = min(row + ROWS_AT_A_TIME, num_rows)
        offsets = np.asarray(indptr[row : last + 1])
        col = np.asarray(indices[offsets[0] : offsets[-1]]).astype(np.int64)
        window = np.repeat(np.arange(last - row) // WINDOW_ROWS, np.diff(offsets))
        counts = (col >= own_from) & (col < own_below)
        key = window[counts] << 32 | col[counts]
        key.sort()
        edges += key.size
        columns += int(key.size > 0) + int(np.count_nonzero(np.diff(key)))
    return edges, columns


def scale_parts(parts: tuple[PartSize, ...], nodes: int, edges: int) -> tuple[PartSize, ...]:
    """The same shares of a larger graph: rows and halo rows grow with the nodes, edges and gathers with the edges."""
    by_nodes = nodes / sum(part.rows for part in parts)
    by_edges = edges / sum(part.edges for part in parts)
    return tuple(
        PartSize(
            rows=round(by_nodes * part.rows),
            boundary_rows=round(by_nodes * part.boundary_rows),
            own_edges=round(by_edges * part.own_edges),
            halo_edges=round(by_edges * part.halo_edges),
            own_gathered=round(by_edges * part.own_gathered),
            halo_gathered=round(by_edges * part.halo_gathered),
            halo=tuple(round(by_nodes * rows) for rows in part.halo),
        )
        for part in parts
    )


def random_parts(nodes: int, edges: int, ranks: int) -> tuple[PartSize, ...]:
    """Expected sizes where every edge has a uniformly random column and the rows' degrees are Poisson: no locality.

    Of c columns that x random edges may hit, c (1 - exp(-x / c)) are hit.
    """
    rows, degree = nodes / ranks, edges / nodes

    def hit(columns: float, draws: float) -> float:
        return columns * -math.expm1(-draws / columns) if columns else 0.0

    others = nodes - rows
    boundary = rows * -math.expm1(-degree * others / nodes)
    own_edges, halo_edges = rows * degree * rows / nodes, rows * degree * others / nodes
    windows = max(rows / WINDOW_ROWS, 1)
    # Boundary rows alone have halo columns, and fill windows of their own.
    halo_windows = max(boundary / WINDOW_ROWS, 1)
    from_each = round(hit(rows, rows * degree * rows / nodes))
    part = PartSize(
        rows=round(rows),
        boundary_rows=round(boundary),
        own_edges=round(own_edges),
        halo_edges=round(halo_edges),
        own_gathered=round(windows * hit(rows, own_edges / windows)),
        halo_gathered=round(halo_windows * hit(others, halo_edges / halo_windows)),
        halo=(),
    )
    return tuple(
        PartSize(**{**vars(part), "halo": tuple(from_each * (other != rank) for other in range(ranks))})
        for rank in range(ranks)
    )
