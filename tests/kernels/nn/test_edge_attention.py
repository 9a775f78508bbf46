"""The operator of compiled layers: torch's checks of it, and layers without a graph break beside PyG's."""

import re
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from layer_pairs import pair as layer_pair
from layer_pairs import random_graph
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode

import fused3s.nn
from fused3s import BoundEdges
from fused3s.fused.plan_state import Fused3SPlan
from fused3s.nn.cached import edge_attention
from fused3s.nn.cached.edge_attention import NO_LOOPS, _refuse_capture, attend_edges

FUSED = pytest.param("fused3s", marks=pytest.mark.gpu)

close = torch.testing.assert_close
pytestmark = pytest.mark.usefixtures("formula")


@pytest.fixture(autouse=True)
def compiles_anew() -> Iterator[None]:
    yield
    torch.compiler.reset()


def place_of(backend):
    return {"device": "cuda", "dtype": torch.float32} if backend == "fused3s" else {"dtype": torch.float64}


def graph(nodes, edges, edge_dim, backend, seed=0):
    """x, edge_index with repeated edges, and edge_attr with an `edge_dim`."""
    place, tensors = place_of(backend), random_graph(nodes, edges, edge_dim=edge_dim, seed=seed)
    return [
        each.to(**place).requires_grad_() if each.is_floating_point() else each.to(place.get("device"))
        for each in tensors
    ]


def is_leaf(each):
    return isinstance(each, torch.Tensor) and each.requires_grad


def results(layer, inputs):
    """The output, and the gradients of a random sum by the inputs and the parameters."""
    if next(layer.parameters()).dtype == torch.float64:
        inputs = [each.detach().double().requires_grad_() if is_leaf(each) else each for each in inputs]
    leaves = [each for each in inputs if is_leaf(each)]
    out = layer(*inputs)
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    return [out, *torch.autograd.grad(out, [*leaves, *layer.parameters()], factors)]


def assert_same(found, expected, backend):
    tolerance = 2e-4 if backend == "fused3s" else 1e-9
    for left, right in zip(found, expected, strict=True):
        close(left.double(), right.double(), rtol=tolerance, atol=tolerance)


LAYERS = {
    "TransformerConv": {"beta": True},
    "TransformerConv-edges": {"beta": True, "edge_dim": 3},
    "TransformerConv-wide edges": {"beta": True, "edge_dim": 20},
    "GATConv": {},
    "GATConv-edges": {"edge_dim": 3},
    "GATConv-edges-sum": {"edge_dim": 3, "fill_value": "add"},
    "GATConv-edges-max": {"edge_dim": 3, "fill_value": "max"},
    "GATConv-edges-1.5": {"edge_dim": 3, "fill_value": 1.5},
    "GATConv-no loops": {"add_self_loops": False},
    "GATv2Conv": {},
    "GATv2Conv-edges": {"edge_dim": 3},
    "AGNNConv": {},
}
every_layer = pytest.mark.parametrize("name", LAYERS)
# One of each type, with edge features: compiling takes long.
each_type = pytest.mark.parametrize(
    "name", ["TransformerConv-edges", "GATConv-edges-max", "GATv2Conv-edges", "AGNNConv"]
)


def pair(name, backend):
    """PyG's layer in float64 and ours, of the same weights."""
    place = place_of(backend)
    theirs, ours = layer_pair(
        name.partition("-")[0], backend=backend, device=place.get("device", "cpu"), **LAYERS[name]
    )
    return theirs, ours.to(**place)


def given_to(name, nodes, edges, backend, seed=0):
    return graph(nodes, edges, LAYERS[name].get("edge_dim"), backend, seed)


@every_layer
@pytest.mark.parametrize("backend", ["dgl", "formula", FUSED])
def test_a_compiled_layer_takes_new_graphs_and_sizes(planned, backend, name):
    if backend == "dgl" and name.startswith("GAT"):
        return  # dgl has no scores of additive form
    theirs, ours = pair(name, backend)
    counter = CompileCounterWithBackend("inductor" if backend == "fused3s" else "aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True, dynamic=True)
    frames = []
    for number, (nodes, edges) in enumerate(((10, 30), (17, 40), (40, 35), (33, 90))):
        inputs = given_to(name, nodes, edges, backend, number)
        assert_same(results(compiled, inputs), results(theirs, inputs), backend)
        assert len(planned) == number + 1, "the backward pass made a plan of its own"
        assert_same(results(ours, inputs), results(theirs, inputs), backend)
        assert len(planned) == number + 1, "an eager call plans what a compiled one had planned"
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1]


@every_layer
@pytest.mark.parametrize("backend", ["formula", FUSED])
def test_a_compiled_layer_takes_a_plan(backend, name):
    if name == "AGNNConv" or "edges" in name:
        return  # no `plan`, no edge features
    theirs, ours = pair(name, backend)
    x, edge_index = given_to(name, 17, 40, backend)
    compiled = torch.compile(ours, backend="aot_eager", fullgraph=True)
    assert_same(results(compiled, (x, ours.plan(edge_index, 17))), results(theirs, (x, edge_index)), backend)


@each_type
def test_a_compiled_layer_drops_weights_as_an_eager_one(name):
    if name == "AGNNConv":
        return  # has no dropout
    _, layer = pair(name, "formula")
    layer.dropout = 0.5
    inputs = given_to(name, 17, 40, "formula")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = []
    for call in (compiled, layer):
        torch.manual_seed(3)
        found.append(results(call, inputs))
    assert_same(*found, "formula")
    layer.eval()
    with torch.no_grad():
        close(compiled(*inputs), layer(*inputs))


@each_type
def test_a_compiled_layer_computes_in_the_type_of_autocast(name):
    _, layer = pair(name, "formula")
    inputs = [each.float() if each.is_floating_point() else each for each in given_to(name, 17, 40, "formula")]
    compiled, found = torch.compile(layer.float(), backend="aot_eager", fullgraph=True), []
    for call in (compiled, layer):
        with torch.autocast("cpu", torch.bfloat16):
            found.append(call(*inputs))
    assert found[0].dtype == found[1].dtype
    close(*found, rtol=2e-2, atol=2e-2)


@each_type
def test_a_compiled_layer_returns_attention_weights(name):
    if name == "AGNNConv":
        return  # returns none
    theirs, ours = pair(name, "formula")
    inputs = given_to(name, 17, 40, "formula")
    out, (edges, weights) = torch.compile(ours, backend="aot_eager")(*inputs, return_attention_weights=True)
    expected, (expected_edges, expected_weights) = theirs(*inputs, return_attention_weights=True)
    close((out, edges, weights), (expected, expected_edges, expected_weights))


def test_edge_features_of_other_edges_are_an_error_of_a_compiled_layer():
    _, layer = pair("TransformerConv-edges", "formula")
    x, edge_index, attr = given_to("TransformerConv-edges", 17, 40, "formula")
    with pytest.raises(ValueError, match="edge_attr: got 39 rows; 40, one of each edge"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x, edge_index, attr[:-1])


@pytest.mark.parametrize("num_loops", [NO_LOOPS, 10])
def test_edge_features_of_other_edges_are_an_error_where_cuda_graphs_are_traced(monkeypatch, num_loops):
    """Fake tensors, as while torch.compile traces on a GPU. The kernel that sorts them does not check."""
    monkeypatch.setattr(edge_attention, "_plans_in_graph", lambda backend, dtype: True)
    with FakeTensorMode():
        query, edge_index = torch.empty(10, 2, 16, device="cuda"), torch.empty(2, 40, dtype=torch.long, device="cuda")
        weight = torch.empty(2, 16, 3, device="cuda")
        for rows in (40, 39):
            features = torch.empty(rows + max(num_loops, 0), 3, device="cuda")
            terms = BoundEdges(padded_features=features, num_features=3, key_weight=weight)
            options = {"backend": "fused3s", "cache": True, "scale": 1.0, "num_loops": num_loops}
            expected = nullcontext() if rows == 40 else pytest.raises(ValueError, match="got 39 rows; 40, one of each")
            with expected:
                assert attend_edges(query, query, query, edge_index, terms, **options).shape == query.shape


def test_wrong_ids_are_named_by_a_compiled_layer():
    layer = fused3s.nn.TransformerConv(8, 4, backend="reference").double()
    x, edge_index = graph(17, 40, None, "reference")
    with pytest.raises(ValueError, match=r"row 0 \(sources\) holds ids from .* to 99"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x, edge_index.clamp(min=99))


@pytest.mark.gpu
@pytest.mark.parametrize("has_tag", [False, True])
def test_gpu_capture_is_refused_by_a_torch_that_would_capture_by_itself(monkeypatch, has_tag):
    query, edge_index = torch.randn(3, 17, 2, 4, device="cuda").half(), graph(17, 40, None, "fused3s")[1]
    terms = [], [False] * 12, [0.2], 0.0, ""
    arguments = *query, "fused3s", edge_index, NO_LOOPS, True, 0.5, *terms, torch.float16, False
    expected, _ = torch.ops.fused3s.attention_of_edges(*arguments)
    monkeypatch.setattr("fused3s.nn.cached.edge_attention.TAGS", ("the tag",) if has_tag else ())
    torch.cuda.synchronize()
    captured = torch.cuda.CUDAGraph()
    refused = pytest.raises(RuntimeError, match=f"torch {re.escape(torch.__version__)}: a CUDA graph of a compiled")
    with nullcontext() if has_tag else refused, torch.cuda.graph(captured):
        output, _ = torch.ops.fused3s.attention_of_edges(*arguments)
    if has_tag:
        captured.replay()
        close(output, expected)


def test_capture_is_refused_on_a_gpu_alone(monkeypatch):
    monkeypatch.setattr("fused3s.nn.cached.edge_attention.is_capturing", lambda device: device.index == 0)
    _refuse_capture(torch.device("cuda", 0))
    monkeypatch.setattr("fused3s.nn.cached.edge_attention.TAGS", ())
    for device in ("cpu", "cuda:1"):
        _refuse_capture(torch.device(device))
    with pytest.raises(RuntimeError, match="would keep the plan of its first edge_index; compile without mode="):
        _refuse_capture(torch.device("cuda", 0))


@pytest.fixture
def filled(monkeypatch):
    """The numbers of edges of each plan in memory, as it is filled."""
    found, refilled = [], Fused3SPlan.refilled
    monkeypatch.setattr(
        Fused3SPlan, "refilled", lambda plan, source: (found.append(source.num_edges), refilled(plan, source))[1]
    )
    return found


class Twice(torch.nn.Module):
    """A layer, and then the same layer on its output, on the same edges."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, *graph):
        return self.layer(self.layer(x, *graph), *graph)


@pytest.mark.gpu
@every_layer
def test_gpu_cuda_graphs_of_torch_compile_plan_each_edge_index(planned, filled, name):
    """One plan a step, also in the steps before the capture, and none outside of the graphs."""
    theirs, ours = map(Twice, pair(name, "fused3s"))
    compiled = torch.compile(ours, mode="reduce-overhead", fullgraph=True)
    for number in range(6):
        inputs = given_to(name, 33, 90, "fused3s", number)
        torch.compiler.cudagraph_mark_step_begin()
        found = [each.clone() for each in results(compiled, inputs)]
        assert_same(found, results(theirs, inputs), "fused3s")
    assert not planned
    assert 2 <= len(filled) <= 3, "a replay calls no operator"
    with torch.no_grad():
        for number in range(5):
            inputs = given_to(name, 33, 90, "fused3s", number)
            torch.compiler.cudagraph_mark_step_begin()
            assert_same(
                [compiled(*inputs)], [theirs(*[each.double() if is_leaf(each) else each for each in inputs])], "fused3s"
            )


@pytest.mark.gpu
def test_gpu_cuda_graphs_sort_features_once_for_all_layers():
    layers = Twice(fused3s.nn.TransformerConv(8, 4, heads=2, edge_dim=3).cuda())
    compiled = torch.compile(layers, mode="reduce-overhead", fullgraph=True)

    def step():
        x, *given = graph(17, 40, 3, "fused3s")
        torch.compiler.cudagraph_mark_step_begin()
        compiled(x, *given).sum().backward()
        layers.zero_grad()  # gradients are in memory that the next step overwrites

    for _ in range(4):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
    assert sum(each.count for each in profile.key_averages() if "gather_rows" in each.key) == 1


@pytest.mark.gpu
def test_gpu_wrong_ids_are_named_before_the_capture():
    layer = torch.compile(fused3s.nn.TransformerConv(8, 4).cuda(), mode="reduce-overhead", fullgraph=True)
    x, edge_index = graph(17, 40, None, "fused3s")
    with pytest.raises(ValueError, match=r"row 0 \(sources\) holds ids from .* to 99"):
        layer(x, edge_index.clamp(min=99))


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("backend", ["formula", FUSED])
def test_torchs_checks_of_the_operators(backend, terms):
    x, edge_index, features = graph(17, 40, 3, backend)
    query, key, value = torch.randn(3, 17, 2, 4).to(x).unbind(0)
    tensors = [each.clone().requires_grad_() for each in (query, key, value)]
    given, is_given, rate, loops = [], [False] * 12, 0.0, NO_LOOPS
    if terms:
        weights = torch.randn(2, 2, 4, 3).to(x).unbind(0)
        given = [torch.cat([features, features[:17]]).detach().requires_grad_()]
        given += [*(weight.clone().requires_grad_() for weight in weights), torch.tensor([5], device=x.device)]
        is_given, rate, loops = [True] * 3 + [False] * 8 + [True], 0.3, 17
    graph_arguments = backend, edge_index, loops, True, 0.5
    terms_of = is_given, [0.2], rate, ""
    op = torch.ops.fused3s.attention_of_edges
    torch.library.opcheck(op, (*tensors, *graph_arguments, given, *terms_of, x.dtype, True))
    plain = [each.detach() for each in tensors], [each.detach() for each in given]
    inputs = (*plain[0], *graph_arguments, plain[1], *terms_of)
    output, lse = op(*inputs, x.dtype, True)
    wanted = [True, False, True] + [terms] * 3 + [False] * 7
    arguments = (*inputs, output, lse, torch.randn_like(output), None, wanted)
    torch.library.opcheck(torch.ops.fused3s.attention_of_edges_backward, arguments)
