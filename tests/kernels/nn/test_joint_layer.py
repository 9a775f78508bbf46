"""A layer as one autograd function, on a backend with a backward pass of its own: what autograd and users do with it,
and the memory that its parameters share. Its numbers: test_pyg_layers.py, and test_layers_by_kernels.py by the kernels.
"""

import copy

import pytest
import torch
from layer_pairs import WITH_EDGES, assert_same, listed_graph, trained
from layer_pairs import pair as pyg_pair

import fused3s.nn
from fused3s.nn.joint import parameters as joint_parameters

close = torch.testing.assert_close
pytestmark = pytest.mark.usefixtures("formula")
EDGES = torch.tensor([[0, 1, 2, 3, 3, 5, 0], [1, 2, 0, 3, 4, 1, 4]])
with_edges = pytest.mark.parametrize("kind", WITH_EDGES)


def pair():
    """A layer on the backend with a backward pass of its own, and the same on one that autograd differentiates."""
    torch.manual_seed(0)
    layer = fused3s.nn.TransformerConv(4, 3, heads=2, backend="formula").double()
    other = copy.deepcopy(layer)
    other.backend = "reference"
    return layer, other


def features():
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(6)).requires_grad_()


def gradients(layer, x):
    return torch.autograd.grad(layer(x, EDGES).square().sum(), [x, *layer.parameters()])


@pytest.fixture
def copies(monkeypatch):
    """Calls that joined the parameters by a copy."""
    calls, join = [], joint_parameters.join_parameters
    monkeypatch.setattr(joint_parameters, "join_parameters", lambda *given: calls.append(given) or join(*given))
    return calls


@with_edges
def test_a_layer_is_one_autograd_node(kind):
    _, ours = pyg_pair(kind, 7, 4, 2, backend="formula")
    x, edge_index = listed_graph("hub", 7)
    out = ours(x.requires_grad_(), edge_index)
    behind = {each.variable for each, _ in out.grad_fn.next_functions if each is not None}  # AccumulateGrad: leaves
    assert behind == {x, *ours.parameters()}


OPTIONS = [(kind, options) for kind in WITH_EDGES for options in ({}, {"concat": False}, {"edge_dim": 2})]


@pytest.mark.parametrize(("kind", "options"), [*OPTIONS, ("TransformerConv", {"beta": True})], ids=str)
def test_frozen_parameters_and_inputs_get_no_gradient(kind, options):
    layers = pyg_pair(kind, 7, 4, 2, backend="formula", **options)
    x, *graph = listed_graph("hub", 7, options.get("edge_dim"))
    names = [name for name, _ in layers[1].named_parameters()]
    for frozen in [[name] for name in names] + [names[1:]]:
        for layer in layers:
            for name, parameter in layer.named_parameters():
                parameter.requires_grad_(name not in frozen)
        theirs, ours = (trained(layer, x, *graph) for layer in layers)
        assert_same(ours, theirs)
        assert all(ours[name] is None for name in frozen)
    of_inputs = [
        torch.autograd.grad(layer(x, *graph).square().sum(), next(iter(layer.parameters())))[0] for layer in layers
    ]
    close(*of_inputs)


@with_edges
def test_weights_that_change_before_the_backward_pass_are_an_error(kind):
    _, ours = pyg_pair(kind, 7, 4, 2, backend="formula")
    x, edge_index = listed_graph("hub", 7)
    for parameter in [each for name, each in ours.named_parameters() if "bias" not in name and "skip" not in name]:
        loss = ours(x, edge_index).sum()
        with torch.no_grad():
            parameter.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@with_edges
def test_second_derivatives_are_an_error(kind):
    _, ours = pyg_pair(kind, 7, 4, 2, backend="formula")
    x, edge_index = listed_graph("hub", 7)
    (gradient,) = torch.autograd.grad(ours(x.requires_grad_(), edge_index).sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        gradient.sum().backward()


def test_hooks_of_parameters_see_gradients_that_are_theirs_alone():
    layer, other = pair()
    seen = []
    layer.lin_value.weight.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)
    for each in (layer, other):
        each(features(), EDGES).square().sum().backward()
    close(seen[0], other.lin_value.weight.grad)
    close(layer.lin_value.weight.grad, 2 * other.lin_value.weight.grad)
    layer.lin_query.weight.grad.zero_()
    close(layer.lin_key.weight.grad, other.lin_key.weight.grad)


def test_parameters_are_not_copied_together(copies):
    layer, other = pair()
    for each in (layer, other):
        optimiser = torch.optim.AdamW(each.parameters(), lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            each(features(), EDGES).square().sum().backward()
            optimiser.step()
    for mine, expected in zip(layer.parameters(), other.parameters(), strict=True):
        close(mine, expected)
    assert not [given for given in copies if given[0][0] is layer.lin_query.weight]


def test_copies_and_other_types_have_memory_of_their_own(copies):
    layer, _ = pair()
    twin = copy.deepcopy(layer)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.zero_()
        assert twin(features(), EDGES).abs().max() == 0
        assert layer(features(), EDGES).abs().max() > 0
        single = copy.deepcopy(layer).float()
        close(single(features().float(), EDGES).double(), layer(features(), EDGES), rtol=1e-5, atol=1e-5)
        with torch.autocast("cpu", torch.bfloat16):
            close(single(features().float(), EDGES).double(), layer(features(), EDGES), rtol=0.1, atol=0.1)
    assert not copies


@pytest.mark.parametrize("how", ["assign", "replaced", "tied", "data"])
def test_parameters_that_are_elsewhere_count(how):
    layer, other = pair()
    state = {name: 2 * tensor for name, tensor in layer.state_dict().items()}
    for each in (layer, other):
        if how == "assign":
            each.load_state_dict({name: tensor.clone() for name, tensor in state.items()}, assign=True)
        elif how == "replaced":
            each.lin_key.weight = torch.nn.Parameter(state["lin_key.weight"].clone())
        elif how == "tied":
            each.lin_key.weight = each.lin_query.weight
            each.float().double()
        elif how == "data":
            each.lin_key.weight.data = state["lin_key.weight"].clone()
    close(gradients(layer, features()), gradients(other, features()))


@with_edges
def test_a_plan_of_grouped_queries_is_refused(kind):
    """Its graph has a row for each query of a group, so that a kernel would read past the rows of a layer."""
    heads = {"num_heads": 4, "num_kv_heads": 2, "edge_data": True}
    plan = fused3s.plan_attention(EDGES, shape=(6, 6), backend="formula", device="cpu", backward=True, **heads)
    layer = getattr(fused3s.nn, kind)(4, 3, heads=4, backend="formula").double()
    with pytest.raises(ValueError, match="the plan is for 2 query heads of each KV head"):
        layer(features(), plan)
