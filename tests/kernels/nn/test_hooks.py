"""Hooks, adapters and wrappers of the linear layers inside fire as in PyG's layers, on every kind of backend."""

import pytest
import torch
import torch_geometric.nn
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
}


def results(layer, pair, has_features):
    """Output and all gradients of a training step."""
    generator = torch.Generator().manual_seed(2)
    x, edge_attr = (torch.randn(length, COLUMNS, generator=generator).double().requires_grad_() for length in (N, E))
    edge_index = torch.randint(N, (2, E), generator=generator)
    out = layer((x, x.clone()) if pair else x, edge_index, edge_attr if has_features else None)
    out.square().sum().backward()
    found = {name: parameter.grad for name, parameter in layer.named_parameters()}
    return {"out": out, "x": x.grad, "edge_attr": edge_attr.grad} | found


@pytest.mark.parametrize("backend", ["scatter", "formula"])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("name", LAYERS)
def test_they_count_as_in_pyg(name, change, backend):
    (options, modules), pair = LAYERS[name], "pairs" in name
    kind, columns = name.split()[0], (COLUMNS, COLUMNS) if pair else COLUMNS
    for module in modules:
        module = "res" if module == "res" else "_".join(filter(None, ("lin", module)))
        torch.manual_seed(3)
        theirs = getattr(torch_geometric.nn, kind)(columns, 3, heads=2, **options).double()
        ours = getattr(fused3s.nn, kind)(columns, 3, heads=2, **options, backend=backend).double()
        ours.load_state_dict(theirs.state_dict())
        found = []
        for layer in (theirs, ours):
            calls = []
            CHANGES[change](layer, module, calls)
            found.append((results(layer, pair, "edge_dim" in options), calls))
        (expected, wanted), (got, calls) = found
        assert calls == wanted, module
        assert got.keys() == expected.keys()
        for each, right in expected.items():
            torch.testing.assert_close(got[each], right, rtol=1e-9, atol=1e-9, msg=f"{module}: {each}")


def test_weights_of_an_adapted_edge_layer_are_pygs():
    torch.manual_seed(3)
    x, edge_index, edge_attr = torch.randn(N, 4).double(), torch.randint(N, (2, E)), torch.randn(E, 5).double()
    for kind in ("TransformerConv", "GATConv", "GATv2Conv"):
        theirs = getattr(torch_geometric.nn, kind)(4, 3, heads=2, edge_dim=5).double()
        ours = getattr(fused3s.nn, kind)(4, 3, heads=2, edge_dim=5, backend="scatter").double()
        ours.load_state_dict(theirs.state_dict())
        found = []
        for layer in (theirs, ours):
            calls = []
            adapted(layer, "lin_edge", calls)
            CHANGES["forward"](layer, "lin_edge", calls)
            out, (_, weights) = layer(x, edge_index, edge_attr, return_attention_weights=True)
            found.append((out, weights, calls))
        (expected, right, wanted), (out, weights, calls) = found
        assert calls == wanted
        torch.testing.assert_close(out, expected)
        torch.testing.assert_close(weights, right)


def test_bound_edges_cannot_pass_through_a_hook():
    layer = fused3s.nn.TransformerConv(4, 3, edge_dim=5, backend="scatter")
    edge_index = torch.randint(N, (2, E))
    plan = layer.plan(edge_index, N)
    bound = plan.bind_edges(EdgeData(features=torch.randn(E, 5)))
    layer(torch.randn(N, 4), plan, bound)
    layer.lin_edge.register_forward_hook(lambda *given: None)
    with pytest.raises(TypeError, match=r"edge_attr: got bound edges, and lin_edge .* pass the tensor \[E, edge_dim\]"):
        layer(torch.randn(N, 4), plan, bound)


@pytest.mark.parametrize("backend", ["scatter", "formula"])
@pytest.mark.parametrize("name", ["q_proj", "k_proj", "v_proj", "out_proj"])
@pytest.mark.parametrize("change", CHANGES)
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
    mask = torch.zeros(N, N, dtype=torch.float64)
    mask.index_put_((edge_index[1], edge_index[0]), torch.ones(E, dtype=torch.float64), accumulate=True)

    def formula(h):
        q, k, v = (each(h).view(N, 3, 2) for each in (layer.q_proj, layer.k_proj, layer.v_proj))
        weights = mask[..., None] * torch.einsum("idh,jdh->ijh", q * 3**-0.5, k).exp()
        weights = weights / weights.sum(1, keepdim=True).clamp(min=1e-300)
        return layer.out_proj(torch.einsum("ijh,jdh->idh", weights, v).flatten(1))

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
    for right, mine in zip(expected, got, strict=True):
        torch.testing.assert_close(mine, right)
