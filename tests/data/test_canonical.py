import hashlib

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from data.canonical import to_csr


@st.composite
def edge_lists(draw):
    num_nodes = draw(st.integers(1, 12))
    node = st.integers(0, num_nodes - 1)
    edges = draw(st.lists(st.tuples(node, node), max_size=60))
    return np.array(edges, np.int64).reshape(-1, 2), num_nodes


@given(edge_lists())
def test_each_edge_once_sorted_in_its_direction(drawn):
    edges, num_nodes = drawn
    csr = to_csr(edges[:, 0], edges[:, 1], num_nodes, "")
    expected = sorted({tuple(edge) for edge in edges.tolist()})
    assert list(zip(csr.row.tolist(), csr.col.tolist(), strict=True)) == expected
    again = to_csr(csr.row.astype(np.int64), csr.col.astype(np.int64), num_nodes, "")
    assert np.array_equal(again.row, csr.row)
    assert np.array_equal(again.col, csr.col)


@given(edge_lists(), st.randoms(use_true_random=False))
def test_hash_ignores_order_and_repeats(drawn, random):
    edges, num_nodes = drawn
    other = [*edges.tolist(), *edges[:5].tolist()]
    random.shuffle(other)
    other = np.array(other, np.int64).reshape(-1, 2)
    hashes = {to_csr(*each.T, num_nodes, "").sha256 for each in (edges, other)}
    assert len(hashes) == 1


def by_definition(row, col, num_nodes):
    """The hash of canonical edges."""
    return hashlib.sha256(str(num_nodes).encode() + np.stack([row, col]).astype("<i8").tobytes()).hexdigest()[:16]


def test_hash_tells_direction_and_size_apart_and_is_stable():
    row, col = np.array([0, 1]), np.array([1, 2])
    hashes = [to_csr(*ends, "").sha256 for ends in ((row, col, 3), (col, row, 3), (row, col, 4))]
    assert len(set(hashes)) == 3
    assert hashes[0] == "359b96cd8d571adf"


def test_the_hash_in_slices_is_that_of_its_definition(monkeypatch):
    edges = np.unique(np.random.default_rng(0).integers(0, 50, (400, 2)), axis=0)
    for rows, ids in ((7, 33), (50, 400)):
        monkeypatch.setattr("data.graph.HASHED_ROWS", rows)
        monkeypatch.setattr("data.graph.HASHED_IDS", ids)
        assert to_csr(*edges.T, 50, "").sha256 == by_definition(*edges.T, 50)


@given(edge_lists())
def test_a_graph_says_its_size_type_and_hash(drawn):
    edges, num_nodes = drawn
    csr = to_csr(edges[:, 0], edges[:, 1], num_nodes, "here")
    assert (csr.num_nodes, csr.removed, csr.origin) == (num_nodes, len(edges) - csr.col.size, "here")
    assert csr.indptr.dtype == csr.col.dtype == np.int32
    assert csr.sha256 == by_definition(csr.row, csr.col, num_nodes)


@given(edge_lists())
def test_edge_data_moves_with_its_edge_and_the_first_of_duplicates_counts(drawn):
    edges, num_nodes = drawn
    number = np.arange(len(edges))[:, None]
    csr = to_csr(edges[:, 0], edges[:, 1], num_nodes, "here", edata={"feat": number})
    first = {}
    for n, edge in enumerate(map(tuple, edges.tolist())):
        first.setdefault(edge, n)
    assert csr.edata["feat"][:, 0].tolist() == [
        first[edge] for edge in zip(csr.row.tolist(), csr.col.tolist(), strict=True)
    ]
