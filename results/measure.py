"""Timers. A pass is queued as a user queues it: no synchronisation between passes, one at the end."""

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

SLOW_MS = 100.0
SLOW_REPEATS = 10

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Spread:
    """Median, 10th and 90th percentile of `repeats` values."""

    median: float
    p10: float
    p90: float
    repeats: int

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        p10, median, p90 = np.percentile(values, [10, 50, 90]).tolist()
        return cls(median, p10, p90, len(values))


class Stopwatch:
    """Intervals on a device: CUDA events on the current stream of a GPU, the clock on the CPU."""

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._marks: list[tuple[Any, Any]] = []

    @contextmanager
    def interval(self) -> Iterator[None]:
        """Time what is queued inside the block; nothing waits for the GPU here."""
        start = self._mark()
        yield
        self._marks.append((start, self._mark()))

    def __len__(self) -> int:
        return len(self._marks)

    def _mark(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def milliseconds(self) -> list[float]:
        """Length of each interval so far. On a GPU this waits for all of them."""
        if self._on_gpu:
            torch.cuda.synchronize()
            return [start.elapsed_time(stop) for start, stop in self._marks]
        return [(stop - start) * 1e3 for start, stop in self._marks]


def time_passes(
    run: Callable[[], Any],
    *,
    device: torch.device,
    repeats: int,
    after_pass: Callable[[], None] = lambda: None,
) -> Spread:
    """Milliseconds of `run()`, which should have run before: the first call may compile.

    `after_pass` is called between passes, outside the timed intervals (a progress bar).
    """
    watch = Stopwatch(device)
    for _ in range(repeats):
        with watch.interval():
            run()
        after_pass()
    return Spread.of(watch.milliseconds())


def time_share(
    run: Callable[[Callable[..., Any]], Any],
    inner: Callable[..., Any],
    *,
    device: torch.device,
    repeats: int,
    after_pass: Callable[[], None] = lambda: None,
) -> Spread:
    """Share (0 to 1) of the time of `run(inner)` that is spent in its calls of `inner`.

    `run` is given a wrapped `inner` that puts two marks around each call. The marks cost a few microseconds each, so
    the share is measured in passes of its own and `time_passes` stays free of them. On a GPU an interval holds whatever
    lies between its marks, also the GPU's waiting for the host to launch, which small graphs are full of.
    """
    whole, inside = Stopwatch(device), Stopwatch(device)
    calls_before_pass = [0]

    def timed_inner(*args: Any, **kwargs: Any) -> Any:
        with inside.interval():
            return inner(*args, **kwargs)

    for _ in range(repeats):
        with whole.interval():
            run(timed_inner)
        calls_before_pass.append(len(inside))
        after_pass()
    spent = inside.milliseconds()
    passes = zip(pairwise(calls_before_pass), whole.milliseconds(), strict=True)
    return Spread.of([sum(spent[first:last]) / total for (first, last), total in passes])


def time_graph_replays(run: Callable[[], Any], *, repeats: int, launches: int = 10) -> Spread:
    """Milliseconds of one `run()` on the GPU without the launch from Python: CUDA graphs of `launches` runs in a row.

    `run` must queue the same work each time and must have run before; its outputs are dropped.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # torch asks for a warm-up on the stream that captures
        run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(launches):
            run()
    graph.replay()
    watch = Stopwatch(torch.device("cuda"))
    for _ in range(repeats):
        with watch.interval():
            graph.replay()
    return Spread.of([milliseconds / launches for milliseconds in watch.milliseconds()])


def time_kernel(run: Callable[[], Any], *, device: torch.device, repeats: int) -> tuple[Spread, str]:
    """Milliseconds of one `run()`, which must have run before, and how they were measured.

    CUDA graph replays; CUDA events around each run where the GPU's work cannot be captured; the clock on a CPU. A slow
    run is timed less often, since its time varies less.
    """
    if device.type != "cuda":
        return time_passes(run, device=device, repeats=repeats), "clock"
    once = time_passes(run, device=device, repeats=1).median
    repeats = min(repeats, SLOW_REPEATS) if once > SLOW_MS else repeats
    try:
        with torch.cuda.stream(torch.cuda.current_stream()):  # torch leaves the stream of a failed capture current
            return time_graph_replays(run, repeats=repeats, launches=10 if once < 10 else 1), "CUDA graph replays"
    except RuntimeError as error:
        logger.info("timing with CUDA events instead of CUDA graphs: %s", str(error).partition("\n")[0])
    # Out of the handler: the error holds what the failed capture allocated.
    return time_passes(run, device=device, repeats=repeats), "CUDA events, which also time waiting for launches"


def reset_peak_memory(device: torch.device) -> None:
    """Start a new measurement of the peak on a GPU; a CPU process has only one, from its start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mib(device: torch.device) -> float:
    """MiB: on a GPU the most that torch's allocator held at once, on the CPU the most this process ever held."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource  # not there on Windows, where only this function is lost

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes on macOS, KiB on Linux
