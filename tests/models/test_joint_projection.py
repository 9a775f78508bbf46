"""`project` against the linear layers that it joins, outputs and gradients; what it leaves to them; training."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from kernels.side_by_side import RowParts, new_side_by_side
from models.joint_projection import project

DOUBLE = torch.float64
PARTS = RowParts((2, 3), (2, 3), (2, 3), (3,))
close = torch.testing.assert_close


def make_layers(bias=True, dtype=DOUBLE):
    torch.manual_seed(0)
    return [nn.Linear(4, width, bias=bias, dtype=dtype) for width in PARTS.sizes]


def features(rows=6, dtype=DOUBLE):
    return torch.randn(rows, 4, dtype=dtype, generator=torch.Generator().manual_seed(1)).requires_grad_()


def apart(x, layers):
    return [layer(x).unflatten(1, shape) for layer, shape in zip(layers, PARTS.shapes, strict=True)]


def leaves_of(x, layers):
    return [x, *(parameter for layer in layers for parameter in layer.parameters() if parameter.requires_grad)]


def mixed(outputs):
    """A number that depends on all outputs, and not linearly."""
    return sum(
        (each.square() * torch.arange(1.0, each.numel() + 1, dtype=each.dtype).view_as(each)).sum() for each in outputs
    )


def is_joint(outputs):
    return all(output.untyped_storage().data_ptr() == outputs[0].untyped_storage().data_ptr() for output in outputs)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [0, 1, 6])
def test_outputs_and_gradients_are_those_of_the_layers(rows, bias):
    x, layers = features(rows), make_layers(bias)
    outputs, expected = project(x, layers, PARTS), apart(x, layers)
    assert is_joint(outputs)
    leaves = leaves_of(x, layers)
    for found, of_layers in zip(outputs, expected, strict=True):
        close(found, of_layers)
    for found, of_layers in zip(
        *(torch.autograd.grad(mixed(each), leaves) for each in (outputs, expected)), strict=True
    ):
        close(found, of_layers)


def test_second_derivatives():
    layers = make_layers()
    assert torch.autograd.gradgradcheck(lambda x, *_: mixed(project(x, layers, PARTS)), leaves_of(features(3), layers))


def test_gradients_that_lie_side_by_side_are_not_copied(monkeypatch):
    x, layers = features(), make_layers()
    query, key, value, root = project(x, layers, PARTS)
    memory = new_side_by_side(query.detach())
    for part, gradient in zip(memory, torch.randn(3, *query.shape, dtype=DOUBLE), strict=True):
        part.copy_(gradient)
    of_root = torch.randn_like(root)
    leaves = leaves_of(x, layers)
    expected = torch.autograd.grad(apart(x, layers), leaves, [*(part.clone() for part in memory), of_root])
    monkeypatch.setattr(torch, "cat", lambda *_: pytest.fail("the gradients were copied"))
    found = torch.autograd.grad([query, key, value, root], leaves, [*memory, of_root])
    for left, right in zip(found, expected, strict=True):
        close(left, right)


def test_memory_of_others_is_left_alone():
    """Gradients in rows as long as the joint ones, but in memory that holds more."""
    x, layers = features(), make_layers()
    outputs = project(x, layers, PARTS)
    memory = torch.randn(7, sum(PARTS.sizes), dtype=DOUBLE)
    before = memory.clone()
    gradients = PARTS.split(memory[:6])
    found = torch.autograd.grad(outputs, layers[3].weight, [*gradients[:3], torch.ones_like(outputs[3])])[0]
    close(found, torch.ones(3, 6, dtype=DOUBLE) @ x)
    assert torch.equal(memory, before)


def test_frozen_parameters_and_inputs_get_no_gradient():
    x, layers = features().detach(), make_layers()
    for parameter in (layers[0].weight, layers[3].bias, *layers[2].parameters()):
        parameter.requires_grad_(False)
    found, expected = (
        torch.autograd.grad(mixed(each), leaves_of(x, layers)[1:])
        for each in (project(x, layers, PARTS), apart(x, layers))
    )
    for left, right in zip(found, expected, strict=True):
        close(left, right)


def test_a_parameter_that_two_layers_share():
    x, layers = features(), make_layers()
    layers[1].weight = layers[0].weight
    found, expected = (
        torch.autograd.grad(mixed(each), layers[0].weight) for each in (project(x, layers, PARTS), apart(x, layers))
    )
    close(found[0], expected[0])


def lora(layer):
    return nn.Sequential(copy.deepcopy(layer), nn.Identity())


def hooked(layer):
    layer.register_forward_hook(lambda module, given, output: 2 * output)
    return layer


def pruned(layer):
    prune.random_unstructured(layer, "weight", 0.5)
    return layer


OTHERS = {
    "replaced": lora,
    "hook": hooked,
    "parametrised": parametrizations.weight_norm,
    "pruned": pruned,
    "no_bias": lambda layer: nn.Linear(4, 6, bias=False, dtype=DOUBLE),
}


@pytest.mark.parametrize("name", OTHERS)
def test_layers_that_are_not_plain_are_called(name):
    x, layers = features(), make_layers()
    layers[1] = OTHERS[name](layers[1])
    outputs, expected = project(x, layers, PARTS), apart(x, layers)
    assert not is_joint(outputs)
    leaves = leaves_of(x, layers)
    for found, of_layers in zip(outputs, expected, strict=True):
        close(found, of_layers)
    for found, of_layers in zip(
        *(torch.autograd.grad(mixed(each), leaves) for each in (outputs, expected)), strict=True
    ):
        close(found, of_layers)


def test_transforms_of_torch_func():
    x, layers = features().detach(), make_layers()
    found = torch.func.jacrev(lambda x: project(x, layers, PARTS)[0])(x)
    close(found, torch.autograd.functional.jacobian(lambda x: apart(x, layers)[0], x))
    _, tangent = torch.func.jvp(lambda x: project(x, layers, PARTS)[1], (x,), (torch.ones_like(x),))
    close(tangent, torch.func.jvp(lambda x: apart(x, layers)[1], (x,), (torch.ones_like(x),))[1])


def test_types_that_do_not_match_are_the_layers_error():
    with pytest.raises(RuntimeError, match="dtype"):
        project(features(dtype=torch.float32), make_layers(), PARTS)


@pytest.mark.parametrize("x_type", [torch.float32, torch.bfloat16])
def test_autocast_as_of_the_layers(x_type):
    x, layers = features(dtype=x_type), make_layers(dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        outputs, expected = project(x, layers, PARTS), apart(x, layers)
    assert is_joint(outputs)
    leaves = leaves_of(x, layers)
    for found, of_layers in zip(outputs, expected, strict=True):
        close(found, of_layers)
    gradients = [torch.autograd.grad(mixed([part.float() for part in each]), leaves) for each in (outputs, expected)]
    for found, of_layers in zip(*gradients, strict=True):
        assert found.dtype == of_layers.dtype
        assert (found - of_layers).float().norm() <= 2e-2 * of_layers.float().norm()  # sums of bfloat16


def test_a_step_of_an_optimiser_counts_and_checkpointing_recomputes():
    x, layers = features(), make_layers()
    others = copy.deepcopy(layers)
    for each, call in ((layers, lambda x: project(x, layers, PARTS)), (others, lambda x: apart(x, others))):
        parameters = [parameter for layer in each for parameter in layer.parameters()]
        optimiser = torch.optim.AdamW(parameters, lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            mixed(torch.utils.checkpoint.checkpoint(call, x, use_reentrant=False)).backward()
            optimiser.step()
    for mine, expected in zip(layers, others, strict=True):
        close(mine.weight, expected.weight)
        close(mine.bias, expected.bias)
