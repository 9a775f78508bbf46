"""Kernel parameters in memory; on a GPU, launches with programmatic dependent launch that read each other's output."""

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from plan_oracle import SplitHeuristic, make_schedule, with_schedule

from kernels import AttentionPlan, plan_attention
from kernels.runtime.cuda_graph import capture
from kernels.runtime.launch import _thread, pack_scalars

NODES, HOP, LAUNCHES = 1024, 389, 30


def test_params_have_c_layout():
    class Params(ctypes.Structure):
        _fields_ = (
            ("first", ctypes.c_void_p),
            ("second", ctypes.c_void_p),
            ("flags", ctypes.c_uint32),
            ("stride", ctypes.c_int64),
            ("rows", ctypes.c_int32),
            ("scale", ctypes.c_float),
            ("last", ctypes.c_int32),
        )

    scalars = pack_scalars(np.uint32(0x80008000), np.int64(-2), np.int32(-3), np.float32(0.5), np.int32(7))
    assert 16 + len(scalars) == ctypes.sizeof(Params)
    _thread.fill([2**63 + 1, 0], scalars)
    (address,) = (ctypes.c_void_p * 1).from_address(_thread.kernel_params)
    params = Params.from_address(address)
    values = (params.first, params.second, params.flags, params.stride, params.rows, params.scale, params.last)
    assert values == (2**63 + 1, None, 0x80008000, -2, -3, 0.5, 7)


def test_threads_do_not_share_params():
    with ThreadPoolExecutor(1) as other:
        assert other.submit(lambda: _thread.kernel_params).result() != _thread.kernel_params


def test_params_that_do_not_fit_are_errors():
    most = _thread.MOST_BYTES // 8
    _thread.fill(range(most - 1), pack_scalars(np.int32(1)))
    with pytest.raises(ValueError, match=f"got {8 * most + 8} bytes; {8 * most} at most"):
        _thread.fill(range(most), pack_scalars(np.int32(1)))
    with pytest.raises(TypeError, match="float64; kernels declare"):
        pack_scalars(np.int32(1), np.float64(1))
    with pytest.raises(TypeError, match="got 3, a int"):
        pack_scalars(3)


def hops(device: str) -> tuple[AttentionPlan, list[torch.Tensor]]:
    """A plan whose windows are all split, and q, k, v whose attention moves row i + HOP of v to row i.

    K holds Q's rows of +-1 moved by HOP: the score of that edge is 64, the others are below 45 or so, and their weights
    vanish. A launch that reads a row too early therefore gives that row of an earlier launch, far from the right one.
    """
    rng = np.random.default_rng(0)
    mask = rng.random((NODES, NODES)) < 0.6
    mask[np.arange(NODES), (np.arange(NODES) + HOP) % NODES] = True
    plan = plan_attention(
        sp.csr_array(mask.astype(np.int8)),
        backend="fused3s",
        device=device,
        dtype=torch.float16,
        head_dim=64,
        num_heads=2,
    )
    data = plan.data
    schedule = make_schedule(data.kv_tiles, data.tile_offset, data.work_items.shape[1], SplitHeuristic(4, 16, 32))
    assert schedule.windows == (0, 0, NODES // 16)
    plan = replace(plan, data=with_schedule(data, schedule))
    q, v = (torch.from_numpy(rng.standard_normal((NODES, 2, 64))).to(device, torch.float16) for _ in range(2))
    q = torch.where(q < 0, -1.0, 1.0).half()
    return plan, [q, q.roll(HOP, 0), v]


def adjacent(plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Each launch reads V from the one before; nothing is queued in between, and memory is reused at once."""
    for _ in range(LAUNCHES):
        v = plan(q, k, v, scale=1.0)
    return v


def one_by_one(plan: AttentionPlan, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same, with the GPU idle before each launch; checked against the rows moved."""
    start = v
    for _ in range(LAUNCHES):
        torch.cuda.synchronize()
        v = plan(q, k, v, scale=1.0)
    torch.cuda.synchronize()
    torch.testing.assert_close(v, start.roll(-HOP * LAUNCHES, 0), rtol=0, atol=1e-2)
    return v


@pytest.mark.gpu
def test_gpu_adjacent_launches_read_what_the_one_before_wrote():
    plan, tensors = hops("cuda")
    expected = one_by_one(plan, *tensors)
    for _ in range(5):
        assert torch.equal(adjacent(plan, *tensors), expected)
    captured = capture(lambda: adjacent(plan, *tensors), plan.device)
    for _ in range(5):
        captured.result.fill_(torch.nan)
        assert torch.equal(captured.replay(), expected)


@pytest.mark.gpu
def test_gpu_graphs_of_one_plan_may_be_replayed_at_the_same_time():
    plan, tensors = hops("cuda")
    expected = one_by_one(plan, *tensors)
    captured = [capture(lambda: adjacent(plan, *tensors), plan.device) for _ in range(3)]
    by_torch = torch.cuda.CUDAGraph()
    with torch.cuda.graph(by_torch):
        result = adjacent(plan, *tensors)
    graphs = [*(one.graph for one in captured), by_torch]
    results = [*(one.result for one in captured), result]
    streams = [torch.cuda.Stream() for _ in graphs]
    for output in results:
        output.fill_(torch.nan)
    torch.cuda.synchronize()
    for _ in range(5):
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        eager = adjacent(plan, *tensors)
    torch.cuda.synchronize()
    assert all(torch.equal(output, expected) for output in (eager, *results))
