"""Graphs of 100 million nodes, at a thousandth of their size and smaller."""

import logging
from dataclasses import replace

import numpy as np
import pytest

import data
from data.synthetic import huge

HUGE = ["igb-large", "ogbn-papers100m"]


def thousandth(name):
    entry = data.info(name)
    return replace(entry, num_nodes=entry.num_nodes // 1000, nnz=entry.nnz // 1000)


@pytest.fixture(scope="module", params=HUGE)
def graph(request):
    entry = thousandth(request.param)
    return entry, entry.synthetic(entry, 1024, 5)


def rows_of(graph):
    return np.repeat(np.arange(graph.num_nodes), np.diff(graph.indptr.astype(np.int64)))


def assert_canonical(graph, num_nodes, nnz):
    """Exact size, every edge once, sorted by row and column, ids in range, no self loop."""
    assert (graph.num_nodes, graph.col.size, int(graph.indptr[-1])) == (num_nodes, nnz, nnz)
    assert graph.indptr.dtype == graph.col.dtype == np.int32
    assert 0 <= graph.col.min() <= graph.col.max() < num_nodes
    row = rows_of(graph)
    assert (np.diff(row * num_nodes + graph.col) > 0).all()
    assert (row != graph.col).all()


def test_exact_size_and_canonical_edges(graph):
    entry, made = graph
    assert_canonical(made, entry.num_nodes, entry.nnz)


def test_degrees_are_log_normal_and_columns_local_and_uniform(graph):
    entry, made = graph
    degrees = np.diff(made.indptr)
    mean = entry.nnz / entry.num_nodes
    assert degrees.std() / degrees.mean() == pytest.approx(np.sqrt(np.e - 1), rel=0.06)  # CV of sigma 1
    assert np.median(degrees) == pytest.approx(mean / np.exp(0.5), abs=1)
    distance = np.abs(made.col.astype(np.int64) - rows_of(made))
    distance = np.minimum(distance, entry.num_nodes - distance)
    others_nearby = 0.75 * 2 * 4096 / entry.num_nodes
    assert (distance <= 4096).mean() == pytest.approx(0.25 + others_nearby, abs=0.01)
    for nearby in (distance[distance <= 4096], distance[distance > 4096] - 4096):
        thirds = np.histogram(nearby, bins=3)[0]
        assert thirds.max() / thirds.min() < 1.03
    popularity = np.histogram(made.col, bins=20, range=(0, entry.num_nodes))[0]
    assert popularity.max() / popularity.min() < 1.1


@pytest.mark.parametrize("chunk", [1, 997, 10**9])
def test_any_chunk_gives_the_same_bits(monkeypatch, chunk):
    spec = replace(data.info("igb-large"), num_nodes=403, nnz=5_001)
    monkeypatch.setattr(huge, "REACH", 20)
    expected = huge.huge(spec, 1, 3)
    monkeypatch.setitem(huge.CHUNK_EDGES, "numpy", chunk)
    chunked = huge.huge(spec, 1, 3)
    np.testing.assert_array_equal(chunked.indptr, expected.indptr)
    np.testing.assert_array_equal(chunked.col, expected.col)
    assert chunked.sha256 == expected.sha256
    assert huge.huge(spec, 1, 4).sha256 != expected.sha256


def test_repeated_edges_of_crowded_rows_are_drawn_again(monkeypatch):
    # Up to half of all columns in a row, and local ranges with more draws than columns.
    spec = replace(data.info("igb-large"), num_nodes=120, nnz=3_000)
    for name, value in {"ROW_SIGMA": 0.3, "LOCAL_SHARE": 0.6, "REACH": 4}.items():
        monkeypatch.setattr(huge, name, value)
    assert_canonical(huge.huge(spec, 1, 0), 120, 3_000)


@pytest.mark.parametrize("name", HUGE)
def test_loads_by_name_and_is_not_kept(name, tmp_path, monkeypatch, caplog):
    entry = thousandth(name)
    monkeypatch.setattr("data.loader.info", lambda name: entry)
    with caplog.at_level(logging.INFO, logger="data"):
        loaded = data.load(name, root=tmp_path, source="synthetic", features=False)
    assert list(tmp_path.iterdir()) == []
    assert "; not kept" in caplog.text
    meta = loaded.meta
    assert (meta.source, meta.num_nodes, meta.num_edges) == ("synthetic", entry.num_nodes, entry.nnz)
    assert int(loaded.row_pointers[-1]) == loaded.columns.numel() == entry.nnz
    assert loaded.graph.adj_tensors("csc")[2].numel() == 0  # no array of edge numbers, which would double the memory


@pytest.mark.gpu
@pytest.mark.parametrize("name", HUGE)
def test_cpu_and_gpu_give_the_same_bits(name, monkeypatch):
    cupy = pytest.importorskip("cupy")
    monkeypatch.setitem(huge.CHUNK_EDGES, "cupy", 100_003)
    entry = thousandth(name)
    left, right = (entry.synthetic(entry, 1024, 5, xp) for xp in (np, cupy))
    np.testing.assert_array_equal(left.indptr, right.indptr)
    np.testing.assert_array_equal(left.col, right.col)
    assert isinstance(right.col, np.ndarray)
