"""Checks of arguments: an error names the argument, its value, what is allowed and, if useful, what to do."""

import math
from collections.abc import Collection
from typing import Any

import torch

from .errors import BackendUnavailableError

MOST_COLUMNS = 65_535  # most columns of a head, and most heads; backends may have lower limits
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_integer(name: str, value: Any, least: int, most: int) -> None:
    """Raise a TypeError or ValueError unless `value` is an integer from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name}: got {value!r}; an integer from {least} to {most:,} is needed")
    if not least <= value <= most:
        raise ValueError(f"{name}: got {value}; {least} to {most:,} are allowed")


def check_flag(name: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: got {value!r}; True and False are allowed")


def finite_number(name: str, value: Any) -> float:
    """`value` as a float; raises unless it is a finite number, or a tensor of one that requires no gradient."""
    if isinstance(value, (bool, str, bytes)):
        raise TypeError(f"{name}: got {value!r}; a number is needed")
    if isinstance(value, torch.Tensor) and value.requires_grad:
        raise ValueError(f"{name}: got a tensor that requires a gradient, but a number gets none; detach() it")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{name}: got {value!r}; a number is needed") from None
    if not -math.inf < number < math.inf:
        raise ValueError(f"{name}: got {number}; a finite number is needed")
    return number


def check_rate(name: str, value: Any) -> None:
    """Raise unless `value` is a number with 0 <= value <= 1."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name}: got {value!r}; a rate from 0 to 1 is needed")
    if not 0 <= value <= 1:
        raise ValueError(f"{name}: got {value}; a rate from 0 to 1 is needed")


def check_dense(name: str, value: Any) -> None:
    """Raise unless `value` is a dense tensor."""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name}: got {type(value).__name__}; a torch.Tensor is needed")
    if value.layout != torch.strided or value.is_nested:
        kind = "a nested tensor" if value.is_nested else f"layout {value.layout}"
        raise ValueError(f"{name}: got {kind}; dense tensors are needed")


def check_matrix(name: str, value: Any) -> None:
    """Raise unless `value` is a dense floating-point tensor [N, F]."""
    check_dense(name, value)
    if value.dim() != 2 or value.dtype not in DTYPES:
        raise ValueError(f"{name}: got {value.dtype} {tuple(value.shape)}; a floating-point tensor [N, F] is needed")


def check_word(name: str, value: Any, allowed: Collection[str]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ValueError(f"{name}: got {value!r}; allowed are {', '.join(map(repr, allowed))}")


def check_dtype(name: str, value: Any, allowed: Collection[torch.dtype]) -> None:
    """Raise unless `value` is one of `allowed`, or None (not known yet)."""
    if value is not None and value not in allowed:
        words = ", ".join(str(dtype) for dtype in allowed)
        raise ValueError(f"{name}: got {value!r}; allowed are {words}, and None where it is not known")


def refuse_tracing(name: str) -> None:
    """Raise a RuntimeError in torch.jit.trace, which would record numbers of one graph as constants."""
    if torch.jit.is_tracing():
        raise RuntimeError(
            f"{name}: torch.jit.trace cannot record attention over a graph; torch.compile can, and torch.export takes "
            "the call of a plan"
        )


def resolve_device(device: torch.device | str | None) -> torch.device:
    """The device with its index; None means the GPU if there is one, else the CPU.

    Raises:
        TypeError, ValueError: it is no device.
        BackendUnavailableError: this machine has no such GPU.
    """
    # `is_available` asks the driver, which costs as much as a launch; if CUDA is initialised, it is available.
    found = torch.cuda.device_count() if torch.cuda.is_initialized() or torch.cuda.is_available() else 0
    if device is None:
        device = "cuda" if found else "cpu"
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise TypeError(f"device: got {device!r}; a torch.device, a text such as 'cpu' or 'cuda:0', or None is needed")
    try:
        device = torch.device(device)
    except (RuntimeError, ValueError):  # ValueError: of a huge number
        raise ValueError(f"device: got {device!r}; allowed are 'cpu', 'cuda', 'cuda:0', 'cuda:1', ...") from None
    if device.type != "cuda":
        return device
    index = torch.cuda.current_device() if device.index is None and found else device.index or 0
    if index >= found:
        which = f"the GPUs here are cuda:0 to cuda:{found - 1}" if found else "no NVIDIA GPU, or a PyTorch without CUDA"
        raise BackendUnavailableError(f"device: got {str(device)!r}, and {which}; device='cpu' runs everywhere")
    return torch.device("cuda", index)
