"""Captures in CUDA graphs: the order of things on fakes, and on a GPU what a failure leaves behind."""

from contextlib import contextmanager, nullcontext

import pytest
import torch

from kernels.runtime.cuda_graph import CaptureError, capture


class FakeStream:
    device_index = 0

    def wait_stream(self, other):
        pass


@pytest.fixture
def calls(monkeypatch):
    """What is called in which order; nothing is captured."""
    calls = []

    @contextmanager
    def graph(graph, pool, stream):
        calls.append("capture")
        try:
            yield
        except Exception:
            raise RuntimeError("capture was invalidated")  # noqa: B904  as torch's does, in the handler

    fakes = {
        "Stream": FakeStream,
        "current_stream": FakeStream,
        "stream": lambda stream: nullcontext(),
        "set_stream": lambda stream: calls.append("set_stream"),
        "CUDAGraph": object,
        "graph_pool_handle": lambda: (0, 0),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": calls.append,
        "graph": graph,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    for name in ("_cuda_endAllocateToPool", "_cuda_releasePool"):
        monkeypatch.setattr(torch._C, name, lambda *arguments: calls.append("give memory back"), raising=False)
    return calls


def test_a_capture_comes_after_a_warm_up_and_a_look_for_waits(calls):
    def run():
        calls.append("run")
        return len(calls)

    _, result = capture(run, launches=2)
    assert calls == ["run", "error", "run", 0, "capture", "run", "run"]
    assert result == len(calls)


def test_the_first_reason_is_told_and_torch_put_back(calls):
    def run():
        if "capture" in calls:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with pytest.raises(CaptureError, match=r"^operation not permitted when stream is capturing$"):
        capture(run)
    assert calls[-3:] == ["set_stream", "give memory back", "give memory back"]


def test_work_that_waits_is_not_captured(calls):
    def run():
        if calls[-1:] == ["error"]:
            raise RuntimeError("called a synchronizing CUDA operation")

    with pytest.raises(CaptureError, match="synchronizing"):
        capture(run)
    assert calls == ["error", 0]


def test_what_fails_before_is_not_the_captures_fault(calls):
    def run():
        raise RuntimeError("a bug")

    with pytest.raises(RuntimeError, match="a bug") as caught:
        capture(run)
    assert not isinstance(caught.value, CaptureError)


def test_too_little_memory_is_told_as_such(calls):
    def run():
        if "capture" in calls:
            raise torch.OutOfMemoryError("too little")

    with pytest.raises(torch.OutOfMemoryError):
        capture(run)


@pytest.mark.gpu
def test_gpu_replays_what_was_captured_and_recovers_from_a_failure():
    x = torch.zeros(4, device="cuda")
    graph, y = capture(lambda: x.add_(1), launches=3)
    before = float(x[0])
    graph.replay()
    assert y.tolist() == [before + 3] * 4
    with pytest.raises(CaptureError):
        capture(lambda: x.sum().item())
    with pytest.raises(CaptureError):
        capture(torch.cuda.synchronize)
    capture(lambda: x.add_(1))[0].replay()
    assert x.isfinite().all()
