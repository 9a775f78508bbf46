"""TransformerConv, GATConv and GATv2Conv with the kernels of `fused3s` on a GPU, against PyG's layers in float64."""

import pytest
import torch
from layer_pairs import listed_graph, pair, parameter_gradients, relative_error

import fused3s.nn
from fused3s import capture_step

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("formula")]
HALF, BFLOAT, FLOAT, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64
of_gat = pytest.mark.parametrize("kind", ["GATConv", "GATv2Conv"])


def on(device, dtype, graph):
    """The tensors of a graph there, in one type; ids as they are."""
    if isinstance(graph, (list, tuple)):
        return type(graph)(on(device, dtype, each) for each in graph)
    return graph.to(device, dtype if graph.is_floating_point() else None)


@pytest.mark.filterwarnings("ignore::fused3s.SlowerBackendWarning")
@of_gat
@pytest.mark.parametrize("is_square", [True, False])
@pytest.mark.parametrize(("heads", "columns", "edge_dim"), [(4, 16, None), (1, 40, None), (3, 13, None), (4, 16, 20)])
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT])
def test_a_training_step_of_gat(dtype, heads, columns, edge_dim, is_square, kind):
    options = {"edge_dim": edge_dim, "add_self_loops": is_square}
    theirs, ours = pair(kind, 32, columns, heads, backend="fused3s", device="cuda", **options)
    x, *graph = listed_graph("hub", 32, edge_dim, FLOAT)
    graph = [x if is_square else (x, x.flip(0)), *graph]
    expected, out = theirs(*on("cuda", DOUBLE, graph)), ours.to(dtype)(*on("cuda", dtype, graph))
    expected.square().sum().backward()
    out.square().sum().backward()
    allowed = 2e-2 if dtype == BFLOAT else 1e-5
    assert relative_error(out, expected) <= allowed
    assert relative_error(*map(parameter_gradients, (ours, theirs))) <= 3 * allowed


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
