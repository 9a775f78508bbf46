"""Kernel parameters in memory; on a GPU, launches with programmatic dependent launch that read each other's output."""

import ctypes
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from plan_oracle import SplitHeuristic, make_schedule, with_schedule

from fused3s import AttentionPlan, plan_attention
from fused3s.fused.plan_state import Fused3SPlan
from fused3s.runtime import debug, launch
from fused3s.runtime.cuda_graph import capture
from fused3s.runtime.jit import Kernel, KernelSizes
from fused3s.runtime.params import ParamsLayout, params_layout
from models.dense.block_training import TrainingPacking

NODES, HOP, LAUNCHES = 1024, 389, 30


MIXED = """
struct Seeds {
  const i64* seed;
  u32 flags;  // of the seed
};
constexpr int kPasses = 2;
struct Params {
  const void* rows[kPasses];  // [num_rows]
  float* output;
  Seeds first;
  i64 stride;
  int num_rows;
  float scale[2];
};
__global__ void mixed(const __grid_constant__ Params p) {}
struct Late {
  int num_rows;
  float* output;
};
__global__ void late(const __grid_constant__ Late p) {}
"""
SCALARS = {"first_flags": 0x80008000, "stride": -2, "num_rows": -3, "scale_0": 0.5, "scale_1": 0.25}


@pytest.fixture
def layout(tmp_path) -> ParamsLayout:
    (tmp_path / "mixed.cu").write_text(MIXED)
    return params_layout(tmp_path / "mixed.cu", "mixed")


def test_params_have_c_layout_by_name(layout):
    class Params(ctypes.Structure):
        _fields_ = (
            *((name, ctypes.c_void_p) for name in ("rows_0", "rows_1", "output", "first_seed")),
            *(("first_flags", ctypes.c_uint32), ("stride", ctypes.c_int64), ("num_rows", ctypes.c_int32)),
            *(("scale_0", ctypes.c_float), ("scale_1", ctypes.c_float)),
        )

    assert layout.num_bytes == ctypes.sizeof(Params)
    assert [*layout.pointers, *layout.scalars] == [name for name, _ in Params._fields_]
    memory = ctypes.create_string_buffer(b"\xff" * layout.num_bytes, layout.num_bytes)
    rows, output = torch.zeros(1), torch.zeros(1)
    tensors = {"output": output, "rows_1": rows, "first_seed": None}  # in any order; what is left out is null
    layout.pack_into(memoryview(memory).cast("B"), tensors, layout.pack_scalars(**SCALARS))
    params = Params.from_buffer(memory)
    assert {name: getattr(params, name) for name in SCALARS} == SCALARS
    found = [getattr(params, name) for name in layout.pointers]
    assert found == [None, rows.data_ptr(), output.data_ptr(), None]


def test_a_tensor_whose_storage_was_freed_is_refused(layout):
    freed, empty = torch.zeros(3), torch.zeros(0, 3)
    freed.untyped_storage().resize_(0)
    memory, scalars = memoryview(bytearray(layout.num_bytes)), layout.pack_scalars(**SCALARS)
    layout.pack_into(memory, {"rows_0": empty}, scalars)
    with pytest.raises(ValueError, match=r"output: got shape \(3,\) without memory"):
        layout.pack_into(memory, {"rows_0": empty, "output": freed}, scalars)


class FakeDriver:
    """In place of libcuda, a GPU 1 that is not current, and its one stream; keeps whether launches overlap."""

    def __init__(self, patch: pytest.MonkeyPatch, error: BaseException | int = 0) -> None:
        self.overlaps, self.current, self.error = [], 0, error
        functions = SimpleNamespace(cuLaunchKernelEx=self.launch, cuGetErrorName=lambda error, name: 0)
        patch.setattr(launch, "_driver", lambda: functions)
        patch.setattr(launch, "_set_device", lambda index: setattr(self, "current", index))
        patch.setattr(launch, "current_gpu", lambda: self.current)
        patch.setattr(launch, "stream_handle", lambda device_index: 7)
        patch.setattr(launch, "_can_overlap", lambda device_index: debug.ALLOWS_OVERLAP)
        patch.setattr(launch, "_waiting", set())
        patch.setattr(torch.Tensor, "get_device", lambda tensor: 1)

    def launch(self, config, function, params, extra):
        *_, has_attributes = launch.CONFIG.unpack(ctypes.string_at(config, launch.CONFIG.size))
        self.overlaps.append(bool(has_attributes))
        if isinstance(self.error, BaseException):
            raise self.error
        return self.error


def start(layout: ParamsLayout, **options) -> None:
    kernel = Kernel("mixed", 1, KernelSizes(), layout, layout.pack_scalars, None)
    launch.launch_kernel(kernel, (2, 3), 64, {"output": torch.zeros(1)}, kernel.scalars(**SCALARS), **options)


def test_the_first_launch_after_next_waits_does_not_overlap(monkeypatch, layout):
    driver = FakeDriver(monkeypatch)
    start(layout, overlaps=True)
    launch.next_waits(1)
    start(layout)
    start(layout, overlaps=True)
    start(layout, overlaps=True)
    assert driver.overlaps == [True, False, False, True]


def test_packing_weights_of_a_pass_makes_the_next_kernel_wait(monkeypatch, layout):
    packing = TrainingPacking(64, torch.float16, 1, 1e-5, torch.device("cpu"))
    matrices = [[torch.zeros(64, 64).half(), torch.zeros(128, 64).half(), torch.zeros(64, 128).half()]]
    vectors = [[torch.zeros(128 if i == 3 else 64).half() for i in range(7)]]
    driver = FakeDriver(monkeypatch)
    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    packing.pack(matrices, vectors)
    start(layout, overlaps=True)
    start(layout, overlaps=True)
    assert driver.overlaps == [False, True]


@pytest.mark.parametrize(("error", "raised"), [(719, RuntimeError), (KeyboardInterrupt(), KeyboardInterrupt)])
def test_a_launch_that_fails_leaves_the_device_as_it_was(monkeypatch, layout, error, raised):
    driver = FakeDriver(monkeypatch, error)
    with pytest.raises(raised):
        start(layout)
    assert driver.overlaps == [False]
    assert driver.current == 0


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
    data = plan.data.arrays
    schedule = make_schedule(data.kv_tiles, data.tile_offset, data.work_items.shape[1], SplitHeuristic(4, 16, 32))
    assert schedule.windows == (0, 0, NODES // 16)
    plan = replace(plan, data=Fused3SPlan(with_schedule(data, schedule)))
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
