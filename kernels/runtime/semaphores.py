"""Counters on a GPU that are zero whenever a kernel that counts with them starts."""

import torch

from .launch import stream_handle


class ZeroedCounters:
    """Zeros that each launch leaves behind as zeros: what counts to its end starts over.

    Launches that may count at the same time must not share them. Those of one stream, and those of one capture in a
    CUDA graph on it, count one after the other, even where they overlap (cuda/overlap.cuh): they have a set for
    themselves, which is zeroed once.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sets: dict[tuple[int, int, int], torch.Tensor] = {}

    def of_call(self, count: int) -> torch.Tensor:
        """[count] int32 zeros for a launch on torch's current stream."""
        stream = stream_handle(self._device.index)
        key = (stream, _capture_id(stream), count)
        if key not in self._sets:
            self._sets[key] = torch.zeros(count, dtype=torch.int32, device=self._device)
        return self._sets[key]


def _capture_id(stream: int) -> int:
    """Which capture in a CUDA graph is under way on the stream, the current one; 0 where none is."""
    if not torch.cuda.is_current_stream_capturing():
        return 0
    from cuda.bindings import driver

    error, _, number, *_ = driver.cuStreamGetCaptureInfo(stream)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"the capture of a stream is not known: {error.name}")
    return int(number)
