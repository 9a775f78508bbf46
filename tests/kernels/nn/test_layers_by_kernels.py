"""Layers with the kernels of `fused3s`, on the CPU (tests/cuda_shim) and on a GPU: the joint projection's strides, and
gradients that the kernels write into rows which hold those of the root or of scores, too. PyG's layers in float64 are
the oracle."""

import pytest
import torch
import torch_geometric.nn
from devices import kernels_of, on_cpu, on_gpu
from layer_pairs import listed_graph, pair, relative_error, trained

import fused3s.nn
from fused3s import capture_step

HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
of_gat = pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv"])
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
CASES = [on_cpu(kind, *case) for kind, cases in CASES.items() for case in cases]
CASES += [
    on_gpu(kind, columns, heads, {"edge_dim": edge_dim, "add_self_loops": name == "hub"}, name, dtype)
    for kind in ("GATConv", "GATv2Conv")
    for heads, columns, edge_dim in ((4, 16, None), (1, 40, None), (3, 13, None), (4, 16, 20))
    for name in ("hub", "wide")
    for dtype in (FLOAT, BFLOAT)
]


def assert_near(found, expected, allowed):
    """Results of `trained`."""
    parameters = [name for name in expected if name not in ("out", "x0", "x1", "edge_attr0")]
    for names in (*([name] for name in expected if name not in parameters), parameters):
        mine, right = (
            torch.cat([each[n].double().flatten() for n in names if expected[n] is not None])
            for each in (found, expected)
        )
        assert (mine - right).norm() <= allowed * right.norm(), names


def on(device, dtype, graph):
    """The tensors of a graph there, in one type; ids as they are."""
    if isinstance(graph, (list, tuple)):
        return type(graph)(on(device, dtype, each) for each in graph)
    return graph.to(device, dtype if graph.is_floating_point() else None)


@pytest.mark.filterwarnings("ignore::fused3s.SlowerBackendWarning")
@pytest.mark.parametrize(("device", "kind", "width", "heads", "options", "name", "dtype"), CASES, ids=str)
def test_a_training_step_is_that_of_pyg(request, device, kind, width, heads, options, name, dtype):
    """With the weights as rounded; float32 of TransformerConv under autocast."""
    graph = listed_graph(name, 16, options.get("edge_dim"), dtype)
    columns = (16, 16) if isinstance(graph[0], tuple) else 16
    exact, layer = pair(kind, columns, width, heads, backend="fused3s", **options)
    exact.load_state_dict(layer.to(dtype).state_dict())
    expected = trained(exact, *on("cpu", DOUBLE, graph))
    casts = dtype == FLOAT and kind == "TransformerConv"
    if device == "cpu":
        request.getfixturevalue("unset_memory")
    with kernels_of(device, "random"), torch.autocast(device, HALF, enabled=casts):
        found = trained(layer.to(device), *on(device, dtype, graph))
    assert not casts or found["out"].dtype == HALF
    found = {name: None if each is None else each.cpu() for name, each in found.items()}
    if device == "cpu":
        assert_near(found, expected, ALLOWED[HALF if casts else dtype])
    else:
        allowed = {FLOAT: 1e-5, BFLOAT: 2e-2}[dtype]
        assert relative_error(found["out"], expected["out"]) <= allowed
        assert_near(found, expected, 3 * allowed)


@pytest.mark.usefixtures("unset_memory")
@pytest.mark.parametrize(("heads", "width", "options"), [(4, 8, {}), (3, 13, {"concat": False}), (1, 64, {})])
def test_gradients_of_the_projections_are_not_copied_together(monkeypatch, heads, width, options):
    """Of query, key, value and root."""
    layer, joined, cat = (
        fused3s.nn.TransformerConv(16, width, heads, **options, backend="fused3s").half(),
        [],
        torch.cat,
    )
    x, edges = listed_graph("n_one_past_16", 16, dtype=HALF)
    with kernels_of("cpu"):
        out = layer(x.requires_grad_(), layer.plan(edges, len(x)))
        monkeypatch.setattr(torch, "cat", lambda *tensors: joined.append(tensors) or cat(*tensors))
        torch.autograd.grad(out.float().square().sum(), [x, *layer.parameters()])
    assert not joined


@pytest.mark.usefixtures("unset_memory")
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

    with kernels_of("cpu", "random"):
        found = step(layer, x)
    allowed = {FLOAT: 1e-5, HALF: 5e-3, BFLOAT: 3e-2}[dtype]
    for mine, correct in zip(found, step(exact, [each.detach().double() for each in x]), strict=True):
        assert (mine.double() - correct).norm() <= allowed * correct.norm()


@pytest.mark.gpu
@of_gat
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
def test_a_training_step_with_a_plan_can_be_captured(dtype, kind):
    x, edge_index = on("cuda", dtype, listed_graph("hub", 32))
    ours = pair(kind, 32, 16, 4, backend="fused3s", device="cuda", dtype=dtype)[1]
    plan = ours.plan(edge_index, len(x))

    def gradients(graph):
        return torch.autograd.grad(ours(x, graph).float().square().sum(), list(ours.parameters()))

    captured = capture_step(lambda: gradients(plan), ours)
    x.neg_()
    torch.testing.assert_close(captured.replay(), gradients(edge_index))


@pytest.mark.gpu
@torch.no_grad()
@pytest.mark.parametrize(("out_channels", "heads", "edge_dim"), [(8, 8, 11), (13, 4, None), (64, 16, 11)])
@pytest.mark.parametrize("name", ["hub", "wide", "empty_rows_and_windows"])
def test_float16_is_as_exact_as_pyg(name, edge_dim, out_channels, heads):
    graph = on("cpu", HALF, listed_graph(name, 16, edge_dim, FLOAT))
    columns = (16, 16) if isinstance(graph[0], tuple) else 16
    options = {"edge_dim": edge_dim, "backend": "fused3s", "device": "cuda", "dtype": HALF}
    theirs, ours = pair("TransformerConv", columns, out_channels, heads, **options)
    out, same_type = (layer(*on("cuda", HALF, graph)) for layer in (ours, theirs))
    expected = theirs.double()(*on("cuda", DOUBLE, graph))
    assert relative_error(out, expected) <= 2 * relative_error(same_type, expected)


@pytest.mark.gpu
@torch.no_grad()
def test_cached_edge_features_survive_use_on_another_stream():
    conv = fused3s.nn.TransformerConv(64, 64, edge_dim=16, backend="fused3s").cuda().half()
    ids, x = torch.randint(20_000, (2, 400_000), device="cuda"), torch.randn(20_000, 64, device="cuda").half()
    features = torch.randn(400_000, 16, device="cuda").half()
    expected = conv(x, ids, features)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda._sleep(20_000_000)
        output = conv(x, ids, features)
    del features
    for _ in range(20):
        torch.full((400_000, 16), torch.nan, dtype=HALF, device="cuda")
    torch.cuda.synchronize()
    assert torch.equal(output, expected)


@pytest.mark.gpu
@pytest.mark.filterwarnings("error::fused3s.SlowerBackendWarning")
@pytest.mark.parametrize("edge_dim", [17, 32, 100, 128, 256])
def test_wide_edge_features(edge_dim):
    """Output and all gradients, in one node and layer by layer (beta).

    Weights leave no softmax with one edge alone: gradients of scores would be differences of equal numbers. They still
    are sums that cancel in the weights of queries and keys, since the backward pass takes dO . O for sum_j p_ij dp_ij:
    in float32 PyTorch that formula is off by up to 4e-5 in them. The key's bias moves no weight: its gradient is 0, a
    sum of terms that cancel.
    """
    for beta in (False, True):
        x, edge_index, edge_attr = listed_graph("hub", 7, edge_dim, FLOAT)
        theirs, ours = pair("TransformerConv", 7, 6, 2, edge_dim=edge_dim, dtype=FLOAT, beta=beta, std=0.3)
        with torch.no_grad():
            theirs.lin_edge.weight.mul_((7 / edge_dim) ** 0.5)
        ours.load_state_dict(theirs.state_dict())
        found = []
        for layer, device, dtype in ((ours, "cuda", FLOAT), (theirs, "cpu", FLOAT), (theirs, "cpu", DOUBLE)):
            layer = layer.to(device, dtype)
            leaves = [each.to(device, dtype).requires_grad_() for each in (x, edge_attr)]
            out = layer(leaves[0], edge_index.to(device), leaves[1])
            parameters = dict(layer.named_parameters())
            grads = torch.autograd.grad(out.square().sum(), [*leaves, *parameters.values()])
            names = ["out", "x", "edge_attr", *parameters]
            found.append({name: each.cpu() for name, each in zip(names, (out.detach(), *grads), strict=True)})
        got, plain, expected = found
        zero, of_queries = got.pop("lin_key.bias"), got["lin_query.bias"]
        assert zero.norm() <= 1e-3 * of_queries.norm()
        for name, each in got.items():
            more = 1e-4 if name.startswith(("lin_query", "lin_key")) else 1e-6
            assert relative_error(each, expected[name]) <= 4 * relative_error(plain[name], expected[name]) + more, name


@pytest.mark.gpu
def test_wide_edge_features_never_become_keys_and_values():
    """Peak memory of both passes is below one [E, H C] tensor."""
    edges, heads, columns = 400_000, 8, 64
    conv = fused3s.nn.TransformerConv(16, columns, heads=heads, edge_dim=32, backend="fused3s").cuda()
    x, edge_index = torch.randn(2_000, 16, device="cuda"), torch.randint(2_000, (2, edges), device="cuda")
    edge_attr = torch.randn(edges, 32, device="cuda", requires_grad=True)

    def step():
        edge_attr.grad = None
        conv(x, edge_index, edge_attr).square().sum().backward()

    step()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step()
    assert torch.cuda.max_memory_allocated() - before < 4 * edges * heads * columns
