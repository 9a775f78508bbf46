"""The Graph Transformer with edge features against its formulas, edge by edge in float64."""

from dataclasses import replace

import pytest
import torch
from model_by_hand import ByHand

from data.dgl import import_dgl
from fused3s import plan_attention
from models import prepare_execution

TOLERANCE = {"rtol": 1e-9, "atol": 1e-9}
BONDS = (4, 3)


@pytest.fixture
def make_molecule(make_graph):
    """A directed graph, its edges in random order with features; node 0 has no edge, some nodes have self loops."""

    def make(num_nodes=40, num_edges=150, bonds=BONDS, columns=3, seed=0):
        ordered = make_graph(num_nodes, num_edges, seed=seed)
        generator, edges = torch.Generator().manual_seed(seed), ordered.num_edges()
        order = torch.randperm(edges, generator=generator)
        graph = import_dgl().graph(tuple(ends[order] for ends in ordered.edges()), num_nodes=num_nodes)
        graph.ndata["feat"] = ordered.ndata["feat"]
        if bonds:
            feat = torch.stack([torch.randint(0, values, (edges,), generator=generator) for values in bonds], 1)
        else:
            feat = torch.randn(edges, columns, generator=generator)
        graph.edata["feat"] = feat
        return graph

    return make


@pytest.fixture
def make_edge_model(make_model):
    def make(form, **arguments):
        model = make_model(edge_features=form, edge_in_features=None if form == "none" else BONDS, **arguments)
        with torch.no_grad():  # scores beyond the clamp
            for block in model.edge_blocks if form == "stream" else ():
                block.project.weight.mul_(8)
        return model.double()

    return make


def plan(graph, backend="reference", **options):
    return plan_attention(graph, backend=backend, device="cpu", edge_data=True, **options)


@torch.inference_mode()
def run(model, graph, backend="reference"):
    return model(model.prepare(graph, plan(graph, backend)))


@pytest.mark.parametrize("form", ["none", "bias", "stream"])
@pytest.mark.parametrize(
    ("backend", "heads", "dim", "norm"),
    [("reference", 1, 32, "layer"), ("csr_unfused", 4, 32, "batch"), ("dgl", 3, 15, "layer")],
)
def test_model_is_its_formula(make_molecule, make_edge_model, heads, dim, norm, backend, form):
    graph, model = make_molecule(), make_edge_model(form, heads=heads, dim=dim, norm=norm)
    by_hand = ByHand(model)
    torch.testing.assert_close(run(model, graph, backend), by_hand(graph), **TOLERANCE)
    assert form != "stream" or by_hand.largest_score > 6  # the clamp counts


@pytest.mark.parametrize("form", ["bias", "stream"])
def test_repeated_edges_count_with_their_own_features(make_molecule, make_edge_model, form):
    graph, model = make_molecule(), make_edge_model(form)
    source, target = graph.edges()
    again = torch.tensor([7, 3, 7])
    repeated = import_dgl().graph(
        (torch.cat([source, source[again]]), torch.cat([target, target[again]])), num_nodes=40
    )
    repeated.ndata["feat"] = graph.ndata["feat"]
    repeated.edata["feat"] = torch.cat([graph.edata["feat"], torch.zeros(3, 2, dtype=torch.int64)])
    torch.testing.assert_close(run(model, repeated), ByHand(model)(repeated), **TOLERANCE)


def no_features(graph):
    del graph.edata["feat"]


def floats(graph):
    graph.edata["feat"] = graph.edata["feat"].float()


def unknown_bond(graph):
    graph.edata["feat"][5, 1] = 3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (no_features, r'edata\["feat"\] of shape \[edges, columns\] is needed; got none'),
        (floats, "edge features are torch.float32"),
        (unknown_bond, "feature column 1 of edge 5 is 3; the model was built for 0 to 2"),
    ],
)
def test_edge_features_that_do_not_fit(make_molecule, make_edge_model, damage, message):
    graph = make_molecule()
    damage(graph)
    with pytest.raises(ValueError, match=message):
        make_edge_model("stream").prepare(graph, plan(graph))


def test_attention_must_keep_the_order_of_the_edges(make_molecule, make_edge_model):
    graph, model = make_molecule(), make_edge_model("bias")
    for attention in (plan_attention(graph, backend="reference", device="cpu"), lambda q, k, v, **options: v):
        with pytest.raises(ValueError, match=r"plan_attention\(.*edge_data=True"):
            model.prepare(graph, attention)


@pytest.mark.gpu
@pytest.mark.parametrize("form", ["bias", "stream"])
@pytest.mark.parametrize(("heads", "dim"), [(8, 80), (1, 128)])
@torch.inference_mode()
def test_gpu_float16_as_a_cuda_graph(make_molecule, make_model, form, heads, dim):
    graph = import_dgl().batch([make_molecule(n, 4 * n, seed=n) for n in range(20, 60)])
    model = make_model(edge_features=form, edge_in_features=BONDS, heads=heads, dim=dim).cuda()
    expected = model.double()(model.prepare(graph, plan_attention(graph, backend="reference", edge_data=True)))
    model = model.half()
    options = {"dtype": torch.float16, "head_dim": dim // heads, "num_heads": heads, "edge_data": True}
    inputs = model.prepare(graph, plan_attention(graph, backend="fused3s", **options))
    same_types = model(model.prepare(graph, plan_attention(graph, backend="reference", **options)))
    execution = prepare_execution(model, inputs, backend="fused3s", cuda_graph=True)
    logits = execution.run()

    def error(one):
        return float((one.double() - expected).norm() / expected.norm())

    assert error(logits) <= 2 * error(same_types)
    torch.testing.assert_close(logits, model(replace(inputs)), rtol=0, atol=0.01)
