"""Tensors made on one stream and used on others: one wait and one record of the memory for each other stream."""

from types import SimpleNamespace

import pytest
import torch

from fused3s.runtime.streams import Made

GPU = torch.device("cuda", 1)


class Stream:
    """A stream that lists what it is asked to do."""

    def __init__(self, handle: int) -> None:
        self.handle, self.log, self.captures = handle, [], False

    def wait_event(self, event: "Event") -> None:
        assert not self.captures, "cudaErrorStreamCaptureIsolation: the event was recorded outside of the capture"
        assert not event.stream.captures, "cudaErrorCapturedEvent"
        self.log.append(("wait", event.stream.handle))


class Event:
    def record(self, stream: Stream) -> None:
        assert not stream.captures, "a captured event serves no eager stream"
        self.stream = stream


class Memory:
    def __init__(self) -> None:
        self.streams = []

    def record_stream(self, stream: Stream) -> None:
        self.streams.append(stream.handle)


@pytest.fixture
def gpu(monkeypatch):
    """`current` is the current stream of GPU 1."""
    gpu = SimpleNamespace(current=Stream(0))

    def current_stream(device: torch.device) -> Stream:
        assert device == GPU
        return gpu.current

    monkeypatch.setattr("fused3s.runtime.streams.stream_handle", lambda index: gpu.current.handle)
    monkeypatch.setattr("fused3s.runtime.streams.is_capturing", lambda device: gpu.current.captures)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    return gpu


def test_a_wait_that_fails_is_tried_again(gpu):
    made = Made.on(GPU)
    gpu.current = Stream(7)
    gpu.current.wait_event = lambda event: (_ for _ in ()).throw(RuntimeError("no"))
    with pytest.raises(RuntimeError, match="no"):
        made.used_by_current_stream([])
    del gpu.current.wait_event
    made.used_by_current_stream([])
    assert gpu.current.log == [("wait", 0)]


def test_a_capture_waits_for_no_event_and_its_stream_still_does_afterwards(gpu):
    made, memory = Made.on(GPU), Memory()
    gpu.current = Stream(7)
    gpu.current.captures = True
    made.used_by_current_stream([memory])
    assert (gpu.current.log, memory.streams) == ([], [])
    gpu.current.captures = False
    made.used_by_current_stream([memory])
    assert (gpu.current.log, memory.streams) == ([("wait", 0)], [7])


def test_nobody_waits_for_an_event_of_a_capture(gpu):
    capturing, memory = gpu.current, Memory()
    capturing.captures = True
    made = Made.on(GPU)
    gpu.current = Stream(7)
    made.used_by_current_stream([memory])
    assert (gpu.current.log, memory.streams) == ([], [7])


def test_a_cpu_has_nothing_to_wait_for(monkeypatch):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: pytest.fail("asked for a stream"))
    Made.on(torch.device("cpu")).used_by_current_stream([torch.zeros(3)])
