"""Optimiser and learning rate."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.schema import TrainingConfig

MOMENTUM = 0.9  # of sgd
ALIGNMENT = 4  # elements: parts of a vector start at whole 16 bytes


def make_optimiser(model: nn.Module, config: TrainingConfig, device: torch.device) -> torch.optim.Optimizer:
    """The optimiser of `training.optimizer`. On a GPU one that a CUDA graph can capture, gradient scaling included.

    The weights become parts of two vectors, those with weight decay and those without, and their gradients likewise:
    the optimiser of a small model takes as long as its number of tensors. Gradients are set to zero in place.
    """
    parameters = list(model.parameters())
    matrices = [parameter for parameter in parameters if parameter.dim() > 1]
    others = [parameter for parameter in parameters if parameter.dim() <= 1]
    groups = [
        {"params": [_as_one_vector(matrices)], "weight_decay": config.weight_decay},
        {"params": [_as_one_vector(others)], "weight_decay": 0.0},
    ]
    on_gpu = device.type == "cuda"
    options = {"lr": torch.tensor(config.lr, device=device) if on_gpu else config.lr, "fused": on_gpu}
    if config.optimizer == "sgd":
        return torch.optim.SGD(groups, momentum=MOMENTUM, **options)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[config.optimizer]
    return kind(groups, capturable=on_gpu, **options)


def _as_one_vector(parameters: list[nn.Parameter]) -> nn.Parameter:
    """A vector whose parts the parameters become, with its gradient."""
    padded = [F.pad(parameter.detach().flatten(), (0, -parameter.numel() % ALIGNMENT)) for parameter in parameters]
    vector = nn.Parameter(torch.cat(padded))
    vector.grad = torch.zeros_like(vector)
    sizes = [len(part) for part in padded]
    parts = zip(parameters, vector.detach().split(sizes), vector.grad.split(sizes), strict=True)
    for parameter, values, gradient in parts:
        parameter.data = values[: parameter.numel()].view_as(parameter)
        parameter.grad = gradient[: parameter.numel()].view_as(parameter)
    return vector


def learning_rate(config: TrainingConfig, epoch: float) -> float:
    """The rate after `epoch` epochs, a fraction for a batch within one."""
    if epoch < config.warmup_epochs:
        return config.lr * epoch / config.warmup_epochs
    if config.schedule == "constant":
        return config.lr
    done = (epoch - config.warmup_epochs) / (config.epochs - config.warmup_epochs)
    return config.lr * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))


def set_learning_rate(optimiser: torch.optim.Optimizer, rate: float) -> None:
    """In place on a GPU, where a CUDA graph reads it."""
    for group in optimiser.param_groups:
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        else:
            group["lr"] = rate
