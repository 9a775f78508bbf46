"""Layers with the kernels of `fused3s` on the CPU (tests/cuda_shim): the joint projection's strides, and gradients that
the kernels write into rows which hold those of the root or of scores, too. PyG's layers in float64 are the oracle."""

import pytest
import torch
import torch_geometric.nn
from layer_pairs import listed_graph, pair, trained

import fused3s.nn
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM, cuda_on_cpu

pytestmark = [*ON_SHIM, pytest.mark.usefixtures("unset_memory")]
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
ALLOWED = {FLOAT: 1e-5, HALF: 5e-3, BFLOAT: 3e-2}  # relative: of the output, of each input, of all parameters together


@pytest.fixture
def unset_memory(monkeypatch):
    """New memory is NaN, as the shim asks for; without the guards of `poison`, so that rows fill their memory."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)

        def unset(*given, make=make, **options):
            made = make(*given, **options)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        monkeypatch.setattr(owner, name, unset)


# Columns of a head, heads, options, graph, type.
CASES = {
    "TransformerConv": [
        (64, 1, {"concat": False}, "wide", HALF),
        (8, 4, {"beta": True, "bias": False}, "n_one_past_16", HALF),
        (8, 4, {}, "wide", HALF),
        (13, 3, {"root_weight": False}, "n_one_past_16", HALF),
        (13, 3, {"concat": False}, "wide", HALF),
        (64, 1, {"edge_dim": 3}, "hub", FLOAT),
        (13, 3, {"edge_dim": 3}, "hub", FLOAT),
        (13, 3, {"edge_dim": 20}, "hub", FLOAT),
    ],
    "GATConv": [
        (8, 4, {}, "n_one_past_16", FLOAT),
        (40, 1, {}, "hub", FLOAT),
        (13, 3, {"add_self_loops": False}, "wide", FLOAT),
        (8, 4, {"add_self_loops": False}, "wide", HALF),
        (1, 1, {"add_self_loops": False}, "wide", HALF),
    ],
    "GATv2Conv": [
        (16, 8, {"edge_dim": 8}, "hub", FLOAT),
        (8, 4, {"edge_dim": 5, "share_weights": True, "concat": False}, "repeated", FLOAT),
        (24, 2, {"edge_dim": 40, "residual": True, "fill_value": "max"}, "repeated", FLOAT),
        (13, 3, {"edge_dim": 3, "add_self_loops": False, "negative_slope": 0.05}, "empty_rows_and_windows", FLOAT),
        (8, 4, {"edge_dim": 20, "bias": False}, "wide", FLOAT),
        (64, 1, {"edge_dim": 1, "add_self_loops": False}, "tall", FLOAT),
        (8, 2, {"edge_dim": 3}, "one_node_no_edge", FLOAT),
        (8, 2, {"edge_dim": 3, "add_self_loops": False}, "no_edges", FLOAT),
        (16, 8, {"edge_dim": 8}, "hub", BFLOAT),
        (8, 4, {"edge_dim": 32, "concat": False}, "directed", HALF),
    ],
}
CASES["GATv2Conv"] += CASES["GATConv"]
CASES = [(kind, *case) for kind, cases in CASES.items() for case in cases]


def assert_near(found, expected, allowed):
    """Results of `trained`."""
    parameters = [name for name in expected if name not in ("out", "x0", "x1", "edge_attr0")]
    for names in (*([name] for name in expected if name not in parameters), parameters):
        mine, right = (
            torch.cat([each[n].double().flatten() for n in names if expected[n] is not None])
            for each in (found, expected)
        )
        assert (mine - right).norm() <= allowed * right.norm(), names


@pytest.mark.parametrize(("kind", "width", "heads", "options", "name", "dtype"), CASES, ids=str)
def test_a_training_step_is_that_of_pyg(kind, width, heads, options, name, dtype):
    """With the weights as rounded; float32 of TransformerConv under autocast."""
    x, *graph = listed_graph(name, 16, options.get("edge_dim"), dtype)
    columns = (16, 16) if isinstance(x, tuple) else 16
    exact, layer = pair(kind, columns, width, heads, backend="fused3s", **options)
    exact.load_state_dict(layer.to(dtype).state_dict())
    casts = dtype == FLOAT and kind == "TransformerConv"
    with cuda_on_cpu(MODES["random"]), torch.autocast("cpu", HALF, enabled=casts):
        found = trained(layer, x, *graph)
    assert not casts or found["out"].dtype == HALF
    double = tuple(each.double() for each in x) if isinstance(x, tuple) else x.double()
    expected = trained(exact, double, graph[0], *(each.double() for each in graph[1:]))
    assert_near(found, expected, ALLOWED[HALF if casts else dtype])


@pytest.mark.parametrize(("heads", "width", "options"), [(4, 8, {}), (3, 13, {"concat": False}), (1, 64, {})])
def test_gradients_of_the_projections_are_not_copied_together(monkeypatch, heads, width, options):
    """Of query, key, value and root."""
    layer, joined, cat = (
        fused3s.nn.TransformerConv(16, width, heads, **options, backend="fused3s").half(),
        [],
        torch.cat,
    )
    x, edges = listed_graph("n_one_past_16", 16, dtype=HALF)
    with cuda_on_cpu(MODES["late"]):
        out = layer(x.requires_grad_(), layer.plan(edges, len(x)))
        monkeypatch.setattr(torch, "cat", lambda *tensors: joined.append(tensors) or cat(*tensors))
        torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])
    assert not joined


@pytest.mark.parametrize(("heads", "columns", "dtype"), [(8, 128, FLOAT), (3, 39, HALF), (2, 8, BFLOAT)])
def test_a_training_step_of_hgt_is_that_of_pyg(heads, columns, dtype):
    """PyG's layer in float64, with the same weights; authors have no edges into them, papers have repeated ones."""
    relations = {("author", "writes", "paper"): 60, ("paper", "cites", "paper"): 90, ("paper", "has", "author"): 0}
    sizes = {"paper": 37, "author": 9}
    torch.manual_seed(0)
    layer = fused3s.nn.HGTConv(16, columns, (list(sizes), list(relations)), heads, backend="fused3s").to(dtype)
    exact = torch_geometric.nn.HGTConv(16, columns, (list(sizes), list(relations)), heads).double()
    exact.load_state_dict(layer.state_dict())
    x = [torch.randn(size, 16).to(dtype) for size in sizes.values()]
    edges = {
        kind: torch.stack([torch.randint(sizes[end], (count,)) for end in kind[::2]])
        for kind, count in relations.items()
    }

    def step(layer, x):
        leaves = [each.requires_grad_() for each in x]
        out = list(layer(dict(zip(sizes, leaves, strict=True)), edges).values())
        used = [each for name, each in layer.named_parameters() if not name.startswith("skip")]  # of as many columns
        loss = sum(each.double().square().sum() for each in out)
        of_x, of_authors, *of_parameters = torch.autograd.grad(loss, [*leaves, *used])
        return *out, of_x, of_authors, torch.cat([each.flatten() for each in of_parameters])

    with cuda_on_cpu(MODES["random"]):
        found = step(layer, x)
    allowed = {FLOAT: 1e-5, HALF: 5e-3, BFLOAT: 3e-2}[dtype]
    for mine, correct in zip(found, step(exact, [each.detach().double() for each in x]), strict=True):
        assert (mine.double() - correct).norm() <= allowed * correct.norm()
