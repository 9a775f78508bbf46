"""Uses of PyG's layers beside the usual call: other types, sparse layouts, no edges, wrong edges, export, meta."""

import pytest
import torch
from layer_pairs import KINDS, WITH_EDGES, assert_same, pair, random_graph
from layer_pairs import trained as results
from torch_geometric import EdgeIndex

import fused3s.nn
from fused3s import Dropout, plan_attention
from fused3s.graph.forms import graph_record
from fused3s.nn.cached import planned_edges

pytestmark = pytest.mark.usefixtures("formula")
N, E = 20, 60


@pytest.fixture
def graph():
    """x, edge_index without repeated edges, edge_attr."""
    x, _, attr = random_graph(N, E, edge_dim=3)
    pairs = torch.randperm(N * N, generator=torch.Generator().manual_seed(0))[:E]
    return x, torch.stack([pairs // N, pairs % N]), attr


@pytest.mark.parametrize("is_adapted", [False, True])
@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", WITH_EDGES)
def test_edge_attr_of_another_type_is_that_of_the_weights(graph, kind, dtype, is_adapted):
    """PyG refuses it."""
    theirs, ours = pair(kind, edge_dim=3)
    x, edges, attr = graph
    attr = (3 * attr.abs()).to(dtype)
    if is_adapted:
        for layer in (theirs, ours):
            layer.lin_edge.register_forward_hook(lambda module, given, out: 2 * out)
    found, expected = results(ours, x, edges, attr), results(theirs, x, edges, attr.double())
    assert_same(
        {name: found[name] for name in found if name != "edge_attr0"},
        {n: expected[n] for n in found if n != "edge_attr0"},
    )
    _, (_, weights) = ours(x, edges, attr, return_attention_weights=True)
    torch.testing.assert_close(weights, theirs(x, edges, attr.double(), return_attention_weights=True)[1][1])


@pytest.mark.parametrize("backend", ["scatter", "formula"])
@pytest.mark.parametrize("add_self_loops", [False, True])
@pytest.mark.parametrize("sizes", [0, N, (0, 0), (3, 0), (0, 3), (3, 3)])
@pytest.mark.parametrize("kind", WITH_EDGES)
def test_gradients_of_a_graph_without_edges(graph, kind, sizes, add_self_loops, backend):
    """None where PyG has None: an optimiser's weight decay then leaves the weight alone."""
    options = {"edge_dim": 3} if isinstance(sizes, int) else {}
    options |= {} if kind == "TransformerConv" else {"add_self_loops": add_self_loops}
    theirs, ours = pair(kind, 8 if isinstance(sizes, int) else (8, 8), 4, 2, backend=backend, **options)
    x, edges, attr = graph
    x = x[:sizes] if isinstance(sizes, int) else tuple(x[:size] for size in sizes)
    given = x, edges[:, :0], *([attr[:0]] if "edge_dim" in options else [])
    expected, found = results(theirs, *given), results(ours, *given)
    assert_same(found, expected)
    if isinstance(sizes, int):
        assert [name for name, each in found.items() if each is None] == [n for n, e in expected.items() if e is None]


@pytest.mark.parametrize("layout", [torch.sparse_csr, torch.sparse_coo])
@pytest.mark.parametrize("add_self_loops", [False, True])
@pytest.mark.parametrize("kind", WITH_EDGES)
def test_weights_of_an_adj_t_have_its_layout_and_order(graph, kind, add_self_loops, layout):
    theirs, ours = pair(kind, **({} if kind == "TransformerConv" else {"add_self_loops": add_self_loops}))
    x, edges, _ = graph
    adj_t = torch.sparse_coo_tensor(edges.flip(0), torch.ones(E), (N, N)).coalesce().to_sparse(layout=layout)
    out, (adj, weights) = ours(x, adj_t, return_attention_weights=True)
    expected_out, (expected, right) = theirs(x, adj_t, return_attention_weights=True)
    torch.testing.assert_close(out, expected_out)
    torch.testing.assert_close(weights, right)
    torch.testing.assert_close(adj, expected)  # layout, indices and values
    if layout is torch.sparse_csr:
        assert torch.equal(adj.crow_indices(), expected.crow_indices())
        if kind != "TransformerConv":  # PyG refuses csc
            of_columns, (adj, weights) = ours(x, adj_t.to_sparse_csc(), return_attention_weights=True)
            torch.testing.assert_close(of_columns, out)
            torch.testing.assert_close(adj.to_sparse_csr(), expected)
            torch.testing.assert_close(weights, adj.values())


@pytest.mark.parametrize("backend", ["reference", "csr_unfused", "scatter", "formula"])
@pytest.mark.parametrize("kind", WITH_EDGES)
def test_a_dropout_of_one_drops_all(graph, kind, backend):
    theirs, ours = pair(kind, dropout=1.0, edge_dim=3, backend=backend)
    assert_same(results(ours, *graph), results(theirs, *graph))
    edges = graph[1]
    plan = plan_attention(edges, shape=(N, N), device="cpu", backend=backend, backward=True)
    q, k, v = torch.randn(3, N, 2, 4, dtype=torch.float64).unbind()
    assert not plan(q, k, v, dropout=Dropout(1.0, seed=3)).any()


def changed(edges, row, value):
    edges = edges.clone()
    edges[row, 0] = value
    return edges


WRONG = {
    "[E, 2]": (lambda edges: edges.t(), rf"edge_index: got shape \({E}, 2\)"),
    "[3, E]": (lambda edges: torch.cat([edges, edges[:1]]), r"edge_index: got shape \(3, 60\)"),
    "[E]": (lambda edges: edges[0], r"edge_index: got shape \(60,\)"),
    "bool": (lambda edges: edges.bool(), r"edge_index: got .* torch\.bool"),
    "float": (lambda edges: edges.double(), r"edge_index: got .* torch\.float64"),
    "int16": (lambda edges: edges.short(), r"edge_index: got .* torch\.int16"),
    "three dimensions": (lambda edges: torch.ones(2, 2, 2).to_sparse(), r"edge_index: got shape \(2, 2, 2\)"),
    "adj_t of another size": (
        lambda edges: torch.eye(N + 1).to_sparse(),
        "adj_t of 21 targets and 21 sources; .* 20 and",
    ),
    "source too large": (lambda edges: changed(edges, 0, N), r"row 0 \(sources\) holds ids from 0 to 20"),
    "source below 0": (lambda edges: changed(edges, 0, -1), r"row 0 \(sources\) holds ids from -1"),
    "target too large": (lambda edges: changed(edges, 1, N + 3), r"row 1 \(targets\) holds ids from 0 to 23"),
    "target below 0": (lambda edges: changed(edges, 1, -1), r"row 1 \(targets\) holds ids from -1"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("kind", KINDS)
def test_wrong_edges_get_a_sentence(graph, kind, wrong):
    """Of calls for the output, with features and for weights, in turn."""
    x, edges, attr = graph
    change, message = WRONG[wrong]
    wants = (
        "output"
        if kind == "AGNNConv"
        else ("output", "features", "weights")[(len(kind) + list(WRONG).index(wrong)) % 3]
    )
    _, layer = pair(kind, **({"edge_dim": 3} if wants == "features" else {}))
    given = {"features": {"edge_attr": attr}, "weights": {"return_attention_weights": True}}
    with pytest.raises(ValueError, match=message):
        layer(x, change(edges), **given.get(wants, {}))


@pytest.mark.parametrize("size", [(5, 5), (N, 7), (30, 9)])
def test_a_size_that_x_has_not_is_refused(graph, size):
    x, edges, _ = graph
    for layer in pair("GATConv", add_self_loops=False):
        with pytest.raises(ValueError, match=r"size"):
            layer((x, x[:9]), torch.stack([edges[0], edges[1] % 5]), size=size)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_not_scripted_and_has_the_attributes_of_pygs(kind):
    theirs, ours = pair(kind)
    with pytest.raises(NotImplementedError, match=r"torch\.jit\.script: .* torch\.export"):
        torch.jit.script(ours)
    for name in ("in_channels", "out_channels", "heads", "aggr", "node_dim", "flow", "requires_grad"):
        assert getattr(ours, name, None) == getattr(theirs, name, None), name


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_device_meta_gives_shapes(graph, kind, edge_dim):
    if kind == "AGNNConv" and edge_dim:
        return
    with torch.device("meta"):
        sizes = () if kind == "AGNNConv" else (8, 4, 2)
        layer = getattr(fused3s.nn, kind)(*sizes, **({"edge_dim": 3, "dropout": 0.5} if edge_dim else {})).double()
    attr = graph[2].to("meta") if edge_dim else None
    found = results(layer, *(each.to("meta") for each in graph[:2]), *(() if attr is None else (attr,)))
    expected = results(pair(kind, **({"edge_dim": 3} if edge_dim else {}))[1], *graph[: 3 if edge_dim else 2])
    for name, right in expected.items():
        assert (found[name].shape, found[name].device.type) == (right.shape, "meta"), name


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_an_exported_layer_takes_other_graphs(graph, kind, edge_dim):
    if kind == "AGNNConv" and edge_dim:
        return
    theirs, layer = pair(kind, **({"edge_dim": edge_dim} if edge_dim else {}))
    nodes, edges = torch.export.Dim("nodes", min=2), torch.export.Dim("edges", min=2)
    given, shapes = (graph, ({0: nodes}, {1: edges}, {0: edges})) if edge_dim else (graph[:2], ({0: nodes}, {1: edges}))
    program = torch.export.export(layer, tuple(given), dynamic_shapes=shapes, strict=False).module()
    torch.testing.assert_close(program(*given), theirs(*given))
    x, edges, attr = graph
    few = edges[:, :7] % 5  # with self-loops
    other = (x[:5], few, attr[:7])[: len(given)]
    torch.testing.assert_close(program(*other), theirs(*other))


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_gets_a_sentence(graph, kind):
    with pytest.raises(RuntimeError, match=r"torch\.jit\.trace: .* torch\.export"):
        torch.jit.trace(pair(kind)[1], graph[:2])


class NoMemory(torch.Tensor):
    """As a DTensor: operations work by another tensor, which kernels cannot see."""

    def __tensor_flatten__(self):
        return [], None


@pytest.mark.parametrize("kind", KINDS)
def test_kernels_get_the_memory_of_an_edge_index_of_pyg(graph, kind, monkeypatch):
    x, edges, _ = graph
    given = EdgeIndex(edges, sparse_size=(N, N)).sort_by("col").values
    assert given.data_ptr() == 0
    arguments = () if kind == "AGNNConv" else (8, 4)
    layer = getattr(fused3s.nn, kind)(*arguments, backend="scatter").double()
    planned = []

    def recorded(graph, **options):
        planned.append(graph)
        return plan_attention(graph, **options)

    monkeypatch.setattr(planned_edges, "plan_attention", recorded)
    out = layer(x, given)
    torch.testing.assert_close(out, layer(x, given.as_tensor().clone()))
    if kind != "AGNNConv":
        torch.testing.assert_close(layer(x, layer.plan(given, N)), out)
    assert all(type(each) is torch.Tensor and each.data_ptr() for each in planned)
    assert graph_record(given, (N, N), None).edge_index is given.as_tensor()
    with pytest.raises(TypeError, match="got a NoMemory, which has no memory of its own"):
        layer(x, edges.as_subclass(NoMemory))
