"""Captures a function in a CUDA graph; a failed capture leaves torch's state unchanged.

Other threads may allocate memory and wait for the GPU during a capture.
"""

import ctypes
import gc
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Generic, NoReturn, TypeVar

import torch

from ..torch_side.torch_private import abandon_pool
from .launch import stream_handle
from .semaphores import graph_semaphores
from .tensor_state import TensorState

Result = TypeVar("Result")
MODE = "thread_local"  # in "global" another thread's cudaMalloc would invalidate a capture
CAPTURE_ACTIVE = 1  # CU_STREAM_CAPTURE_STATUS_ACTIVE


class CaptureError(RuntimeError):
    """A function cannot be captured in a CUDA graph; the text is the first error."""


class KeptResults:
    """Results that were computed from tensors before a capture, and that its CUDA graph reads. The graph owns them."""

    def __init__(self) -> None:
        self._results: dict[tuple[int, int], tuple[str, TensorState, Any]] = {}

    def add(self, name: str, state: TensorState, result: Any) -> None:
        """name: argument that the tensor came from; state: of the tensor that `result` was computed from."""
        self._results[id(state), id(result)] = name, state, result

    def check(self) -> None:
        """Raise a CaptureError if a tensor has changed."""
        for name, state, _ in self._results.values():
            if state.has_changed():
                tensor = state.reference()
                raise CaptureError(
                    f"{name}: the tensor of shape {tuple(tensor.shape)} on {tensor.device} was changed since the "
                    "capture, and the CUDA graph keeps the plan of its old values. Capture again; or give the layers "
                    "cache=False, and each replay plans the current values; or use a PlanRoom"
                )


# Captures in progress; then the graph owns the results. Key: GPU, stream, and not thread: autograd has own threads.
_kept: dict[tuple[int, int], KeptResults] = {}


def kept_results(device: torch.device) -> KeptResults | None:
    """The kept results of the capture by `capture` on torch's current stream; None: the stream has no such capture."""
    return _kept.get((device.index, stream_handle(device.index)))


@dataclass(frozen=True, eq=False)
class CapturedGraph(Generic[Result]):
    """A CUDA graph, with all objects that its replays need.

    Attributes:
        graph: the CUDA graph.
        result: result of the last captured call; a replay overwrites its tensors.
        run: the captured function; it keeps alive what its launches read and write, such as a plan with room.
        semaphores: buffers of the captured split-KV launches, kept alive with the graph.
        stream: the stream that was captured.
        kept: results of tensors, computed before the capture.
    """

    graph: torch.cuda.CUDAGraph
    result: Result
    run: Callable[[], Result]
    semaphores: Any
    stream: torch.cuda.Stream
    kept: KeptResults = field(default_factory=KeptResults)

    def replay(self) -> Result:
        """Queue the graph on torch's current stream.

        Raises:
            CaptureError: an edge_index whose plan was made before the capture was changed since; the text names it.
        """
        self.kept.check()
        self.graph.replay()
        return self.result


def capture(
    run: Callable[[], Result], device: torch.device, launches: int = 1, shares: CapturedGraph[Any] | None = None
) -> CapturedGraph[Result]:
    """Capture `launches` consecutive calls of `run` in a CUDA graph.

    Args:
        run: a function that only queues work on torch's current stream of `device`. It is called twice before the
            capture, where it may compile and tune; exceptions of these calls propagate.
        device: the GPU that `run` uses; need not be the current one.
        launches: number of captured calls.
        shares: a graph whose temporary memory this one uses, too: never run the two at the same time.

    Raises:
        CaptureError: `run` waits for the GPU, does something else that a capture does not allow, or queues nothing on
            `device`. Torch's allocator, random numbers, streams and current device are unchanged.
    """
    with torch.cuda.device(device):
        # torch's allocator gives freed memory to the same stream only.
        stream, current = shares.stream if shares else torch.cuda.Stream(), torch.cuda.current_stream()
        with graph_semaphores(current.device_index, stream.cuda_stream) as semaphores:
            return _capture(run, stream, current, launches, semaphores, shares)


def _capture(
    run: Callable[[], Result],
    stream: torch.cuda.Stream,
    current: torch.cuda.Stream,
    launches: int,
    semaphores: Any,
    shares: CapturedGraph[Any] | None,
) -> CapturedGraph[Result]:
    stream.wait_stream(current)
    with torch.cuda.stream(stream):  # torch asks for a warm-up on the stream that captures
        run()
        run()
    current.wait_stream(stream)
    graph, pool = torch.cuda.CUDAGraph(), shares.graph.pool() if shares else torch.cuda.graph_pool_handle()
    key, kept = (current.device_index, stream.cuda_stream), KeptResults()
    _kept[key], first = kept, None
    try:
        with (
            without_collector(),
            torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode=MODE),
        ):
            try:
                for _ in range(launches):
                    result = run()
            except BaseException as error:
                first = error
                raise
            is_empty = _num_nodes(stream.cuda_stream) == 0
    except RuntimeError as error:  # another error ends the capture by itself, or comes with one of torch's
        _abandon(stream, current, pool)
        _raise_first(first or error)
    finally:
        del _kept[key]
    if is_empty:
        raise CaptureError(
            f"nothing was queued on cuda:{current.device_index}: the function works on another device, or not at all"
        )
    return CapturedGraph(graph, result, run, semaphores, stream, kept)


_capturing, _lock, _collects = 0, threading.Lock(), False  # captures in progress; whether Python collected before them


@contextmanager
def without_collector() -> Iterator[None]:
    """Python's garbage collector is off: in a thread that captures, it could destroy another CUDA graph, left in a
    reference cycle, and that ends the capture."""
    global _capturing, _collects
    with _lock:
        if not _capturing:
            _collects = gc.isenabled()
            gc.disable()
        _capturing += 1
    try:
        yield
    finally:
        with _lock:
            _capturing -= 1
            if _collects and not _capturing:
                gc.enable()


def _num_nodes(stream: int) -> int | None:
    """Number of nodes captured so far on the stream with this handle; None if the capture has failed."""
    driver = ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    status, graph, count = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_size_t()
    outputs = (ctypes.byref(status), None, ctypes.byref(graph), None, None)
    if driver.cuStreamGetCaptureInfo_v2(ctypes.c_void_p(stream), *outputs) or status.value != CAPTURE_ACTIVE:
        return None
    return None if driver.cuGraphGetNodes(graph, None, ctypes.byref(count)) else count.value


def _abandon(stream: torch.cuda.Stream, current: torch.cuda.Stream, pool: Any) -> None:
    """Restore torch's state after a failed capture, which torch cannot end.

    Otherwise the stream stays current, the allocator neither frees the capture's memory nor empties its cache, and the
    random number generator refuses to draw numbers until another capture that registers it has ended.
    """
    torch.cuda.set_stream(current)
    abandon_pool(current.device_index, pool)
    with suppress(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), stream=stream, capture_error_mode=MODE):
        torch.zeros(1, device="cuda")  # an empty graph would be a warning


def _raise_first(first: BaseException) -> NoReturn:
    """Raise the first error; later ones only say that the capture is invalid."""
    if not isinstance(first, Exception) or isinstance(first, torch.OutOfMemoryError):
        raise first
    text = str(first).strip().partition("\n")[0]
    raise CaptureError(text if isinstance(first, RuntimeError) else f"{type(first).__name__}: {text}") from first
