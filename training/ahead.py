"""Batches that are made while the GPU runs the step before."""

from collections.abc import Iterator
from typing import TypeVar

import torch

Item = TypeVar("Item")


class SideStream:
    """Makes items on a CUDA stream of its own: a plan reads its sizes on the host, and on the current stream the host
    would wait for all steps that are queued there. Elsewhere than on a GPU items are made as they come.

    One object serves all epochs, since torch keeps the memory of each stream apart.
    """

    def __init__(self, device: torch.device) -> None:
        # Its small kernels come before those of a step.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def made(self, items: Iterator[Item]) -> Iterator[Item]:
        """The items, each complete on the device. An item's memory is used again when the work that its user queued on
        the current stream, before asking for the next item, is done."""
        if self._stream is None:
            yield from items
            return
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))  # the last item of the epoch before
        before = None  # the item before the last one, and the end of its use
        while True:
            with torch.cuda.stream(self._stream):
                item = next(items, None)
                self._stream.synchronize()
            if item is None:
                return
            yield item
            if before is not None:
                self._stream.wait_event(before[1])
            before = item, torch.cuda.current_stream(self._stream.device).record_event()
