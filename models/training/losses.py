"""Losses: means over the known labels of `models.metrics.labels_of`, without data-dependent shapes."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from models.metrics import OF_TARGETS, UNKNOWN

Loss = Callable[[Tensor, Tensor], Tensor]  # of outputs and labels


def loss_for(metric: str, asked: str) -> Loss:
    """The loss of a metric.

    Args:
        asked: `training.loss` of a configuration.

    Raises:
        ValueError: it is of regression, and the metric is not.
    """
    if asked == "auto":
        return BY_METRIC[metric]
    if metric not in OF_TARGETS:
        raise ValueError(f"training.loss = {asked!r}: it is of regression, and the metric here is {metric}; use auto")
    return {"l1": l1, "l2": l2}[asked]


def cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    # A separate sum: torch's mean reduction of the loss runs in one thread block.
    return _cross_entropies(logits, labels).sum() / (labels >= 0).sum()


def balanced_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    """As in Dwivedi et al. (2020): the weight of a row is the share of rows of other classes; 0 where all rows are of
    one class."""
    known = labels >= 0
    of_class = (labels[:, None] == torch.arange(logits.shape[1], device=labels.device)).sum(0)
    weights = ((known.sum() - of_class)[labels.clamp(min=0)] * known).float()
    return (_cross_entropies(logits, labels) * weights).sum() / weights.sum().clamp(min=1)


def _cross_entropies(logits: Tensor, labels: Tensor) -> Tensor:
    """[rows], 0 for an unknown label."""
    return F.cross_entropy(logits.float(), labels.where(labels >= 0, UNKNOWN), reduction="none")


def binary_cross_entropy(logits: Tensor, labels: Tensor) -> Tensor:
    known = ~labels.isnan()
    targets, weight = labels.where(known, 0.0), known.float()
    loss = F.binary_cross_entropy_with_logits(logits.float(), targets, weight=weight, reduction="sum")
    return loss / known.sum().clamp(min=1)


def l1(outputs: Tensor, labels: Tensor) -> Tensor:
    return _mean_of_known(outputs, labels, torch.abs)


def l2(outputs: Tensor, labels: Tensor) -> Tensor:
    return _mean_of_known(outputs, labels, torch.square)


def _mean_of_known(outputs: Tensor, labels: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
    known = ~labels.isnan()
    return function((outputs.float() - labels).where(known, 0.0)).sum() / known.sum().clamp(min=1)


BY_METRIC: dict[str, Loss] = {
    "accuracy": cross_entropy,
    "balanced_accuracy": balanced_cross_entropy,
    "f1": balanced_cross_entropy,
    "rocauc": binary_cross_entropy,
    "ap": binary_cross_entropy,
    "mae": l1,
    "rmse": l2,
}
