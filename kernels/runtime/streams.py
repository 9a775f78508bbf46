"""Other streams use tensors that kernels of one stream are still writing: waits, and lifetime of the memory."""

from collections.abc import Iterable

import torch

from .launch import stream_handle
from .semaphores import is_capturing


class Made:
    """Marks the point of torch's current stream after which tensors are complete.

    Owned by whatever keeps the tensors. It holds one CUDA event, and the handles of the streams that use the tensors:
    at most as many as the process has streams.
    """

    __slots__ = ("_device", "_event", "_streams")

    def __init__(self, device: torch.device | None, event: torch.cuda.Event | None, streams: set[int]) -> None:
        self._device, self._event, self._streams = device, event, streams

    @classmethod
    def on(cls, device: torch.device) -> "Made":
        """After the work queued so far on the current stream of `device`. On a CPU all tensors are complete.

        Inside a capture there is no event: only streams of that capture could wait for it, and elsewhere a wait fails.
        """
        if device.type != "cuda":
            return cls(None, None, set())
        event = None
        if not is_capturing(device):
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
        return cls(device, event, {stream_handle(device.index)})

    def used_by_current_stream(self, tensors: Iterable[torch.Tensor | None]) -> None:
        """Make torch's current stream wait until the tensors are complete, without waiting on the host, and keep the
        allocator from reusing their memory before its work is done. Both are done once for each stream.

        Nothing is done inside a capture. A capture cannot wait for an event recorded outside of it, and need not:
        `torch.cuda.graph` waits for the GPU before it begins. A graph needs the tensors as long as it is replayed: its
        owner keeps them.

        Args:
            tensors: the same ones at every call; None is skipped.
        """
        device = self._device
        if device is None or (handle := stream_handle(device.index)) in self._streams or is_capturing(device):
            return
        stream = torch.cuda.current_stream(device)
        if self._event is not None:
            stream.wait_event(self._event)
        for tensor in tensors:
            if tensor is not None:
                tensor.record_stream(stream)
        self._streams.add(handle)  # last: another thread on this stream must not run ahead of the wait
