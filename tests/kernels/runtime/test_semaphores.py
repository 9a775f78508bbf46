"""Semaphores for split-KV: one buffer a stream, own buffers for each CUDA graph, fresh zeros in any other capture."""

import weakref
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from fused3s.runtime.semaphores import MOST_STREAMS, graph_semaphores, is_capturing, semaphores

CPU = torch.device("cpu")


@pytest.fixture
def stream(monkeypatch):
    """Torch's current stream: `handle` names it, `capturing` says whether a CUDA graph is captured on it."""
    stream = SimpleNamespace(handle=7, capturing=False, eager={})
    monkeypatch.setattr("fused3s.runtime.semaphores.stream_handle", lambda device_index: stream.handle)
    monkeypatch.setattr("fused3s.runtime.semaphores.is_capturing", lambda device: stream.capturing)
    monkeypatch.setattr("fused3s.runtime.semaphores._eager", stream.eager)
    return stream


def test_launches_on_one_stream_share_zeros_and_streams_share_none(stream):
    first = semaphores(4, CPU)
    assert first.tolist() == [0] * 4
    assert first.dtype == torch.int32
    assert semaphores(4, CPU) is first
    assert semaphores(3, CPU) is first
    stream.handle = 8
    assert semaphores(4, CPU).data_ptr() != first.data_ptr()
    stream.handle = 7
    assert semaphores(4, CPU) is first


def test_a_graph_takes_what_its_warm_up_allocated(stream):
    eager = semaphores(4, CPU)
    graphs = []
    for _ in range(2):
        with graph_semaphores(None, 7) as buffers, ThreadPoolExecutor(1) as of_autograd:
            semaphores(2, CPU)
            warm = semaphores(4, CPU)
            stream.capturing = True
            captured = [semaphores(2, CPU), semaphores(4, CPU), of_autograd.submit(semaphores, 3, CPU).result()]
            stream.capturing = False
        assert all(one is warm for one in captured)
        assert [one is warm for one in buffers] == [True]
        graphs.append(warm)
    assert len({one.data_ptr() for one in (eager, *graphs)}) == 3
    assert semaphores(4, CPU) is eager, "a capture changed the buffers of eager launches"


def test_what_the_warm_up_did_not_need_comes_out_of_the_capture(stream):
    with graph_semaphores(None, 7) as buffers:
        warm = semaphores(4, CPU)
        stream.capturing = True
        larger = semaphores(9, CPU)
        stream.handle = 8  # a second stream that joins the capture
        other = semaphores(4, CPU)
    assert larger.tolist() == [0] * 9
    assert other is not warm
    assert [one is warm for one in buffers] == [True], "memory of a capture was kept"


def test_any_other_capture_gets_fresh_zeros_that_nothing_keeps(stream):
    eager = semaphores(4, CPU)
    stream.capturing = True
    captured = [semaphores(4, CPU), semaphores(4, CPU)]
    assert len({one.data_ptr() for one in (eager, *captured)}) == 3
    assert [held[0] is eager for held in stream.eager.values()] == [True], "memory of a capture was kept"


def test_buffers_of_streams_that_are_gone_are_dropped(stream):
    first = weakref.ref(semaphores(4, CPU))
    for handle in range(100, 100 + 2 * MOST_STREAMS):
        stream.handle = handle
        latest = semaphores(4, CPU)
        assert len(stream.eager) <= MOST_STREAMS
    assert first() is None
    assert semaphores(4, CPU) is latest
    stream.handle = 7
    assert semaphores(4, CPU).tolist() == [0] * 4


@pytest.mark.parametrize("current", [0, 1])
def test_the_device_of_the_plan_is_asked_and_not_the_current_one(monkeypatch, current):
    now = [current]

    @contextmanager
    def device(device):
        now.append(device.index)
        yield
        now.pop()

    with monkeypatch.context() as patch:  # not until the end of the test: torch needs its own
        patch.setattr("fused3s.runtime.semaphores.current_gpu", lambda: now[-1])
        patch.setattr(torch.cuda, "device", device)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: now[-1] == 1)
        assert is_capturing(torch.device("cuda", 1))
        assert not is_capturing(torch.device("cuda", 0))
        assert not is_capturing(torch.device("cpu"))
    assert now == [current]
