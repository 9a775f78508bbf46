"""Hooks, adapters and wrappers of the linear layers inside fire as in PyG's layers, on every kind of backend."""

import pytest
import torch
from attention_cases import dense_attention
from layer_pairs import WITH_EDGES, assert_same, pair, random_graph, trained
from torch import nn
from torch.nn.utils import parametrizations

import fused3s.nn
from fused3s import plan_attention
from fused3s.terms.edge_data import EdgeData

pytestmark = pytest.mark.usefixtures("formula")
N, E, COLUMNS = 12, 40, 6
LAYERS = {
    "TransformerConv": ({}, ("query", "key", "value", "skip")),
    "TransformerConv with features": (
        {"edge_dim": COLUMNS, "beta": True},
        ("query", "key", "value", "skip", "beta", "edge"),
    ),
    "GATConv": ({}, ("",)),
    "GATConv with features": ({"edge_dim": COLUMNS, "residual": True}, ("", "edge", "res")),
    "GATConv of pairs": ({"edge_dim": COLUMNS, "residual": True}, ("src", "dst", "edge", "res")),
    "GATv2Conv": ({}, ("l", "r")),
    "GATv2Conv with features": ({"edge_dim": COLUMNS, "residual": True}, ("l", "r", "edge", "res")),
}


class Adapter(nn.Module):
    """A low-rank term beside a frozen layer, which keeps the layer's weight readable."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        generator = torch.Generator().manual_seed(5)
        rows, columns = base.weight.shape
        self.extra = nn.Parameter(torch.randn(rows, columns, generator=generator, dtype=torch.float64))

    weight = property(lambda self: self.base.weight)
    bias = property(lambda self: self.base.bias)

    def forward(self, x):
        return self.base(x) + x @ self.extra.t()


def observed(register, change):
    def apply(owner, name, calls):
        getattr(getattr(owner, name), register)(lambda *given: calls.append(register) or change(*given))

    return apply


def adapted(owner, name, calls):
    setattr(owner, name, Adapter(getattr(owner, name)))


def of_subclass(owner, name, calls):
    """A subclass of the layer's type with a forward of its own, by class as FSDP changes it."""
    layer = getattr(owner, name)
    base = type(layer)
    layer.__class__ = type("Doubled", (base,), {"forward": lambda self, x: 2 * base.forward(self, x)})


def patched(owner, name, calls):
    layer = getattr(owner, name)
    forward = layer.forward
    layer.forward = lambda x: calls.append("patch") or 2 * forward(x)


def replaced(owner, name, calls):
    rows, columns = getattr(owner, name).weight.shape
    torch.manual_seed(7)
    setattr(owner, name, nn.Linear(columns, rows).double())  # with a bias


CHANGES = {
    "forward_pre": observed("register_forward_pre_hook", lambda module, given: (2 * given[0],)),
    "forward": observed("register_forward_hook", lambda module, given, out: 2 * out),
    "backward_pre": observed("register_full_backward_pre_hook", lambda module, grads: (2 * grads[0],)),
    "backward": observed(
        "register_full_backward_hook",
        lambda module, of_inputs, of_outputs: tuple(None if each is None else 2 * each for each in of_inputs),
    ),
    "weight_norm": lambda owner, name, calls: parametrizations.weight_norm(getattr(owner, name)),
    "adapter": adapted,
    "subclass": of_subclass,
    "patch": patched,
    "replaced": replaced,
}


# The backend with a backward pass of its own, for which layers join their projections; another one for two changes.
WITH_BACKENDS = [(change, "formula") for change in CHANGES] + [("forward", "scatter"), ("adapter", "scatter")]


@pytest.mark.parametrize(("change", "backend"), WITH_BACKENDS)
@pytest.mark.parametrize("name", LAYERS)
def test_they_count_as_in_pyg(name, change, backend):
    (options, modules), kind = LAYERS[name], name.split()[0]
    x, edges, attr = random_graph(N, E, COLUMNS, COLUMNS)
    given, columns = ((x, x.clone()), (COLUMNS, COLUMNS)) if "pairs" in name else (x, COLUMNS)
    graph = (edges, attr) if "edge_dim" in options else (edges,)
    for module in modules:
        module = "res" if module == "res" else "_".join(filter(None, ("lin", module)))
        found = []
        for layer in pair(kind, columns, 3, 2, backend=backend, **options):
            calls = []
            CHANGES[change](layer, module, calls)
            found.append((trained(layer, given, *graph), calls))
        (expected, wanted), (got, calls) = found
        assert calls == wanted, module
        assert_same(got, expected)


def test_weights_of_an_adapted_edge_layer_are_pygs():
    graph = random_graph(N, E, 4, 5)
    for kind in WITH_EDGES:
        found, calls = [], []
        for layer in pair(kind, 4, 3, 2, edge_dim=5, backend="scatter"):
            calls.append([])
            adapted(layer, "lin_edge", calls[-1])
            CHANGES["forward"](layer, "lin_edge", calls[-1])
            out, (_, weights) = layer(*graph, return_attention_weights=True)
            found.append((out, weights))
        assert calls[0] == calls[1]
        torch.testing.assert_close(found[1], found[0])


def test_bound_edges_cannot_pass_through_a_hook():
    layer = fused3s.nn.TransformerConv(4, 3, edge_dim=5, backend="scatter")
    edge_index = torch.randint(N, (2, E))
    plan = layer.plan(edge_index, N)
    bound = plan.bind_edges(EdgeData(features=torch.randn(E, 5)))
    layer(torch.randn(N, 4), plan, bound)
    layer.lin_edge.register_forward_hook(lambda *given: None)
    with pytest.raises(TypeError, match=r"edge_attr: got bound edges, and lin_edge .* pass the tensor \[E, edge_dim\]"):
        layer(torch.randn(N, 4), plan, bound)


@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
@pytest.mark.parametrize(("change", "backend"), WITH_BACKENDS)
def test_sparse_mha_counts_them(change, name, backend):
    """By the layer's formula, written with its modules."""
    torch.manual_seed(3)
    layer = fused3s.nn.SparseMHA(6, 2, backend=backend).double()
    edge_index, h = torch.randint(N, (2, E)), torch.randn(N, 6, dtype=torch.float64)
    plan = plan_attention(
        edge_index,
        shape=(N, N),
        backend=backend,
        device="cpu",
        dtype=torch.float64,
        head_dim=3,
        num_heads=2,
        backward=True,
    )
    counts = torch.zeros(N, N, dtype=torch.float64)
    counts.index_put_((edge_index[1], edge_index[0]), torch.ones(E, dtype=torch.float64), accumulate=True)

    def formula(h):
        q, k, v = (each(h).view(N, 3, 2).transpose(1, 2) for each in (layer.q_proj, layer.k_proj, layer.v_proj))
        return layer.out_proj(dense_attention(q, k, v, counts, 3**-0.5).transpose(1, 2).flatten(1))

    calls, found = [], []
    CHANGES[change](layer, name, calls)
    for run in (formula, lambda h: layer(plan, h)):
        calls.clear()
        leaf = h.clone().requires_grad_()
        layer.zero_grad()
        out = run(leaf)
        out.square().sum().backward()
        found.append((list(calls), [out, leaf.grad, *(each.grad for each in layer.parameters())]))
    (wanted, expected), (counted, got) = found
    assert counted == wanted
    torch.testing.assert_close(got, expected)
