"""Work on a second CUDA stream beside the current one."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class Beside:
    """Work whose results are needed later, on a stream of its own. On the CPU it is done at once.

    Tensors that it reads must stay in memory meanwhile, which torch does not know: `keep` holds them. The work of one
    `keep` may be behind the current stream, not more.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._kept: tuple[torch.cuda.Event, tuple[Tensor | None, ...]] | None = None

    @contextmanager
    def work(self) -> Iterator[None]:
        """Inside, work is queued on the second stream, after all that is queued on the current one."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            yield

    def keep(self, *tensors: Tensor | None) -> None:
        """Hold what the work so far reads; the current stream waits for the work of the `keep` before."""
        if self._stream is None:
            return
        if self._kept is not None:
            torch.cuda.current_stream(self._device).wait_event(self._kept[0])
        self._kept = self._stream.record_event(), tensors

    def join(self) -> None:
        """The current stream waits for all work."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
            self._kept = None
