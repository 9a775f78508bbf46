"""A layer as one autograd function, on a backend with a backward pass of its own: what autograd and users do with it,
and the memory that its parameters share. Its numbers: test_transformer_conv.py; with the fused kernels:
test_layers_on_cpu.py.
"""

import copy
import io

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

import fused3s.nn
from fused3s.nn import transformer_conv
from fused3s.nn.joint import parameters as joint_parameters

close = torch.testing.assert_close
pytestmark = pytest.mark.usefixtures("formula")
EDGES = torch.tensor([[0, 1, 2, 3, 3, 5, 0], [1, 2, 0, 3, 4, 1, 4]])


def pair(**options):
    """A layer on the backend with a backward pass of its own, and the same on one that autograd differentiates."""
    torch.manual_seed(0)
    layer = fused3s.nn.TransformerConv(4, 3, heads=2, backend="formula", **options).double()
    other = copy.deepcopy(layer)
    other.backend = "reference"
    return layer, other


def features():
    return torch.randn(6, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(6)).requires_grad_()


def gradients(layer, x, *attr):
    leaves = [each for each in (x, *attr, *layer.parameters()) if each.requires_grad]
    return torch.autograd.grad(layer(x, EDGES, *attr).square().sum(), leaves)


@pytest.fixture
def copies(monkeypatch):
    """Calls that joined the parameters by a copy."""
    calls, join = [], joint_parameters.join_parameters
    monkeypatch.setattr(joint_parameters, "join_parameters", lambda *given: calls.append(given) or join(*given))
    return calls


@pytest.mark.parametrize("options", [{}, {"concat": False}, {"beta": True}, {"edge_dim": 2}], ids=str)
def test_frozen_parameters_and_inputs_get_no_gradient(options):
    attr = (torch.randn(EDGES.shape[1], 2).double().requires_grad_(),) if options.get("edge_dim") else ()
    layer, other = pair(**options)
    for each in (layer, other):
        for parameter in (each.lin_query.weight, each.lin_skip.bias, *each.lin_value.parameters()):
            parameter.requires_grad_(False)
    for x in (features(), features().detach()):
        for mine, expected in zip(gradients(layer, x, *attr), gradients(other, x, *attr), strict=True):
            close(mine, expected)


def test_weights_that_change_before_the_backward_pass_are_an_error():
    layer, _ = pair()
    loss = layer(features(), EDGES).sum()
    with torch.no_grad():
        layer.lin_key.weight.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


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
    rate = {"lr": 0.1}
    for each in (layer, other):
        optimiser = torch.optim.AdamW(each.parameters(), **rate)
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


@pytest.mark.parametrize("how", ["assign", "pickle", "replaced", "tied", "data"])
def test_parameters_that_are_elsewhere_count(how):
    layer, other = pair()
    state = {name: 2 * tensor for name, tensor in layer.state_dict().items()}
    if how == "pickle":
        file = io.BytesIO()
        torch.save(layer, file)
        layer = torch.load(io.BytesIO(file.getvalue()), weights_only=False)
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
    for mine, expected in zip(gradients(layer, features()), gradients(other, features()), strict=True):
        close(mine, expected)


@pytest.mark.parametrize(
    "change", [parametrizations.weight_norm, lambda layer: nn.Linear(4, 6, bias=False, dtype=torch.float64)]
)
def test_projections_that_are_not_plain_are_called(change, monkeypatch):
    monkeypatch.setattr(transformer_conv, "run_as_node", None)
    layer, other = pair()
    for each in (layer, other):
        torch.manual_seed(7)
        each.lin_key = change(each.lin_key)
    for mine, right in zip(gradients(layer, features()), gradients(other, features()), strict=True):
        close(mine, right)


@pytest.mark.parametrize("kind", ["TransformerConv", "GATConv", "GATv2Conv"])
def test_a_plan_of_grouped_queries_is_refused(kind):
    """Its graph has a row for each query of a group, so that a kernel would read past the rows of a layer."""
    heads = {"num_heads": 4, "num_kv_heads": 2, "edge_data": True}
    plan = fused3s.plan_attention(EDGES, shape=(6, 6), backend="formula", device="cpu", backward=True, **heads)
    layer = getattr(fused3s.nn, kind)(4, 3, heads=4, backend="formula").double()
    with pytest.raises(ValueError, match="the plan is for 2 query heads of each KV head"):
        layer(features(), plan)
