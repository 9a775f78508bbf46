"""Parts of a graph against the matrix that they were made of."""

import sys

import numpy as np
import pytest
import scipy.sparse as sp

from data import memory
from parallel import PartitionError, partition_graph
from parallel.partition import METHODS, assign_rows


def _random(num_nodes: int, density: float) -> sp.csr_array:
    return sp.csr_array(np.random.default_rng(num_nodes).random((num_nodes, num_nodes)) < density)


def _clusters() -> sp.csr_array:
    """Three dense clusters with one edge between two of them, rows shuffled."""
    mask = np.kron(np.eye(3, dtype=bool), np.ones((20, 20), bool))
    mask[0, 59] = True
    order = np.random.default_rng(0).permutation(60)
    return sp.csr_array(mask[order][:, order])


def _repeated() -> sp.csr_array:
    """Every edge twice, columns unsorted, some stored values 0."""
    matrix = _random(70, 0.1)
    indices = [np.r_[row[::-1], row] for row in np.split(matrix.indices, matrix.indptr[1:-1])]
    return sp.csr_array((np.arange(2 * matrix.nnz) % 2, np.concatenate(indices), 2 * matrix.indptr), shape=(70, 70))


MATRICES = {
    "no_rows": lambda: sp.csr_array((0, 0)),
    "one_row": lambda: sp.csr_array(np.ones((1, 1))),
    "no_edges": lambda: sp.csr_array((40, 40)),
    "random": lambda: _random(70, 0.1),
    "repeated": _repeated,
    "clusters": _clusters,
    "hub": lambda: sp.coo_array(np.vstack([np.ones((1, 50)), np.eye(50)[1:]])),
}


def mask_of(matrix: sp.sparray) -> np.ndarray:
    """Which edges are stored, whatever their value."""
    mask, coo = np.zeros(matrix.shape, bool), matrix.tocoo()
    mask[coo.row, coo.col] = True
    return mask


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MATRICES)
def test_parts_are_the_matrix(name, method):
    if method == "metis":
        pytest.importorskip("pymetis")
    matrix = MATRICES[name]()
    before = matrix.copy()
    parts = partition_graph(matrix, 3, method)
    assert (matrix != before).nnz == 0
    mask, partition = mask_of(matrix), parts[0].partition
    assert (sum(partition.rows), sum(partition.edges)) == (matrix.shape[0], mask.sum())
    assert sorted(np.concatenate([part.rows for part in parts])) == list(range(matrix.shape[0]))
    for part in parts:
        assert part.partition == partition
        assert part.num_rows == partition.rows[part.rank]
        own, halo = np.split(part.matrix.toarray(), [part.num_rows], 1)
        assert part.matrix.has_sorted_indices
        wanted = mask[part.rows]
        assert (own == wanted[:, part.rows]).all()
        assert (halo == wanted[:, part.halo]).all()
        assert set(part.halo) == set(np.flatnonzero(wanted.any(0))) - set(part.rows)
        assert (halo.any(1) == (np.arange(part.num_rows) >= part.num_interior)).all()
        for rows in np.split(part.rows, [part.num_interior]):
            assert (np.diff(rows) > 0).all()
        starts = np.cumsum([counts[part.rank] for counts in partition.halo])[:-1]
        for other, sent in zip(parts, np.split(part.send_rows, starts), strict=True):  # what it sends, others wait for
            received = np.split(other.halo, np.cumsum(partition.halo[other.rank])[:-1])[part.rank]
            assert (part.rows[sent] == received).all()
    if method == "contiguous":
        ends = np.cumsum([0, *partition.rows])
        assert all(set(part.rows) == set(range(*ends[part.rank : part.rank + 2])) for part in parts)


def test_metis_finds_clusters_and_balances_rows():
    pytest.importorskip("pymetis")
    partition = partition_graph(_clusters(), 3)[0].partition
    assert partition.rows == (20, 20, 20)
    assert sum(map(sum, partition.halo)) == 1


def test_metis_gives_the_same_parts_on_every_run():
    pytest.importorskip("pymetis")
    first, second = (assign_rows(_random(200, 0.05), 4, "metis") for _ in range(2))
    assert (first == second).all()


@pytest.mark.parametrize(
    ("matrix", "options", "message"),
    [
        (sp.csr_array((3, 4)), {}, r"graph: got csr_array of shape \(3, 4\); a square SciPy sparse matrix"),
        (np.eye(3), {}, "graph: got ndarray"),
        (_random(9, 0.3), {"method": "random"}, "method: got 'random'; allowed are metis, contiguous"),
        (_random(9, 0.3), {"num_parts": 0}, "num_parts: got 0; an integer from 1 to 4096"),
        (_random(9, 0.3), {"num_parts": 10**6}, "num_parts: got 1000000; an integer from 1 to 4096"),
        (_random(9, 0.3), {"owner": np.zeros(8, np.int32)}, r"owner: got \[8\] int32; \[9\] integers from 0 to 1"),
        (_random(9, 0.3), {"owner": np.full(9, 2)}, r"owner: got \[9\] int64; \[9\] integers from 0 to 1"),
        (_random(9, 0.3), {"owner": np.zeros(9)}, r"owner: got \[9\] float64"),
    ],
)
def test_wrong_arguments_are_named(matrix, options, message):
    with pytest.raises(ValueError, match=message):
        partition_graph(matrix, **{"num_parts": 2, "method": "contiguous"} | options)


def test_a_graph_that_does_not_fit_is_refused(monkeypatch):
    monkeypatch.setattr(memory, "available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match="partition: the matrix in two orders: about"):
        partition_graph(_random(70, 0.1), 2, "contiguous")


def test_metis_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pymetis", None)
    with pytest.raises(PartitionError, match="got 'metis' without pymetis: pip install pymetis"):
        partition_graph(_random(9, 0.3), 2)
