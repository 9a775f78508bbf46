"""A GPU whose progress the test decides, for the state of plans on a CPU.

The planning kernels run on the CPU (`gpu_on_cpu`), and their results are there at once. What the host learns of them is
faked: a readback is pending until `FakeGPU.finish`, and streams and events write down who waits for whom.
"""

import ctypes
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from gpu_plan_on_cpu import gpu_on_cpu
from poison import poisoned_buffers

from fused3s.backends.base import BackwardCall, Call
from fused3s.fused import backend as fused3s
from fused3s.fused import plan_state as fused3s_plan
from fused3s.fused.planning import plan as fused3s_planning
from fused3s.runtime import streams
from tests.cuda_shim.cuda_on_cpu import cuda_on_cpu


class FakeGPU:
    """
    Attributes:
        stream: handle of the current stream.
        captures: whether it is captured.
        waits: (stream that waits, stream whose event it waits for), in order.
        recorded: streams that tensors were recorded on.
        on_read: called when a plan waits for numbers or reads them.
    """

    def __init__(self) -> None:
        self.stream, self.captures, self._is_done = 0, False, False
        self.waits: list[tuple[int, int]] = []
        self.recorded: set[int] = set()
        self.on_read: Callable[[], None] = lambda: None

    def finish(self) -> None:
        """All queued kernels and copies are done."""
        self._is_done = True

    def readback(self, address: int, count: int, device_index: int | None) -> "FakeReadback":
        return FakeReadback(self, list((ctypes.c_int64 * count).from_address(address)))


class FakeReadback:
    """As `fused3s.runtime.readback.Readback`."""

    def __init__(self, gpu: FakeGPU, numbers: list[int]) -> None:
        self._gpu, self._numbers = gpu, numbers

    def is_done(self) -> bool:
        return self._gpu._is_done

    def wait(self) -> None:
        self._gpu.finish()
        self._gpu.on_read()

    def numbers(self) -> list[int]:
        assert self._gpu._is_done, "read before the copy was done"
        self._gpu.on_read()
        return self._numbers


class FakeStream:
    def __init__(self, gpu: FakeGPU, handle: int) -> None:
        self._gpu, self.handle = gpu, handle

    def wait_event(self, event: "FakeEvent") -> None:
        self._gpu.waits.append((self.handle, event.stream.handle))


class FakeEvent:
    def record(self, stream: FakeStream) -> None:
        self.stream = stream


def _poisoned(monkeypatch: pytest.MonkeyPatch, function: Callable[..., Any]) -> Callable[..., Any]:
    """A method of the backend whose buffers start as NaN."""

    def run(backend: Any, data: Any, call: Call | BackwardCall) -> Any:
        if isinstance(call, Call) and call.lse is not None:  # the forward pass writes it
            call.lse.fill_(torch.nan)
        with poisoned_buffers(monkeypatch):
            return function(backend, data, call)

    return run


@contextmanager
def fake_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGPU]:
    """Inside, `fused3s` plans graphs on the CPU as it does those on a GPU, and runs on the CPU (tests/cuda_shim)."""
    gpu, plan_graph, made_on = FakeGPU(), fused3s_planning.plan_graph, streams.Made.on.__func__
    with cuda_on_cpu(), gpu_on_cpu(monkeypatch), monkeypatch.context() as patch:
        patch.setattr(fused3s, "plan_graph", plan_graph)
        patch.setattr(fused3s_planning, "_is_on_cpu", lambda graph: False)
        patch.setattr(fused3s_plan, "Readback", gpu.readback)
        for module in (fused3s_plan, fused3s_planning, streams):
            patch.setattr(module, "is_capturing", lambda device: gpu.captures)
        patch.setattr(streams.Made, "on", classmethod(lambda cls, device: made_on(cls, torch.device("cuda", 0))))
        patch.setattr(streams, "stream_handle", lambda device_index: gpu.stream)
        for name in ("attend", "attend_backward"):
            method = getattr(fused3s.Fused3SBackend, name)
            patch.setattr(fused3s.Fused3SBackend, name, _poisoned(monkeypatch, method))
        patch.setattr(torch.cuda, "Event", FakeEvent)
        patch.setattr(torch.cuda, "current_stream", lambda device: FakeStream(gpu, gpu.stream))
        patch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: gpu.recorded.add(stream.handle))
        yield gpu
