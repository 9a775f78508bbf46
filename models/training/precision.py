"""16-bit layers with float32 weights."""

import copy

import torch
from torch import nn

from models import GraphModel
from models.training.vectors import WeightVector


class WorkingCopy:
    """A 16-bit copy of the model for forward and backward passes; the optimiser updates the float32 model.

    Two kernels round all weights and four convert all gradients, where torch.autocast runs a kernel per weight. Batch
    norms, buffers and the float32 readout of graph tasks (`GraphModel.cast`) are shared with the model.

    Args:
        model: model with float32 weights, which become views of vectors.
        dtype: type of the layers of the copy; for float32 the copy is the model.

    Attributes:
        model: the copy; updated by `refresh`.
        vectors: all weights, in separate vectors by weight decay and by having a copy.
    """

    def __init__(self, model: GraphModel, dtype: torch.dtype) -> None:
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
        """Round the weights into the copy, and clear its gradients."""
        for vector in self.vectors:
            vector.refresh()

    def collect_gradients(self) -> None:
        """Copy the gradients of the copy to the float32 gradients of the model."""
        for vector in self.vectors:
            vector.collect_gradients()


def _copy(model: GraphModel, dtype: torch.dtype) -> GraphModel:
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
