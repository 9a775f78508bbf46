"""Plans as data: frozen, moved and printed; errors where that cannot be done."""

from dataclasses import fields, is_dataclass, replace

import pytest
import torch
from attention_cases import EDGE_CASES
from edge_cases import qkv
from gpu_calls import no_waits
from instances import plan_for
from plan_oracle import SplitHeuristic, make_schedule, with_schedule

from bench.baselines import REGISTRY
from fused3s import AttentionPlan, plan_attention
from fused3s.backends.cuda import CudaBackend
from fused3s.fused.plan_state import Fused3SPlan
from fused3s.runtime import jit
from fused3s.runtime.device import GPULimits
from fused3s.torch_side.tensor_record import map_tensors, num_bytes, tensors_of

GPU = torch.device("cuda", 0)
HALF, FLOAT = torch.float16, torch.float32
WITH_DATA = [name for name, backend in REGISTRY.items() if backend.data_type is not None]
CUDA_BACKENDS = [name for name in WITH_DATA if isinstance(REGISTRY[name], CudaBackend)]


@pytest.fixture
def plannable(monkeypatch):
    """Every installed backend builds its data on the CPU; those with CUDA kernels, for an H200, do not run there."""
    for name in [*CUDA_BACKENDS, "flex_attention"]:
        monkeypatch.setattr(REGISTRY[name], "unavailable", lambda device: None)
    limits = GPULimits(num_sms=132, sm_shared_bytes=228 * 1024, block_shared_bytes=227 * 1024)
    plan_for(monkeypatch, limits)


def make_plan(backend: str, name: str = "n_one_past_16", **options) -> AttentionPlan:
    if backend not in CUDA_BACKENDS:
        options = {"dtype": FLOAT, "head_dim": 16, "num_heads": 2} | options
    return plan_attention(EDGE_CASES[name](), backend=backend, device="cpu", **options)


def all_tensors(plan: AttentionPlan) -> list[torch.Tensor]:
    return list(tensors_of(REGISTRY[plan.backend].tensors(plan.data)))


def assert_same_record(left, right) -> None:
    """Equal types, numbers and bits, all the way down."""
    assert type(left) is type(right)
    if isinstance(left, torch.Tensor):
        assert (left.dtype, left.device) == (right.dtype, right.device)
        assert torch.equal(left, right)
    elif is_dataclass(left):
        for field in fields(left):
            assert_same_record(getattr(left, field.name), getattr(right, field.name))
    else:
        assert left == right


@pytest.mark.parametrize("backend", WITH_DATA)
def test_a_moved_plan_has_all_its_tensors_there(plannable, backend):
    plan = make_plan(backend)
    assert plan.to("cpu") is plan
    moved = plan.to("meta")
    assert moved.device == torch.device("meta")
    assert (moved.backend, moved.shape, moved.inputs) == (plan.backend, plan.shape, plan.inputs)
    assert {tensor.device.type for tensor in all_tensors(moved)} == {"meta"}
    assert {tensor.device.type for tensor in all_tensors(plan)} == {"cpu"}
    assert moved.nbytes == plan.nbytes


def test_bytes_are_those_of_all_tensors(plannable):
    plan = make_plan("fused3s", "hub", reorder="communities")
    data = plan.data.arrays
    tensors = (data.kv_tiles, data.tile_offset, data.row_ids, data.work_items)
    assert plan.nbytes == sum(4 * tensor.numel() for tensor in tensors)
    assert plan.nbytes == num_bytes(map_tensors(data, torch.clone))


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_a_row_order_that_was_kept_gives_the_plan_again(plannable, dtype):
    found = make_plan("fused3s", "hub", reorder="communities")
    again = make_plan("fused3s", "hub", reorder=found.order.perm.to(dtype))
    assert_same_record(again.data.arrays, found.data.arrays)
    assert again.order is None, "no order was searched for"


@pytest.mark.parametrize(
    ("perm", "error", "text"),
    [
        (torch.arange(64), ValueError, r"reorder: got shape \(64,\); \[65\], the number of rows, is needed"),
        (torch.arange(65) + 1, ValueError, "reorder: entry 64 is 65; allowed are 0 to 64"),
        (torch.arange(65.0), TypeError, "reorder: got torch.float32; torch.int32 and torch.int64 are allowed"),
    ],
)
def test_what_is_no_order_of_the_rows_is_named(plannable, perm, error, text):
    with pytest.raises(error, match=text):
        make_plan("fused3s", reorder=perm)
    with pytest.raises(ValueError, match="reference cannot run this: it cannot reorder rows"):
        make_plan("reference", reorder=perm)


def gpu_plan(**options) -> AttentionPlan:
    """A plan with split windows, whatever the GPU."""
    plan = plan_attention(EDGE_CASES["hub"](), backend="fused3s", device=GPU, **options)
    data = plan.data.arrays
    schedule = make_schedule(data.kv_tiles, data.tile_offset, data.work_items.shape[1], SplitHeuristic(2, 16, 32))
    assert schedule.num_splits > 0
    return replace(plan, data=Fused3SPlan(with_schedule(data, schedule)))


@pytest.mark.gpu
@pytest.mark.parametrize("reorder", ["none", "communities"])
def test_gpu_plan_runs_after_a_move(reorder):
    plan = gpu_plan(dtype=HALF, head_dim=16, reorder=reorder)
    tensors = [each.to(GPU) for each in qkv(plan.shape, 2, 16, HALF)]
    expected = plan(*tensors)
    assert torch.equal(plan.to("cpu").to("cuda")(*tensors), expected)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", CUDA_BACKENDS)
@pytest.mark.parametrize("out_dtype", [None, FLOAT])
def test_gpu_first_call_neither_compiles_nor_synchronises(backend, out_dtype, monkeypatch):
    dtype = HALF if REGISTRY[backend].unsupported(FLOAT, 40) else FLOAT
    monkeypatch.setattr(jit, "_kernels", {})
    graph = EDGE_CASES["n_one_past_16"]()
    plan = plan_attention(
        graph, backend=backend, device=GPU, dtype=dtype, head_dim=40, num_heads=2, out_dtype=out_dtype
    )
    tensors = [each.to(GPU) for each in qkv(plan.shape, 2, 40, dtype)]
    torch.cuda.synchronize()
    compiled = set(jit._kernels)
    with no_waits():
        torch.cuda._sleep(200_000_000)  # about 0.1 s
        plan(*tensors, out_dtype=out_dtype)
        assert not torch.cuda.current_stream().query(), "the call returned only after the GPU had finished"
    assert set(jit._kernels) == compiled
