"""Launches that overlap: how parameters lie, and that on a GPU each kernel finds what those before it wrote."""

import ctypes
import struct
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from attention_cases import EDGE_CASES

from kernels import plan_attention
from kernels.counters import ZeroedCounters
from kernels.cuda_graph import capture
from kernels.launch import _layout, _parameters

CPU = torch.device("cpu")


def test_parameters_lie_eight_bytes_apart_where_their_addresses_say():
    pointers, scalars = [2**63 + 1, 0], [np.int64(-2), np.int32(-3), np.uint32(0x80008000), np.float32(0.5)]
    _layout(2, tuple(map(type, scalars))).pack_into(_parameters.values, 0, *pointers, *scalars)
    addresses = (ctypes.c_void_p * _parameters.MOST).from_address(_parameters.addresses_start)
    for address, parameter in zip(addresses, [*map(np.uint64, pointers), *scalars], strict=False):
        assert ctypes.string_at(address, parameter.nbytes) == parameter.tobytes()


def test_threads_do_not_share_parameters():
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: _parameters.addresses_start).result() != _parameters.addresses_start


def test_parameters_that_no_kernel_declares_are_errors():
    with pytest.raises(KeyError, match="float64"):
        _layout(0, (np.float64,))
    with pytest.raises(struct.error):
        _layout(0, (np.int32,)).pack(np.int64(2**40))
    with pytest.raises(struct.error, match="buffer"):
        _layout(_parameters.MOST + 1, ()).pack_into(_parameters.values, 0, *range(_parameters.MOST + 1))


class FakeStream:
    cuda_stream = 7


@pytest.fixture
def fake_stream(monkeypatch):
    """A stream that `fake_stream.cuda_stream` numbers, in the capture that `fake_stream.capture` numbers."""
    stream = FakeStream()
    stream.capture = 0
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    monkeypatch.setattr("kernels.counters._capture_id", lambda handle: stream.capture)
    return stream


def test_launches_of_a_stream_or_a_capture_share_counters_and_no_others(fake_stream):
    counters = ZeroedCounters(CPU)
    first = counters.of_call(4)
    assert first.tolist() == [0] * 4
    assert counters.of_call(4) is first
    assert counters.of_call(8) is not first  # with more heads
    sets = {first.data_ptr()}
    for stream, number in ((8, 0), (7, 1), (7, 2), (8, 2)):
        fake_stream.cuda_stream, fake_stream.capture = stream, number
        sets.add(counters.of_call(4).data_ptr())
    assert len(sets) == 5
    fake_stream.cuda_stream, fake_stream.capture = 7, 0
    assert counters.of_call(4) is first


def cut_plan():
    """A plan in which a window is cut, so that launches count its pieces, and q, k, v with two heads."""
    graph = EDGE_CASES["hub"]()
    plan = plan_attention(graph, backend="fused3s", device="cuda", dtype=torch.float16, head_dim=64)
    generator = torch.Generator("cuda").manual_seed(0)
    return plan, torch.randn(3, graph.shape[0], 2, 64, generator=generator, device="cuda").half()


def chain(plan, qkv, length: int) -> torch.Tensor:
    """Each launch reads what the one before wrote, into memory that one before that has given back."""
    for _ in range(length):
        qkv = torch.stack([qkv[0], plan(*qkv), qkv[2]])
        qkv[2] = plan(*qkv)
        qkv[0] = plan(*qkv, scale=0.1) + qkv[0]
    return qkv


def waiting_chain(plan, qkv, length: int) -> torch.Tensor:
    def wait(*inputs, **options):
        torch.cuda.synchronize()
        output = plan(*inputs, **options)
        torch.cuda.synchronize()
        return output

    return chain(wait, qkv, length)


@pytest.mark.gpu
def test_gpu_launches_in_a_row_find_what_the_ones_before_wrote():
    plan, qkv = cut_plan()
    expected = waiting_chain(plan, qkv, 30)
    assert expected.isfinite().all()
    for _ in range(3):
        assert torch.equal(chain(plan, qkv, 30), expected)
    graph, output = capture(lambda: chain(plan, qkv, 30))
    for _ in range(3):
        output.fill_(torch.nan)
        graph.replay()
        assert torch.equal(output, expected)


@pytest.mark.gpu
def test_gpu_graphs_of_one_plan_may_be_replayed_at_the_same_time():
    plan, qkv = cut_plan()
    expected = waiting_chain(plan, qkv, 10)
    captured = [capture(lambda: chain(plan, qkv, 10)) for _ in range(3)]
    streams = [torch.cuda.Stream() for _ in captured]
    for _, output in captured:
        output.fill_(torch.nan)
    torch.cuda.synchronize()
    for _ in range(5):
        for (graph, _), stream in zip(captured, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = chain(plan, qkv, 10)
    torch.cuda.synchronize()
    assert all(torch.equal(output, expected) for output in (eager, *(output for _, output in captured)))
