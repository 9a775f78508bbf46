"""A user's collection that does not fit into memory: the graphs and predictions of one that does, within the bound."""

import errno
import shutil
import tracemalloc
import zipfile
from collections import namedtuple
from dataclasses import asdict
from itertools import pairwise

import numpy as np
import pytest
import torch
from scripts_as_modules import load_script
from typer.testing import CliRunner

import data
from bench import cli
from data import mapped_collections, memory
from data.csr_batches import CsrBatches

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
    def limit(bound=BOUND):
        monkeypatch.setattr(memory, "_of_system", lambda: bound)
        monkeypatch.setattr(memory, "_of_container", lambda: None)

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
    """What is kept below the root; hidden files, such as a lock or an unfinished copy, too."""
    place = tmp_path / "root" / "mapped"
    return sorted(place.iterdir()) if place.is_dir() else []


def assert_same(found, expected):
    assert asdict(found.meta) == asdict(expected.meta)
    for ours, theirs in zip(found.graph.adj_tensors("csc"), expected.graph.adj_tensors("csc"), strict=True):
        assert ours.dtype == theirs.dtype
        assert torch.equal(ours, theirs)
    for key in ("batch_num_nodes", "batch_num_edges"):
        assert torch.equal(getattr(found.graph, key)(), getattr(expected.graph, key)())
    assert found.graph.idtype == expected.graph.idtype
    assert torch.equal(found.graph.ndata["feat"], expected.graph.ndata["feat"])
    assert torch.equal(found.labels.isnan(), expected.labels.isnan())
    assert torch.equal(found.labels.nan_to_num(), expected.labels.nan_to_num())
    assert torch.equal(found.graph_ids, expected.graph_ids)
    for part, ids in expected.splits.items():
        assert torch.equal(found.splits[part], ids)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("batch_size", [None, 90])
def test_the_graphs_are_those_of_a_collection_in_memory(load, little_memory, tmp_path, caplog, save, batch_size):
    caplog.set_level("INFO", "data.loader")
    arrays = random_collection()
    expected = load(arrays, save, batch_size)
    assert not folders(tmp_path)
    little_memory()
    found = load(batch_size=batch_size)
    assert caplog.messages[0] == caplog.messages[1]
    assert "duplicate edges" in caplog.messages[0]
    assert [place.name[:5] for place in folders(tmp_path)] == ["mine-"]
    assert_same(found, expected)

    # Edges from sets, without any of the code above.
    wanted, node, edge = [], 0, 0
    for size, more in list(zip(arrays["node_counts"], arrays["edge_counts"], strict=True))[:batch_size]:
        ends = [(node + int(arrays["u"][at]), node + int(arrays["v"][at])) for at in range(edge, edge + more)]
        wanted += sorted({*ends, *((key, query) for query, key in ends)})
        node, edge = node + int(size), edge + int(more)
    keys, queries = found.graph.edges()
    assert list(zip(queries.tolist(), keys.tolist(), strict=True)) == wanted

    for ours, theirs in zip(*(CsrBatches(each, 32, torch.device("cpu")) for each in (found, expected)), strict=True):
        assert (ours.first_row, ours.last_row) == (theirs.first_row, theirs.last_row)
        for key in ("indptr", "col", "features", "graph_starts"):
            assert getattr(ours, key).dtype == getattr(theirs, key).dtype
            assert torch.equal(getattr(ours, key), getattr(theirs, key))


def test_few_graphs_of_a_file_that_does_not_fit(load, little_memory, tmp_path):
    expected = load(random_collection(), batch_size=5)
    little_memory(150_000)
    assert_same(load(batch_size=5), expected)
    assert folders(tmp_path)


def test_the_blocks_are_small_and_hold_each_graph_once(load, little_memory, monkeypatch):
    seen = []
    convert = mapped_collections._convert

    def spy(*given):
        seen.extend(given[4])
        convert(*given)

    monkeypatch.setattr(mapped_collections, "_convert", spy)
    arrays = random_collection()
    little_memory()
    load(arrays)
    assert len(seen) > 5
    assert [seen[0][0], seen[-1][1]] == [0, COUNT]
    assert all(last == first for (_, last), (first, _) in pairwise(seen))
    nodes, edges = (
        np.add.reduceat(arrays[key], [first for first, _ in seen]) for key in ("node_counts", "edge_counts")
    )
    assert (16 * nodes + 2 * 48 * edges).max() < BOUND / 4


def test_the_peak_of_memory_stays_below_the_bound(load, little_memory):
    arrays = random_collection(count=6000)
    bound = 6_000_000

    def peak(**more):
        tracemalloc.start()
        try:
            loaded = load(**more)
            for _ in CsrBatches(loaded, 256, torch.device("cpu")):
                pass
            return tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    load(arrays)
    assert peak() > 2 * bound  # in memory
    little_memory(bound)
    assert peak() < bound


def test_graphs_without_edges(load, little_memory):
    arrays = random_collection()
    arrays |= {"edge_counts": np.zeros(COUNT, int), "u": np.zeros(0, int), "v": np.zeros(0, int)}
    expected = load(arrays)
    little_memory(60_000)
    assert_same(load(), expected)


def test_ids_are_int64_beyond_int32(load, little_memory, monkeypatch):
    expected = load(random_collection())
    little_memory()
    monkeypatch.setattr(mapped_collections, "MAX_INT32", 1000)
    found = load()
    assert found.graph.idtype == torch.int64
    assert found.meta == expected.meta
    assert torch.equal(found.graph.adj_tensors("csc")[1], expected.graph.adj_tensors("csc")[1].long())


def test_the_files_are_used_again_for_the_same_archive_only(load, little_memory, tmp_path, monkeypatch):
    little_memory()
    first = load(random_collection())
    with monkeypatch.context() as patch:
        patch.setattr(mapped_collections, "_convert", None)
        assert load().meta == first.meta
    changed = load(random_collection(seed=1))
    assert changed.meta.sha256 != first.meta.sha256
    assert len(folders(tmp_path)) == 2


def test_a_damaged_copy_is_an_error_that_says_what_to_delete(load, little_memory, tmp_path):
    little_memory()
    load(random_collection())
    (folder,) = folders(tmp_path)
    with (folder / "col.npy").open("r+b") as file:
        file.truncate(2000)
    with pytest.raises(ValueError, match=rf"{folder.name}: cannot be used .*; delete this folder"):
        load()
    shutil.rmtree(folder)
    load()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
@pytest.mark.parametrize("name", ["u", "v", "feat"])
def test_a_changed_byte_is_found(load, little_memory, tmp_path, save, name):
    arrays = random_collection()
    save(tmp_path / "mine.npz", **arrays)
    with zipfile.ZipFile(tmp_path / "mine.npz") as archive:
        member = archive.getinfo(f"{name}.npy")
    content = bytearray((tmp_path / "mine.npz").read_bytes())
    content[member.header_offset + member.compress_size - 100] ^= 1
    (tmp_path / "mine.npz").write_bytes(content)
    little_memory()
    with pytest.raises(ValueError, match=r"mine\.npz: (damaged|edge \d+ joins|feat holds NaN)"):
        load()
    assert not folders(tmp_path)


def wrong_edge(arrays):
    arrays["v"][-1] = 40
    return arrays


def wrong_feature(arrays):
    arrays["feat"][-1, 2] = np.nan
    return arrays


@pytest.mark.parametrize(("spoil", "message"), [(wrong_edge, "edge .* joins"), (wrong_feature, "feat holds NaN")])
def test_values_are_checked_as_in_memory(load, little_memory, tmp_path, spoil, message):
    with pytest.raises(ValueError, match=message) as expected:
        load(spoil(random_collection()))
    little_memory()
    with pytest.raises(ValueError, match=message) as found:
        load()
    assert str(found.value) == str(expected.value)
    assert not folders(tmp_path)


@pytest.mark.parametrize(
    ("arrays", "more", "error", "message"),
    [
        ({}, {"order": "random"}, MemoryError, r"read with order='dataset' only, and got 'random'"),
        ({"feat": None}, {}, MemoryError, r"the sum of node_counts of the chosen graphs is"),
        ({"feat": "columns"}, {}, ValueError, r"feat is stored column after column.*numpy\.ascontiguousarray\(feat\)"),
    ],
)
def test_collections_that_cannot_be_mapped(load, little_memory, tmp_path, arrays, more, error, message):
    given = random_collection()
    if "feat" in arrays:
        given["feat"] = None if arrays["feat"] is None else np.asfortranarray(given["feat"])
    little_memory()
    with pytest.raises(error, match=message):
        load({key: values for key, values in given.items() if values is not None}, **more)
    assert not folders(tmp_path)


def test_a_graph_that_alone_does_not_fit(load, little_memory, tmp_path):
    arrays = random_collection()
    arrays["node_counts"][7] += 100_000
    arrays["feat"] = np.zeros((arrays["node_counts"].sum(), WIDTH), np.float32)
    little_memory()
    with pytest.raises(MemoryError, match=r"graph 7, of 100,\d\d\d nodes and \d+ edges: about 0\.0 GiB needed"):
        load(arrays)
    assert not folders(tmp_path)


def test_a_full_disk(load, little_memory, tmp_path, monkeypatch):
    little_memory()
    with monkeypatch.context() as patch:
        usage = namedtuple("usage", "total used free")
        patch.setattr(shutil, "disk_usage", lambda place: usage(2**30, 2**30, 1000))
        with pytest.raises(OSError, match=r"mine\.npz: does not fit into memory.*0\.00 GiB are free.*set root"):
            load(random_collection())
    assert not folders(tmp_path)

    append = mapped_collections._NpyFile.append

    def fill(file, values):
        if file._rows > 1000:
            raise OSError(errno.ENOSPC, "No space left on device")
        append(file, values)

    with monkeypatch.context() as patch:
        patch.setattr(mapped_collections._NpyFile, "append", fill)
        with pytest.raises(OSError, match=r"cannot be written \(No space left on device\). It takes 0\.00 GiB of disk"):
            load()
    assert not folders(tmp_path)
    load()


def test_predictions_of_all_batches(little_memory, tmp_path, monkeypatch):
    monkeypatch.setattr(cli, "configure_logging", lambda *packages: None)  # for the process, also for later tests
    np.savez(tmp_path / "mine.npz", **random_collection())
    config = tmp_path / "mine.yaml"
    config.write_text(
        f"data: {{name: mine, source: file, path: '{tmp_path / 'mine.npz'}', root: '{tmp_path / 'root'}', "
        "batch_size: 32, batches: all}\nmodel: {blocks: 2, dim: 16, pos_enc: 2}\n"
        "runtime: {warmup: 1, repeats: 1, device: cpu}\n"
    )
    app = load_script("infer").app

    def run(name):
        given = ["--config", config, "--results", tmp_path / "r.csv", "--output", tmp_path / name]
        done = CliRunner().invoke(app, [*map(str, given)])
        assert done.exit_code == 0, done.output
        with np.load(tmp_path / name) as arrays:
            return dict(arrays)

    expected = run("memory.npz")
    assert not folders(tmp_path)
    little_memory()
    found = run("mapped.npz")
    assert folders(tmp_path)
    assert set(found) == set(expected) == {"logits", "labels", "graph_ids"}
    for key, values in expected.items():
        np.testing.assert_array_equal(found[key], values, strict=True)
