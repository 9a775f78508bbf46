"""Launches that overlap: how parameters lie, and that on a GPU each kernel finds what those before it wrote."""

import ctypes
import math
import struct
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from attention_cases import EDGE_CASES

from kernels import plan_attention
from kernels.backends.fused3s import _scalars
from kernels.runtime.cuda_graph import capture
from kernels.runtime.launch import _parameters, pack_scalars
from kernels.runtime.semaphores import ZeroedCounters

CPU = torch.device("cpu")


def test_parameters_lie_eight_bytes_apart_where_their_addresses_say():
    pointers, scalars = [2**63 + 1, 0], [np.int64(-2), np.int32(-3), np.uint32(0x80008000), np.float32(0.5)]
    _parameters.fill(pointers, pack_scalars(*scalars))
    addresses = (ctypes.c_void_p * _parameters.MOST).from_address(_parameters.addresses_start)
    for address, parameter in zip(addresses, [*map(np.uint64, pointers), *scalars], strict=False):
        assert ctypes.string_at(address, parameter.nbytes) == parameter.tobytes()


def test_threads_do_not_share_parameters():
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: _parameters.addresses_start).result() != _parameters.addresses_start


def test_parameters_that_do_not_fit_are_errors():
    _parameters.fill(range(_parameters.MOST - 1), pack_scalars(np.int32(1)))
    with pytest.raises(ValueError, match="33 parameters; 32"):
        _parameters.fill(range(_parameters.MOST), pack_scalars(np.int32(1)))
    with pytest.raises(TypeError, match="float64; kernels declare"):
        pack_scalars(np.int32(1), np.float64(1))
    with pytest.raises(TypeError, match="got 3, a int"):
        pack_scalars(3)


def test_scalars_of_fused3s_follow_the_strides():
    query, key, _ = torch.zeros(5, 3, 2, 16, dtype=torch.float16).unbind(1)
    packed = _scalars(5, -0.5, 2, query.stride(), key.stride(), torch.zeros(5, 2, 16).stride())
    heads, rows = struct.unpack("<3q", packed[:24]), struct.unpack("<i4xi4xi4x", packed[24:48])
    assert (heads, rows) == ((16, 16, 16), (192, 192, 64))
    assert struct.unpack("<i4xI4xf4x", packed[48:]) == (5, 0x80008000, pytest.approx(0.5 * math.log2(math.e)))
    with pytest.raises(OverflowError):
        _scalars(1, 1.0, 2, *[(2**30, 16, 1)] * 3)


@pytest.fixture
def fake_stream(monkeypatch):
    """A stream that `fake_stream.handle` numbers, in the capture that `fake_stream.capture` numbers."""
    stream = SimpleNamespace(handle=7, capture=0)
    monkeypatch.setattr("kernels.runtime.semaphores.stream_handle", lambda device_index: stream.handle)
    monkeypatch.setattr("kernels.runtime.semaphores._capture_id", lambda handle: stream.capture)
    return stream


def test_launches_of_a_stream_or_a_capture_share_counters_and_no_others(fake_stream):
    counters = ZeroedCounters(CPU)
    first = counters.of_call(4)
    assert first.tolist() == [0] * 4
    assert counters.of_call(4) is first
    assert counters.of_call(8) is not first  # with more heads
    sets = {first.data_ptr()}
    for stream, number in ((8, 0), (7, 1), (7, 2), (8, 2)):
        fake_stream.handle, fake_stream.capture = stream, number
        sets.add(counters.of_call(4).data_ptr())
    assert len(sets) == 5
    fake_stream.handle, fake_stream.capture = 7, 0
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
