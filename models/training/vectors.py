"""Weights as views of a few vectors: the time of a small model's step grows with its number of tensors."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

ALIGNMENT = 8  # elements: parts of a 16-bit vector start at whole 16 bytes
# torch's fused optimisers give a block of threads 65,536 elements of one tensor, and a launch 36 tensors.
CHUNK, LAUNCH_TENSORS = 65_536, 36
LEAST_PIECE = 4_096  # elements of a tensor


@dataclass(frozen=True, eq=False)
class WeightVector:
    """Concatenated float32 weights, with padding for alignment.

    Attributes:
        values, gradients: [n] float32; the model's parameters are views of the former, and with a copy their gradients
            of the latter. Padding is 0 and stays so.
        copy: [n] of another type; `weights` are its views; None without a copy.
        weights: the parameters that compute, of the copy or of the model itself.
        decays: whether weight decay acts on them: matrices.
    """

    values: Tensor
    gradients: Tensor
    copy: Tensor | None
    weights: list[nn.Parameter]
    decays: bool

    @classmethod
    def of(cls, parts: list[nn.Parameter], copies: list[nn.Parameter] | None, decays: bool) -> "WeightVector":
        """Make the parameters views of a new vector, and so their copies if there are any."""
        values = _as_vector(parts)
        gradients, copy = torch.zeros_like(values), None
        if copies:
            copy = _as_vector(copies)
            for part, gradient in zip(parts, _views(gradients, parts), strict=True):
                part.grad = gradient
        return cls(values, gradients, copy, copies or parts, decays)

    @torch.no_grad()
    def refresh(self) -> None:
        """Round the weights of the copy, and drop old gradients: autograd then keeps the new ones, without a sum."""
        if self.copy is not None:
            self.copy.copy_(self.values)
        for weight in self.weights:
            weight.grad = None

    @torch.no_grad()
    def collect_gradients(self) -> None:
        """Copy the gradients of the weights to `gradients`; 0 for missing ones."""
        missing = [weight.numel() for weight in self.weights if weight.grad is None]
        zeros, found = self.weights[0].new_zeros(max(ALIGNMENT, *missing, 0)), []
        for weight in self.weights:
            found.append(zeros[: weight.numel()] if weight.grad is None else weight.grad.reshape(-1))
            if padding := -weight.numel() % ALIGNMENT:
                found.append(zeros[:padding])
        self.gradients.copy_(torch.cat(found))

    def pieces(self) -> list[nn.Parameter]:
        """The vector as tensors for an optimiser, which changes them in place.

        On a GPU they are as many as fit in a launch of torch's fused ones, so that many blocks of threads share the
        work; a vector too long for one launch has enough blocks as it is.
        """
        length = len(self.values)
        size = length
        if self.values.is_cuda and length <= LAUNCH_TENSORS * CHUNK:
            size = max(LEAST_PIECE, -(-length // (LAUNCH_TENSORS * ALIGNMENT)) * ALIGNMENT)
        pieces = [nn.Parameter(piece) for piece in self.values.split(size)]
        for piece, gradient in zip(pieces, self.gradients.split(size), strict=True):
            piece.grad = gradient
        return pieces


def _as_vector(weights: Sequence[nn.Parameter]) -> Tensor:
    """A vector whose views the parameters become."""
    padded = [F.pad(weight.detach().flatten(), (0, -weight.numel() % ALIGNMENT)) for weight in weights]
    vector = torch.cat(padded)
    for weight, view in zip(weights, _views(vector, weights), strict=True):
        weight.data = view
    return vector


def _views(vector: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Parts of a vector in the shapes of the weights."""
    sizes = [weight.numel() + -weight.numel() % ALIGNMENT for weight in weights]
    parts = zip(vector.split(sizes), weights, strict=True)
    return [part[: weight.numel()].view_as(weight) for part, weight in parts]
