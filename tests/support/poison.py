"""Buffers that start as NaN between guard rows, so that unwritten elements and writes past an end show."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


def poison(dtype: torch.dtype) -> float | int:
    """NaN, or the least integer."""
    return torch.nan if dtype.is_floating_point else torch.iinfo(dtype).min


def is_poison(values: torch.Tensor) -> bool:
    return bool(torch.isnan(values).all() if values.is_floating_point() else (values == poison(values.dtype)).all())


@contextmanager
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, uninitialised memory is poison, between guards of poison that must be intact at the end."""
    empty = torch.empty
    buffers = []

    def poisoned(shape, *, dtype, device):
        if isinstance(shape, int):  # scratch memory; its guards keep the alignment of 16 bytes
            guard = 16 // dtype.itemsize
            buffer = empty(-(-shape // guard) * guard + 2 * guard, dtype=dtype, device=device).fill_(poison(dtype))
            buffers.append(buffer.view(-1, guard))
            return buffer[guard : guard + shape]
        buffer = empty((shape[0] + 2, *shape[1:]), dtype=dtype, device=device).fill_(poison(dtype))
        buffers.append(buffer)
        return buffer[1:-1]

    def poisoned_like(tensor, *, dtype=None, memory_format):
        assert memory_format == torch.contiguous_format, "a buffer with the strides of an input"
        return poisoned(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)

    def new_poisoned(tensor, shape, *, dtype=None):
        return poisoned(shape, dtype=dtype or tensor.dtype, device=tensor.device)

    with monkeypatch.context() as patch:
        patch.setattr("torch.empty", poisoned)
        patch.setattr("torch.empty_like", poisoned_like)
        patch.setattr("torch.Tensor.new_empty", new_poisoned)
        yield
    assert buffers, "nothing was allocated with torch.empty, empty_like or new_empty"
    for buffer in buffers:
        assert is_poison(buffer[0]), f"written before a buffer of shape {tuple(buffer[1:-1].shape)}"
        assert is_poison(buffer[-1]), f"written past a buffer of shape {tuple(buffer[1:-1].shape)}"
