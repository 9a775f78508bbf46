"""Layers in 16 bits over weights in float32."""

import copy

import torch
from torch import nn

from models import GraphTransformer
from training.vectors import WeightVector


class WorkingCopy:
    """The model whose layers compute a step, beside the one whose weights the optimiser changes.

    The copy has 16-bit weights: two kernels round all of them, and four more make their gradients float32, where
    torch.autocast takes a kernel for each weight. Batch norms, buffers and the readout of graphs, which stays in
    float32 (`GraphTransformer.cast`), are those of the model itself.

    Args:
        model: with float32 weights, which become parts of vectors.
        dtype: of the copy's layers; for float32 the copy is the model.

    Attributes:
        model: the copy. `refresh` brings it up to date.
        vectors: all weights, matrices apart from others, and those with a copy apart from those without.
    """

    def __init__(self, model: GraphTransformer, dtype: torch.dtype) -> None:
        self.model = model if dtype == torch.float32 else _copy(model, dtype)
        pairs = list(zip(model.parameters(), self.model.parameters(), strict=True))
        self.vectors: list[WeightVector] = []
        for decays in (True, False):
            kind = [(weight, working) for weight, working in pairs if (weight.dim() > 1) == decays]
            own = [pair for pair in kind if pair[0] is not pair[1]]
            shared = [weight for weight, working in kind if weight is working]
            if own:
                self.vectors.append(WeightVector.of([one for one, _ in own], [other for _, other in own], decays))
            if shared:
                self.vectors.append(WeightVector.of(shared, None, decays))

    def refresh(self) -> None:
        """Round the weights, and drop old gradients of the copy."""
        for vector in self.vectors:
            vector.refresh()

    def collect_gradients(self) -> None:
        """Write the copy's gradients over the model's, which are float32."""
        for vector in self.vectors:
            vector.collect_gradients()


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
