"""Optimiser and learning rate."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from configs.schema import TrainingConfig
from models.training.vectors import WeightVector

MOMENTUM = 0.9  # of sgd


def make_optimiser(
    vectors: Sequence[WeightVector], config: TrainingConfig, device: torch.device
) -> torch.optim.Optimizer:
    """The optimiser of `training.optimizer`; on a GPU capturable, with gradient scaling."""
    groups = [
        {"params": vector.pieces(), "weight_decay": config.weight_decay if vector.decays else 0.0} for vector in vectors
    ]
    on_gpu = device.type == "cuda"
    options = {"lr": torch.tensor(config.lr, device=device) if on_gpu else config.lr, "fused": on_gpu}
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=MOMENTUM, **options)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[config.optimizer]
    return kind(groups, capturable=on_gpu, **options)


def learning_rate(config: TrainingConfig, epoch: float) -> float:
    """The learning rate after `epoch` epochs (fractional within an epoch)."""
    if epoch < config.warmup_epochs:
        return config.lr * epoch / config.warmup_epochs
    if config.schedule == "constant":
        return config.lr
    done = (epoch - config.warmup_epochs) / (config.epochs - config.warmup_epochs)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """Set the learning rate; in place on a GPU, where a CUDA graph reads it."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
