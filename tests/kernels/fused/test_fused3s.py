"""The host side of `fused3s` on the CPU: which instance a plan takes, parameters of a launch, and refusals."""

from itertools import product

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import EDGE_CASES
from instances import forward_instance, plan_for
from plan_oracle import SplitHeuristic, make_schedule, with_schedule

from bench.baselines import REGISTRY
from fused3s.backends import cuda
from fused3s.backends.base import Call, InputSpec
from fused3s.fused import backend as fused3s
from fused3s.fused.plan_state import Fused3SPlan
from fused3s.fused.shapes import EXPRESSION, KEY_FEATURES, VALUE_FEATURES
from fused3s.fused.tiles import backward as fused3s_backward
from fused3s.fused.tiles.backward import backward_instance
from fused3s.fused.tuning import SM90
from fused3s.graph.csr import csr_pattern
from fused3s.runtime.device import GPULimits
from fused3s.runtime.jit import Element
from tests.cuda_shim.cuda_on_cpu import sizes_alone

CPU = torch.device("cpu")
WARPS, FEW_WARPS = SM90.warps, SM90.few_warps
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
A100 = GPULimits(num_sms=108, sm_shared_bytes=164 * 1024, block_shared_bytes=163 * 1024)
H200 = GPULimits(num_sms=132, sm_shared_bytes=228 * 1024, block_shared_bytes=227 * 1024)
RTX_4090 = GPULimits(num_sms=128, sm_shared_bytes=100 * 1024, block_shared_bytes=99 * 1024)
SMALL, LARGE = EDGE_CASES["n_one_past_16"], lambda: sp.csr_array(np.ones((1600, 300), np.int8))


def fits(instance, gpu: GPULimits) -> bool:
    return sizes_alone((instance,))[0].shared_bytes <= gpu.block_shared_bytes


def build(monkeypatch, graph, inputs: InputSpec, gpu: GPULimits = H200, perm=None):
    """Data of a plan for `gpu`, and the instances compiled for it."""
    compiled = []
    plan_for(monkeypatch, gpu)
    monkeypatch.setattr(fused3s, "get_kernel", lambda spec, device_index: compiled.append(spec))
    return REGISTRY["fused3s"].build(csr_pattern(graph), CPU, inputs, perm).arrays, compiled


@pytest.mark.parametrize(
    ("make_graph", "gpu", "dim", "warps"),
    [
        (LARGE, H200, 192, WARPS),
        (LARGE, H200, 200, FEW_WARPS),
        (SMALL, H200, 256, WARPS),  # too few KV tiles for all SMs: more warps share them
        (SMALL, RTX_4090, 256, FEW_WARPS),  # four warps' rings are more than a block gets
        (SMALL, RTX_4090, 64, FEW_WARPS),  # the rings of a call with wider heads would be, too
    ],
)
def test_warps_of_a_plan(monkeypatch, make_graph, gpu, dim, warps):
    data, compiled = build(monkeypatch, make_graph(), InputSpec(HALF, dim, 1, FLOAT), gpu)
    assert data.work_items.shape[1] == warps
    assert compiled == [forward_instance(HALF, FLOAT, dim, warps)]
    assert fits(compiled[0], gpu)


@pytest.mark.parametrize("gpu", [H200, A100, RTX_4090], ids=["H200", "A100", "RTX 4090"])
@pytest.mark.parametrize("edge_data", [False, True])
def test_a_plan_for_few_columns_runs_with_many(monkeypatch, gpu, edge_data):
    plan_for(monkeypatch, gpu)
    inputs = InputSpec(HALF, 64, edge_data=edge_data)
    terms = EXPRESSION | KEY_FEATURES | VALUE_FEATURES if edge_data else 0
    for most_tiles in (1, 1 << 20):
        items = fused3s.forward_schedule(gpu, inputs, None, most_tiles).warps
        for dim in (136, 192, 250, 256):
            assert fits(forward_instance(BFLOAT, FLOAT, dim, items, terms=terms), gpu)
    for columns, form in enumerate(fused3s_backward.pass_schedules(CPU, 1, 64, HALF)):
        for dim in (136, 192, 250, 256):
            assert fits(backward_instance(Element.HALF, dim, bool(columns), form.warps), gpu)


def test_a_plan_whose_blocks_are_too_large_for_a_call_names_the_argument(monkeypatch):
    """Teams of float32 at 256 columns: four need more shared memory than any GPU has."""
    graph = SMALL()
    data, _ = build(monkeypatch, graph, InputSpec(HALF, 64))

    def get_kernel(instance, device_index):
        raise ValueError("it needs 266240 bytes of shared memory a block; this GPU offers 232448")

    monkeypatch.setattr(cuda, "get_kernel", get_kernel)
    q = torch.zeros(graph.shape[0], 1, 256)
    text = r"q: got 256 columns a head of torch.float32, .*266240 bytes.*\(..., head_dim=256, dtype=torch.float32\)"
    with pytest.raises(ValueError, match=text):
        REGISTRY["fused3s"].attend(Fused3SPlan(data), Call(q, q, q, 1.0, FLOAT))


@pytest.mark.parametrize("gpu", [H200, RTX_4090], ids=["H200", "RTX 4090"])
@pytest.mark.parametrize("make_graph", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize(
    ("dim", "dim_warps", "most_teams"), [(2, 1, 4), (64, 1, 4), (66, 2, 2), (128, 2, 2), (130, 3, 1), (256, 4, 1)]
)
def test_float32_plans_run_under_both_precisions(monkeypatch, make_graph, gpu, dim, dim_warps, most_teams):
    """A plan made under one setting of torch.set_float32_matmul_precision has blocks for the other, too."""
    shapes = {}
    for precision in ("highest", "high"):
        monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda precision=precision: precision)
        data, compiled = build(monkeypatch, make_graph(), InputSpec(FLOAT, dim), gpu)
        (instance,) = compiled
        assert instance.arguments.element == (Element.TF32 if precision == "high" else Element.FLOAT)
        assert instance.arguments.dim_warps == dim_warps
        assert fits(instance, gpu)
        shapes[precision] = data.work_items.shape
    assert shapes["highest"] == shapes["high"]
    if make_graph is LARGE:
        assert data.work_items.shape[1] == most_teams


def test_instances_with_two_warps_fit_every_gpu():
    instances = [
        forward_instance(HALF, FLOAT, dim, FEW_WARPS, terms=terms)
        for dim, terms in product(range(2, 257, 2), (0, EXPRESSION))
    ]
    sizes = sizes_alone(tuple(instances))
    assert max(each.shared_bytes for each in sizes) <= RTX_4090.block_shared_bytes


@pytest.mark.parametrize(
    "instance",
    [
        forward_instance(HALF, HALF, 64, FEW_WARPS),
        forward_instance(HALF, HALF, 72),
        forward_instance(BFLOAT, BFLOAT, 64),
    ],
    ids=["items", "dim", "dtype"],
)
def test_an_instance_that_does_not_fit_tensors_and_schedule_is_refused(monkeypatch, instance):
    graph = SMALL()
    data, _ = build(monkeypatch, graph, InputSpec())
    data = with_schedule(data, make_schedule(data.kv_tiles, data.tile_offset, WARPS, SplitHeuristic(4, 16, 32)))
    q = torch.zeros(graph.shape[0], 1, 64, dtype=HALF)
    with pytest.raises(ValueError, match=r"^instance: got .*; the tensors have torch.float16, d = 64, .* 4 work"):
        fused3s.launch(instance, data, Call(q, q, q, 1.0, instance.arguments.out_dtype))
    with pytest.raises(ValueError, match=r"out_dtype: got torch.bfloat16"):
        fused3s.launch(forward_instance(HALF, BFLOAT, 64), data, Call(q, q, q, 1.0, BFLOAT))
