"""torch's float32 matmul precision, for a call."""

from collections.abc import Callable
from typing import TypeVar

import torch

Found = TypeVar("Found")


def with_precision(precision: str, run: Callable[[], Found]) -> Found:
    """A call under a float32 matmul precision, which is set back afterwards."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        return run()
    finally:
        torch.set_float32_matmul_precision(before)
