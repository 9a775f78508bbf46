"""Stacks of attention layers against PyG's layers with the same weights; self-loops of the data."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import torch_geometric.nn as pyg

import data
from fused3s import plan_attention
from models import ConvNet

PYG = {
    "transformer_conv": (pyg.TransformerConv, {"root_weight": False}),
    "gat_conv": (pyg.GATConv, {"add_self_loops": False}),
    "gatv2_conv": (pyg.GATv2Conv, {"add_self_loops": False}),
}


@pytest.mark.parametrize("layer", PYG)
@pytest.mark.parametrize(("blocks", "out_heads"), [(1, 3), (3, 2)])
def test_it_computes_what_pygs_layers_compute(make_graph, layer, blocks, out_heads):
    graph = make_graph()
    torch.manual_seed(1)
    model = ConvNet(
        layer=layer, in_features=6, num_classes=3, dim=8, heads=2, blocks=blocks, out_heads=out_heads, dropout=0.5
    )
    model = model.double().eval()
    kind, options = PYG[layer]
    layers = [kind(width, 4, heads=2, **options) for width in [6, *[8] * (blocks - 1)]][: blocks - 1]
    layers.append(kind(8 if blocks > 1 else 6, 3, heads=out_heads, concat=False, **options))
    edges, h = torch.stack(graph.edges()), graph.ndata["feat"].double()
    for index, (theirs, ours) in enumerate(zip(layers, model.blocks, strict=True)):
        theirs.double().load_state_dict(ours.state_dict())
        h = theirs(h if index == 0 else F.elu(h), edges)
    plan = plan_attention(graph, device="cpu", backend="reference", dtype=torch.float64)
    torch.testing.assert_close(model(model.prepare(graph, plan)), h)


def test_dropout_is_in_training_alone(make_graph):
    graph = make_graph()
    model = ConvNet(layer="gat_conv", in_features=6, num_classes=3, dim=8, heads=2, blocks=2, dropout=0.5)
    inputs = model.prepare(graph, plan_attention(graph, device="cpu", dtype=torch.float32))
    assert not torch.equal(model(inputs), model(inputs))
    model.eval()
    assert torch.equal(model(inputs), model(inputs))


@pytest.mark.parametrize(
    ("change", "words"),
    [({"in_features": [3, 4]}, "classifies nodes by float features"), ({"task": "graph"}, "classifies nodes")],
)
def test_what_it_is_not_for(change, words):
    arguments = {"in_features": 6, "num_classes": 3, "dim": 8, "heads": 2, "blocks": 2}
    with pytest.raises(ValueError, match=words):
        ConvNet(layer="gat_conv", **arguments | change)


def test_features_of_another_width_are_named(make_graph):
    model = ConvNet(layer="gat_conv", in_features=5, num_classes=3, dim=8, heads=2, blocks=2)
    graph = make_graph()
    with pytest.raises(ValueError, match="6 columns; the model was built for 5 columns"):
        model.prepare(graph, plan_attention(graph, device="cpu"))


def test_each_node_gets_one_self_loop(tmp_path):
    np.savez(tmp_path / "g.npz", src_li=np.array([0, 1, 1, 3]), dst_li=np.array([1, 1, 2, 0]), num_nodes=5)
    loaded = data.load("g", path=tmp_path / "g.npz", self_loops=True)
    dense = torch.zeros(5, 5)
    dense[[0, 1, 1, 3], [1, 1, 2, 0]] = 1
    rows = torch.repeat_interleave(torch.arange(5), loaded.row_pointers.diff().long())
    found = torch.zeros(5, 5)
    found[rows, loaded.columns.long()] += 1
    assert torch.equal(found, (dense + torch.eye(5)).clamp(max=1))
    assert loaded.meta.num_edges == 8
    with pytest.raises(ValueError, match="self-loops have no features"):
        data.load("g", path=tmp_path / "g.npz", self_loops=True, edge_features=True)
