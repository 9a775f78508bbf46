"""Targets of regression: standardised by the training split, so that one loss and one learning rate suit all units."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

LAST_LAYER = "readout.classes"


@dataclass(frozen=True)
class Targets:
    """Mean and standard deviation of each of T targets, float64 [T]."""

    mean: Tensor
    deviation: Tensor

    @classmethod
    def of(cls, labels: Tensor) -> Self:
        """Those of the known labels [rows, T]; a constant target is not scaled.

        Raises:
            ValueError: a target has no known label.
        """
        columns = [column[~column.isnan()] for column in labels.double().T]
        for target, known in enumerate(columns):
            if not len(known):
                raise ValueError(f"target {target} has no known label in the training split; at least one is needed")
        mean = torch.stack([column.mean() for column in columns])
        deviation = torch.stack([column.std(correction=0) for column in columns])
        return cls(mean, deviation.where(deviation > 0, 1.0))

    def standardised(self, labels: Tensor) -> Tensor:
        """Labels [rows, T] float32 as the model learns them."""
        return ((labels.double() - self.mean.to(labels.device)) / self.deviation.to(labels.device)).float()

    def in_units(self, outputs: Tensor) -> Tensor:
        """Outputs or standardised labels [rows, T] in the unit of each target, float64."""
        return outputs.double() * self.deviation.to(outputs.device) + self.mean.to(outputs.device)

    def folded(self, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Weights of a model that predicts in units: the last layer scales and shifts."""
        weight, bias = (weights[f"{LAST_LAYER}.{name}"] for name in ("weight", "bias"))
        scaled = weight.double() * self.deviation.to(weight.device)[:, None]
        return dict(weights) | {
            f"{LAST_LAYER}.weight": scaled.to(weight.dtype),
            f"{LAST_LAYER}.bias": self.in_units(bias[None])[0].to(bias.dtype),
        }
