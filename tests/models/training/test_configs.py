"""Every configuration of configs/train trains an epoch, on a tiny graph or collection like its data set."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch

import data
from configs import TrainConfig, load_config
from models.training import Trainer

TRAIN = Path(__file__).resolve().parents[3] / "configs" / "train"
# On the CPU, and the warm-up is shorter than the one epoch.
HERE = ("runtime.device=cpu", "runtime.dense=auto", "training.epochs=1", "training.warmup_epochs=0")
GRAPHS, NODES = 18, 5  # of a collection; of each graph


def tiny_file(path, entry):
    """A file of the user's, which gets random features of the registered kind. A part of a split is every third row."""
    rng, rows = np.random.default_rng(0), GRAPHS if entry.num_graphs else 40
    ids = {f"{part}_ids": np.arange(first, rows, 3) for first, part in enumerate(("train", "valid", "test"))}
    if not entry.num_graphs:
        source, target = rng.integers(0, rows, (2, 150))
        label = np.arange(rows) // 3 % entry.num_classes
        return np.savez(path, src_li=target, dst_li=source, num_nodes=rows, label=label, **ids)
    u, v = rng.integers(0, NODES, (2, 6 * GRAPHS))
    label = rng.standard_normal((GRAPHS, entry.num_classes))
    if entry.metric in ("rocauc", "ap"):
        label = np.broadcast_to(np.arange(GRAPHS)[:, None] // 3 % 2, label.shape)  # both answers in each part
    sizes = {"node_counts": np.full(GRAPHS, NODES), "edge_counts": np.full(GRAPHS, 6)}
    return np.savez(path, **sizes, u=u, v=v, graph_label=label, **ids)


@pytest.mark.parametrize("name", sorted(path.stem for path in TRAIN.glob("*.yaml")))
def test_it_trains_an_epoch(tmp_path, one_thread, name):
    path = tmp_path / "tiny.npz"
    config = load_config(TRAIN / f"{name}.yaml", [*HERE, f"data.path={path}"], TrainConfig)
    entry = data.info(config.data.name)
    tiny_file(path, entry)
    loaded = data.load(**config.load_arguments())
    if entry.task == "node" and entry.num_graphs:
        labels = torch.arange(loaded.meta.num_nodes) % entry.num_classes
        starts = torch.arange(NODES)
        splits = {part: (NODES * ids[:, None] + starts).flatten() for part, ids in loaded.splits.items()}
        loaded = dataclasses.replace(loaded, labels=labels, splits=splits, metric=entry.metric)
    trainer = Trainer(config, loaded, tmp_path / "run", seed=0)
    (record,) = trainer.run()
    assert np.isfinite([record.loss, record.valid_loss, record.valid_metric, trainer.result.test]).all()
