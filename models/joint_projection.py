"""Linear layers of one input as one GEMM, forward and backward.

    x [N, F]  ->  row:   | q: H heads of C | k: H heads of C | v: H heads of C | root |

The parameters stay those of the layers, and each call copies them into one matrix: N rows of x outweigh the copy. The
backward pass is a GEMM for x, one for all weights and a sum for all biases. Gradients of q, k and v that lie side by
side (`kernels.side_by_side`) are part of the joint gradient as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from kernels.autocast import input_type
from kernels.side_by_side import RowParts, is_transformed

PLAIN = (nn.Parameter, Tensor)  # the latter under torch.func.functional_call


def project(x: Tensor, layers: Sequence[nn.Module], parts: RowParts) -> Sequence[Tensor]:
    """What each layer makes of x: [N, *shape] for each.

    Layers that one GEMM cannot stand for are called one by one: those that are no plain nn.Linear (replaced,
    parametrised, with hooks, of several types), and all of them under torch.compile, forward mode and torch.func.

    Args:
        x: [N, F].
        layers: linear maps of F columns.
        parts: of the columns of each.
    """
    joint = joint_parameters(x, layers)
    if joint is not None:
        dtype, parameters = joint
        return project_jointly(x.to(dtype), parameters, parts)
    return [layer(x).unflatten(-1, shape) for layer, shape in zip(layers, parts.shapes, strict=True)]


def joint_parameters(x: Tensor, layers: Sequence[nn.Module]) -> tuple[torch.dtype, list[Tensor]] | None:
    """The type of the product of x and the layers, and their weights, then their biases; None where one GEMM cannot
    stand for them, see `project`."""
    if _is_transformed() or x.dim() != 2:
        return None
    parameters = _parameters(layers)
    if parameters is None:
        return None
    device_type = x.device.type
    dtype = input_type(x.dtype, device_type)
    return (dtype, parameters) if dtype is input_type(parameters[0].dtype, device_type) else None


def project_jointly(x: Tensor, parameters: Sequence[Tensor], parts: RowParts) -> Sequence[Tensor]:
    """The products of x [N, F] and all weights, in x's type: [N, *shape] for each, views of one tensor.

    Args:
        parameters: weights, [.., F] each with the rows of a part, then as many biases or none; of one type.
    """
    if torch.is_grad_enabled():
        return _Projection.apply(parts, x, *parameters)
    return parts.split(joint_product(x, *join_parameters(parameters, parts, x.dtype)))


def _is_transformed() -> bool:
    return torch.compiler.is_compiling() or is_transformed() or torch._C._len_torch_dispatch_stack() > 0


def _parameters(layers: Sequence[nn.Module]) -> list[Tensor] | None:
    """The weights, then the biases, of layers that are plain and alike; None for others."""
    if _has_any_global_hook():
        return None
    weights, biases = [], []
    for layer in layers:
        if type(layer) is not nn.Linear or layer._forward_pre_hooks or layer._forward_hooks or layer._backward_hooks:
            return None
        parameters = layer._parameters
        weights.append(parameters.get("weight"))
        if (bias := parameters.get("bias")) is not None:
            biases.append(bias)
    if biases and len(biases) != len(weights):
        return None
    weights += biases
    dtype = None if weights[0] is None else weights[0].dtype
    for each in weights:
        if type(each) not in PLAIN or each.dtype is not dtype:
            return None
    return weights


def join_parameters(parameters: Sequence[Tensor], parts: RowParts, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
    """The weights as one matrix, and the biases as one vector."""
    count = len(parts.shapes)
    weight = torch.cat(parameters[:count])
    bias = torch.cat(parameters[count:]) if len(parameters) > count else None
    if weight.dtype is not dtype:
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return weight, bias


def joint_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.mm(x, weight.t()) if bias is None else torch.addmm(bias, x, weight.t())


def parameter_gradients(
    joint: Tensor, x: Tensor, dtype: torch.dtype, parts: RowParts, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the parameters, views of two tensors of type `dtype`; None where not `needed`.

    Args:
        joint: [N, columns], gradient of the product.
        x: [N, F].
    """
    count = len(parts.sizes)
    found: list[Tensor | None] = [None] * len(needed)
    if any(needed[:count]):
        found[:count] = torch.mm(joint.t(), x).to(dtype).split_with_sizes(parts.sizes)
    if any(needed[count:]):
        found[count:] = joint.sum(0, dtype=dtype).split_with_sizes(parts.sizes)
    if not all(needed):
        found = [each if is_needed else None for each, is_needed in zip(found, needed, strict=True)]
    return found


class _Projection(torch.autograd.Function):
    """(parts, x, *weights, *biases) -> [N, *shape] for each part."""

    @staticmethod
    def forward(ctx: Any, parts: RowParts, x: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        weight, bias = join_parameters(parameters, parts, x.dtype)
        ctx.parts = parts
        ctx.save_for_backward(x, weight, *parameters)
        return parts.split(joint_product(x, weight, bias))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, *parameters = ctx.saved_tensors
        parts = ctx.parts
        if torch.is_grad_enabled():  # a gradient of this gradient may be asked for: no step outside of autograd
            weight, _ = join_parameters(parameters, parts, x.dtype)
            joint = torch.cat([gradient.flatten(1) for gradient in gradients], 1)
        else:
            joint = parts.join(gradients)
        _, of_x, *needed = ctx.needs_input_grad
        found = parameter_gradients(joint, x, parameters[0].dtype, parts, needed)
        return None, torch.mm(joint, weight) if of_x else None, *found
