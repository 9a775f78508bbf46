"""Parameters of linear layers that share their input, as one matrix: one GEMM computes them all.

    x [N, F]  ->  row:   | root | q: H heads of C | k: H heads of C | v: H heads of C |

The layers keep their parameters side by side in one memory (`JointMemory`); otherwise each call concatenates them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.dlpack import from_dlpack, to_dlpack

from ...torch_side.autocast import input_type
from ...torch_side.side_by_side import RowParts, is_transformed
from ...torch_side.torch_private import dispatch_modes, has_global_hooks
from ..base import Layer

PLAIN = {nn.Parameter, Tensor}  # the latter under torch.func.functional_call
Joined = list[tuple[Tensor, Tensor | None]]  # weight and bias


def joint_parameters(inputs: Sequence[Tensor], layers: Sequence[nn.Module]) -> tuple[torch.dtype, list[Tensor]] | None:
    """The type of the GEMM, and the weights, then the biases, of the layers. None if one GEMM cannot compute them: a
    layer is not plain (`plain_parameters`), or torch.compile, forward mode, torch.func or device meta is active."""
    if torch.compiler.is_compiling() or is_transformed() or dispatch_modes() > 0 or inputs[0].is_meta:
        return None
    parameters = plain_parameters(layers)
    if parameters is None:
        return None
    device_type, own = inputs[0].device.type, parameters[0].dtype
    dtype = input_type(own, device_type)
    for x in inputs:
        if x.dim() != 2 or (x.dtype is not own and input_type(x.dtype, device_type) is not dtype):
            return None
    return dtype, parameters


def plain_parameters(layers: Sequence[nn.Module]) -> list[Tensor] | None:
    """The weights, then the biases, of layers that compute exactly nn.Linear. None if a layer is replaced, parametrised
    or sharded, has hooks or another `forward`, or if layers differ in type or bias."""
    if has_global_hooks():
        return None
    found, biases = [], []
    for layer in layers:
        if not is_plain(layer):
            return None
        parameters = layer._parameters
        found.append(parameters.get("weight"))
        if (bias := parameters.get("bias")) is not None:
            biases.append(bias)
    if biases and len(biases) != len(found):
        return None
    found += biases
    if not PLAIN.issuperset(map(type, found)) or len(set(map(_dtype_of, found))) > 1:
        return None
    return found


def plain_weight(layer: nn.Module) -> Tensor | None:
    """The weight of a plain layer without a bias; None: the layer must be called."""
    if has_global_hooks() or not is_plain(layer):
        return None
    weight = layer.weight  # FSDP's flat parameter leaves a view that is no parameter
    return weight if type(weight) in PLAIN and layer.bias is None else None


def is_plain(layer: nn.Module, kind: type[nn.Module] = nn.Linear) -> bool:
    """Whether this is a layer of this kind itself, whose call runs no code of a caller: hooks, or another `forward`."""
    if type(layer) is not kind:
        return False
    own = layer.__dict__
    return not (
        own["_forward_pre_hooks"]
        or own["_forward_hooks"]
        or own["_backward_pre_hooks"]
        or own["_backward_hooks"]
        or "forward" in own
    )


_dtype_of = Tensor.dtype.__get__  # runs in `map` without Python code


def join_parameters(parameters: Sequence[Tensor], parts: Sequence[RowParts]) -> Joined:
    """Concatenated weights and biases of the parts of each GEMM, from `plain_parameters`."""
    count, first, joined = sum(len(part.sizes) for part in parts), 0, []
    for part in parts:
        last = first + len(part.sizes)
        weight, bias = torch.cat(parameters[first:last]), None
        if len(parameters) > count:
            bias = torch.cat(parameters[count + first : count + last])
        joined.append((weight, bias))
        first = last
    return joined


class JointMemory:
    """One memory for the parameters of a module's linear layers, so that joining needs no copy; like
    `flatten_parameters` of torch's recurrent layers.

        | weights, concatenated | (up to BIAS_ALIGNMENT elements unused) | biases |

    Parameters that are elsewhere at a call (assigned, sharded, shared with other processes) are joined by a copy.
    Copies of the module, and modules read from a file, have no joint memory until `lay`.
    """

    BIAS_ALIGNMENT = 128  # elements; GEMMs load biases in vectors

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._memory: Tensor | None = None
        self._joined: dict[Sequence[RowParts], Joined] = {}  # views, by the two ways of calling a layer; until `lay`

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return JointMemory, ()

    def lay(self, parameters: Sequence[Tensor] | None) -> None:
        """Move the parameters into one memory, if they have one type and device.

        Args:
            parameters: weights, [.., F] each, then as many biases or none; None: they cannot be joined.
        """
        if parameters is not None and [each.data_ptr() for each in parameters] == self._addresses:
            return
        self.__init__()
        if parameters is None or not _can_move(parameters):
            return
        weights = [each for each in parameters if each.dim() == 2]
        num_rows, self._columns = sum(len(each) for each in weights), weights[0].shape[1]
        size = num_rows * self._columns
        self._first_bias, self._has_bias = size + -size % self.BIAS_ALIGNMENT, len(parameters) > len(weights)
        memory = weights[0].detach().new_empty(self._first_bias + num_rows)
        starts = [0, self._first_bias]
        for each in parameters:
            kind = 2 - each.dim()
            part = memory.as_strided(each.shape, each.stride(), starts[kind])
            starts[kind] += each.numel()
            part.copy_(each.detach())
            each.data = from_dlpack(to_dlpack(part))  # its own storage: savers treat views of one storage as copies
        self._addresses = [each.data_ptr() for each in parameters]
        self._memory = memory

    def join(self, parameters: Sequence[Tensor], parts: Sequence[RowParts], dtype: torch.dtype) -> Joined:
        """`join_parameters`, without a copy if the parameters are in this memory."""
        if list(map(Tensor.data_ptr, parameters)) != self._addresses:
            joined = join_parameters(parameters, parts)
            return [(weight.to(dtype), None if bias is None else bias.to(dtype)) for weight, bias in joined]
        if self._memory.dtype is not dtype:
            return self._views(self._memory.to(dtype), parts)
        joined = self._joined.get(parts)
        if joined is None:
            joined = self._joined[parts] = self._views(self._memory, parts)
        return joined

    def _views(self, memory: Tensor, parts: Sequence[RowParts]) -> Joined:
        joined, row = [], 0
        for part in parts:
            weight = memory.as_strided((part.pitch, self._columns), (self._columns, 1), row * self._columns)
            bias = memory.as_strided((part.pitch,), (1,), self._first_bias + row) if self._has_bias else None
            joined.append((weight, bias))
            row += part.pitch
        return joined


class JointModule(Layer):
    """A module that keeps the parameters of `joint_layers()` in one memory."""

    def __init__(self) -> None:
        super().__init__()
        self._memory = JointMemory()

    def joint_layers(self) -> tuple[nn.Module, ...]:
        """The linear layers, in the order of the joint columns."""
        raise NotImplementedError

    def lay_parameters(self) -> None:
        """Move the parameters into the memory, after they were made or moved."""
        self._is_lazy = any(isinstance(layer, nn.LazyLinear) for layer in self.children())
        self._memory.lay(plain_parameters(self.joint_layers()))

    @torch.compiler.disable
    def materialise(self, *calls: tuple[nn.Module | None, Tensor]) -> None:
        """Make the parameters of lazy layers, in this order, by calls of each with an input of any length."""
        with torch.no_grad():
            for layer, x in calls:
                if isinstance(layer, nn.LazyLinear):
                    layer(x[:0])
        self.lay_parameters()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> "JointModule":
        super()._apply(fn, recurse)  # `to`, `half`, `cuda` give each parameter separate memory
        self.lay_parameters()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.lay_parameters()


def _can_move(parameters: Sequence[Tensor]) -> bool:
    """Whether the parameters may move: one input width, one device, no parameter twice, no memory shared between
    processes."""
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
            and each.untyped_storage().nbytes() == each.nbytes  # not a view
            and not (device.type == "cpu" and each.is_shared())
            for each in parameters
        )
    )


def parameter_gradients(
    products: Sequence[tuple[Tensor, Tensor, RowParts]], dtype: torch.dtype, needed: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of the weights, then the biases, of type `dtype`; None where not `needed`. The gradients of a product
    are views of two tensors.

    Args:
        products: of each the gradient [N, columns], x [N, F] and the parts of the columns.
    """
    count, of_weights, of_biases = sum(len(parts.sizes) for *_, parts in products), [], []
    for gradient, x, parts in products:
        first, size = len(of_weights), len(parts.sizes)
        weights: Sequence[Tensor | None] = (None,) * size
        biases: Sequence[Tensor | None] = (None,) * size
        if any(needed[first : first + size]):
            weight = torch.mm(gradient.t(), x)
            weights = (weight if weight.dtype is dtype else weight.to(dtype)).split_with_sizes(parts.sizes)
        if any(needed[count + first : count + first + size]):
            biases = gradient.sum(0, dtype=dtype).split_with_sizes(parts.sizes)
        of_weights += weights
        of_biases += biases
    found = [*of_weights, *of_biases][: len(needed)]
    if not all(needed):
        found = [each if is_needed else None for each, is_needed in zip(found, needed, strict=True)]
    return found
