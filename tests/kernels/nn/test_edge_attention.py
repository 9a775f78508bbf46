"""The operator of compiled layers: torch's checks of it, and layers without a graph break beside PyG's."""

import re
from collections.abc import Iterator
from contextlib import nullcontext

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import fused3s.nn
from fused3s.nn.cached.edge_attention import _refuse_capture

FUSED = pytest.param("fused3s", marks=pytest.mark.gpu)

close = torch.testing.assert_close
pytestmark = pytest.mark.usefixtures("one_thread", "formula")


@pytest.fixture(autouse=True)
def compiles_anew() -> Iterator[None]:
    yield
    torch.compiler.reset()


def place_of(backend):
    return {"device": "cuda", "dtype": torch.float16} if backend == "fused3s" else {"dtype": torch.float64}


def graph(nodes, edges, edge_dim, backend, seed=0):
    """x, edge_index with repeated edges, edge_attr or None."""
    generator, place = torch.Generator().manual_seed(seed), place_of(backend)
    x = torch.randn(nodes, 8, generator=generator).to(**place).requires_grad_()
    edge_index = torch.randint(nodes, (2, edges), generator=generator).to(x.device)
    attr = None
    if edge_dim:
        attr = torch.randn(edges, edge_dim, generator=generator).to(**place).requires_grad_()
    return x, edge_index, attr


def results(layer, inputs):
    """The output, and the gradients of a random sum by the inputs and the parameters."""
    leaves = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
    out = layer(*inputs)
    factors = torch.randn(out.shape, generator=torch.Generator().manual_seed(9)).to(out)
    return [out, *torch.autograd.grad(out, [*leaves, *layer.parameters()], factors)]


def assert_same(found, expected, backend):
    for left, right in zip(found, expected, strict=True):
        if backend == "fused3s":
            assert (left.double() - right.double()).norm() <= 2e-2 * right.double().norm() + 1e-2
        else:
            close(left, right, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("edge_dim", [None, 3])
@pytest.mark.parametrize("backend", ["dgl", "formula", FUSED])
def test_a_compiled_layer_takes_new_graphs_and_sizes(planned, backend, edge_dim):
    pyg = pytest.importorskip("torch_geometric.nn", reason="torch_geometric is not installed")
    options = {"heads": 2, "edge_dim": edge_dim, "beta": True}
    theirs = pyg.TransformerConv(8, 4, **options).to(**place_of(backend))
    ours = fused3s.nn.TransformerConv(8, 4, **options, backend=backend).to(**place_of(backend))
    ours.load_state_dict(theirs.state_dict())
    counter = CompileCounterWithBackend("inductor" if backend == "fused3s" else "aot_eager")
    compiled = torch.compile(ours, backend=counter, fullgraph=True, dynamic=True)
    frames = []
    for number, (nodes, edges) in enumerate(((10, 30), (17, 40), (40, 35))):
        inputs = graph(nodes, edges, edge_dim, backend, number)
        assert_same(results(compiled, inputs), results(theirs, inputs), backend)
        assert len(planned) == number + 1, "the backward pass made a plan of its own"
        frames.append(counter.frame_count)
    assert frames[0] == frames[-1]


def test_a_compiled_layer_drops_weights_as_an_eager_one():
    layer = fused3s.nn.TransformerConv(8, 4, heads=2, edge_dim=3, dropout=0.5, backend="formula").double()
    inputs = graph(17, 40, 3, "formula")
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    found = []
    for call in (compiled, layer):
        torch.manual_seed(3)
        found.append(results(call, inputs))
    assert_same(*found, "formula")
    layer.eval()
    with torch.no_grad():
        close(compiled(*inputs), layer(*inputs))


def test_wrong_ids_are_named_by_a_compiled_layer():
    layer = fused3s.nn.TransformerConv(8, 4, backend="reference").double()
    x, edge_index, _ = graph(17, 40, None, "reference")
    with pytest.raises(ValueError, match=r"row 0 \(sources\) holds ids from .* to 99"):
        torch.compile(layer, backend="aot_eager", fullgraph=True)(x, edge_index.clamp(min=99))


@pytest.mark.gpu
@pytest.mark.parametrize("has_tag", [False, True])
def test_gpu_capture_is_refused_by_a_torch_that_would_capture_by_itself(monkeypatch, has_tag):
    query, edge_index = torch.randn(3, 17, 2, 4, device="cuda").half(), graph(17, 40, None, "fused3s")[1]
    arguments = (*query, None, None, None, None, 0.0, 0.5, edge_index, "fused3s", True, False)
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


@pytest.mark.parametrize("terms", [False, True])
@pytest.mark.parametrize("backend", ["formula", FUSED])
def test_torchs_checks_of_the_operators(backend, terms):
    x, edge_index, features = graph(17, 40, 3, backend)
    query, key, value = torch.randn(3, 17, 2, 4).to(x).unbind(0)
    tensors = [each.clone().requires_grad_() for each in (query, key, value)]
    given = [None, None, None, None, 0.0, 0.5]
    if terms:
        weights = torch.randn(2, 2, 4, 3).to(x).unbind(0)
        weights = [weight.clone().requires_grad_() for weight in weights]
        given = [features, *weights, torch.tensor([5], device=x.device), 0.3, 0.5]
    graph_arguments = edge_index, backend, True
    torch.library.opcheck(torch.ops.fused3s.attention_of_edges, (*tensors, *given, *graph_arguments, True))
    plain = [each.detach() if isinstance(each, torch.Tensor) else each for each in (*tensors, *given)]
    output, lse = torch.ops.fused3s.attention_of_edges(*plain, *graph_arguments, True)
    arguments = (*plain, *graph_arguments, torch.randn_like(output), output, lse)
    wanted = [True, False, True] + [terms] * 3
    torch.library.opcheck(torch.ops.fused3s.attention_of_edges_backward, (*arguments, wanted))
