"""A trace of the GPU during some calls: time in which it was busy, and durations of kernels.

From a trace of CUPTI through torch.profiler, which also sees launches of CuPy and the kernels of CUDA graphs.
"""

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

KERNEL = "kernel"
ON_GPU = (KERNEL, "gpu_memcpy", "gpu_memset")  # categories of events


@dataclass(frozen=True)
class GpuTrace:
    """Sums over the traced calls.

    Attributes:
        busy_ms: time in which at least one kernel, copy or memset ran.
        kernel_ms: the sum of the durations of kernels, or of those asked for; more than `busy_ms` where they overlap.
    """

    busy_ms: float
    kernel_ms: float

    @classmethod
    def of(cls, events: Iterable[Mapping[str, Any]], named: str = "") -> "GpuTrace":
        """From the events of a Chrome trace, whose times are in microseconds; `kernel_ms` of kernels whose name holds
        `named`."""
        intervals, kernels = [], 0.0
        for event in events:
            if event.get("cat") in ON_GPU:
                intervals.append((event["ts"], event["ts"] + event["dur"]))
                kernels += event["dur"] if event["cat"] == KERNEL and named in event["name"] else 0.0
        busy, reached = 0.0, float("-inf")
        for start, end in sorted(intervals):
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return cls(busy / 1e3, kernels / 1e3)


def trace_gpu(run: Callable[[], Any], named: str = "") -> GpuTrace:
    """Trace the work that `run` queues on the GPU. Tracing slows the host down: times are taken without it.

    Args:
        named: part of the names of the kernels that `kernel_ms` counts.

    Raises:
        RuntimeError: no such kernel was seen.
    """
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    with TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace = GpuTrace.of(json.loads(path.read_bytes())["traceEvents"], named)
    if not trace.kernel_ms:
        what = f"no kernel named {named}" if named else "no kernel"
        raise RuntimeError(f"the trace holds {what}: nothing was queued, or CUPTI may not trace on this machine")
    return trace
