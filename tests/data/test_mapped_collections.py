"""A user's collection that does not fit into memory: the graphs and predictions of one that does, within the bound."""

from dataclasses import asdict

import numpy as np
import pytest
import torch

import data
from data import mapped_collections
from data.batches import GraphSet

BOUND = 300_000  # bytes; the collection below takes 570,000 to load
COUNT, WIDTH = 150, 6


def random_collection(seed=0, count=COUNT):
    """Arrays with listed edges in both directions or twice, self loops, isolated nodes, and graphs without edges."""
    rng = np.random.default_rng(seed)
    sizes = rng.integers(1, 40, count)
    edge_counts = rng.integers(0, 60, count)
    edge_counts[:3] = 0
    u, v = (rng.integers(0, np.repeat(sizes, edge_counts)).astype(np.uint16) for _ in range(2))
    labels = rng.normal(size=(count, 2))
    labels[rng.random(labels.shape) < 0.2] = np.nan
    parts = np.split(rng.permutation(count), [count // 2, count - 10])
    return {
        "node_counts": sizes.astype(np.int32),
        "edge_counts": edge_counts,
        "u": u,
        "v": v,
        "feat": rng.normal(size=(sizes.sum(), WIDTH)),
        "graph_label": labels,
        **dict(zip(("train_ids", "valid_ids", "test_ids"), parts, strict=True)),
    }


@pytest.fixture
def little_memory(monkeypatch):
    def limit():
        monkeypatch.setattr("data.memory.available_bytes", lambda: BOUND)
        monkeypatch.setattr(mapped_collections, "BLOCK_ITEMS", 300)

    return limit


@pytest.fixture
def load(tmp_path):
    """Writes arrays to a file once, and loads them."""

    def load(arrays=None, save=np.savez, batch_size=None, **more):
        path = tmp_path / "mine.npz"
        if arrays is not None:
            save(path, **arrays)
        return data.load("mine", source="file", path=path, root=tmp_path / "root", batch_size=batch_size, **more)

    return load


def folders(tmp_path):
    """What is kept below the root, but for locks."""
    place = tmp_path / "root" / "mapped"
    return sorted(path for path in place.glob("*") if path.suffix != ".lock") if place.is_dir() else []


def assert_same(found, expected):
    assert asdict(found.meta) == asdict(expected.meta)
    for key in ("row_pointers", "columns", "graph_sizes", "graph_ids"):
        ours, theirs = getattr(found, key), getattr(expected, key)
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    assert torch.equal(found.node_data["feat"], expected.node_data["feat"])
    assert torch.equal(found.labels.nan_to_num(7.0), expected.labels.nan_to_num(7.0))
    for part, ids in expected.splits.items():
        assert torch.equal(found.splits[part], ids)


@pytest.mark.parametrize(("save", "batch_size"), [(np.savez, None), (np.savez_compressed, 90)])
def test_the_graphs_are_those_of_a_collection_in_memory(load, little_memory, tmp_path, caplog, save, batch_size):
    caplog.set_level("INFO", "data.loader")
    arrays = random_collection()
    expected = load(arrays, save, batch_size)
    assert not folders(tmp_path)
    little_memory()
    found = load(batch_size=batch_size)
    assert caplog.messages[0] == caplog.messages[-1]
    assert "each counts once" in caplog.messages[0]
    assert [place.name[:5] for place in folders(tmp_path)] == ["mine-"]
    assert_same(found, expected)

    graphs, others = GraphSet(found), GraphSet(expected)
    for first in range(0, len(graphs), 32):
        part = range(first, min(first + 32, len(graphs)))
        ours, theirs = graphs.slice(part), others.slice(part)
        for key in ("indptr", "col", "features", "graph_starts"):
            assert getattr(ours, key).dtype == getattr(theirs, key).dtype
            assert torch.equal(getattr(ours, key), getattr(theirs, key))


def test_the_memory_that_a_conversion_takes_is_bounded(load, little_memory, monkeypatch):
    blocks = []
    join = mapped_collections.join_graphs

    def spy(sizes, *rest):
        blocks.append(sizes.size)
        return join(sizes, *rest)

    monkeypatch.setattr(mapped_collections, "join_graphs", spy)
    arrays = random_collection()
    little_memory()
    load(arrays)
    assert len(blocks) > 10
    assert sum(blocks) == COUNT


def test_the_files_are_made_once_and_again_if_the_archive_changes(load, little_memory, tmp_path, monkeypatch):
    little_memory()
    first = load(random_collection())
    (kept,) = folders(tmp_path)
    assert sorted(path.name for path in kept.iterdir()) == ["about.json", "col.bin", "feat.npy", "indptr.npy"]
    with monkeypatch.context() as patched:
        patched.setattr(mapped_collections, "_convert", None)
        assert_same(load(), first)
    second = load(random_collection(seed=1))
    assert second.meta.sha256 != first.meta.sha256
    assert len(folders(tmp_path)) == 2


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [("u", 60000, r"mine\.npz: edge \[60000, \d+\] in a graph"), ("feat", np.nan, "feat holds NaN")],
)
def test_a_wrong_archive_leaves_nothing(load, little_memory, tmp_path, name, value, message):
    arrays = random_collection()
    arrays[name].reshape(-1)[-1] = value
    little_memory()
    with pytest.raises(ValueError, match=message):
        load(arrays)
    assert folders(tmp_path) == []


def changed_array(name, change):
    def damage(folder):
        array = np.load(folder / name)
        np.save(folder / name, change(array))

    return damage


DAMAGES = {
    "bit": lambda folder: (folder / "col.bin").write_bytes(b"\7" + (folder / "col.bin").read_bytes()[1:]),
    "columns": lambda folder: (folder / "col.bin").unlink(),
    "order": changed_array("indptr.npy", lambda indptr: np.r_[indptr[:9], indptr[-1], indptr[10:]]),
    "type": changed_array("indptr.npy", lambda indptr: indptr.astype(np.float32)),
    "width": changed_array("feat.npy", lambda feat: feat.repeat(2, 1)),
    "json": lambda folder: (folder / "about.json").write_text("[" * 100_000),
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_converted_files_that_are_damaged_are_named(load, little_memory, tmp_path, damage):
    little_memory()
    load(random_collection(count=60))
    (kept,) = folders(tmp_path)
    damage(kept)
    with pytest.raises(ValueError, match=rf"{kept.name}: damaged .*; remove this folder, and it is made again"):
        load()


def test_what_does_not_fit_in_a_random_order_is_refused(load, little_memory):
    little_memory()
    with pytest.raises(MemoryError, match=r"with order='dataset' only, and got 'random'"):
        load(random_collection(), order="random")
    arrays = random_collection()
    del arrays["feat"]
    with pytest.raises(MemoryError, match=r"mine\.npz: 150 graphs: about"):
        load(arrays)
