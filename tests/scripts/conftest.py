"""A small graph of the user's, and a machine without a network."""

from pathlib import Path

import numpy as np
import pytest

import data

NODES = 70


@pytest.fixture
def user_graph(tmp_path) -> Path:
    """A directed graph whose labels are the largest of three features, with splits of 30, 10 and 30 nodes."""
    rng = np.random.default_rng(0)
    features = rng.standard_normal((NODES, 6)).astype(np.float32)
    (source, target), ids = rng.integers(0, NODES, (2, 300)), rng.permutation(NODES)
    arrays = {"src_li": source, "dst_li": target, "num_nodes": NODES, "feat": features}
    splits = {"train_ids": ids[:30], "valid_ids": ids[30:40], "test_ids": ids[40:]}
    np.savez(tmp_path / "mine.npz", label=features[:, :3].argmax(1), **arrays, **splits)
    return tmp_path / "mine.npz"


@pytest.fixture
def no_network(monkeypatch) -> None:
    """No file of a data set can be fetched."""

    def refuse(*_):
        raise data.DownloadError("no such host")

    monkeypatch.setattr("data.sources.base.fetch", refuse)
