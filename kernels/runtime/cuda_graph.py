"""Capture of a function's launches in a CUDA graph; a capture that fails leaves torch as it was."""

import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, NoReturn, TypeVar

import torch

from .semaphores import graph_semaphores

Result = TypeVar("Result")


class CaptureError(RuntimeError):
    """A function cannot be captured in a CUDA graph; the text is torch's first reason."""


@dataclass(frozen=True, eq=False)
class CapturedGraph(Generic[Result]):
    """A CUDA graph with everything that its replays need.

    Attributes:
        graph: the CUDA graph.
        result: result of the last captured call; a replay overwrites its tensors.
        run: the captured function, which holds what its launches read and write, such as a plan with room.
        semaphores: buffers of the captured split-KV launches, kept alive with the graph.
    """

    graph: torch.cuda.CUDAGraph
    result: Result
    run: Callable[[], Result]
    semaphores: Any

    def replay(self) -> Result:
        """Queue the graph on torch's current stream."""
        self.graph.replay()
        return self.result


def capture(run: Callable[[], Result], device: torch.device, launches: int = 1) -> CapturedGraph[Result]:
    """A CUDA graph of `launches` calls of `run` in a row.

    Args:
        run: a function that only queues work on torch's current stream of `device`. It is called twice before the
            capture, so it may compile and tune then; an exception of these calls is raised as it is.
        device: the GPU that `run` works on, current or not.
        launches: captured calls.

    Raises:
        CaptureError: `run` waits for the GPU, does something that a capture does not allow, or queues nothing on
            `device`. Torch's allocator, streams and current device are as they were before.
    """
    with torch.cuda.device(device), graph_semaphores() as semaphores:
        stream, current = torch.cuda.Stream(), torch.cuda.current_stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # torch asks for a warm-up on the stream that captures
            run()
            current.wait_stream(stream)
            try:
                _refuse_synchronisation(run)
            except RuntimeError as error:
                _raise_first(error)
        current.wait_stream(stream)
        graph, pool = torch.cuda.CUDAGraph(), torch.cuda.graph_pool_handle()
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                with torch.cuda.graph(graph, pool=pool, stream=stream):
                    for _ in range(launches):
                        result = run()
        except RuntimeError as error:
            # A capture that failed cannot be ended: torch stays on its stream, and its allocator, in the belief that
            # the capture goes on, would neither free the capture's memory nor empty its cache.
            torch.cuda.set_stream(current)
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(current.device_index, pool)
                torch._C._cuda_releasePool(current.device_index, pool)
            _raise_first(error)
        for warning in caught:
            if "CUDA Graph is empty" in str(warning.message):
                raise CaptureError(
                    f"nothing was queued on {device}: the function works on another device, or not at all"
                )
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
        return CapturedGraph(graph, result, run, semaphores)


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
    """Raise the first of torch's errors; a later one only says that the capture is over."""
    first = error.__context__ if isinstance(error.__context__, RuntimeError) else error
    if isinstance(first, torch.OutOfMemoryError):
        raise first
    raise CaptureError(str(first).strip().partition("\n")[0]) from error
