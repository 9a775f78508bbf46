"""A second CUDA stream beside the one that a step is queued on."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class SecondStream:
    """A second CUDA stream for work whose results are needed later. On the CPU the work runs immediately.

    torch does not know which tensors the second stream reads, so `keep` holds references to them. At most the work of
    one `keep` may lag behind the current stream.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._kept: tuple[torch.cuda.Event, tuple[Tensor | None, ...]] | None = None

    @contextmanager
    def work(self) -> Iterator[None]:
        """Queue work on the second stream, after all work queued on the current one."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def keep(self, *tensors: Tensor | None) -> None:
        """Hold the tensors that the queued work reads; the current stream waits for the work of the previous `keep`."""
        if self._stream is None:
            return
        if self._kept is not None:
            torch.cuda.current_stream(self._device).wait_event(self._kept[0])
        self._kept = self._stream.record_event(), tensors

    def join(self) -> None:
        """Make the current stream wait for all work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._kept = None
