"""TransformerConv against the TransformerConv of PyTorch Geometric with the same weights."""

import warnings

import numpy as np
import pytest
import torch
from attention_cases import EDGE_CASES
from torch_geometric.nn import TransformerConv
from torch_geometric.utils import to_edge_index

import fused3s.nn
from fused3s import EdgeData, SlowerBackendWarning
from fused3s.nn.attention_conv import warn_of_slower_layer
from fused3s.nn.cached import edge_scores, planned_edges

pytestmark = pytest.mark.usefixtures("formula")
FLOAT = torch.float32
BACKENDS = ["reference", "csr_unfused", "scatter", "dgl", "formula"]  # the last has a backward pass of its own
# concat, beta, bias, root_weight: every pair of values
SWITCHES = [
    (True, True, True, True),
    (True, False, False, False),
    (False, True, False, False),
    (False, False, True, True),
]
SWITCHES += [(True, True, False, True), (False, True, True, False)]


def layers(*arguments, backend="reference", dtype=torch.float64, **options):
    """PyG's layer and ours with its weights, in eval mode."""
    torch.manual_seed(0)
    theirs = TransformerConv(*arguments, **options).to(dtype).eval()
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_()
    ours = fused3s.nn.TransformerConv(*arguments, **options, backend=backend).to(dtype).eval()
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


class Problem:
    """Features and edges of a graph of EDGE_CASES, the edges in random order."""

    def __init__(self, name, columns=7, edge_dim=None, dtype=torch.float64):
        coo = EDGE_CASES[name]().tocoo()
        rng = np.random.default_rng(1)
        order = rng.permutation(coo.nnz)
        self.edge_index = torch.from_numpy(np.stack([coo.col[order], coo.row[order]]).astype(np.int64))
        targets, sources = coo.shape
        self.is_square = targets == sources
        x_source, x_target = (
            torch.from_numpy(rng.standard_normal((size, columns))).to(dtype) for size in coo.shape[::-1]
        )
        self.x = x_source if self.is_square else (x_source, x_target)
        self.edge_attr = None
        if edge_dim:
            self.edge_attr = torch.from_numpy(rng.standard_normal((coo.nnz, edge_dim))).to(dtype)

    @property
    def arguments(self):
        return self.x, self.edge_index, self.edge_attr


def relative_error(out, expected):
    return float((out.double() - expected).norm() / expected.norm().clamp(min=1e-30))


@torch.no_grad()
def assert_same(theirs, ours, arguments):
    out, expected = ours(*arguments), theirs(*arguments)
    assert (out.shape, out.dtype) == (expected.shape, expected.dtype)
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(("concat", "beta", "bias", "root_weight"), SWITCHES)
def test_every_switch_has_pygs_state_dict_and_numbers(concat, beta, bias, root_weight):
    switches = {"concat": concat, "beta": beta, "bias": bias, "root_weight": root_weight}
    for heads, edge_dim in ((1, None), (3, None), (1, 5), (3, 5)):
        theirs, ours = layers(7, 5, heads=heads, edge_dim=edge_dim, **switches)
        shapes = [{key: tensor.shape for key, tensor in layer.state_dict().items()} for layer in (theirs, ours)]
        assert shapes[0] == shapes[1]
        assert_same(theirs, ours, Problem("n_one_past_16", edge_dim=edge_dim).arguments)


@pytest.mark.parametrize(("number", "name"), list(enumerate(EDGE_CASES)))
def test_graphs_directed_and_bipartite(number, name):
    backend, edge_dim = BACKENDS[number % 5], (None, 1, 16)[number % 3]
    problem = Problem(name, edge_dim=edge_dim)
    theirs, ours = layers(7 if problem.is_square else (7, 7), 6, heads=2, edge_dim=edge_dim, beta=True, backend=backend)
    assert_same(theirs, ours, problem.arguments)


@pytest.mark.parametrize("backend", BACKENDS)
def test_wide_edge_features(backend):
    theirs, ours = layers((7, 7), 6, heads=2, edge_dim=37, beta=True, backend=backend)
    problem = Problem("wide", edge_dim=37)
    assert_same(theirs, ours, problem.arguments)
    assert_same_gradients(theirs, ours, problem.arguments)


def test_a_slower_layer_warns_once():
    with pytest.warns(SlowerBackendWarning, match="a reason of this test"):
        warn_of_slower_layer("a reason of this test")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_slower_layer("a reason of this test")


@pytest.mark.parametrize("wants_weights", [True, False])
@pytest.mark.parametrize(("edge_dim", "name"), [(None, "wide"), (4, "empty_rows_and_windows"), (20, "hub")])
def test_attention_weights(monkeypatch, edge_dim, name, wants_weights):
    """With gradients, in one chunk of edges or several."""
    problem = Problem(name, edge_dim=edge_dim)
    theirs, ours = layers(7 if problem.is_square else (7, 7), 6, heads=2, edge_dim=edge_dim, beta=True)
    expected, (their_index, their_weights) = theirs(*problem.arguments, return_attention_weights=wants_weights)
    for most in (edge_scores.MOST_ELEMENTS, 12 * 5):
        monkeypatch.setattr(edge_scores, "MOST_ELEMENTS", most)
        out, (edge_index, weights) = ours(*problem.arguments, return_attention_weights=wants_weights)
        assert torch.equal(edge_index, their_index)
        for mine, right in ((out, expected), (weights, their_weights)):
            torch.testing.assert_close(mine, right, rtol=1e-10, atol=1e-12)
        mine, right = (
            torch.autograd.grad(each.square().sum(), layer.lin_key.weight, retain_graph=True)[0]
            for each, layer in ((weights, ours), (their_weights, theirs))
        )
        torch.testing.assert_close(mine, right, rtol=1e-9, atol=1e-12)


def test_attention_weights_need_tensors():
    conv = fused3s.nn.TransformerConv(7, 5, heads=2, backend="reference")
    with pytest.raises(TypeError, match="return_attention_weights: got with a plan"):
        conv(X, conv.plan(EDGES, len(X)), return_attention_weights=True)


def test_an_edge_index_is_planned_once_for_all_layers(planned):
    problem = Problem("n_one_past_16")
    _, first = layers(7, 5, heads=2)
    _, second = layers(7, 5, heads=2)
    for layer in (first, second, first):
        layer(*problem.arguments)
    assert len(planned) == 1
    first(problem.x, problem.edge_index.clone())
    assert len(planned) == 2
    layers(7, 3, heads=2)[1](*problem.arguments)  # another head dimension: another schedule
    assert len(planned) == 3


def test_without_a_cache_every_call_plans(planned):
    theirs, ours = layers(7, 5, heads=2, edge_dim=3)
    ours.cache = False
    problem = Problem("n_one_past_16", edge_dim=3)
    assert_same(theirs, ours, problem.arguments)
    problem.edge_index.numpy()[:] = problem.edge_index.flip(0).numpy()
    problem.edge_attr.numpy()[:] *= 2
    assert_same(theirs, ours, problem.arguments)
    assert len(planned) == 2


def test_nothing_is_kept_of_a_tensor_that_is_gone():
    _, ours = layers(7, 5, heads=2, edge_dim=3)
    problem = Problem("n_one_past_16", edge_dim=3)
    memos = planned_edges._plans, planned_edges._bound
    before = [len(memo._entries) for memo in memos]
    ours(*problem.arguments)
    assert [len(memo._entries) for memo in memos] == [number + 1 for number in before]
    del problem.edge_index, problem.edge_attr
    assert [len(memo._entries) for memo in memos] == before


def test_edges_and_attributes_that_change_are_planned_and_bound_anew(planned):
    theirs, ours = layers(7, 5, heads=2, edge_dim=3)
    problem = Problem("n_one_past_16", edge_dim=3)
    assert_same(theirs, ours, problem.arguments)
    problem.edge_attr.mul_(2)
    assert_same(theirs, ours, problem.arguments)
    assert len(planned) == 1
    problem.edge_index.copy_(problem.edge_index.flip(0))
    assert_same(theirs, ours, problem.arguments)
    assert len(planned) == 2


def test_a_plan_and_bound_edges_in_place_of_tensors(planned):
    theirs, ours = layers((7, 7), 5, heads=2, edge_dim=4)
    problem = Problem("wide", edge_dim=4)
    sources, targets = problem.x
    plan = ours.plan(problem.edge_index, (len(sources), len(targets)))
    edges = plan.bind_edges(EdgeData(features=problem.edge_attr))
    with torch.no_grad():
        out = ours(problem.x, plan, edges)
        torch.testing.assert_close(out, theirs(*problem.arguments), rtol=1e-10, atol=1e-12)
        assert torch.equal(out, ours(problem.x, plan, problem.edge_attr))
    assert len(planned) == 1


def assert_same_gradients(theirs, ours, arguments):
    """Of the parameters, of x and of edge_attr."""
    x, edge_index, edge_attr = arguments
    found = []
    for layer in (theirs, ours):
        nodes = tuple(each.detach().clone().requires_grad_() for each in (x if isinstance(x, tuple) else (x,)))
        attr = () if edge_attr is None else (edge_attr.detach().clone().requires_grad_(),)
        out = layer(nodes if isinstance(x, tuple) else nodes[0], edge_index, *attr)
        names = {"weight": layer.parameters(), "x": nodes, "edge_attr": attr}
        leaves = [leaf for of_name in names.values() for leaf in of_name if leaf.requires_grad]
        found.append(torch.autograd.grad(out.square().sum(), leaves, allow_unused=True, materialize_grads=True))
    for expected, mine in zip(*found, strict=True):
        torch.testing.assert_close(mine, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("number", "values"), list(enumerate(SWITCHES)))
@pytest.mark.parametrize("kind", ["formula", "autograd"])
def test_gradients_are_pygs(number, values, kind):
    switches = dict(zip(("concat", "beta", "bias", "root_weight"), values, strict=True))
    backend = "formula" if kind == "formula" else BACKENDS[number % 4]
    for name, edge_dim in (("n_one_past_16", 3), ("wide", None), ("empty_rows_and_windows", None)):
        problem = Problem(name, edge_dim=edge_dim)
        widths = 7 if problem.is_square else (7, 7)
        assert_same_gradients(
            *layers(widths, 5, heads=2, edge_dim=edge_dim, **switches, backend=backend), problem.arguments
        )


@pytest.mark.parametrize(("backend", "edge_dim"), [("formula", 4), ("formula", None), ("csr_unfused", 4)])
def test_repeated_edges_count_as_often_as_in_pyg(edge_dim, backend):
    theirs, ours = layers(7, 6, heads=2, edge_dim=edge_dim, backend=backend)
    problem = Problem("n_one_past_16", edge_dim=edge_dim)
    again = torch.randint(problem.edge_index.shape[1], (300,), generator=torch.Generator().manual_seed(5))
    edge_index = torch.cat([problem.edge_index, problem.edge_index[:, again]], 1)
    attr = None if edge_dim is None else torch.cat([problem.edge_attr, problem.edge_attr[again].flip(0)])
    assert_same(theirs, ours, (problem.x, edge_index, attr))
    assert_same_gradients(theirs, ours, (problem.x, edge_index, attr))


@pytest.mark.parametrize("layout", ["to_sparse_csr", "to_sparse_csc", "coalesce"])
def test_a_transposed_adjacency_as_in_pyg(layout):
    """edge_attr in the order of the stored entries; values with columns in its place."""
    problem = Problem("wide", edge_dim=4)
    theirs, ours = layers((7, 7), 6, heads=2, edge_dim=4)
    sizes, indices = [len(x) for x in problem.x[::-1]], problem.edge_index.flip(0)
    adj_t = torch.sparse_coo_tensor(indices, torch.ones(indices.shape[1]).double(), sizes).coalesce()
    stored, adj_t = torch.randn_like(problem.edge_attr), getattr(adj_t, layout)()
    edges, _ = to_edge_index(adj_t)  # in stored order, for PyG's layer refuses csc
    expected = theirs(problem.x, edges.flip(0), stored)
    torch.testing.assert_close(ours(problem.x, adj_t, stored), expected, rtol=1e-10, atol=1e-12)
    with_columns = torch.sparse_coo_tensor(indices, problem.edge_attr, (*sizes, 4)).coalesce()
    if layout != "to_sparse_csc":
        with_columns = getattr(with_columns, layout)()
    torch.testing.assert_close(ours(problem.x, with_columns), theirs(*problem.arguments), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_autocast_plans_for_the_type_that_q_has(planned, dtype):
    """PyG's sums by autocast are in bfloat16, so the bound is that of two roundings."""
    theirs, ours = layers(7, 16, heads=2, edge_dim=3, dtype=dtype)
    problem = Problem("n_one_past_16", edge_dim=3, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        out = ours(*problem.arguments)
        assert torch.equal(out, ours(problem.x, ours.plan(problem.edge_index, len(problem.x)), problem.edge_attr))
    expected_type = torch.bfloat16 if dtype == torch.float32 else dtype
    assert (out.dtype, [options["dtype"] for options in planned]) == (expected_type, [expected_type])
    exact = [each.double() if each.is_floating_point() else each for each in problem.arguments]
    expected = theirs.double()(*exact)
    assert relative_error(out, expected) < (2e-2 if dtype == torch.float32 else 1e-12)
    out.to(dtype).square().sum().backward()
    assert {parameter.grad.dtype for parameter in ours.parameters()} == {dtype}
    expected.square().sum().backward()
    mine, exactly = (torch.cat([each.grad.flatten() for each in layer.parameters()]) for layer in (ours, theirs))
    assert relative_error(mine, exactly) < (5e-2 if dtype == torch.float32 else 1e-6)


X = torch.zeros(4, 7)
EDGES = torch.tensor([[0, 1], [1, 2]])
ATTR = torch.zeros(2, 3)


@pytest.mark.parametrize(
    ("options", "arguments", "error", "message"),
    [
        ({}, (X, torch.tensor([[0, 4], [1, 2]])), ValueError, r"row 0 \(sources\) holds ids from 0 to 4.*0 to 3 are"),
        (
            {},
            (X, torch.zeros(3, 2, dtype=torch.int64)),
            ValueError,
            r"edge_index: got shape \(3, 2\), torch.int64; \[2, E\]",
        ),
        ({}, (X, torch.eye(5).to_sparse()), ValueError, "adj_t of 5 targets and 5 sources; the features have 4 and 4"),
        ({}, (X, [[0], [1]]), TypeError, "edge_index: got list"),
        ({"edge_dim": 3}, (X, EDGES), ValueError, "edge_attr: got none.*edge_dim=3"),
        ({"edge_dim": 2}, (X, EDGES, ATTR), ValueError, r"edge_attr: got shape \(2, 3\); \[E, 2\]"),
        ({"edge_dim": 17}, (X, EDGES, torch.zeros(3, 17)), ValueError, r"edge_attr: got shape \(3, 17\); \[2, 17\] is"),
    ],
)
def test_wrong_calls_get_a_sentence(options, arguments, error, message):
    conv = fused3s.nn.TransformerConv(7, 5, heads=2, **{"backend": "reference"} | options).eval()
    with pytest.raises(error, match=message):
        conv(*arguments)


def test_dropout_of_attention_weights_keeps_their_mean():
    """The layer is linear in the weights without a gate, so that the mean over masks is the output of eval mode."""
    _, ours = layers(7, 5, heads=2, dropout=0.4)
    arguments = Problem("n_one_past_16").arguments
    expected = ours(*arguments)
    ours.train()
    with torch.no_grad():
        outputs = torch.stack([ours(*arguments) for _ in range(100)])
    deviation = outputs.std(0)
    assert (deviation > 0).float().mean() > 0.9
    assert ((outputs.mean(0) - expected).abs() <= 5 * deviation / 100**0.5 + 1e-9).all()
    repeated = []
    for _ in range(2):
        torch.manual_seed(3)
        repeated.append(torch.autograd.grad(ours(*arguments).square().sum(), ours.lin_value.weight)[0])
    assert torch.equal(*repeated)


@pytest.mark.gpu
@pytest.mark.parametrize(("out_channels", "heads", "edge_dim"), [(8, 8, 11), (13, 4, None), (64, 16, 11)])
@pytest.mark.parametrize("name", ["hub", "wide", "empty_rows_and_windows"])
def test_gpu_float16_is_as_exact_as_pyg(name, edge_dim, out_channels, heads):
    problem = Problem(name, columns=16, edge_dim=edge_dim, dtype=torch.float32)
    widths = 16 if problem.is_square else (16, 16)
    torch.manual_seed(0)
    theirs = TransformerConv(widths, out_channels, heads=heads, edge_dim=edge_dim).half().eval()
    ours = (
        fused3s.nn.TransformerConv(widths, out_channels, heads=heads, edge_dim=edge_dim, backend="fused3s")
        .half()
        .eval()
    )
    ours.load_state_dict(theirs.state_dict())

    def on_gpu(dtype):
        to = {"device": "cuda", "dtype": dtype}
        x = problem.x.half().to(**to) if problem.is_square else tuple(one.half().to(**to) for one in problem.x)
        return x, problem.edge_index.cuda(), None if edge_dim is None else problem.edge_attr.half().to(**to)

    with torch.no_grad():
        out, same_type = (layer.cuda()(*on_gpu(torch.float16)) for layer in (ours, theirs))
        expected = theirs.double()(*on_gpu(torch.float64))
    assert relative_error(out, expected) <= 2 * relative_error(same_type, expected)


@pytest.mark.gpu
@torch.no_grad()
def test_gpu_cached_edge_features_survive_use_on_another_stream():
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
        torch.full((400_000, 16), torch.nan, dtype=torch.float16, device="cuda")
    torch.cuda.synchronize()
    assert torch.equal(output, expected)


@pytest.mark.gpu
@pytest.mark.filterwarnings("error::fused3s.SlowerBackendWarning")
@pytest.mark.parametrize("edge_dim", [17, 32, 100, 128, 256])
def test_gpu_wide_edge_features(edge_dim):
    """Output and all gradients, in one node and layer by layer (beta).

    Weights leave no softmax with one edge alone: gradients of scores would be differences of equal numbers. They still
    are sums that cancel in the weights of queries and keys, since the backward pass takes dO . O for sum_j p_ij dp_ij:
    in float32 PyTorch that formula is off by up to 4e-5 in them. The key's bias moves no weight: its gradient is 0, a
    sum of terms that cancel.
    """
    for beta in (False, True):
        problem = Problem("hub", edge_dim=edge_dim, dtype=torch.float32)
        theirs, ours = layers(7, 6, heads=2, edge_dim=edge_dim, backend="auto", dtype=torch.float32, beta=beta)
        with torch.no_grad():
            for parameter in theirs.parameters():
                parameter.mul_(0.3)
            theirs.lin_edge.weight.mul_((7 / edge_dim) ** 0.5)
        ours.load_state_dict(theirs.state_dict())
        x, edge_index, edge_attr = problem.arguments
        found = []
        for layer, device, dtype in ((ours, "cuda", FLOAT), (theirs, "cpu", FLOAT), (theirs, "cpu", torch.float64)):
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
def test_gpu_wide_edge_features_never_become_keys_and_values():
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
