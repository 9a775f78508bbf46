"""Timers. Passes are queued without synchronisation between them, as a user queues them, with one at the end."""

import logging
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from fused3s.runtime.cuda_graph import CapturedGraph, CaptureError, capture

LONG_MS = 10.0  # a run this long hides the launch of the next one, and is repeated less often:
LONG_TOTAL_MS, LONG_REPEATS = 300.0, 3  # for so long, but at least so often
LONG_ISOLATED_MS = 200.0  # for so long where each run is isolated, since that makes no difference; at most LONG_REPEATS
WARM_MS = 10.0  # work before the first timed replay: an idle GPU needs as long to raise its clock
REPLAY_MS = 2.0  # a CUDA graph repeats a shorter run, up to ten times
SPIN_CYCLES = 400_000  # of the kernel in front of a replay: about 0.2 ms, longer than the host takes to queue it
LONGEST_SPIN = 512 * SPIN_CYCLES  # about 0.1 s: work that takes longer to queue waits for the GPU

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


def milliseconds(intervals: Sequence[tuple[Any, Any]], device: torch.device) -> list[float]:
    """Time between the two marks of each interval. Waits for the GPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return [milliseconds_between(start, stop) for start, stop in intervals]


def pass_times(
    run: Callable[[], Any],
    *,
    device: torch.device,
    repeats: int,
    after_pass: Callable[[], None] = lambda: None,
) -> list[float]:
    """Milliseconds of each `run()`. Call it once before: the first call may compile.

    `after_pass` is called between passes, outside the timed intervals (a progress bar).
    """
    intervals = []
    for _ in range(repeats):
        start = mark(device)
        run()
        intervals.append((start, mark(device)))
        after_pass()
    return milliseconds(intervals, device)


def time_passes(run: Callable[[], Any], **options: Any) -> Spread:
    """Spread of `pass_times`."""
    return Spread.of(pass_times(run, **options))


def times_inside(
    run: Callable[[Callable[..., Any]], Any], inner: Callable[..., Any], *, device: torch.device, repeats: int
) -> tuple[list[float], list[float]]:
    """Milliseconds that each `run(inner)` spends in calls of `inner`, and milliseconds of the whole `run(inner)`.

    `run` gets a wrapped `inner` with two marks around each call. Marks cost a few microseconds each: the whole is that
    of `pass_times` only where a pass is long. On a GPU an interval includes waiting for launches, which dominates on
    small graphs.
    """
    calls: list[list[tuple[Any, Any]]] = []

    def timed_inner(*args: Any, **kwargs: Any) -> Any:
        start = mark(device)
        output = inner(*args, **kwargs)
        calls[-1].append((start, mark(device)))
        return output

    def run_once() -> None:
        calls.append([])
        run(timed_inner)

    whole = pass_times(run_once, device=device, repeats=repeats)
    return [sum(milliseconds(one, device)) for one in calls], whole


def _replays_by_turns(runs: Sequence[Callable[[], Any]], launches: Sequence[int], repeats: int) -> list[Spread]:
    """Milliseconds of one `run()` of each run in a CUDA graph of `launches` runs in a row: a replay of the first graph,
    one of the second, ..., and again.

    A run must queue the same work each time and must have run before; its outputs are dropped. It may start before the
    one in front has finished (programmatic dependent launch), and finds its data in L2 where they fit. The host queues
    each replay behind a spin kernel, see `time_isolated`: however slow it is, it has no part in the time.

    Raises:
        CaptureError: the work cannot be captured. Torch's allocator and streams are unchanged.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    graphs = [capture(run, device, count) for run, count in zip(runs, launches, strict=True)]
    for graph in graphs:
        _raise_clock(graph)
    times = _times_behind_spin([graph.replay for graph in graphs], device, repeats)
    return [
        Spread.of([milliseconds / count for milliseconds in found])
        for found, count in zip(times, launches, strict=True)
    ]


def _raise_clock(graph: CapturedGraph) -> None:
    """Replay a graph for WARM_MS."""
    start = time.perf_counter()
    while time.perf_counter() - start < WARM_MS / 1e3:
        graph.replay()
        torch.cuda.synchronize()


def time_kernel(run: Callable[[], Any], *, device: torch.device, repeats: int) -> tuple[Spread, str]:
    """Milliseconds of one `run()` of several back to back, and the timer. `run` must have run before.

    GPU: CUDA graph replays of up to 10 runs, about 2 ms each. CUDA events around each run if the work cannot be
    captured or a run takes 10 ms or more, which is repeated less often. CPU: the clock.
    """
    spreads, timer = time_kernels_by_turns({"": run}, device=device, repeats=repeats)
    return spreads[""], timer


def time_kernels_by_turns(
    runs: Mapping[str, Callable[[], Any]], *, device: torch.device, repeats: int
) -> tuple[dict[str, Spread], str]:
    """`time_kernel` of runs whose times are compared, by name: their CUDA graphs are replayed by turns.

    Some kernels make a GPU lower its clock. By turns all runs have the same clock, as where one follows the other.
    Runs of 10 ms or more, and such that cannot be captured, are timed one after the other.
    """
    longest = 0.0
    if device.type == "cuda":
        once = [_once(run, device) for run in runs.values()]
        longest = max(once)
        if longest < LONG_MS:
            try:
                spreads = _replays_by_turns([*runs.values()], [_launches(time) for time in once], repeats)
                return dict(zip(runs, spreads, strict=True)), "CUDA graph replays" + " by turns" * (len(runs) > 1)
            except (CaptureError, torch.OutOfMemoryError) as error:  # a capture allocates its own memory
                logger.info("timing without CUDA graphs, or one after the other: %s", str(error).partition("\n")[0])
    # Outside of the handler: the error keeps alive the memory of the failed capture.
    if len(runs) > 1:
        return _spreads_and_timers(
            {name: time_kernel(run, device=device, repeats=repeats) for name, run in runs.items()}
        )
    if longest >= LONG_MS:
        repeats = min(repeats, max(LONG_REPEATS, int(LONG_TOTAL_MS / longest)))
    ((name, run),) = runs.items()
    times, timer = _times_of_runs(run, device, repeats)
    return {name: Spread.of(times)}, timer


def _spreads_and_timers(timed: dict[str, tuple[Spread, str]]) -> tuple[dict[str, Spread], str]:
    """The spreads by name, and all timers, each once."""
    timers = dict.fromkeys(timer for _, timer in timed.values())
    return {name: spread for name, (spread, _) in timed.items()}, ", ".join(timers)


def _once(run: Callable[[], Any], device: torch.device) -> float:
    """Milliseconds of a run on a GPU."""
    return min(_times_of_runs(run, device, 2)[0])


def _launches(once: float) -> int:
    """Runs of a CUDA graph."""
    return min(10, math.ceil(REPLAY_MS / once))


def time_isolated(
    run: Callable[[], Any],
    *,
    device: torch.device,
    repeats: int,
    expected_ms: float,
    before: Mapping[str, Callable[[], Any]],
) -> tuple[dict[str, Spread], str]:
    """Milliseconds of one `run()` alone, for each function in `before`, and the timer. `run` must have run before.

    GPU: each interval holds one replay of a CUDA graph of one run. The function of `before` and then a spin kernel,
    which touches no memory, are queued in front of it, and the host queues the replay while the spin kernel runs.

    Included: the run, and what the GPU needs between the two events for starting the graph and for noticing its end.
    An empty kernel shows how long that is.
    Excluded: launch latency of the host. If the GPU reached the first event before the host had queued the second, the
    interval is dropped, and taken again behind a spin kernel of twice the length.
    Excluded: overlap with the work in front (programmatic dependent launch). A kernel with that attribute may start
    early behind a kernel that it follows directly on its stream or in its graph. Here it is the first node of its
    graph, an event lies between it and the spin kernel, and the spin kernel triggers no dependent launch.

    A run of 10 ms or more: CUDA events around a few runs, each behind a spin kernel. CPU: the clock.

    Args:
        expected_ms: time of a run.
        before: functions called before each interval, such as `l2_flusher(device)`, by any name.

    Raises:
        CaptureError: a run of less than 10 ms cannot be captured.
    """
    on_gpu = device.type == "cuda"
    if on_gpu and expected_ms < LONG_MS:
        graph = capture(run, device)
        _raise_clock(graph)
        times = {
            name: Spread.of(_times_behind_spin([graph.replay], device, repeats, prepare)[0])
            for name, prepare in before.items()
        }
        return times, "CUDA graph replays of one run"
    if on_gpu:
        repeats = max(1, min(LONG_REPEATS, int(LONG_ISOLATED_MS / expected_ms)))
    timed = {}
    for name, prepare in before.items():
        times, timer = _times_of_runs(run, device, repeats, prepare)
        timed[name] = Spread.of(times), timer
    return _spreads_and_timers(timed)


def _times_of_runs(
    run: Callable[[], Any], device: torch.device, repeats: int, prepare: Callable[[], Any] = lambda: None
) -> tuple[list[float], str]:
    """Milliseconds of each `run()`, without the launch latency of the host where it can queue a run, and the timer."""
    timer = "clock"
    if device.type == "cuda":
        try:
            return _times_behind_spin([run], device, repeats, prepare, LONGEST_SPIN)[0], "CUDA events"
        except _LateHostError:
            timer = "CUDA events with launch gaps"
    prepare()
    return pass_times(run, device=device, repeats=repeats, after_pass=prepare), timer


class _LateHostError(RuntimeError):
    """The longest spin kernel is over before the host has queued the work behind it."""


def _times_behind_spin(
    queues: Sequence[Callable[[], Any]],
    device: torch.device,
    repeats: int,
    prepare: Callable[[], Any] = lambda: None,
    longest_spin: float = math.inf,
) -> list[list[float]]:
    """Milliseconds of the work that each function queues, by turns, see `time_isolated`.

    Raises:
        _LateHostError: a spin kernel of `longest_spin` cycles is too short.
    """
    spin_cycles = SPIN_CYCLES
    intervals: list[list[tuple[Any, Any]]] = [[] for _ in queues]
    for _ in range(repeats):
        for queue, found in zip(queues, intervals, strict=True):
            while (interval := _interval_behind_spin(queue, device, prepare, spin_cycles)) is None:
                spin_cycles *= 2
                if spin_cycles > longest_spin:
                    raise _LateHostError
            found.append(interval)
    return [milliseconds(found, device) for found in intervals]


def _interval_behind_spin(
    queue: Callable[[], Any], device: torch.device, prepare: Callable[[], Any], spin_cycles: int
) -> tuple[Any, Any] | None:
    """Marks around the work that `queue` queues; None if the spin is over: the GPU may have waited for the host."""
    prepare()
    torch.cuda._sleep(spin_cycles)
    start = mark(device)
    queue()
    stop = mark(device)
    return None if start.query() else (start, stop)


def l2_flusher(device: torch.device) -> Callable[[], None]:
    """A function that evicts the L2 cache of a GPU by writing twice its size.

    The cache then holds lines that must be written back before others take their place, as behind any kernel that
    writes a large output.
    """
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
