"""Projections that share their inputs, and their gradients, for a layer that is one autograd node."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from ...torch_side.side_by_side import RowParts
from .parameters import JointMemory, parameter_gradients


class Projections:
    """One GEMM for each input: x [N, F] -> parts of rows [N, pitch]. A layer has one object for each way of calling it.

    The differentiable arguments of a node with projections end with the inputs, then the weights, then the biases (or
    none) of all parts (`joint_parameters`); its saved tensors end with those of `forward`.

    Attributes:
        parts: columns of the GEMM of each input.
    """

    def __init__(self, memory: JointMemory, *parts: RowParts) -> None:
        """memory: joint memory of the parameters."""
        self._memory, self.parts = memory, parts
        self._num_inputs, self._num_parts = len(parts), sum(part.count for part in parts)
        self._num_saved = 2 * self._num_inputs + self._num_parts

    def forward(self, given: Sequence[Tensor], dtype: torch.dtype) -> tuple[list[Tensor], Sequence[Tensor]]:
        """The parts of all rows, and the tensors to save: inputs, joint weights, and the weights themselves, so that
        autograd detects changes.

        Args:
            dtype: type of the GEMMs.
        """
        parameters = given[self._num_inputs :]
        inputs, weights, columns = [], [], []
        joined = self._memory.join(parameters, self.parts, dtype)
        for x, part, (weight, bias) in zip(given, self.parts, joined, strict=False):
            if x.dtype is not dtype:
                x = x.to(dtype)
            inputs.append(x)
            weights.append(weight)
            columns += part.split(functional.linear(x, weight, bias))
        return columns, (*inputs, *weights, *parameters[: self._num_parts])

    def split_saved(self, saved: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Sequence[Tensor]]:
        """The tensors that the node saved for itself, and those of `forward`."""
        return saved[: -self._num_saved], saved[-self._num_saved :]

    def gradients(
        self, joints: Sequence[Tensor], saved: Sequence[Tensor], needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs and parameters.

        Args:
            joints: gradient of the rows of each input, [N, pitch].
            saved: from `forward`.
        """
        count = self._num_inputs
        of_inputs = [
            torch.mm(joint, weight) if is_needed else None
            for joint, weight, is_needed in zip(joints, saved[count:], needed, strict=False)
        ]
        products = list(zip(joints, saved, self.parts, strict=False))
        return *of_inputs, *parameter_gradients(products, saved[-1].dtype, needed[count:])
