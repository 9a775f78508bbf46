"""Edges and plans that are kept with a DGLGraph: for many calls, until the graph changes or is freed."""

import gc
import pickle
import weakref
from copy import deepcopy

import pytest
import torch

import fused3s
import fused3s.nn
import fused3s.nn.dgl
from data.dgl import import_dgl
from fused3s.nn.cached import planned_edges
from fused3s.nn.cached.dgl_edges import edges_of_dgl

dgl = import_dgl()
pytestmark = pytest.mark.usefixtures("formula")
CPU = torch.device("cpu")


@pytest.fixture
def graph():
    return dgl.add_self_loop(dgl.graph((torch.tensor([0, 1, 2, 3, 4]), torch.tensor([1, 2, 3, 4, 0]))))


@pytest.fixture
def layers():
    """DGL's GATConv, and ours with its parameters."""
    theirs, ours = dgl.nn.GATConv(6, 4, 2).double(), fused3s.nn.dgl.GATConv(6, 4, 2).double()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def assert_same(layers, graph):
    x = torch.randn(graph.num_nodes(), 6, dtype=torch.float64)
    theirs, ours = (layer(graph, x) for layer in layers)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def reversed_edges(graph):
    """As many nodes and edges as before, and others."""
    source, destination = graph.edges()
    graph.remove_edges(torch.arange(graph.num_edges()))
    graph.add_edges(destination, source)


CHANGES = {
    "add_edges": lambda graph: graph.add_edges([3, 3], [1, 1]),
    "remove_edges": lambda graph: graph.remove_edges([0, 2]),
    "reversed": reversed_edges,
    "remove_nodes": lambda graph: graph.remove_nodes([1]),
    "add_nodes": lambda graph: (graph.add_nodes(2), graph.add_edges([5, 6], [5, 6])),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_graph_is_seen(graph, layers, change):
    assert_same(layers, graph)
    CHANGES[change](graph)
    assert_same(layers, graph)


def test_a_plan_serves_all_calls_and_layers_of_its_kind(graph, planned):
    x = torch.randn(5, 8)
    transformer, gat = fused3s.nn.dgl.TransformerConv(8, 4, 2), fused3s.nn.dgl.GATConv(8, 4, 2)
    for _ in range(2):
        for layer in (transformer, gat, fused3s.nn.dgl.GATv2Conv(8, 4, 2), fused3s.nn.SparseMHA(8, 2)):
            for each in (graph, graph.local_var()):
                layer(each, x)
        with graph.local_scope():
            graph.ndata["x"] = x
            gat(graph, x)
    assert len(planned) == 2  # of TransformerConv and SparseMHA; of the GATs, which have score terms
    edges = edges_of_dgl(graph, CPU)
    assert edges is edges_of_dgl(graph.local_var(), CPU)
    graph.create_formats_()
    assert edges is edges_of_dgl(graph, CPU)
    with torch.inference_mode():
        other = edges_of_dgl(graph, torch.device("meta")).edge_index
    assert (other.is_meta, other.is_inference()) == (True, False)  # or nothing would be cached for training


@pytest.mark.parametrize("end", [lambda graph: None, CHANGES["add_edges"]], ids=["freed", "changed"])
def test_edges_and_plans_go_with_the_graph(layers, end):
    graph = dgl.add_self_loop(dgl.rand_graph(5, 9))
    gc.collect()
    layers[1](graph, torch.randn(5, 6, dtype=torch.float64))
    edge_index, count = edges_of_dgl(graph, CPU).edge_index, len(planned_edges._plans._entries)
    held = weakref.ref(edge_index)
    del edge_index
    kept = end(graph), graph if end is CHANGES["add_edges"] else None
    del graph
    gc.collect()
    assert held() is None
    assert len(planned_edges._plans._entries) == count - 1
    del kept


def test_copies_of_a_graph_leave_the_edges_behind(graph, layers):
    assert_same(layers, graph)
    for copy in (deepcopy(graph), pickle.loads(pickle.dumps(graph)), graph.clone()):
        reversed_edges(copy)
        assert_same(layers, copy)
    assert_same(layers, graph)
