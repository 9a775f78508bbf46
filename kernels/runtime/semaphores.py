"""Semaphores for split-KV: int32 counters that are 0 before and after every launch (the last arrival resets them).

Launches on one stream run in order, also with programmatic dependent launch, so all plans share one buffer per stream.
A CUDA graph may run concurrently with any stream, so each graph has its own buffers:

    runtime.cuda_graph.capture   allocates them before the capture and keeps them with the graph (`graph_semaphores`)
    operators of torch.compile   zeros at each launch (`FreshSemaphores`): its CUDA graphs own all memory of a call
    any other capture            a node of the graph zeroes memory from the graph's pool
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .launch import current_gpu, stream_handle


class _Current(threading.local):
    fresh: bool = False  # inside of `FreshSemaphores`


_current = _Current()
MOST_STREAMS = 128  # torch has 32 streams of each priority
# Key: GPU, stream; value: the buffer, if there is one. By stream and not by thread: backward passes run in threads of
# autograd.
_Buffers = dict[tuple[int, int], list[torch.Tensor]]
# Eager launches. Bound: MOST_STREAMS, as long as the process. The oldest may be dropped at any time: its memory goes to
# later work of its own stream, and the stream's next launch gets new zeros.
_eager: _Buffers = {}
_of_graphs: _Buffers = {}  # captures in progress; then the graph owns the buffer


def semaphores(count: int, device: torch.device) -> torch.Tensor:
    """At least [count] int32 zeros for one launch on torch's current stream of the GPU `device`."""
    if _current.fresh:
        return torch.zeros(count, dtype=torch.int32, device=device)
    key = (device.index, stream_handle(device.index))
    held, capturing = _of_graphs.get(key), is_capturing(device)
    if held is None:
        held = [] if capturing else _eager.get(key)
        if held is None:
            for oldest in list(_eager)[: 1 - MOST_STREAMS]:
                _eager.pop(oldest, None)
            held = _eager.setdefault(key, [])
    if held and held[0].numel() >= count:
        return held[0]
    buffer = torch.zeros(count, dtype=torch.int32, device=device)
    if not capturing:  # a capture's memory may be used again by the graph
        held[:] = [buffer]
    return buffer


@contextmanager
def graph_semaphores(device_index: int, stream: int) -> Iterator[list[torch.Tensor]]:
    """The buffer of one CUDA graph, used by launches on this stream inside the context (warm-up, then capture).

    The caller keeps it as long as the graph may be replayed.
    """
    key = device_index, stream
    _of_graphs[key] = held = []
    try:
        yield held
    finally:
        del _of_graphs[key]


class FreshSemaphores:
    """This thread's launches inside the context get newly zeroed memory."""

    __slots__ = ("_outer",)

    def __enter__(self) -> None:
        self._outer, _current.fresh = _current.fresh, True

    def __exit__(self, *_: object) -> None:
        _current.fresh = self._outer


def is_capturing(device: torch.device) -> bool:
    """Whether torch's current stream of `device` is being captured; a CPU has none."""
    if device.type != "cuda":
        return False
    if device.index == current_gpu():
        return torch.cuda.is_current_stream_capturing()
    with torch.cuda.device(device):
        return torch.cuda.is_current_stream_capturing()
