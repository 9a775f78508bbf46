"""Layers with the kernels of `fused3s` on the CPU (tests/cuda_shim): the joint projection's strides, and gradients that
the kernels write into rows which hold those of the root or of scores, too."""

import pytest
import torch
import torch_geometric.nn
from attention_cases import EDGE_CASES
from edge_cases import EDGE_LISTS

import fused3s.nn
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM, cuda_on_cpu

pytestmark = ON_SHIM


@pytest.fixture
def unset_memory(monkeypatch):
    """New memory is NaN, as the shim asks for; without the guards of `poison`, so that rows fill their memory."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        make = getattr(owner, name)

        def unset(*given, make=make, **options):
            made = make(*given, **options)
            return made.fill_(torch.nan) if made.is_floating_point() else made

        monkeypatch.setattr(owner, name, unset)


@pytest.mark.usefixtures("unset_memory")
@pytest.mark.parametrize(
    ("heads", "width", "switches", "graph_name"),
    [
        (1, 64, {"concat": False}, "wide"),
        (4, 8, {"beta": True, "bias": False}, "n_one_past_16"),
        (4, 8, {}, "wide"),
        (3, 13, {"root_weight": False}, "n_one_past_16"),
        (3, 13, {"concat": False}, "wide"),
    ],
)
def test_a_training_step_is_that_of_float64(monkeypatch, heads, width, switches, graph_name):
    torch.manual_seed(0)
    exact = fused3s.nn.TransformerConv(16, width, heads=heads, **switches, backend="reference").double()
    layer = fused3s.nn.TransformerConv(16, width, heads=heads, **switches, backend="fused3s").half()
    with torch.no_grad():
        for mine, parameter in zip(layer.parameters(), exact.parameters(), strict=True):
            parameter.copy_(mine.copy_(parameter))
    graph = EDGE_CASES[graph_name]().tocoo()
    edge_index = torch.stack([torch.from_numpy(graph.col), torch.from_numpy(graph.row)]).long()
    num_targets, num_sources = graph.shape
    x = torch.randn(num_sources, 16).half().requires_grad_()

    def given(x):
        return x if num_targets == num_sources else (x, x[:num_targets])

    joined = []
    cat = torch.cat
    with cuda_on_cpu(MODES["late"]):
        plan = layer.plan(edge_index, (num_sources, num_targets))
        out = layer(given(x), plan)
        leaves = [x, *(each for each in layer.parameters())]
        with monkeypatch.context() as patch:
            patch.setattr(torch, "cat", lambda *tensors: joined.append(tensors) or cat(*tensors))
            found = torch.autograd.grad(out.float().square().sum(), leaves, allow_unused=True)
    nodes = x.detach().double().requires_grad_()
    expected_out = exact(given(nodes), edge_index)
    expected = torch.autograd.grad(expected_out.square().sum(), [nodes, *exact.parameters()], allow_unused=True)
    for mine, correct in zip((out, *found), (expected_out, *expected), strict=True):
        assert (mine is None) == (correct is None)
        if mine is not None:
            assert (mine.double() - correct).norm() <= 1e-2 * correct.norm() + 1e-2
    if not switches.get("beta"):
        assert not joined, "the gradients of q, k, v and root were copied into one tensor"


@pytest.mark.usefixtures("unset_memory")
@pytest.mark.parametrize(("heads", "width", "edge_dim"), [(1, 64, 3), (3, 13, 3), (3, 13, 20)])
def test_float32_weights_under_autocast_with_edge_attributes(heads, width, edge_dim):
    torch.manual_seed(0)
    layer = fused3s.nn.TransformerConv(16, width, heads=heads, edge_dim=edge_dim, backend="fused3s")
    exact = fused3s.nn.TransformerConv(16, width, heads=heads, edge_dim=edge_dim, backend="reference").double()
    exact.load_state_dict(layer.state_dict())
    graph = EDGE_CASES["hub"]().tocoo()
    edge_index = torch.stack([torch.from_numpy(graph.col), torch.from_numpy(graph.row)]).long()
    x, attr = torch.randn(graph.shape[0], 16), torch.randn(graph.nnz, edge_dim)
    with cuda_on_cpu(MODES["late"]):
        with torch.autocast("cpu", torch.float16):
            plan = layer.plan(edge_index, len(x))
            out = layer(x, plan, attr)
        assert (plan.inputs.dtype, out.dtype) == (torch.float16, torch.float16)
        out.float().square().sum().backward()
    expected = exact(x.double(), edge_index, attr.double())
    expected.square().sum().backward()
    assert (out.double() - expected).norm() <= 1e-2 * expected.norm()
    mine, correct = (torch.cat([each.grad.double().flatten() for each in one.parameters()]) for one in (layer, exact))
    assert (mine - correct).norm() <= 1e-2 * correct.norm()


@pytest.mark.usefixtures("unset_memory")
@pytest.mark.parametrize("layer_type", [fused3s.nn.GATConv, fused3s.nn.GATv2Conv])
@pytest.mark.parametrize(
    ("heads", "width", "graph_name", "dtype", "allowed"),
    [
        (4, 8, "n_one_past_16", torch.float32, 1e-5),
        (1, 40, "hub", torch.float32, 1e-5),
        (3, 13, "wide", torch.float32, 1e-5),
        (4, 8, "wide", torch.float16, 5e-3),
        (1, 1, "wide", torch.float16, 5e-3),
    ],
)
def test_a_training_step_of_gat(layer_type, heads, width, graph_name, dtype, allowed):
    graph = EDGE_CASES[graph_name]().tocoo()
    num_targets, num_sources = graph.shape
    options = {"heads": heads, "add_self_loops": num_targets == num_sources}
    torch.manual_seed(0)
    layer = layer_type(16, width, **options, backend="fused3s").to(dtype)
    exact = layer_type(16, width, **options, backend="reference").double()
    exact.load_state_dict(layer.state_dict())
    edge_index = torch.stack([torch.from_numpy(graph.col), torch.from_numpy(graph.row)]).long()
    x = torch.randn(num_sources, 16).to(dtype).requires_grad_()

    def step(layer, x):
        given = x if num_targets == num_sources else (x, x[:num_targets])
        out = layer(given, edge_index)
        of_x, *of_parameters = torch.autograd.grad(out.double().square().sum(), [x, *layer.parameters()])
        return out, of_x, torch.cat([each.flatten() for each in of_parameters])

    with cuda_on_cpu(MODES["late"]):
        found = step(layer, x)
    for mine, correct in zip(found, step(exact, x.detach().double().requires_grad_()), strict=True):
        assert (mine.double() - correct).norm() <= allowed * correct.norm()


@pytest.mark.usefixtures("unset_memory")
@pytest.mark.parametrize(
    ("graph_name", "heads", "width", "edge_dim", "dtype", "options"),
    [
        ("hub", 8, 16, 8, torch.float32, {}),
        ("repeated", 4, 8, 5, torch.float32, {"share_weights": True, "concat": False}),
        ("repeated", 2, 24, 40, torch.float32, {"residual": True, "fill_value": "max"}),
        ("empty_rows_and_windows", 3, 13, 3, torch.float32, {"add_self_loops": False, "negative_slope": 0.05}),
        ("wide", 4, 8, 20, torch.float32, {"bias": False}),
        ("tall", 1, 64, 1, torch.float32, {"add_self_loops": False}),
        ("one_node_no_edge", 2, 8, 3, torch.float32, {}),
        ("no_edges", 2, 8, 3, torch.float32, {"add_self_loops": False}),
        ("hub", 8, 16, 8, torch.bfloat16, {}),
        ("directed", 4, 8, 32, torch.float16, {"concat": False}),
    ],
)
def test_a_training_step_of_gatv2_with_edge_features_is_that_of_pyg(graph_name, heads, width, edge_dim, dtype, options):
    """PyG's layer in float64, with the same weights."""
    graph = EDGE_LISTS[graph_name]()
    num_targets, num_sources = graph.shape
    columns = 16 if num_targets == num_sources else (16, 16)
    torch.manual_seed(0)
    layer = fused3s.nn.GATv2Conv(columns, width, heads, edge_dim=edge_dim, **options, backend="fused3s").to(dtype)
    exact = torch_geometric.nn.GATv2Conv(columns, width, heads, edge_dim=edge_dim, **options).double()
    exact.load_state_dict(layer.state_dict())
    edge_index = torch.stack([graph.col, graph.row])
    x, attr = torch.randn(num_sources, 16).to(dtype), torch.randn(graph.num_edges, edge_dim).to(dtype)

    def step(layer, x, attr):
        leaves = x.requires_grad_(), attr.requires_grad_()
        out = layer(x if num_targets == num_sources else (x, x[:1].repeat(num_targets, 1)), edge_index, attr)
        of_x, of_attr, *of_parameters = torch.autograd.grad(out.double().square().sum(), [*leaves, *layer.parameters()])
        return out, of_x, of_attr, torch.cat([each.flatten() for each in of_parameters])

    with cuda_on_cpu(MODES["random"]):
        found = step(layer, x, attr)
    allowed = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    for mine, correct in zip(found, step(exact, x.detach().double(), attr.detach().double()), strict=True):
        assert (mine.double() - correct).norm() <= allowed * correct.norm()


@pytest.mark.usefixtures("unset_memory")
@pytest.mark.parametrize(
    ("heads", "columns", "dtype"), [(8, 128, torch.float32), (3, 39, torch.float16), (2, 8, torch.bfloat16)]
)
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
    allowed = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}[dtype]
    for mine, correct in zip(found, step(exact, [each.detach().double() for each in x]), strict=True):
        assert (mine.double() - correct).norm() <= allowed * correct.norm()
