"""Small data sets with labels that the features give away, and configurations for them."""

import dataclasses

import numpy as np
import pytest
import torch
from loaded_graphs import loaded_from_dgl

from configs import TrainConfig
from data import GraphMeta
from data.dgl import import_dgl
from data.random_walk import random_walk_encoding
from models.training import Trainer

NODES, COLUMNS, CLASSES = 37, 6, 3  # not a multiple of 16
GRAPHS, TASKS = 24, 2


def meta(task, graph, num_classes, num_graphs=1):
    sizes = graph.num_nodes(), graph.num_edges(), num_graphs
    features = "float", COLUMNS, None, "original"
    return GraphMeta("tiny", "file", "a test", task, *sizes, *features, num_classes, "0123456789abcdef")


def random_graph(rng, num_nodes, num_edges):
    edges = torch.from_numpy(np.unique(rng.integers(0, num_nodes, (2, num_edges)), axis=1))
    return import_dgl().graph((edges[0], edges[1]), num_nodes=num_nodes)


@pytest.fixture
def nodes():
    """One directed graph; the label of a node is its largest feature of three, unknown for the last node."""
    rng = np.random.default_rng(0)
    graph = random_graph(rng, NODES, 120)
    graph.ndata["feat"] = torch.from_numpy(rng.standard_normal((NODES, COLUMNS)).astype(np.float32))
    labels = graph.ndata["feat"][:, :CLASSES].argmax(1)
    labels[-1] = -1
    ids = torch.from_numpy(rng.permutation(NODES))
    splits = {"train": ids[:15], "valid": ids[15:25], "test": ids[25:]}
    return loaded_from_dgl(graph, meta("node", graph, CLASSES), labels=labels, splits=splits, metric="accuracy")


@pytest.fixture
def graphs():
    """Small graphs with two tasks, given by their mean features; one label in five is missing."""
    rng = np.random.default_rng(0)
    made = [random_graph(rng, int(size), int(3 * size)) for size in rng.integers(1, 12, GRAPHS)]
    for graph in made:
        graph.ndata["feat"] = torch.from_numpy(rng.standard_normal((graph.num_nodes(), COLUMNS)).astype(np.float32))
    labels = torch.stack([(graph.ndata["feat"].mean(0)[:TASKS] > 0).float() for graph in made])
    labels[torch.from_numpy(rng.random((GRAPHS, TASKS)) < 0.2)] = torch.nan
    splits = {"train": torch.arange(10), "valid": torch.arange(10, 17), "test": torch.arange(17, GRAPHS)}
    batch = import_dgl().batch(made)
    about = meta("graph", batch, TASKS, GRAPHS)
    return loaded_from_dgl(batch, about, labels=labels, splits=splits, metric="rocauc")


@pytest.fixture
def molecules(graphs):
    """The graphs with codes of edges and a random-walk encoding."""
    about = {"edge_features": "original", "edge_feature_dim": 2, "edge_feature_cardinalities": (4, 3)}
    codes = [torch.randint(0, 3, (len(graphs.columns),), generator=torch.Generator().manual_seed(i)) for i in range(2)]
    csr = (graphs.row_pointers.numpy(), graphs.columns.numpy(), graphs.graph_sizes.numpy())
    walks = torch.from_numpy(random_walk_encoding(*csr, 3))
    return dataclasses.replace(
        graphs,
        meta=dataclasses.replace(graphs.meta, **about),
        node_data=graphs.node_data | {"random_walk": walks},
        edge_data={"feat": torch.stack(codes, 1)},
    )


@pytest.fixture
def nodes_of_graphs(graphs):
    """The collection with a label for each node, its larger feature of two: the second for one node in six."""
    features = graphs.node_data["feat"]
    labels = (features[:, 1] > features[:, 0] + 1.4).long()
    labels[::11] = -1
    starts = torch.cat([torch.zeros(1, dtype=torch.int64), graphs.graph_sizes.cumsum(0)])
    splits = {part: torch.arange(starts[ids[0]], starts[ids[-1] + 1]) for part, ids in graphs.splits.items()}
    meta = dataclasses.replace(graphs.meta, task="node", num_classes=2)
    return dataclasses.replace(graphs, meta=meta, labels=labels, splits=splits, metric="balanced_accuracy")


@pytest.fixture
def targets(graphs):
    """The collection with two targets of regression, far from 0 and of other sizes; one in six is missing."""
    features, starts = graphs.node_data["feat"], graphs.graph_sizes.cumsum(0) - graphs.graph_sizes
    means = torch.stack([part.mean(0)[:2] for part in features.tensor_split(starts[1:])])
    labels = torch.tensor([300.0, -7.0]) + torch.tensor([20.0, 0.1]) * means
    labels[torch.from_numpy(np.random.default_rng(1).random(labels.shape) < 1 / 6)] = torch.nan
    return dataclasses.replace(graphs, meta=dataclasses.replace(graphs.meta, unit="eV"), labels=labels, metric="mae")


@pytest.fixture
def make_config():
    """A configuration on the CPU with the reference backend; keys are given as section__key."""

    def make(**changes):
        sections = {
            "data": {"name": "tiny", "source": "file", "path": "tiny.npz"},
            "model": {"dim": 8, "blocks": 2, "heads": 2},
            "attention": {"backend": "reference"},
            "runtime": {"device": "cpu"},
            "training": {"epochs": 3, "lr": 0.01, "checkpoint_seconds": 0.0},
        }
        for name, value in changes.items():
            section, key = name.split("__")
            sections[section][key] = value
        return TrainConfig.model_validate(sections)

    return make


@pytest.fixture
def gpu_config(make_config):
    def make(**changes):
        sizes = {"model__dim": 64, "model__heads": 4, "runtime__device": "cuda", "attention__backend": "fused3s"}
        return make_config(**(sizes | {"training__epochs": 6, "training__precision": "bfloat16"} | changes))

    return make


@pytest.fixture
def trained(one_thread):
    """A trainer that has run to its end, and its epochs."""

    def run(config, loaded, folder, **arguments):
        trainer = Trainer(config, loaded, folder, **({"seed": 0} | arguments))
        return trainer, list(trainer.run())

    return run


@pytest.fixture
def replaced():
    return dataclasses.replace
