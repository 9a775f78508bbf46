"""Small graphs, and models with random values of every parameter: initial norms and biases would hide mistakes."""

import numpy as np
import pytest
import torch
from torch import nn

from data.dgl import import_dgl
from models import GraphTransformer


@pytest.fixture
def make_graph():
    """A random DGLGraph with features; node 0 has no edge."""

    def make(num_nodes=40, num_edges=150, columns=6, cardinalities=None, seed=0):
        rng = np.random.default_rng(seed)
        edges = torch.from_numpy(np.unique(rng.integers(1, num_nodes, (2, num_edges)), axis=1))
        graph = import_dgl().graph((edges[0], edges[1]), num_nodes=num_nodes)
        if cardinalities:
            feat = np.stack([rng.integers(0, values, num_nodes) for values in cardinalities], axis=1)
        else:
            feat = rng.standard_normal((num_nodes, columns)).astype(np.float32)
        graph.ndata["feat"] = torch.from_numpy(feat)
        return graph

    return make


@pytest.fixture
def make_model():
    def make(**arguments) -> GraphTransformer:
        torch.manual_seed(0)
        model = GraphTransformer(**({"in_features": 6, "num_classes": 3, "dim": 32, "blocks": 3} | arguments))
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
            for module in model.modules():
                if isinstance(module, nn.BatchNorm1d):
                    module.running_mean.normal_(0, 0.3)
                    module.running_var.uniform_(0.5, 2.0)
        return model.eval()

    return make
