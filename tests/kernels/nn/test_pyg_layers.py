"""TransformerConv, GATConv, GATv2Conv and AGNNConv against the layers of PyTorch Geometric with the same weights."""

import warnings

import pytest
import torch
from edge_cases import EDGE_LISTS
from layer_pairs import (
    DTYPE,
    KINDS,
    WITH_EDGES,
    assert_same,
    listed_graph,
    pair,
    parameter_gradients,
    relative_error,
    trained,
)
from torch_geometric.utils import to_edge_index

import fused3s
import fused3s.nn
from data.dgl import import_dgl
from fused3s import EdgeData, SlowerBackendWarning
from fused3s.nn.attention_conv import warn_of_slower_layer
from fused3s.nn.cached import edge_scores

pytestmark = pytest.mark.usefixtures("formula")
FLOAT, BFLOAT = torch.float32, torch.bfloat16
BACKENDS = ["reference", "csr_unfused", "scatter", "dgl", "formula"]  # the last has a backward pass of its own
every_kind = pytest.mark.parametrize("kind", KINDS)
with_edges = pytest.mark.parametrize("kind", WITH_EDGES)
of_gat = pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv"])


def every_pair(*names):
    """Options of which every pair of values occurs."""
    rows = ((1, 1, 1, 1), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 1), (0, 1, 1, 0), (1, 0, 1, 1), (1, 1, 0, 1))
    return [dict(zip(names, map(bool, row), strict=True)) for row in rows]


SWITCHES = {
    "TransformerConv": every_pair("concat", "beta", "bias", "root_weight"),
    "GATConv": every_pair("concat", "add_self_loops", "bias", "residual"),
    "GATv2Conv": [
        options | {"share_weights": index % 2 == 1}
        for index, options in enumerate(every_pair("concat", "add_self_loops", "bias", "residual"))
    ],
    "AGNNConv": [{"requires_grad": False}, {"add_self_loops": False}],
}


@pytest.mark.parametrize("backend", ["reference", "formula"])
@pytest.mark.parametrize(("kind", "options"), [(kind, each) for kind in KINDS for each in SWITCHES[kind]], ids=str)
def test_every_switch(kind, options, backend):
    for heads, edge_dim in ((1, None), (3, None), (1, 5), (3, 20)):
        columns = {} if kind == "AGNNConv" else {"edge_dim": edge_dim}
        theirs, ours = pair(kind, 7, 4, heads, backend=backend, std=0.5, **options, **columns)
        graph = listed_graph("hub", 7, columns.get("edge_dim"))
        assert_same(trained(ours, *graph), trained(theirs, *graph))


@pytest.mark.parametrize("name", EDGE_LISTS)
@every_kind
def test_every_graph_on_every_backend(kind, name):
    """Directed, bipartite, repeated edges and none; with self-loops and without; edge features of several widths."""
    for number, backend in enumerate(BACKENDS, list(EDGE_LISTS).index(name)):
        edge_dim = None if kind == "AGNNConv" else (None, 3, 20)[number % 3]
        graph = listed_graph(name, 7, edge_dim)
        columns = (7, 7) if isinstance(graph[0], tuple) else 7
        if kind == "AGNNConv" and columns != 7:
            return
        options = {} if kind == "TransformerConv" else {"add_self_loops": number % 2 == 0 and columns == 7}
        options |= {"edge_dim": edge_dim} if edge_dim else {}
        theirs, ours = pair(kind, columns, 6, 2, backend=backend, std=0.5, **options)
        assert_same(trained(ours, *graph), trained(theirs, *graph))


def test_agnn_of_a_row_of_zeros_and_by_a_plan_of_dgls_graph():
    """The gradient of such a row is a convention."""
    dgl = import_dgl()
    edges = torch.randint(83, (2, 600), generator=torch.Generator().manual_seed(0)).unique(dim=1)
    graph = dgl.add_self_loop(dgl.remove_self_loop(dgl.graph((edges[0], edges[1]), num_nodes=83)))
    x = torch.randn(83, 16, generator=torch.Generator().manual_seed(1), dtype=DTYPE)
    x[41] = 0
    theirs = dgl.nn.pytorch.AGNNConv(init_beta=1.75).double()
    expected = theirs(graph, x).detach()
    for dtype, tolerance in ((torch.float16, 5e-3), (FLOAT, 1e-5), (DTYPE, 1e-9)):
        layer = fused3s.nn.AGNNConv().to(dtype)
        with torch.no_grad():
            layer.beta.fill_(1.75)
            plan = fused3s.plan_attention(graph, backend="scatter", device="cpu", dtype=dtype, head_dim=16)
            out = layer(x.to(dtype), plan)
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("fill_value", ["add", "mean", "min", "max", "mul", 0.5, torch.tensor([0.1, 0.2, 0.3])])
@of_gat
def test_features_of_self_loops(kind, fill_value):
    """With second derivatives by them."""
    theirs, ours = pair(kind, 7, 4, 2, edge_dim=3, fill_value=fill_value, backend="reference")
    for edge_dim in (3, None):
        graph = listed_graph("hub", 7, edge_dim)
        assert_same(trained(ours, *graph), trained(theirs, *graph))
    x, edges, attr = listed_graph("hub", 7, 3)
    if fill_value in ("add", "mean", "max"):
        found = []
        for layer in (ours, theirs):
            given = attr.clone().requires_grad_()
            (first,) = torch.autograd.grad(layer(x, edges, given).square().sum(), given, create_graph=True)
            found.append(torch.autograd.grad(first.square().sum(), given)[0])
        torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["reference", "formula"])
def test_gat_of_sources_and_targets_of_their_own(backend):
    """Of one projection or two, and without features of the targets."""
    (sources, targets), edges = listed_graph("wide", 7)
    x, sizes = (sources, targets), (len(sources), len(targets))
    for columns in (7, (7, 7)):
        for options in ({}, {"residual": True, "add_self_loops": False}):
            theirs, ours = pair("GATConv", columns, 4, 2, backend=backend, **options)
            assert_same(trained(ours, x, edges), trained(theirs, x, edges))
    theirs, ours = pair("GATConv", (7, 7), 4, 2, add_self_loops=False, backend=backend)
    arguments = ((sources, None), edges, None, sizes)
    torch.testing.assert_close(ours(*arguments), theirs(*arguments))
    adj_t = torch.sparse_coo_tensor(edges.flip(0), torch.ones(edges.shape[1]), sizes[::-1])
    torch.testing.assert_close(ours((sources, None), adj_t), theirs(*arguments))
    _, (weighted, weights) = ours((sources, None), adj_t, return_attention_weights=True)
    _, (_, expected) = theirs(*arguments, return_attention_weights=True)
    torch.testing.assert_close(weights, expected)
    has_edge = (adj_t.to_dense().sum(1) > 0)[:, None].expand(-1, 2)
    torch.testing.assert_close(weighted.to_dense().sum(1), has_edge.double())


@pytest.mark.parametrize(("name", "edge_dim"), [("hub", None), ("hub", 3), ("wide", 4), ("empty_rows_and_windows", 20)])
@with_edges
def test_attention_weights(monkeypatch, kind, name, edge_dim):
    """With gradients, in one chunk of edges or several."""
    graph = listed_graph(name, 7, edge_dim)
    columns = (7, 7) if isinstance(graph[0], tuple) else 7
    options = {} if kind == "TransformerConv" else {"add_self_loops": columns == 7}
    theirs, ours = pair(kind, columns, 6, 2, edge_dim=edge_dim, std=0.5, backend="reference", **options)
    expected = theirs(*graph, return_attention_weights=True)
    for most in (edge_scores.MOST_ELEMENTS, 12 * 5):
        monkeypatch.setattr(edge_scores, "MOST_ELEMENTS", most)
        found = ours(*graph, return_attention_weights=True)
        torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
        gradients = [
            torch.autograd.grad(weights.square().sum(), list(layer.parameters()), allow_unused=True, retain_graph=True)
            for (_, (_, weights)), layer in ((found, ours), (expected, theirs))
        ]
        for mine, right in zip(*gradients, strict=True):
            if right is not None:
                torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["scatter", "formula"])
@with_edges
def test_a_plan_in_place_of_an_edge_index(kind, backend):
    theirs, ours = pair(kind, 7, 4, 2, backend=backend)
    x, edges = listed_graph("hub", 7)
    few = edges[:, edges[1] < 5]
    for given, wanted, shape in ((x, edges, len(x)), ((x, x[:5]), few, (len(x), 5))):
        expected = trained(theirs, given, wanted)
        assert_same(trained(ours, given, ours.plan(wanted, shape)), expected)


def test_a_plan_and_bound_edges_in_place_of_tensors(planned):
    theirs, ours = pair("TransformerConv", (7, 7), 5, 2, edge_dim=4, backend="reference")
    x, edges, attr = listed_graph("wide", 7, 4)
    plan = ours.plan(edges, tuple(map(len, x)))
    out = ours(x, plan, plan.bind_edges(EdgeData(features=attr)))
    torch.testing.assert_close(out, theirs(x, edges, attr), rtol=1e-10, atol=1e-12)
    assert torch.equal(out, ours(x, plan, attr))
    assert len(planned) == 1


@pytest.mark.parametrize("layout", ["to_sparse_csr", "to_sparse_csc", "coalesce"])
@with_edges
def test_a_transposed_adjacency(kind, layout):
    """edge_attr in the order of the stored entries; values with columns in its place."""
    x, edges, attr = listed_graph("wide", 7, 4)
    theirs, ours = pair(
        kind, (7, 7), 6, 2, edge_dim=4, **({} if kind == "TransformerConv" else {"add_self_loops": False})
    )
    sizes, indices = [len(each) for each in x[::-1]], edges.flip(0)
    adj_t = torch.sparse_coo_tensor(indices, torch.ones(indices.shape[1]).double(), sizes).coalesce()
    stored, adj_t = torch.randn_like(attr), getattr(adj_t, layout)()
    in_order, _ = to_edge_index(adj_t)  # PyG's layer refuses csc
    torch.testing.assert_close(ours(x, adj_t, stored), theirs(x, in_order.flip(0), stored))
    with_columns = torch.sparse_coo_tensor(indices, attr, (*sizes, 4)).coalesce()
    if layout != "to_sparse_csc":
        with_columns = getattr(with_columns, layout)()
    torch.testing.assert_close(ours(x, with_columns), theirs(x, edges, attr))


@pytest.mark.parametrize("dtype", [FLOAT, DTYPE])
@with_edges
def test_autocast(planned, kind, dtype):
    """PyG's own error is the scale; float64 is not cast."""
    (theirs, ours), (exact, _) = (
        pair(kind, 7, 16, 2, edge_dim=3, backend="formula", dtype=each) for each in (dtype, DTYPE)
    )
    graph, errors = listed_graph("hub", 7, 3, dtype), []
    expected = exact(*listed_graph("hub", 7, 3))
    expected.square().sum().backward()
    for layer in (ours, theirs):
        with torch.autocast("cpu", BFLOAT):
            out = layer(*graph)
        out.double().square().sum().backward()
        errors.append([relative_error(out, expected), relative_error(*map(parameter_gradients, (layer, exact)))])
        assert {parameter.grad.dtype for parameter in layer.parameters()} == {dtype}
        if layer is ours:
            cast = BFLOAT if dtype == FLOAT and kind == "TransformerConv" else dtype  # a GAT adds the bias last
            assert out.dtype == cast
            assert kind != "TransformerConv" or [options["dtype"] for options in planned] == [cast]
    least = 5e-3 if dtype == FLOAT else 1e-10
    assert all(mine <= 2 * max(other, least) for mine, other in zip(*errors, strict=True)), errors


@with_edges
def test_dropout_of_attention_weights_keeps_their_mean(kind):
    """The layer is linear in the weights, so that the mean over masks is the output of eval mode."""
    _, ours = pair(kind, 7, 5, 2, dropout=0.4, backend="scatter")
    graph = listed_graph("n_one_past_16", 7)
    expected = ours.eval()(*graph)
    ours.train()
    with torch.no_grad():
        outputs = torch.stack([ours(*graph) for _ in range(100)])
    deviation = outputs.std(0)
    assert (deviation > 0).float().mean() > 0.9
    assert ((outputs.mean(0) - expected).abs() <= 5 * deviation / 100**0.5 + 1e-9).all()
    repeated = []
    for _ in range(2):
        torch.manual_seed(3)
        repeated.append(trained(ours, *graph)["x0"])
    assert torch.equal(*repeated)


def test_a_slower_layer_warns_once():
    with pytest.warns(SlowerBackendWarning, match="a reason of this test"):
        warn_of_slower_layer("a reason of this test")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_slower_layer("a reason of this test")


X, EDGES, ATTR = torch.zeros(4, 7), torch.tensor([[0, 1], [1, 2]]), torch.zeros(2, 3)
CALLS = [
    ({"fill_value": "median"}, None, "fill_value: got 'median'; a number, a tensor or one of add, mean"),
    ({"fill_value": None}, None, "fill_value: got None"),
    ({"fill_value": [0.1, 0.2]}, None, r"fill_value: got \[0.1, 0.2\]"),
    ({"fill_value": torch.ones(2), "edge_dim": 3}, None, r"fill_value: got shape \(2,\); \[3\] is needed"),
    ({"edge_dim": 3}, (X, EDGES, ATTR[1:]), r"edge_attr: got shape \(1.*; \[2, 3\] is needed"),
    ({"edge_dim": 3}, (X, EDGES, torch.zeros(3, 3)), r"edge_attr: got shape \(3.*; \[2, 3\] is needed"),
    ({"edge_dim": 3}, (X, EDGES, ATTR.to(torch.complex64)), "edge_attr: got torch.complex64; real numbers"),
    ({"add_self_loops": False}, (X, EDGES.tolist()), r"edge_index: got list; an edge_index \[2, E\]"),
]
OF_TRANSFORMER = [
    ({}, (X, [[0], [1]]), "edge_index: got list"),
    ({"edge_dim": 3}, (X, EDGES), "edge_attr: got none.*edge_dim=3"),
    ({"edge_dim": 2}, (X, EDGES, ATTR), r"edge_attr: got shape \(2, 3\); \[E, 2\]"),
    ({"edge_dim": 17}, (X, EDGES, torch.zeros(3, 17)), r"edge_attr: got shape \(3, 17\); \[2, 17\] is"),
]
WRONG = [(kind, *each) for kind in WITH_EDGES[1:] for each in CALLS]
WRONG += [("TransformerConv", *each) for each in OF_TRANSFORMER]
WRONG.append(("GATv2Conv", {}, (X, EDGES, ATTR), "edge_attr: got some, and the layer was made with edge_dim=None"))


@pytest.mark.parametrize(("kind", "options", "given", "message"), WRONG)
def test_wrong_arguments(kind, options, given, message):
    with pytest.raises((TypeError, ValueError), match=message):
        getattr(fused3s.nn, kind)(7, 4, 2, **options, backend="reference")(*given or ())


@with_edges
def test_calls_that_need_tensors_in_place_of_a_plan(kind):
    layer = getattr(fused3s.nn, kind)(7, 4, 2, backend="scatter")
    with pytest.raises(TypeError, match="return_attention_weights: got with a plan"):
        layer(X, layer.plan(EDGES, 4), return_attention_weights=True)
    if kind != "TransformerConv":
        with pytest.raises(ValueError, match="edge_attr: got with a plan"):
            getattr(fused3s.nn, kind)(7, 4, 2, edge_dim=3)(X, layer.plan(EDGES, 4), X[:, :3])
