"""Cora's files that ship with this repository: the real graph, with and without a network."""

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch

import data

FOLDER = Path(data.__file__).parent / "embedded" / "cora"


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_files_are_the_published_ones():
    shipped = hashes(FOLDER)
    published = {f"ind.cora_v2.{part}": sha for part, sha in data.info("cora").official.sha256.items()}
    assert len(published) == 8
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
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert loaded.metric == "accuracy"
    assert loaded.labels.data_ptr() == labels.data_ptr()
    assert [loaded.splits[part].tolist() for part in ("train", "valid", "test")] == [
        mask.nonzero()[:, 0].tolist() for mask in masks
    ]
    assert hashes(FOLDER) == before
    assert list(tmp_path.iterdir()) == []
