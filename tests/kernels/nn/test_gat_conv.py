"""GATConv and GATv2Conv against the layers of PyTorch Geometric with the same weights."""

import pytest
import torch
from edge_cases import EDGE_LISTS
from torch.nn.utils import parametrizations
from torch_geometric.nn import GATConv, GATv2Conv

import fused3s.nn
from fused3s import capture_step
from fused3s.nn.cached import edge_scores

pytestmark = pytest.mark.usefixtures("formula")
BACKENDS = ["reference", "csr_unfused", "scatter", "dgl", "formula"]  # the last has a backward pass of its own
BOTH = pytest.mark.parametrize("version", [1, 2])  # GATConv, GATv2Conv
# concat, add_self_loops, bias, residual: every pair of values
SWITCHES = [(True, True, True, True), (True, False, False, False), (False, True, False, False)]
SWITCHES += [(False, False, True, True), (False, True, True, False), (True, False, True, True)]


class Problem:
    """Features and edges of a square graph of EDGE_LISTS."""

    def __init__(self, name, columns=7, edge_dim=None, dtype=torch.float64):
        graph, generator = EDGE_LISTS[name](), torch.Generator().manual_seed(1)
        self.edge_index = torch.stack([graph.col, graph.row])
        self.x = torch.randn(graph.shape[0], columns, generator=generator).to(dtype)
        features = torch.randn(graph.num_edges, edge_dim or 1, generator=generator).to(dtype)
        self.edge_attr = features if edge_dim else None
        self.arguments = self.x, self.edge_index, self.edge_attr


def layers(*arguments, backend="reference", dtype=torch.float64, version=1, **options):
    """PyG's layer and ours, with the weights that each draws from the same seed."""
    theirs, ours = ((GATConv, fused3s.nn.GATConv), (GATv2Conv, fused3s.nn.GATv2Conv))[version - 1]
    made = []
    for layer, extra in ((theirs, {}), (ours, {"backend": backend})):
        torch.manual_seed(3)
        made.append(layer(*arguments, **options, **extra).to(dtype))
    return made


def assert_same(theirs, ours, arguments, **options):
    """Outputs, and gradients of all parameters and of x."""
    results = []
    for layer in (theirs, ours):
        layer.zero_grad()
        x, *rest = arguments
        leaves = [each.detach().requires_grad_() for each in ((x,) if isinstance(x, torch.Tensor) else x)]
        out = layer(leaves[0] if len(leaves) == 1 else tuple(leaves), *rest, **options)
        out.square().sum().backward()
        of_layer = {name: each.grad for name, each in layer.named_parameters()}
        results.append((out.detach(), of_layer | {f"x{i}": leaf.grad for i, leaf in enumerate(leaves)}))
    (expected, expected_gradients), (out, gradients) = results
    tolerance = 1e-9 if out.dtype == torch.float64 else 1e-4
    torch.testing.assert_close(out, expected, rtol=tolerance, atol=tolerance)
    assert gradients.keys() == expected_gradients.keys()
    for name, wanted in expected_gradients.items():
        if wanted is None:
            assert gradients[name] is None, name
            continue
        got = torch.zeros_like(wanted) if gradients[name] is None else gradients[name]
        torch.testing.assert_close(got, wanted, rtol=tolerance, atol=tolerance, msg=f"gradient of {name}")


# Heads, columns of edge features, share_weights
KINDS = {1: [(1, None, None), (3, None, None), (1, 5, None), (3, 20, None)]}
KINDS |= {2: [(1, 20, False), (3, None, False), (3, None, True), (3, 5, True)]}


@BOTH
@pytest.mark.parametrize("backend", ["reference", "formula"])
@pytest.mark.parametrize(("concat", "add_self_loops", "bias", "residual"), SWITCHES)
def test_every_switch_has_pygs_weights_and_numbers(concat, add_self_loops, bias, residual, backend, version):
    switches = {"concat": concat, "add_self_loops": add_self_loops, "bias": bias, "residual": residual}
    for heads, edge_dim, share_weights in KINDS[version]:
        shared = {} if version == 1 else {"share_weights": share_weights}
        theirs, ours = layers(7, 4, heads, edge_dim=edge_dim, backend=backend, version=version, **switches, **shared)
        assert list(theirs.state_dict()) == list(ours.state_dict())
        for name, weight in theirs.state_dict().items():
            assert torch.equal(ours.state_dict()[name], weight), name
        assert_same(theirs, ours, Problem("hub", edge_dim=edge_dim).arguments)


@BOTH
@pytest.mark.parametrize("backend", BACKENDS)
def test_every_backend(backend, version):
    for name in ("hub", "repeated", "one_node_no_edge", "self_loops", "directed"):
        arguments = Problem(name, dtype=torch.float32).arguments[:2]
        for add_self_loops in (True, False):
            options = {"backend": backend, "dtype": torch.float32, "add_self_loops": add_self_loops, "version": version}
            assert_same(*layers(7, 8, 2, **options), arguments)


@pytest.mark.parametrize("fill_value", ["add", "mean", "min", "max", "mul", 0.5, torch.tensor([0.1, 0.2, 0.3])])
@BOTH
def test_features_of_self_loops(version, fill_value):
    problem = Problem("hub", edge_dim=3)
    assert_same(*layers(7, 4, 2, edge_dim=3, fill_value=fill_value, version=version), problem.arguments)
    assert_same(*layers(7, 4, 2, edge_dim=3, fill_value=fill_value, version=version), problem.arguments[:2])


@pytest.mark.parametrize("fill_value", ["add", "mean", "max"])
@BOTH
def test_second_derivatives_by_edge_features(version, fill_value):
    x, edge_index, edge_attr = Problem("hub", edge_dim=3).arguments
    found = []
    for layer in layers(7, 4, 2, edge_dim=3, fill_value=fill_value, backend="reference", version=version):
        given = edge_attr.detach().clone().requires_grad_()
        (first,) = torch.autograd.grad(layer(x, edge_index, given).square().sum(), given, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), given)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("backend", ["reference", "formula"])
def test_sources_and_targets_of_their_own(backend):
    generator = torch.Generator().manual_seed(1)
    x = tuple(torch.randn(size, 7, generator=generator, dtype=torch.float64) for size in (12, 5))
    edge_index = torch.stack(
        [torch.randint(12, (40,), generator=generator), torch.randint(5, (40,), generator=generator)]
    )
    assert_same(*layers((7, 7), 4, 2, version=2, backend=backend), (x, edge_index))
    assert_same(*layers((7, 7), 4, 2, residual=True, version=2, backend=backend), (x, edge_index))
    for in_channels in (7, (7, 7)):
        assert_same(*layers(in_channels, 4, 2, backend=backend), (x, edge_index))
        assert_same(*layers(in_channels, 4, 2, residual=True, add_self_loops=False, backend=backend), (x, edge_index))
    theirs, ours = layers((7, 7), 4, 2, add_self_loops=False, backend=backend)
    arguments = ((x[0], None), edge_index, None, (12, 5))
    torch.testing.assert_close(ours(*arguments), theirs(*arguments))
    adj_t = torch.sparse_coo_tensor(edge_index.flip(0), torch.ones(40), (5, 12))
    torch.testing.assert_close(ours((x[0], None), adj_t), theirs(*arguments))
    _, (weighted, weights) = ours((x[0], None), adj_t, return_attention_weights=True)
    _, (_, expected) = theirs(*arguments, return_attention_weights=True)
    torch.testing.assert_close(weights, expected)
    torch.testing.assert_close(
        weighted.to_dense().sum(1), ((adj_t.to_dense().sum(1) > 0)[:, None].expand(5, 2)).double()
    )


@BOTH
@pytest.mark.parametrize("backend", ["reference", "formula"])
@pytest.mark.parametrize("sizes", [(0, 0), (3, 0), (0, 3), (3, 3)])
def test_no_nodes_or_no_edges(version, backend, sizes):
    theirs, ours = layers((7, 7), 4, 2, version=version, backend=backend)
    x = tuple(torch.ones(size, 7, dtype=torch.float64) for size in sizes)
    assert_same(theirs, ours, (x, torch.zeros(2, 0, dtype=torch.int64)))


@BOTH
def test_on_a_backend_with_a_backward_pass_of_its_own_a_layer_is_one_autograd_node(version):
    _, ours = layers(7, 4, 2, backend="formula", version=version)
    x, edge_index, _ = Problem("hub").arguments
    out = ours(x.requires_grad_(), edge_index)
    behind = {
        each.variable for each, _ in out.grad_fn.next_functions if each is not None
    }  # AccumulateGrad, of leaves alone
    assert behind == {x, *ours.parameters()}


@BOTH
@pytest.mark.parametrize("change", ["hook", "weight_norm", "bias"])
def test_projections_that_are_not_plain_are_called(version, change):
    made, calls = layers(7, 4, 2, backend="formula", version=version), []
    for layer in made:
        name = "lin" if version == 1 else "lin_l"
        if change == "hook":
            getattr(layer, name).register_forward_hook(lambda *given: calls.append(given) or 2 * given[-1])
        elif change == "weight_norm":
            parametrizations.weight_norm(getattr(layer, name))
        else:
            torch.manual_seed(7)
            setattr(layer, name, torch.nn.Linear(7, 8).double())
    assert_same(*made, Problem("hub").arguments)
    assert len(calls) == 2 * (change == "hook")


@BOTH
def test_frozen_parameters_and_inputs_get_no_gradient(version):
    theirs, ours = layers(7, 4, 2, backend="formula", version=version)
    x, edge_index, _ = Problem("hub").arguments
    names = [name for name, _ in ours.named_parameters()]
    for frozen in [[name] for name in names] + [names[1:]]:
        for layer in (theirs, ours):
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(name not in frozen)
        assert_same(theirs, ours, (x, edge_index))


@BOTH
def test_weights_that_change_before_the_backward_pass_are_an_error(version):
    _, ours = layers(7, 4, 2, backend="formula", version=version)
    x, edge_index, _ = Problem("hub").arguments
    for parameter in [each for name, each in ours.named_parameters() if "bias" not in name]:
        loss = ours(x, edge_index).sum()
        with torch.no_grad():
            parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@BOTH
def test_second_derivatives_are_an_error(version):
    _, ours = layers(7, 4, 2, backend="formula", version=version)
    x, edge_index, _ = Problem("hub").arguments
    (gradient,) = torch.autograd.grad(ours(x.requires_grad_(), edge_index).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        gradient.sum().backward()


@BOTH
@pytest.mark.parametrize("share", [True, False])
def test_autocast(version, share):
    """float32 weights under autocast; PyG's own error is the scale."""
    in_channels = 7 if share else (7, 7)
    theirs, ours = layers(in_channels, 8, 2, backend="formula", version=version, dtype=torch.float32)
    exact, _ = layers(in_channels, 8, 2, version=version)
    problem = Problem("hub", dtype=torch.float32)
    expected = exact(problem.x.double(), problem.edge_index)
    expected.square().sum().backward()
    wanted, errors = gradients_together(exact), []
    for layer in (ours, theirs):
        with torch.autocast("cpu", torch.bfloat16):
            out = layer(problem.x, problem.edge_index)
        assert out.dtype == torch.float32  # the bias's type
        out.double().square().sum().backward()
        pairs = (out.detach(), expected.detach()), (gradients_together(layer), wanted)
        errors.append([float((got - right).norm() / right.norm()) for got, right in pairs])
    assert all(mine <= 2 * max(other, 5e-3) for mine, other in zip(*errors, strict=True)), errors


def gradients_together(layer):
    """Of all parameters: a term of the targets alone cancels in the softmax but for the kinks, so its own is small."""
    return torch.cat([parameter.grad.double().flatten() for _, parameter in sorted(layer.named_parameters())])


@BOTH
@pytest.mark.parametrize("edge_dim", [None, 3])
def test_attention_weights(monkeypatch, version, edge_dim):
    """In one chunk of edges or several."""
    problem = Problem("hub", edge_dim=edge_dim)
    theirs, ours = layers(7, 4, 2, edge_dim=edge_dim, version=version)
    expected, (their_index, their_weights) = theirs(*problem.arguments, return_attention_weights=True)
    for most in (edge_scores.MOST_ELEMENTS, 8 * 5):
        monkeypatch.setattr(edge_scores, "MOST_ELEMENTS", most)
        out, (edge_index, weights) = ours(*problem.arguments, return_attention_weights=True)
        torch.testing.assert_close(out, expected)
        assert torch.equal(edge_index, their_index)
        torch.testing.assert_close(weights, their_weights)
        assert_same(theirs, ours, problem.arguments)


@BOTH
@pytest.mark.parametrize("backend", ["scatter", "formula"])
def test_a_plan_in_place_of_an_edge_index(version, backend):
    theirs, ours = layers(7, 4, 2, version=version, backend=backend)
    x, edge_index, _ = Problem("hub").arguments
    plan = ours.plan(edge_index, len(x))
    for given, graph in ((x, plan), ((x, x[:5]), ours.plan(edge_index[:, edge_index[1] < 5], (len(x), 5)))):
        wanted = edge_index if graph is plan else edge_index[:, edge_index[1] < 5]
        torch.testing.assert_close(ours(given, graph), theirs(given, wanted))
    assert_same(ours, theirs, (x, edge_index))
    ours(x, plan).sum().backward()
    with pytest.raises(TypeError, match="return_attention_weights: got with a plan"):
        ours(x, plan, return_attention_weights=True)
    _, with_edges = layers(7, 4, 2, version=version, edge_dim=3, backend=backend)
    with pytest.raises(ValueError, match="edge_attr: got with a plan"):
        with_edges(x, plan, x[:, :3])


def test_plans_are_cached_with_the_self_loops():
    theirs, ours = layers(7, 4, 2, backend="scatter")
    x, edge_index, _ = Problem("hub").arguments
    from fused3s.nn.cached import planned_edges, self_loops

    ours(x, edge_index)
    looped = self_loops.edges_with_self_loops(edge_index, len(x))
    assert looped is self_loops.edges_with_self_loops(edge_index, len(x))
    for _ in range(2):
        assert len(planned_edges._plans._entries[id(looped)].results) == 1
        ours(x, edge_index)
    edge_index[:, 0] = 1
    torch.testing.assert_close(ours(x, edge_index), theirs(x, edge_index))


def test_dropout_keeps_the_mean():
    _, ours = layers(7, 4, 2, dropout=0.5, backend="scatter")
    x, edge_index, _ = Problem("directed").arguments
    expected = ours.eval()(x, edge_index)
    ours.train()
    mean = torch.stack([ours(x, edge_index) for _ in range(400)]).mean(0)
    assert not torch.equal(ours(x, edge_index), ours(x, edge_index))
    torch.testing.assert_close(mean, expected, rtol=0.2, atol=0.2)


def test_wrong_arguments():
    for wrong, got in (("median", "'median'"), (None, "None"), ([0.1, 0.2, 0.3], r"\[0.1, 0.2, 0.3\]")):
        with pytest.raises(ValueError, match=f"fill_value: got {got}; a number, a tensor or one of add, mean"):
            fused3s.nn.GATConv(7, 4, fill_value=wrong)
    with pytest.raises(ValueError, match=r"fill_value: got shape \(2,\); \[3\] is needed"):
        fused3s.nn.GATv2Conv(7, 4, edge_dim=3, fill_value=torch.ones(2))
    x, edge_index, edge_attr = Problem("hub", edge_dim=3, dtype=torch.float32).arguments
    with pytest.raises(ValueError, match="edge_attr: got some, and the layer was made with edge_dim=None"):
        fused3s.nn.GATv2Conv(7, 4)(x, edge_index, edge_attr)
    for layer in (fused3s.nn.GATConv, fused3s.nn.GATv2Conv):
        for wrong, got in ((edge_attr[1:], edge_attr.shape[0] - 1), (torch.cat([edge_attr, edge_attr[:1]]), "")):
            with pytest.raises(ValueError, match=rf"edge_attr: got shape \({got}.*; \[{len(edge_attr)}, 3\] is needed"):
                layer(7, 4, edge_dim=3)(x, edge_index, wrong)
        with pytest.raises(TypeError, match=r"edge_attr: got torch.complex64; real numbers are needed"):
            layer(7, 4, edge_dim=3)(x, edge_index, edge_attr.to(torch.complex64))
    for layer in (fused3s.nn.GATConv(7, 4), fused3s.nn.GATv2Conv(7, 4, add_self_loops=False), fused3s.nn.AGNNConv()):
        with pytest.raises(TypeError, match=r"edge_index: got list; an edge_index \[2, E\]"):
            layer(x, edge_index.tolist())


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::fused3s.SlowerBackendWarning")
@BOTH
@pytest.mark.parametrize("is_square", [True, False])
@pytest.mark.parametrize(("heads", "columns", "edge_dim"), [(4, 16, None), (1, 40, None), (3, 13, None), (4, 16, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_on_a_gpu(dtype, heads, columns, edge_dim, is_square, version):
    """Output and gradients against PyG's layer in float64."""
    problem = Problem("hub", columns=32, edge_dim=edge_dim, dtype=torch.float32)
    options = {"edge_dim": edge_dim, "version": version, "add_self_loops": is_square}
    theirs, ours = layers(32, columns, heads, backend="fused3s", dtype=torch.float64, **options)
    theirs, ours = theirs.cuda(), ours.cuda().to(dtype)
    edge_index = problem.edge_index.cuda()

    def given(dtype):
        x, edge_attr = (None if each is None else each.cuda().to(dtype) for each in (problem.x, problem.edge_attr))
        return (x if is_square else (x, x.flip(0))), edge_index, edge_attr

    expected, out = theirs(*given(torch.float64)), ours(*given(dtype))
    expected.square().sum().backward()
    out.square().sum().backward()
    allowed = 2e-2 if dtype == torch.bfloat16 else 1e-5
    assert (out - expected).norm() <= allowed * expected.norm()
    wanted, got = gradients_together(theirs), gradients_together(ours)
    assert (got - wanted).norm() <= 3 * allowed * wanted.norm()


@pytest.mark.gpu
@BOTH
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_training_step_with_a_plan_can_be_captured(dtype, version):
    x, edge_index, _ = (None if each is None else each.cuda() for each in Problem("hub", columns=32).arguments)
    _, ours = layers(32, 16, 4, backend="fused3s", version=version)
    ours, x = ours.cuda().to(dtype), x.to(dtype)
    plan = ours.plan(edge_index, len(x))

    def gradients(graph):
        return torch.autograd.grad(ours(x, graph).float().square().sum(), list(ours.parameters()))

    captured = capture_step(lambda: gradients(plan), ours)
    x.neg_()
    for mine, eager in zip(captured.replay(), gradients(edge_index), strict=True):
        torch.testing.assert_close(mine, eager)
