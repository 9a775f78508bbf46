"""Linear layers of one input as one GEMM, forward and backward.

    x [N, F]  ->  row:   | q: H heads of C | k: H heads of C | v: H heads of C | root |

The parameters stay those of the layers. They lie in one memory (`JointMemory`), or each call copies them into one
matrix: N rows of x outweigh the copy. The backward pass is a GEMM for x, one for all weights and a sum for all biases.
Gradients of q, k and v that lie side by side (`kernels.side_by_side`) are part of the joint gradient as they are.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
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
    parameters = plain_parameters(layers)
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


def plain_parameters(layers: Sequence[nn.Module]) -> list[Tensor] | None:
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
    """The weights as one matrix, and the biases as one vector, copied."""
    count = len(parts.shapes)
    weight = torch.cat(parameters[:count])
    bias = torch.cat(parameters[count:]) if len(parameters) > count else None
    if weight.dtype is not dtype:
        weight, bias = weight.to(dtype), None if bias is None else bias.to(dtype)
    return weight, bias


class JointMemory:
    """Memory of the parameters of a module's linear layers, which need no copy to be joined; like `flatten_parameters`
    of torch's recurrent layers.

        | weights, one behind the other | (up to BIAS_ALIGNMENT elements unused) | biases |

    Parameters that are elsewhere at a call (assigned, sharded, shared with other processes) are joined by a copy.
    Copies of the module and modules read from a file start without it: see `lay`.
    """

    BIAS_ALIGNMENT = 128  # elements; GEMMs load biases in vectors

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._memory = self._weight = self._bias = None

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return JointMemory, ()

    def lay(self, parameters: Sequence[Tensor] | None) -> None:
        """Move the parameters into one memory, where they are alike.

        Args:
            parameters: weights, [.., F] each, then as many biases or none; None: they cannot be joined.
        """
        if parameters is not None and [each.data_ptr() for each in parameters] == self._addresses:
            return
        self.__init__()
        if parameters is None or not _can_move(parameters):
            return
        weights = [each for each in parameters if each.dim() == 2]
        num_rows, num_columns = sum(len(each) for each in weights), weights[0].shape[1]
        size = num_rows * num_columns
        first_bias = size + -size % self.BIAS_ALIGNMENT
        memory = weights[0].detach().new_empty(first_bias + num_rows)
        starts = [0, first_bias]
        for each in parameters:
            kind = 2 - each.dim()
            part = memory.as_strided(each.shape, each.stride(), starts[kind])
            starts[kind] += each.numel()
            part.copy_(each.detach())
            each.data = part
        self._addresses = [each.data_ptr() for each in parameters]
        self._memory, self._shape, self._first_bias = memory, (num_rows, num_columns), first_bias
        self._weight, self._bias = self._views(memory, len(parameters) > len(weights))

    def join(self, parameters: Sequence[Tensor], parts: RowParts, dtype: torch.dtype) -> tuple[Tensor, Tensor | None]:
        """`join_parameters`, without a copy where the parameters are in this memory."""
        if [each.data_ptr() for each in parameters] != self._addresses:
            return join_parameters(parameters, parts, dtype)
        if self._memory.dtype is dtype:
            return self._weight, self._bias
        return self._views(self._memory.to(dtype), self._bias is not None)

    def _views(self, memory: Tensor, has_bias: bool) -> tuple[Tensor, Tensor | None]:
        num_rows, num_columns = self._shape
        weight = memory.as_strided(self._shape, (num_columns, 1), 0)
        return weight, memory.as_strided((num_rows,), (1,), self._first_bias) if has_bias else None


def _can_move(parameters: Sequence[Tensor]) -> bool:
    """Whether other memory may take the place of the parameters': columns of one x, one device, no parameter twice,
    nobody else's memory."""
    device = parameters[0].device
    return (
        device.type in ("cpu", "cuda")
        and not torch.is_inference_mode_enabled()
        and len({each.shape[1] for each in parameters if each.dim() == 2}) == 1
        and len({id(each) for each in parameters}) == len(parameters)
        and all(
            type(each) is nn.Parameter
            and each.device == device
            and each.is_contiguous()
            and not each.is_inference()
            and each.untyped_storage().nbytes() == each.nbytes  # no view of anything
            and not (device.type == "cpu" and each.is_shared())
            for each in parameters
        )
    )


def joint_product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return functional.linear(x, weight, bias)


def parameter_gradients(
    joint: Tensor, x: Tensor, dtype: torch.dtype, parts: RowParts, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the parameters, views of two tensors of type `dtype`; None where not `needed`.

    Args:
        joint: [N, columns], gradient of the product.
        x: [N, F].
    """
    count = len(parts.sizes)
    of_weights: Sequence[Tensor | None] = (None,) * count
    of_biases: Sequence[Tensor | None] = (None,) * (len(needed) - count)
    if any(needed[:count]):
        weight = torch.mm(joint.t(), x)
        of_weights = (weight if weight.dtype is dtype else weight.to(dtype)).split_with_sizes(parts.sizes)
    if any(needed[count:]):
        of_biases = joint.sum(0, dtype=dtype).split_with_sizes(parts.sizes)
    found = [*of_weights, *of_biases]
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
