import logging
import zlib

import numpy as np
import pytest
import torch

import data
import data.synthetic.generate
from bench.block_stats import TARGETS, dataset_rows, decile_rows, measure
from data.loader import find_graph
from data.synthetic.random import CHUNK, random_bits, shuffled
from data.synthetic.windows import decile_counts, log_normal_counts

# Sizes up to 5 M edges, and ppa's 5.4 M; `python scripts/datasets.py stats` checks the others.
QUICK = [e.name for e in map(data.info, data.names()) if e.nnz < 5.5e6 and e.surrogate]


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("datasets")


@pytest.mark.parametrize("name", QUICK)
def test_a_surrogate_has_the_papers_block_statistics_and_the_originals_symmetry(name, root):
    entry, (_, raw) = data.info(name), find_graph(name, root=root, source="synthetic")
    measured = measure(raw)
    forward, backward = (
        np.sort(a.astype(np.int64) * raw.num_nodes + b) for a, b in ((raw.row, raw.col), (raw.col, raw.row))
    )
    assert np.array_equal(forward, backward) == entry.symmetric
    assert (raw.graph_sizes is None) == (entry.num_graphs is None)
    if raw.graph_sizes is not None:  # edges keep to their graph
        owner = np.repeat(np.arange(raw.graph_sizes.size), raw.graph_sizes)
        assert owner.size == raw.num_nodes
        assert np.array_equal(owner[raw.row], owner[raw.col])
    rows = [*dataset_rows(entry, measured), *decile_rows(entry, measured)]
    assert [row for row in rows if row["status"] == "off"] == []
    checked = sum(row["status"] == "ok" for row in rows)
    if not entry.published:
        assert checked == 2  # nodes and nnz
    elif entry.num_graphs:
        assert checked == 4  # and the two means
    else:
        assert checked == (16 if entry.published.get("deciles") else 6)


@pytest.mark.parametrize("name", ["cora", "musae-github", "pubmed", "fb100-cornell5", "ogbg-molhiv"])
def test_degree_spread_is_near_the_original(root, real_graph_dir, name):
    entry = data.info(name)
    path = real_graph_dir / ("batched" if entry.num_graphs else "single") / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    ours, theirs = (
        np.percentile(np.bincount(raw.row, minlength=raw.num_nodes), [50, 90, 99])
        for _, raw in (
            find_graph(name, root=root, source="synthetic"),
            find_graph(name, source="file", path=path),
        )
    )
    assert np.all(np.abs(ours - theirs) <= 2 + 0.4 * theirs), (ours, theirs)


@pytest.mark.parametrize("name", ["facebook-large", "soc-epinions1", "ogbn-arxiv", "fb100-cornell5", "ego-twitter"])
def test_blocks_without_published_figures_are_those_of_the_real_file(root, real_graph_dir, name):
    path = real_graph_dir / "single" / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    ours, theirs = (
        measure(find_graph(name, root=root, **source)[1]).figures
        for source in ({"source": "synthetic"}, {"path": path})
    )
    for metric, target in TARGETS.items():
        assert ours[metric] == pytest.approx(theirs[metric], rel=target), metric


@pytest.mark.parametrize("name", ["elliptic", "ogbg-code2", "pascalvoc-sp"])
def test_seed_decides(name, root):
    first, same, other = (
        data.load(name, root=root, source="synthetic", seed=seed, batch_size=64) for seed in (3, 3, 4)
    )
    assert first.meta == same.meta
    assert torch.equal(first.graph.ndata["feat"], same.graph.ndata["feat"])
    assert first.meta.sha256 != other.meta.sha256


@pytest.mark.parametrize(("name", "batch_size"), [("ogbg-molhiv", 1), ("ogbg-molpcba", 7), ("zinc", 1500)])
def test_molecules_are_connected_trees_with_rings(name, batch_size):
    entry = data.info(name)
    loaded = data.load(name, source="synthetic", batch_size=batch_size)
    graph = loaded.graph
    assert (loaded.meta.num_graphs, loaded.meta.task) == (batch_size, "graph")
    assert graph.num_nodes() == pytest.approx(batch_size * entry.num_nodes / 1_024, abs=1)
    assert graph.num_edges() == pytest.approx(batch_size * entry.nnz / 1_024, abs=2)
    keys, queries = (ids.numpy() for ids in graph.edges())
    reached = np.unique(queries[keys < queries])  # every atom but a graph's first is bound to an earlier one
    assert reached.size == graph.num_nodes() - batch_size
    chain = np.mean(np.abs(queries - keys) == 1)  # 0.72 of the bonds of real molecules join neighbours in the order
    assert 0.6 < chain < 0.85


@pytest.mark.parametrize("batch_size", [1, 40])
def test_code_is_trees(batch_size):
    graph = data.load("ogbg-code2", source="synthetic", batch_size=batch_size).graph
    children, parents = (ids.numpy() for ids in graph.edges())
    assert graph.num_edges() == graph.num_nodes() - batch_size
    assert np.unique(children).size == children.size  # one parent each
    assert np.all(parents < children)  # preorder, so no cycle


def test_decile_counts_have_bounds_and_mean():
    bounds = (2, 13, 16, 18, 20, 23, 25, 29, 34, 46, 1191)
    counts = decile_counts(bounds, 2357, 29.41)
    assert counts.mean() == pytest.approx(29.41, rel=1e-3)
    assert [counts[0], counts[-1]] == pytest.approx([2, 1191])
    assert np.percentile(counts, range(10, 100, 10)) == pytest.approx(bounds[1:-1], rel=0.03)


def test_log_normal_counts_have_mean_and_cv():
    counts = log_normal_counts(1.22, np.inf, 10_000, 330.5)
    assert (counts.mean(), counts.std() / counts.mean()) == pytest.approx((330.5, 1.22), rel=1e-3)
    assert log_normal_counts(1.0, 50, 1000, 10).max() <= 50
    with pytest.raises(ValueError, match="different signs"):
        log_normal_counts(2.0, 50, 1000, 10)  # a maximum of five times the mean allows no such CV


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """cora's surrogate, kept as large ones are: its file and the function that loads it."""
    monkeypatch.setattr(data.synthetic.generate, "CACHED_FROM_EDGES", 1)

    def load(**arguments):
        return data.load("cora", root=tmp_path, source="synthetic", **arguments)

    load()
    (path,) = (tmp_path / "synthetic").iterdir()
    return path, load


def test_large_surrogates_are_kept_and_read(kept, monkeypatch, caplog):
    path, load = kept
    monkeypatch.setattr(data.synthetic.generate, "CACHED_FROM_EDGES", 10**9)
    made = load()
    monkeypatch.setattr(data.synthetic.generate, "CACHED_FROM_EDGES", 1)
    with caplog.at_level(logging.INFO, logger="data"):
        read = load()
    assert read.meta == made.meta
    assert not caplog.records
    assert load(seed=1).meta.sha256 != made.meta.sha256
    monkeypatch.setattr(data.synthetic.generate, "GENERATOR_VERSION", 10**6)
    load()
    assert len(list(path.parent.iterdir())) == 3  # another seed and another version are other files


@pytest.mark.parametrize("damage", ["truncated", "flipped"])
def test_a_damaged_kept_surrogate_is_named_and_stays(kept, damage):
    path, load = kept
    good, content = load(), bytearray(path.read_bytes())
    if damage == "truncated":
        content = content[: len(content) // 2]
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{path}: cannot be read .* move it away"):
        load()
    path.unlink()
    assert load().meta == good.meta


def test_random_bits_are_uniform_and_differ_between_streams():
    bits = random_bits(np, 5, 0, CHUNK + 10)
    assert bits.min() >= 0
    assert np.unique(bits).size == bits.size
    assert np.bincount(bits % 10, minlength=10) == pytest.approx(bits.size / 10, rel=0.03)
    assert np.array_equal(bits[:5], random_bits(np, 5, 0, 5))  # independent of the count
    assert not np.intersect1d(bits, random_bits(np, 5, 1, bits.size)).size
    assert zlib.crc32(random_bits(np, 5, 0, 4).astype("<i8").tobytes()) == 2768639363  # the same on every machine
    ids = np.arange(1000)
    mixed = shuffled(np, ids, 5, 0)
    assert np.array_equal(np.sort(mixed), ids)
    assert np.abs(np.corrcoef(ids, mixed)[0, 1]) < 0.1


def test_a_surrogate_that_does_not_fit_is_refused_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr("data.memory.available_bytes", lambda: 10**8)
    for name, batch_size in (("amazon0505", 1024), ("zinc", 10**5), ("igb-large", 1)):
        with pytest.raises(MemoryError, match=rf"the surrogate of {name}, .* edges: about .* GiB needed, 0\.1 GiB"):
            data.load(name, root=tmp_path, source="synthetic", batch_size=batch_size, features=False)
    assert list(tmp_path.iterdir()) == []


# One direction and both, with and without patches, with self loops.
@pytest.mark.gpu
@pytest.mark.parametrize("name", ["citeseer", "elliptic", "musae-github", "igb-small"])
def test_gpu_makes_the_same_graph(name):
    import cupy

    entry = data.info(name)
    ours, theirs = (entry.synthetic(entry, 1, 7, xp) for xp in (np, cupy))
    for a, b in ((ours.row, theirs.row), (ours.col, theirs.col)):
        assert a.dtype == b.dtype == np.int32
        assert np.array_equal(a, b)


@pytest.mark.gpu
def test_gpu_makes_what_is_kept_and_gives_its_memory_back(kept, monkeypatch, caplog):
    import cupy

    _, load = kept
    held = cupy.get_default_memory_pool().total_bytes()
    with caplog.at_level(logging.INFO, logger="data"):
        ours = load(seed=1).meta
    assert "s on the GPU; to be kept in" in caplog.text
    assert cupy.get_default_memory_pool().total_bytes() <= held
    monkeypatch.setattr(data.synthetic.generate, "CACHED_FROM_EDGES", 10**9)
    assert load(seed=1).meta == ours


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(data.synthetic.generate, "CACHED_FROM_EDGES", 1)

    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(np, "savez", stopped)
    with pytest.raises(KeyboardInterrupt):
        data.load("cora", root=tmp_path, source="synthetic")
    assert list((tmp_path / "synthetic").iterdir()) == []
