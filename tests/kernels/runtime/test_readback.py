"""Numbers that a GPU found, read without waiting."""

import threading

import pytest
import torch

from fused3s.runtime.readback import Readback

pytestmark = pytest.mark.gpu


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


def readback_of(value: int, device: torch.device) -> Readback:
    numbers = torch.full((5,), value, device=device)
    return Readback(numbers.data_ptr(), 5, device.index)  # the memory is free before the copy has run


def test_gpu_copies_in_flight_are_kept_apart(device):
    torch.cuda._sleep(20_000_000)
    found = [readback_of(value, device) for value in range(50)]
    assert not found[-1].is_done()
    found[-1].wait()
    assert all(each.is_done() for each in found)
    assert [each.numbers() for each in found] == [[value] * 5 for value in range(50)]


def test_gpu_memory_of_a_copy_that_nobody_read_is_not_used_before_it_has_run(device):
    torch.cuda._sleep(20_000_000)
    for value in range(5):
        readback_of(value, device)  # given back at once
    kept = [readback_of(10 + value, device) for value in range(5)]
    kept[-1].wait()
    assert [each.numbers() for each in kept] == [[10 + value] * 5 for value in range(5)]


def test_gpu_copies_on_another_stream(device):
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(1_000_000_000)  # longer than a host waits that shares its GPU with other tests
        found = readback_of(7, device)
    torch.cuda.current_stream(device).synchronize()
    assert not found.is_done()
    found.wait()
    assert found.numbers() == [7] * 5


def test_gpu_copies_while_another_thread_captures(device):
    """In torch's own mode, "global", which forbids other threads what may disturb a capture."""
    numbers, stream, found = torch.full((5,), 3, device=device), torch.cuda.Stream(device), []

    def read():
        with torch.cuda.stream(stream):
            for _ in range(2):  # into new memory, then into the same
                copy = Readback(numbers.data_ptr(), 5, device.index)
                copy.wait()
                found.append((copy.is_done(), copy.numbers()))
                del copy

    torch.cuda.synchronize()
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        numbers.add(1)
        thread = threading.Thread(target=read)
        thread.start()
        thread.join()
    assert found == [(True, [3] * 5)] * 2
