"""Graph Transformer against a plain re-computation, across backends, and its symmetries."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from model_by_hand import ByHand

from data.dgl import import_dgl
from fused3s import plan_attention
from models.readout import mean_nodes

# float32 with sums of at most a few hundred terms in another order, through three blocks: a few eps (1.2e-7) of
# values near 1. A mistake would be larger than 1e-2.
TOLERANCE = {"rtol": 1e-4, "atol": 2e-5}


def plan(graph, backend="reference", **arguments):
    return plan_attention(graph, backend=backend, device="cpu", **arguments)


@torch.inference_mode()
def run(model, graph, backend="reference"):
    return model(model.prepare(graph, plan(graph, backend)))


def test_categorical_features_and_mean_readout(make_graph, make_model):
    values = (5, 3, 2)
    batch = import_dgl().batch([make_graph(n, 4 * n, cardinalities=values, seed=n) for n in (9, 2, 30)])
    model = make_model(in_features=values, task="graph", heads=4)
    torch.testing.assert_close(run(model, batch, "dgl"), ByHand(model)(batch).float(), **TOLERANCE)


def test_a_batch_with_encodings_is_the_concatenation_of_its_graphs(make_graph, make_model):
    graphs = [make_graph(n, 4 * n, seed=n) for n in (17, 5, 32)]
    batch = import_dgl().batch(graphs)
    for task in ("node", "graph"):
        model = make_model(task=task, pos_enc=4)
        parts = torch.cat([run(model, graph, "dgl") for graph in graphs])
        torch.testing.assert_close(run(model, batch, "dgl"), parts, **TOLERANCE)


def test_the_random_walk_encoding_is_normalised_and_added(make_graph, make_model):
    graph, model = make_graph(), make_model(random_walk=5, norm="batch")
    with pytest.raises(ValueError, match=r"nodes, 5\] is needed; got none: data.load\(..., random_walk=5\)"):
        run(model, graph, "reference")
    graph.ndata["random_walk"] = torch.rand(40, 5, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(run(model, graph, "reference"), ByHand(model)(graph).float(), **TOLERANCE)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_mean_of_many_nodes_in_float16_does_not_stagnate(make_graph, make_model, device):
    graph = make_graph(num_nodes=9000)
    inputs = make_model().to(device).prepare(graph, plan(graph))
    ones = torch.ones(9000, 2, dtype=torch.float16, device=device)  # a sum in float16 would stay at 2048
    assert torch.equal(mean_nodes(ones, inputs), torch.ones_like(ones[:1]))


def test_gradient_of_the_mean_of_each_graph():
    sizes = [3, 0, 0, 5, 1, 0]
    starts = torch.tensor([0, *np.cumsum(sizes)[:-1]])
    inputs = SimpleNamespace(nodes=torch.arange(9), graph_starts=starts)
    h = torch.randn(9, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)
    assert torch.autograd.gradcheck(lambda h: mean_nodes(h, inputs), h)


@pytest.mark.parametrize(
    ("feat", "in_features", "message"),
    [
        (None, 6, r"ndata\[.feat.\].*got none"),
        (torch.zeros(40), 6, r"got shape \(40,\)"),
        (torch.zeros(40, 6, dtype=torch.int32), 6, "torch.int32"),
        (torch.zeros(40, 6, dtype=torch.int64), 6, "built for 6 columns of floats"),
        (torch.zeros(40, 1, dtype=torch.int64), (3, 3), "1 columns; the model was built for 2"),
        (torch.full((40, 2), 3), (4, 3), "feature column 1 of node 0 is 3; the model was built for 0 to 2"),
    ],
)
def test_features_that_do_not_fit(make_graph, make_model, feat, in_features, message):
    graph, model = make_graph(), make_model(in_features=in_features)
    del graph.ndata["feat"]
    if feat is not None:
        graph.ndata["feat"] = feat
    with pytest.raises(ValueError, match=message):
        model.prepare(graph, plan(graph))
