"""Semaphores for split-KV: int32 counters that are 0 before and after every launch (the last arrival resets them).

Launches on one stream run in order, also with programmatic dependent launch, so all plans share one buffer per stream.
A CUDA graph may run concurrently with any stream, so each graph has its own buffers:

    runtime.cuda_graph.capture   allocates them before the capture and keeps them with the graph (`graph_semaphores`)
    operators of torch.compile   zeros at each launch (`fresh_semaphores`): its CUDA graphs own all memory of a call
    any other capture            a node of the graph zeroes memory from the graph's pool
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .launch import current_gpu, stream_handle

_Buffers = dict[tuple[int, int], torch.Tensor]  # by device index and stream handle


class _Current(threading.local):
    buffers: _Buffers | None = None  # of the graph that this thread captures
    fresh: bool = False  # inside of `fresh_semaphores`


_eager: _Buffers = {}
_current = _Current()


def semaphores(count: int, device: torch.device) -> torch.Tensor:
    """At least [count] int32 zeros for one launch on torch's current stream of the GPU `device`."""
    if _current.fresh:
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (device.index, stream_handle(device.index))
    buffers = _eager if _current.buffers is None else _current.buffers
    buffer = buffers.get(key)
    capturing = is_capturing(device)
    if capturing and (buffers is _eager or buffer is None or buffer.numel() < count):
        return torch.zeros(count, dtype=torch.int32, device=device)
    if buffer is None or buffer.numel() < count:
        buffers[key] = buffer = torch.zeros(count, dtype=torch.int32, device=device)
    return buffer


@contextmanager
def graph_semaphores() -> Iterator[_Buffers]:
    """Buffers for one CUDA graph, used by this thread's launches inside the context (warm-up, then capture).

    The caller keeps them as long as the graph may be replayed.
    """
    outer, _current.buffers = _current.buffers, {}
    try:
        yield _current.buffers
    finally:
        _current.buffers = outer


@contextmanager
def fresh_semaphores() -> Iterator[None]:
    """This thread's launches inside the context get newly zeroed memory."""
    outer, _current.fresh = _current.fresh, True
    try:
        yield
    finally:
        _current.fresh = outer


def is_capturing(device: torch.device) -> bool:
    """Whether torch's current stream of the GPU `device` is being captured."""
    if device.index == current_gpu():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
