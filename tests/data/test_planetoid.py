"""Planetoid's files: an independent writer and reader, the real files, and pickles that are refused."""

import contextlib
import gzip
import os
import pickle
import shutil
import sys

import numpy as np
import pytest
import scipy.sparse
import torch

import data
from data.sources.array_pickle import read_array_pickle
from data.sources.dgl_graphs import dgl_class

FOLDERS = {"cora": "cora_v2_d697a464", "citeseer": "citeseer_d6836239"}
ARCHIVES = {"cora": "cora_v2", "citeseer": "citeseer"}


@pytest.fixture
def published(real_graph_dir):
    """Folder of Planetoid's real files."""
    folder = real_graph_dir / "official" / "planetoid"
    if not folder.is_dir():
        pytest.skip(f"{folder} is not there")
    return folder


def test_isolated_nodes_that_test_index_leaves_out(tmp_path, write_planetoid):
    """As in Citeseer: ids in the range of the test nodes, in no file but `graph`."""
    num_nodes = 620
    row = np.arange(num_nodes)
    write_planetoid(tmp_path / FOLDERS["citeseer"], row, (row * 7 + 3) % num_nodes, num_nodes, name="citeseer")
    folder = tmp_path / FOLDERS["citeseer"]
    index = folder / "ind.citeseer.test.index"
    test = np.array(index.read_text().split(), int)
    gone = [575, 600, 611]  # neither the first nor the last of the range
    kept = ~np.isin(test, gone)
    index.write_text("\n".join(map(str, test[kept])))
    parts = {}
    for part in ("tx", "ty", "x", "allx", "ally"):
        parts[part] = pickle.loads((folder / f"ind.citeseer.{part}").read_bytes())
    parts["tx"], parts["ty"] = parts["tx"][kept], parts["ty"][kept]
    for part in ("tx", "ty"):
        (folder / f"ind.citeseer.{part}").write_bytes(pickle.dumps(parts[part], protocol=3))

    loaded = data.load("citeseer", root=tmp_path, source="official")
    # Node by node, from the files.
    feat, label = np.zeros((num_nodes, 12)), np.zeros(num_nodes, int)
    for node in range(num_nodes - 50):
        feat[node], label[node] = parts["allx"][node].toarray()[0], parts["ally"][node].argmax()
    for i, node in enumerate(test[kept]):
        feat[node], label[node] = parts["tx"][i].toarray()[0], parts["ty"][i].argmax()
    total = feat.sum(1, keepdims=True)
    assert loaded.graph.ndata["feat"].numpy() == pytest.approx(feat / np.where(total, total, 1), rel=1e-6)
    assert not loaded.graph.ndata["feat"][gone].any()
    assert loaded.labels.tolist() == label.tolist()
    splits = {part: ids.tolist() for part, ids in loaded.splits.items()}
    assert splits == {"train": list(range(20)), "valid": list(range(20, 520)), "test": sorted(test[kept].tolist())}
    keys, queries = loaded.graph.edges()
    pairs = {(int(i), int(i * 7 + 3) % num_nodes) for i in range(num_nodes)}
    assert set(zip(queries.tolist(), keys.tolist(), strict=True)) == pairs | {(j, i) for i, j in pairs}


@pytest.mark.parametrize("name", FOLDERS)
def test_real_files_as_dgl_reads_them(tmp_path, published, name):
    (tmp_path / "dgl" / FOLDERS[name]).mkdir(parents=True)
    (tmp_path / "planetoid").mkdir()
    for file in published.glob(f"ind.{name}.*"):
        shutil.copyfile(file, tmp_path / "planetoid" / file.name)  # the names that Planetoid publishes
        shutil.copyfile(file, tmp_path / "dgl" / FOLDERS[name] / file.name.replace(name, ARCHIVES[name]))
    theirs = dgl_class(f"{name.capitalize()}GraphDataset")(raw_dir=str(tmp_path / "dgl"), verbose=False)[0]
    for root in (tmp_path, tmp_path / "dgl"):
        ours = data.load(name, root=root, source="official")
        assert torch.equal(ours.graph.ndata["feat"], theirs.ndata["feat"])  # the same bits
        assert torch.equal(ours.labels, theirs.ndata["label"])
        for part, mask in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
            assert ours.splits[part].tolist() == theirs.ndata[mask].nonzero()[:, 0].tolist()
            assert torch.equal(ours.graph.ndata[mask], theirs.ndata[mask].bool())
        edges = [set(zip(*(ends.tolist() for ends in graph.edges()), strict=True)) for graph in (ours.graph, theirs)]
        assert edges[0] == edges[1]
    assert [ids.numel() for ids in ours.splits.values()] == [140 if name == "cora" else 120, 500, 1000]
    info = data.info(name)
    assert (ours.meta.num_nodes, ours.meta.num_edges, ours.meta.feature_dim) == (
        info.num_nodes,
        info.nnz,
        info.feature_dim,
    )


def test_real_citeseer_has_fifteen_isolated_nodes(tmp_path, published):
    shutil.copytree(published, tmp_path / "planetoid")
    loaded = data.load("citeseer", root=tmp_path)
    assert loaded.meta.source == "official"
    zero = (loaded.graph.ndata["feat"] == 0).all(1).nonzero()[:, 0].tolist()
    test = set(map(int, (published / "ind.citeseer.test.index").read_text().split()))
    assert [node for node in range(min(test), max(test) + 1) if node not in test] == [
        node for node in zero if node >= 2312
    ]
    assert sum(node >= 2312 for node in zero) == 15
    assert not any(set(ids.tolist()) & set(zero[-15:]) for ids in loaded.splits.values())


@pytest.mark.parametrize("protocol", [3, 4])  # Planetoid's, of Python 2, are in the tests of its files
def test_pickles_of_arrays(tmp_path, protocol):
    content = scipy.sparse.random(9, 4, 0.3, "csr", np.float32, random_state=0)
    path = tmp_path / "pickle"
    path.write_bytes(pickle.dumps(content, protocol=protocol))
    assert np.array_equal(read_array_pickle(path).dense(), content.toarray())
    path.write_bytes(pickle.dumps(np.asfortranarray(np.arange(6.0).reshape(2, 3)), protocol=protocol))
    assert np.array_equal(read_array_pickle(path), np.arange(6.0).reshape(2, 3))


class Call:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def broken_csr(**changes):
    matrix = scipy.sparse.csr_matrix(np.eye(3, dtype=np.float32))
    vars(matrix).update(changes)
    return matrix


REFUSED = {
    "a command": Call(os.system, "echo ran > ran"),
    "eval": Call(eval, "open('ran', 'w')"),
    "an import": Call(__import__, "antigravity"),
    "a class of NumPy": np.float64(1.0),
    "another class": gzip.GzipFile,
    "objects in an array": np.array([{}, []], object),
    "text": np.array(["a", "b"]),
    "a column too far": broken_csr(indices=np.array([0, 1, 3], np.int32)),
    "a negative column": broken_csr(indices=np.array([0, 1, -1], np.int32)),
    "offsets that fall": broken_csr(indptr=np.array([0, 2, 1, 3], np.int32)),
    "offsets beyond the data": broken_csr(indptr=np.array([0, 1, 2, 9], np.int32)),
    "too few offsets": broken_csr(indptr=np.array([0, 3], np.int32)),
}


@pytest.mark.parametrize("what", REFUSED)
def test_pickles_that_are_refused(tmp_path, monkeypatch, what):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "ind.cora.x"
    for protocol in (3, 4):
        path.write_bytes(pickle.dumps(REFUSED[what], protocol=protocol))
        with pytest.raises(ValueError, match=r"ind\.cora\.x: not a pickle of arrays"):
            read_array_pickle(path)
    assert not (tmp_path / "ran").exists()
    assert "antigravity" not in sys.modules


def test_damaged_pickles_are_errors(tmp_path):
    """Every cut, and every changed byte that is noticed: never anything but a ValueError."""
    whole = pickle.dumps(scipy.sparse.csr_matrix(np.eye(3, dtype=np.float32)), protocol=3)
    path = tmp_path / "pickle"
    for end in range(0, len(whole), 5):
        path.write_bytes(whole[:end])
        with pytest.raises(ValueError, match="not a pickle of arrays"):
            read_array_pickle(path)
    rng = np.random.default_rng(0)
    for at in range(len(whole)):
        path.write_bytes(whole[:at] + rng.bytes(1) + whole[at + 1 :])
        with contextlib.suppress(ValueError):
            read_array_pickle(path)


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("y", np.eye(19, 7, dtype=int), r"rows \(features, labels\) of x, tx and allx are \[\(20, 19\)"),
        ("tx", scipy.sparse.csr_matrix(np.eye(50, 13)), r"rows \(features, labels\) of x, tx and allx"),
        ("graph", {0: [600]}, r"graph holds ids outside 0 \.\. 599"),
        ("graph", [[1]], r"graph a dict of lists"),
        ("ally", {}, r"x, tx and allx must be CSR matrices"),
        ("test.index", "550\n" * 50, r"test\.index must list 50 different nodes from 550 on"),
        ("test.index", "550\nmany\n", r"invalid literal for int"),
    ],
)
def test_files_that_do_not_fit_together(tmp_path, write_planetoid, part, content, message):
    folder = tmp_path / FOLDERS["cora"]
    write_planetoid(folder, np.arange(600), np.roll(np.arange(600), 1), 600)
    file = folder / f"ind.cora_v2.{part}"
    file.write_text(content) if isinstance(content, str) else file.write_bytes(pickle.dumps(content))
    with pytest.raises(
        ValueError, match=rf"{FOLDERS['cora']}: the official files exist but cannot be read .*{message}"
    ):
        data.load("cora", root=tmp_path)
