"""Layers in 16 bits over weights in float32."""

import copy

import torch
from torch import Tensor, nn

from models import GraphTransformer


class WorkingCopy:
    """The model whose layers compute a step, beside the one whose weights the optimiser changes.

    The copy has 16-bit weights: all of them are rounded in one kernel, and their gradients become float32 in one more,
    where torch.autocast takes a kernel for each weight. Batch norms, buffers and the readout of graphs, which stays in
    float32 (`GraphTransformer.cast`), are those of the model itself.

    Args:
        model: with float32 weights.
        dtype: of the copy's layers; for float32 the copy is the model.

    Attributes:
        model: the copy. `refresh` brings it up to date.
    """

    def __init__(self, model: GraphTransformer, dtype: torch.dtype) -> None:
        self.model = model if dtype == torch.float32 else _copy(model, dtype)
        pairs = zip(model.parameters(), self.model.parameters(), strict=True)
        self._pairs = [(master, working) for master, working in pairs if master is not working]

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the weights, and drop old gradients of the copy."""
        for _, working in self._pairs:
            working.grad = None
        _copy_all([working for _, working in self._pairs], [master for master, _ in self._pairs])

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Write the copy's gradients over the model's, which are float32."""
        found = [(master.grad, working.grad) for master, working in self._pairs if working.grad is not None]
        _copy_all([target for target, _ in found], [gradient for _, gradient in found])


def _copy(model: GraphTransformer, dtype: torch.dtype) -> GraphTransformer:
    shared = [module for module in model.modules() if isinstance(module, nn.BatchNorm1d)]  # with running statistics
    shared += model.buffers()
    if model.task == "graph":
        shared.append(model.readout)
    found = copy.deepcopy(model, {id(each): each for each in shared})
    own = set(model.parameters())
    for parameter in found.parameters():
        if parameter not in own:
            parameter.data = parameter.data.to(dtype)
    return found


def _copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)
