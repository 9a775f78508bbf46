"""Capture of queued work in a CUDA graph, which leaves torch as it was where that fails."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import NoReturn, TypeVar

import torch

Result = TypeVar("Result")


class CaptureError(RuntimeError):
    """Work cannot be captured in a CUDA graph; the text is torch's first reason."""


def capture(run: Callable[[], Result], launches: int = 1) -> tuple[torch.cuda.CUDAGraph, Result]:
    """A CUDA graph of `launches` calls of `run` in a row, and what the last of them returned.

    `run` is called twice before: it may compile and tune, and what fails there is raised as it is.

    Raises:
        CaptureError: the work waits for the GPU, or does what a capture does not allow. Torch's allocator and streams
            are as they were before.
    """
    stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):  # torch asks for a warm-up on the stream that captures
        run()
    current.wait_stream(stream)
    try:
        _refuse_synchronisation(run)
    except RuntimeError as error:
        _raise_first(error)
    graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
    try:
        with torch.cuda.graph(graph, pool=pool, stream=stream):
            for _ in range(launches):
                result = run()
    except RuntimeError as error:
        # A capture that failed cannot be ended: torch stays on its stream, and its allocator, in the belief that the
        # capture goes on, would neither free the capture's memory nor empty its cache.
        torch.cuda.set_stream(current)
        with suppress(RuntimeError):
            torch._C._cuda_endAllocateToPool(current.device_index, pool)
            torch._C._cuda_releasePool(current.device_index, pool)
        _raise_first(error)
    return graph, result


def _refuse_synchronisation(run: Callable[[], object]) -> None:
    """Raise torch's RuntimeError if `run` waits for the GPU, which a capture does not survive."""
    mode = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode(mode)


def _raise_first(error: RuntimeError) -> NoReturn:
    """Torch's second error only says that the capture is over."""
    first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
    if isinstance(first, torch.OutOfMemoryError):
        raise first
    raise CaptureError(str(first).strip().partition("\n")[0]) from error
