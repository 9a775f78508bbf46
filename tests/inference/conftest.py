"""Small collections, models for them, and the reference plan."""

import dataclasses

import numpy as np
import pytest
import torch

import data
from inference.batches import run_pass
from kernels import plan_attention
from models import GraphTransformer


@pytest.fixture
def collection(tmp_path):
    """A function that gives 37 graphs of 1 to 12 nodes, some without an edge, with changes of their description."""
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 13, 37)
    edges = rng.integers(0, 30, 37) * (sizes > 1)
    u, v = rng.integers(0, np.repeat(sizes, edges), (2, edges.sum()))
    feat = rng.normal(size=(sizes.sum(), 5))
    np.savez(tmp_path / "c.npz", node_counts=sizes, edge_counts=edges, u=u, v=v, feat=feat)

    def collection(codes=False, **changes):
        loaded = data.load("mine", path=tmp_path / "c.npz", batch_size=None)
        if codes:
            loaded.node_data["feat"] = torch.from_numpy(rng.integers(0, 4, (int(sizes.sum()), 2)))
        return dataclasses.replace(loaded, meta=dataclasses.replace(loaded.meta, **changes))

    return collection


def model_for(task="graph", **options):
    torch.manual_seed(0)
    sizes = {"in_features": 5, "num_classes": 3, "dim": 16, "heads": 2, "blocks": 2} | options
    return GraphTransformer(task=task, **sizes).eval()


def reference_plan(graph, device="cpu", **options):
    return plan_attention(graph, backend="reference", device=torch.device(device), **options)


def logits_of_all(passes, device="cpu"):
    """Logits of all graphs in their order, and the pass."""
    rows, parts = [0], []

    def take(batch, logits):
        assert batch.first_row == rows[-1]
        rows.append(batch.last_row)
        parts.append(logits.clone())

    with torch.inference_mode():
        one = run_pass(passes, take, torch.device(device))
    return torch.cat(parts), one
