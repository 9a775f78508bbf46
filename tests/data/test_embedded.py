"""Cora's files that ship with this repository: the real graph, with and without a network."""

import hashlib
from pathlib import Path

import pytest
import torch

import data

FOLDER = Path(data.__file__).parent / "embedded" / "cora" / "planetoid"


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_the_files_are_the_published_ones():
    published = {f"ind.cora.{part}": sha for part, sha in data.info("cora").official.sha256.items()}
    assert len(published) == 8
    assert hashes(FOLDER) == published
    assert "The MIT License (MIT)\nCopyright (c) 2016 Zhilin Yang" in (FOLDER.parent / "LICENSE").read_text()


@pytest.mark.parametrize("source", ["auto", "official"])
def test_cora_is_the_real_graph_without_a_network(tmp_path, caplog, source):
    before = hashes(FOLDER)
    loaded = data.load("cora", root=tmp_path, source=source)
    meta = loaded.meta
    assert (meta.source, meta.features) == ("official", "original")
    assert meta.origin == "https://github.com/kimiyoung/planetoid, as shipped in data/embedded/cora"
    assert (meta.num_nodes, meta.num_edges, meta.feature_dim, meta.num_classes) == (2_708, 10_556, 1_433, 7)
    assert torch.bincount(loaded.labels).tolist() == [351, 217, 418, 818, 426, 298, 180]
    assert {part: len(ids) for part, ids in loaded.splits.items()} == {"train": 140, "valid": 500, "test": 1_000}
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    assert loaded.metric == "accuracy"
    assert hashes(FOLDER) == before
    assert list(tmp_path.iterdir()) == []
