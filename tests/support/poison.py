"""Output buffers that start as NaN between guard rows, so that unwritten elements and writes past an end show."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch


@contextmanager
def poisoned_buffers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Inside, uninitialised memory is NaN, with a guard of NaN before and after it that must be intact at the end."""
    empty = torch.empty
    buffers = []

    def poisoned(shape, *, dtype, device):
        if isinstance(shape, int):  # scratch memory; its guards keep the alignment of 16 bytes
            guard = 16 // dtype.itemsize
            buffer = empty(shape + 2 * guard, dtype=dtype, device=device).fill_(torch.nan)
            buffers.append(buffer.view(-1, guard))
            return buffer[guard:-guard]
        buffer = empty((shape[0] + 2, *shape[1:]), dtype=dtype, device=device).fill_(torch.nan)
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
        assert torch.isnan(buffer[0]).all(), f"written before a buffer of shape {tuple(buffer[1:-1].shape)}"
        assert torch.isnan(buffer[-1]).all(), f"written past a buffer of shape {tuple(buffer[1:-1].shape)}"
