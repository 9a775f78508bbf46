"""Projections that share their inputs, and their gradients, for a layer that is one autograd node."""

from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch.nn import functional

from ...torch_side.side_by_side import RowParts
from .parameters import JointMemory, parameter_gradients

_count = attrgetter("count")


@dataclass(frozen=True, eq=False, slots=True)
class Projections:
    """One GEMM for each input: x [N, F] -> parts of rows [N, pitch].

    The differentiable arguments of a node that has them end with the inputs, and with the weights, then the biases (or
    none) of all parts (`joint_parameters`); the tensors that it saves end with those of `forward`.

    Attributes:
        parts: columns of the GEMM of each input.
        memory: joint memory of the parameters.
        dtype: type of the GEMMs.
    """

    parts: tuple[RowParts, ...]
    memory: JointMemory
    dtype: torch.dtype

    def forward(self, given: Sequence[Tensor]) -> tuple[list[Tensor], Sequence[Tensor]]:
        """The parts of all rows, and the tensors to save: inputs, joint weights, and the weights themselves, so that
        autograd detects changes."""
        parts, dtype = self.parts, self.dtype
        parameters = given[len(parts) :]
        joined = self.memory.join(parameters, parts, dtype)
        inputs, columns = [], []
        for x, part, (weight, bias) in zip(given, parts, joined, strict=False):
            if x.dtype is not dtype:
                x = x.to(dtype)
            inputs.append(x)
            columns += part.split(functional.linear(x, weight, bias))
        weights, _ = zip(*joined, strict=True)
        return columns, (*inputs, *weights, *parameters[: sum(map(_count, parts))])

    def split_saved(self, saved: Sequence[Tensor | None]) -> tuple[Sequence[Tensor | None], Sequence[Tensor]]:
        """The tensors that the node saved for itself, and those of `forward`."""
        own = len(saved) - 2 * len(self.parts) - sum(map(_count, self.parts))
        return saved[:own], saved[own:]

    def gradients(
        self, joints: Sequence[Tensor], saved: Sequence[Tensor], needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the inputs and parameters.

        Args:
            joints: gradient of the rows of each input, [N, pitch].
            saved: from `forward`.
        """
        count = len(self.parts)
        inputs, weights, dtype = saved[:count], saved[count : 2 * count], saved[-1].dtype
        of_inputs = [
            torch.mm(joint, weight) if is_needed else None
            for joint, weight, is_needed in zip(joints, weights, needed, strict=False)
        ]
        products = list(zip(joints, inputs, self.parts, strict=True))
        return *of_inputs, *parameter_gradients(products, dtype, needed[count:])
