"""Timers. Passes are queued without synchronisation between them, as a user queues them, with one at the end."""

import logging
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from kernels.runtime.cuda_graph import CaptureError, capture

SLOW_MS = 100.0  # a run this long is repeated for SLOW_TOTAL_MS, but at least SLOW_REPEATS times
SLOW_TOTAL_MS = 2000.0
SLOW_REPEATS = 3
LONG_MS = 10.0  # a run this long hides the launch of the next one
WARM_MS = 10.0  # work before the first timed replay: an idle GPU needs as long to raise its clock
REPLAY_MS = 2.0  # length of a CUDA graph replay, long enough to hide its launch cost

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

    def columns(self) -> dict[str, float | int]:
        """Columns of a row of results."""
        return {"value": self.median, "p10": self.p10, "p90": self.p90, "repeats": self.repeats}


def mark(device: torch.device) -> Any:
    """Timestamp without synchronisation: an event on the current stream of a GPU, the clock on the CPU."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def milliseconds_between(start: Any, stop: Any) -> float:
    """Time between two marks on one device. A GPU must have reached both."""
    return (stop - start) * 1e3 if isinstance(start, float) else start.elapsed_time(stop)


class Stopwatch:
    """Intervals between marks on a device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._marks: list[tuple[Any, Any]] = []

    @contextmanager
    def interval(self) -> Iterator[None]:
        """Time the work that is queued inside the block, without synchronisation."""
        start = mark(self._device)
        yield
        self._marks.append((start, mark(self._device)))

    def __len__(self) -> int:
        return len(self._marks)

    def milliseconds(self) -> list[float]:
        """Length of each interval so far. Waits for the GPU."""
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        return [milliseconds_between(start, stop) for start, stop in self._marks]


def time_passes(
    run: Callable[[], Any],
    *,
    device: torch.device,
    repeats: int,
    after_pass: Callable[[], None] = lambda: None,
) -> Spread:
    """Milliseconds of `run()`. Call it once before: the first call may compile.

    `after_pass` is called between passes, outside the timed intervals (a progress bar).
    """
    watch = Stopwatch(device)
    for _ in range(repeats):
        with watch.interval():
            run()
        after_pass()
    return Spread.of(watch.milliseconds())


def time_inside(
    run: Callable[[Callable[..., Any]], Any], inner: Callable[..., Any], *, device: torch.device, repeats: int
) -> Spread:
    """Milliseconds that `run(inner)` spends in calls of `inner`.

    `run` gets a wrapped `inner` with two marks around each call. Marks cost a few microseconds each, so these passes
    are separate from those of `time_passes`. On a GPU an interval includes waiting for launches, which dominates on
    small graphs.
    """
    watch, calls_before_pass = Stopwatch(device), [0]

    def timed_inner(*args: Any, **kwargs: Any) -> Any:
        with watch.interval():
            return inner(*args, **kwargs)

    for _ in range(repeats):
        run(timed_inner)
        calls_before_pass.append(len(watch))
    spent = watch.milliseconds()
    return Spread.of([sum(spent[first:last]) for first, last in pairwise(calls_before_pass)])


def time_graph_replays(
    run: Callable[[], Any], *, repeats: int, launches: int = 10, between: Callable[[], Any] = lambda: None
) -> Spread:
    """Milliseconds of one `run()` in a CUDA graph of `launches` runs in a row.

    `run` must queue the same work each time and must have run before; its outputs are dropped. `between` is called
    before each replay, outside the timed interval.

    Raises:
        CaptureError: the work cannot be captured. Torch's allocator and streams are unchanged.
    """
    graph = capture(run, torch.device("cuda", torch.cuda.current_device()), launches)
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_MS / 1e3:
        graph.replay()
        torch.cuda.synchronize()
    watch = Stopwatch(torch.device("cuda"))
    for _ in range(repeats):
        between()
        with watch.interval():
            graph.replay()
    return Spread.of([milliseconds / launches for milliseconds in watch.milliseconds()])


def time_kernel(
    run: Callable[[], Any], *, device: torch.device, repeats: int, flush: Callable[[], Any] | None = None
) -> tuple[Spread, str]:
    """Milliseconds of one `run()`, which must have run before, and the timer.

    GPU: CUDA graph replays of up to 10 runs, about 2 ms each. CUDA events around each run if the work cannot be
    captured or a run takes 10 ms or more. CPU: the clock. A run of over 100 ms is repeated less often.

    Args:
        flush: called before each timed interval, which then holds one run, see `l2_flusher`.
    """
    between = flush or (lambda: None)
    if device.type != "cuda":
        between()
        return time_passes(run, device=device, repeats=repeats, after_pass=between), "clock"
    once = min(time_passes(run, device=device, repeats=1).median for _ in range(2))  # one alone may be disturbed
    if once > SLOW_MS:
        repeats = min(repeats, max(SLOW_REPEATS, int(SLOW_TOTAL_MS / once)))
    if once < LONG_MS:
        launches = 1 if flush else min(10, math.ceil(REPLAY_MS / once))
        try:
            spread = time_graph_replays(run, repeats=repeats, launches=launches, between=between)
            return spread, "CUDA graph replays"
        except (CaptureError, torch.OutOfMemoryError) as error:  # a capture allocates its own memory
            logger.info("timing with CUDA events instead of CUDA graphs: %s", str(error).partition("\n")[0])
    # Outside of the handler: the error keeps alive the memory of the failed capture.
    between()
    spread = time_passes(run, device=device, repeats=repeats, after_pass=between)
    return spread, "CUDA events" if once >= LONG_MS else "CUDA events with launch gaps"


def l2_flusher(device: torch.device) -> Callable[[], None]:
    """A function that evicts the L2 cache of a GPU by writing twice its size."""
    num_bytes = 2 * torch.cuda.get_device_properties(device).L2_cache_size
    buffer = torch.empty(num_bytes // 4, dtype=torch.int32, device=device)

    def flush() -> None:
        buffer.fill_(1)

    return flush


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak of a GPU. The peak of a CPU process counts from its start."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mib(device: torch.device) -> float:
    """Peak in MiB: of torch's allocator on a GPU, of the whole process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    import resource  # missing on Windows, where only this function fails

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10  # bytes on macOS, KiB on Linux
