"""Cora's files that ship with this repository: the real graph, with and without a network."""

import hashlib
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

import data
import data.download

FOLDER = Path(data.__file__).parent / "embedded" / "cora"
# SHA-256 of kimiyoung/planetoid's files, by the ending of their names.
PUBLISHED = {
    "allx": "9419ba2f26f5c35243db64aba110e0f35a04851609e0dc5433450676ca6b8543",
    "ally": "2b998f5cc7fedc86e7f97ca2498f47a1ffc1462c29e2d578b23bf3f62b6e7d71",
    "graph": "58f13302f39dde8852dad6fe6d15b89b077b6d7f837626bce671ef80344b383d",
    "test.index": "297ce89af2b51a6a194181c7dbe1796c6a1cf9cd9349a88383b1b1e227867875",
    "tx": "b9afbaa4a400df991f6f02ef677e1e44da55ffc04801fd02f9e673987829226a",
    "ty": "41f5ac76596a1699cc33f53084a2419e92961c42bb75f36fc38e616d348532ad",
    "x": "23cfa55d91c6f624233f5eb7b6e3f141f1bd2b2ae39608a63cf5d084bb27baab",
    "y": "94465c14eb53e04ca262198dcbb2521ee8af60fb3f3d546cd6ca24a511b0e7d1",
}


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.fixture(autouse=True)
def nobody_asks_the_network(monkeypatch):
    def asked(url):
        raise AssertionError(f"the network was asked for {url}")

    monkeypatch.setattr(data.download, "why_unreachable", asked)


def test_the_files_are_the_published_ones():
    shipped = hashes(FOLDER)
    published = {f"ind.cora_v2.{part}": sha for part, sha in PUBLISHED.items()}
    assert shipped.items() >= published.items()
    assert shipped.keys() - published.keys() == {"LICENSE"}
    assert "The MIT License (MIT)\nCopyright (c) 2016 Zhilin Yang" in (FOLDER / "LICENSE").read_text()


@pytest.mark.parametrize("source", ["auto", "official"])
def test_cora_is_the_real_graph_without_a_network(tmp_path, caplog, source):
    before = hashes(FOLDER)
    loaded = data.load("cora", root=tmp_path, source=source)
    meta, graph = loaded.meta, loaded.graph
    assert (meta.source, meta.features) == ("official", "original")
    assert meta.origin == "https://github.com/kimiyoung/planetoid, as shipped in data/embedded/cora"
    assert (meta.num_nodes, meta.num_edges, meta.feature_dim, meta.num_classes) == (2_708, 10_556, 1_433, 7)
    # Known facts: the sizes of the classes, the largest degree, the standard split with 20 training nodes a class, and
    # 49,216 words in the 2,708 papers. DGL divides each row of features by its sum.
    labels = graph.ndata["label"]
    assert torch.bincount(labels).tolist() == [351, 217, 418, 818, 426, 298, 180]
    degrees = graph.in_degrees()
    assert (degrees.max(), degrees.min()) == (168, 1)
    keys, queries = graph.edges()
    assert (keys != queries).all()
    assert graph.has_edges_between(queries, keys).all()  # symmetric
    masks = [graph.ndata[f"{part}_mask"] for part in ("train", "val", "test")]
    assert [int(mask.sum()) for mask in masks] == [140, 500, 1_000]
    assert torch.bincount(labels[masks[0]]).tolist() == [20] * 7
    feat = graph.ndata["feat"]
    assert feat.count_nonzero() == 49_216
    assert feat.sum(1).numpy() == pytest.approx(np.ones(2_708), abs=1e-5)
    assert not caplog.records
    assert loaded.metric == "accuracy"
    assert loaded.labels.data_ptr() == labels.data_ptr()
    assert [loaded.splits[part].tolist() for part in ("train", "valid", "test")] == [
        mask.nonzero()[:, 0].tolist() for mask in masks
    ]
    assert hashes(FOLDER) == before
    assert list(tmp_path.iterdir()) == []


def test_it_is_the_graph_of_the_papers_authors(tmp_path, real_graph_dir):
    path = real_graph_dir / "single" / "cora.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    assert data.load("cora", root=tmp_path).meta.sha256 == data.load("cora", path=path).meta.sha256


def test_files_below_the_root_come_first(tmp_path):
    np.savez(tmp_path / "cora.npz", src_li=np.array([0, 1]), dst_li=np.array([1, 2]), num_nodes=3)
    assert data.load("cora", root=tmp_path).meta.source == "file"
    assert data.load("cora", root=tmp_path, source="official").meta.num_nodes == 2_708
    shutil.copytree(FOLDER, tmp_path / "cora_v2_d697a464")  # where a download lies
    assert data.load("cora", root=tmp_path).meta.origin == "https://data.dgl.ai/dataset/cora_v2.zip"
