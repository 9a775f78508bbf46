"""Sizes of parts against the matrix; scaled sizes; expected sizes of random columns against a random graph."""

import math

import numpy as np
import pytest
import scipy.sparse as sp

from bench.traffic import gathered_columns as gathered_by_format
from kernels.formats.csr import csr_pattern
from parallel import load_part, partition_graph, source_from_csr
from simulator import sizes
from simulator.sizes import PartSize, count_parts, count_whole, gathered_columns, random_parts, scale_parts

WINDOW = 16


def _random(num_nodes: int, density: float) -> sp.csr_array:
    return sp.csr_array(np.random.default_rng(num_nodes).random((num_nodes, num_nodes)) < density)


def _hub() -> sp.csr_array:
    """Row 0 has every column, the next 40 rows none, the others themselves."""
    mask = np.eye(100, dtype=bool)
    mask[0], mask[1:41] = True, False
    return sp.csr_array(mask)


MATRICES = {
    "random": lambda: _random(200, 0.03),
    "hub": _hub,
    "blocks": lambda: sp.csr_array(np.kron(np.eye(4, dtype=bool), np.ones((16, 16), bool))),  # no halo on 4 ranks
    "no_edges": lambda: sp.csr_array((40, 40)),
    "fewer_windows_than_ranks": lambda: _random(20, 0.3),
}


def windows_of(pairs: set[tuple[int, int]]) -> int:
    """Distinct (window, column) of (place of a row, column)."""
    return len({(place // WINDOW, column) for place, column in pairs})


@pytest.mark.parametrize("name", MATRICES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_parts_are_those_of_the_matrix(name, ranks, tmp_path):
    matrix = MATRICES[name]()
    partition_graph(source_from_csr(matrix.indptr, matrix.indices), tmp_path / "parts", ranks, "contiguous")
    found = count_parts(tmp_path / "parts")
    rows = [load_part(tmp_path / "parts", rank=rank).rows.tolist() for rank in range(ranks)]
    owner = {row: rank for rank, members in enumerate(rows) for row in members}
    dense = matrix.toarray()
    for rank, members in enumerate(rows):
        edges = [(place, column) for place, row in enumerate(members) for column in np.flatnonzero(dense[row])]
        own = {edge for edge in edges if owner[edge[1]] == rank}
        halo = {edge for edge in edges if owner[edge[1]] != rank}
        first = min((place for place, _ in halo), default=len(members))
        columns = {column for _, column in halo}
        assert found[rank] == PartSize(
            rows=len(members),
            boundary_rows=len({place for place, _ in halo}),
            own_edges=len(own),
            halo_edges=len(halo),
            own_gathered=windows_of(own),
            halo_gathered=windows_of({(place - first, column) for place, column in halo}),
            halo=tuple(sum(owner[column] == other for column in columns) for other in range(ranks)),
        )


@pytest.mark.parametrize("rows_at_a_time", [16, 48, 1 << 16])
def test_blocks_of_rows_do_not_matter(monkeypatch, rows_at_a_time):
    monkeypatch.setattr(sizes, "ROWS_AT_A_TIME", rows_at_a_time)
    matrix = _random(200, 0.03)
    found = gathered_columns(matrix.indptr, matrix.indices, 0, 200)
    assert found == (matrix.nnz, gathered_by_format(csr_pattern(matrix)))


def test_a_graph_on_one_rank():
    matrix = _random(200, 0.03)
    gathered = gathered_by_format(csr_pattern(matrix))
    assert count_whole(matrix.indptr, matrix.indices) == PartSize(200, 0, matrix.nnz, 0, gathered, 0, (0,))


def test_scaled_parts_keep_their_shares():
    parts = (PartSize(30, 10, 200, 40, 150, 30, (0, 12)), PartSize(10, 8, 50, 10, 40, 9, (6, 0)))
    first, second = scale_parts(parts, nodes=400, edges=900)  # 10 times the rows, 3 times the edges
    assert first == PartSize(300, 100, 600, 120, 450, 90, (0, 120))
    assert second == PartSize(100, 80, 150, 30, 120, 27, (60, 0))


@pytest.mark.parametrize(("ranks", "degree"), [(2, 10), (4, 10), (16, 3)])
def test_expected_sizes_are_those_of_a_random_graph(ranks, degree, tmp_path):
    nodes = 16_000
    rng = np.random.default_rng(0)
    row, column = rng.integers(0, nodes, (2, nodes * degree))
    matrix = sp.csr_array((np.ones(row.size, bool), (row, column)), (nodes, nodes))
    partition_graph(source_from_csr(matrix.indptr, matrix.indices), tmp_path / "parts", ranks, "contiguous")
    counted = count_parts(tmp_path / "parts")
    for name in ("rows", "boundary_rows", "own_edges", "halo_edges", "own_gathered", "halo_gathered"):
        mean = sum(getattr(part, name) for part in counted) / ranks
        assert getattr(random_parts(nodes, matrix.nnz, ranks)[0], name) == pytest.approx(mean, rel=0.02), name
    received = sum(sum(part.halo) for part in counted) / ranks
    expected = random_parts(nodes, matrix.nnz, ranks)
    assert sum(expected[0].halo) == pytest.approx(received, rel=0.02)
    assert [part.halo[rank] for rank, part in enumerate(expected)] == [0] * ranks


def test_random_columns_on_one_rank():
    (part,) = random_parts(1000, 5000, 1)
    assert (part.rows, part.boundary_rows, part.own_edges, part.halo_edges, part.halo) == (1000, 0, 5000, 0, (0,))
    # 80 edges of a window hit 1000 (1 - exp(-0.08)) columns.
    assert part.own_gathered == pytest.approx(1000 / WINDOW * 1000 * (1 - math.exp(-0.08)), rel=1e-3)
    assert part.halo_gathered == 0
