"""Exponential moving average of the weights, which evaluation runs with and a run keeps."""

import copy
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from fused3s.torch_side.torch_private import foreach_copy_, foreach_lerp_
from models import GraphModel


class Averages:
    """The average over the steps of a model's weights and of the running statistics of its batch norms. It begins with
    the initial weights.

    Args:
        model: model with float32 weights, whose tensors stay where they are.
        decay: share of the old average in the new one, at each step.

    Attributes:
        model: a copy of the model with the averaged values.
    """

    def __init__(self, model: GraphModel, decay: float) -> None:
        self.decay, self.model = decay, copy.deepcopy(model)
        own, averaged = model.state_dict(), self.model.state_dict()
        names = [name for name, tensor in own.items() if tensor.is_floating_point()]
        self._own, self._averaged = [own[name] for name in names], [averaged[name] for name in names]
        self._before = [tensor.clone() for tensor in self._own]

    @torch.no_grad()
    def update(self) -> None:
        """Take in the weights after a step."""
        foreach_lerp_(self._averaged, self._own, 1 - self.decay)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Inside, the weights of the model are the averaged ones. A CUDA graph can capture it."""
        foreach_copy_(self._before, self._own)
        foreach_copy_(self._own, self._averaged)
        try:
            yield
        finally:
            foreach_copy_(self._own, self._before)
