"""Busy time and durations of kernels, from traces written by hand and from a GPU."""

import pytest
import torch

from bench.gpu_trace import GpuTrace, trace_gpu


def event(cat, start, length, name="work"):
    return {"cat": cat, "ts": start, "dur": length, "name": name, "ph": "X"}


def test_time_in_which_several_kernels_run_counts_once():
    events = [
        event("kernel", 100.0, 50.0),
        event("kernel", 120.0, 10.0),  # inside the first
        event("gpu_memcpy", 140.0, 30.0),  # overlaps it
        event("gpu_memset", 300.0, 5.0),
        event("cpu_op", 0.0, 1000.0),
        event("gpu_user_annotation", 0.0, 1000.0),
        {"name": "process_name", "ph": "M"},
    ]
    assert GpuTrace.of(events) == GpuTrace(busy_ms=0.075, kernel_ms=0.06)
    assert GpuTrace.of(reversed(events)) == GpuTrace.of(events)
    assert GpuTrace.of([]) == GpuTrace(0.0, 0.0)


def test_kernels_can_be_counted_by_name():
    events = [event("kernel", 0.0, 50.0, "void f3sKernel1tb1rw<64>(int)"), event("kernel", 50.0, 10.0, "fill")]
    assert GpuTrace.of(events, "f3sKernel") == GpuTrace(busy_ms=0.06, kernel_ms=0.05)
    assert GpuTrace.of(events, "spmm").kernel_ms == 0.0


@pytest.mark.gpu
def test_a_gpu_is_traced():
    x = torch.ones(1 << 20, device="cuda")

    def run():
        for _ in range(5):
            (x * 2).sum().item()

    run()
    found = trace_gpu(run)
    assert 0 < found.kernel_ms <= 1.1 * found.busy_ms < 1000
    with pytest.raises(RuntimeError, match="no kernel named f3sKernel"):
        trace_gpu(run, "f3sKernel")
