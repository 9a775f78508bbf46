"""What the precision of a model costs: logits of a 16-bit model against the same model in float32."""

from dataclasses import dataclass

import torch
from torch import Tensor

from bench.verify import compare


@dataclass(frozen=True)
class Accuracy:
    """Attributes:
    argmax_agreement: share of the rows with the same largest logit, 0 to 1; None for a single output.
    relative: error of the logits as `bench.verify.Agreement` defines it.
    max_abs: largest absolute error.
    """

    argmax_agreement: float | None
    relative: float
    max_abs: float


def accuracy(logits: Tensor, exact: Tensor) -> Accuracy:
    """Compare logits [rows, classes] of any precision with float32 ones."""
    if exact.dtype != torch.float32:
        raise TypeError(f"exact: got {exact.dtype}; logits of a float32 model are needed")
    error = compare(logits, exact)
    same = None
    if exact.shape[1] > 1:
        same = (logits.argmax(1) == exact.argmax(1)).double().mean().item()
    return Accuracy(same, error.relative, error.max_abs)
