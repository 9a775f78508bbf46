"""The host side of `fused3s` on the CPU: which instance a plan takes, parameters of a launch, and refusals."""

import math
import struct
from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import EDGE_CASES

from kernels.backends import REGISTRY, fused3s
from kernels.backends.base import InputSpec
from kernels.backends.fused3s import FEW_WARPS, WARPS, FusedKernelSpec, _scalars
from kernels.formats.csr import csr_pattern
from kernels.formats.schedule import SplitHeuristic, make_schedule
from kernels.runtime.device import GPULimits

CPU = torch.device("cpu")
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
H200 = GPULimits(num_sms=132, sm_shared_bytes=228 * 1024, block_shared_bytes=227 * 1024)
RTX_4090 = GPULimits(num_sms=128, sm_shared_bytes=100 * 1024, block_shared_bytes=99 * 1024)
SMALL, LARGE = EDGE_CASES["n_one_past_16"], lambda: sp.csr_array(np.ones((1600, 300), np.int8))


def build(monkeypatch, graph, inputs: InputSpec, gpu: GPULimits = H200, perm=None):
    """Data of a plan for `gpu`, and the instances compiled for it."""
    compiled = []
    monkeypatch.setattr(fused3s, "gpu_limits", lambda device: gpu)
    monkeypatch.setattr(fused3s, "get_kernel", lambda spec, device_index: compiled.append(spec))
    return REGISTRY["fused3s"].build(csr_pattern(graph), CPU, inputs, perm), compiled


@pytest.mark.parametrize(
    ("make_graph", "gpu", "dim", "warps"),
    [
        (LARGE, H200, 192, WARPS),
        (LARGE, H200, 200, FEW_WARPS),
        (SMALL, H200, 256, WARPS),  # too few KV tiles for all SMs: more warps share them
        (SMALL, RTX_4090, 256, FEW_WARPS),  # four warps' rings are more than a block gets
        (SMALL, RTX_4090, 192, WARPS),
    ],
)
def test_warps_of_a_plan(monkeypatch, make_graph, gpu, dim, warps):
    data, compiled = build(monkeypatch, make_graph(), InputSpec(HALF, dim, 1, FLOAT), gpu)
    assert data.schedule.warps == warps
    assert compiled == [FusedKernelSpec(HALF, FLOAT, dim, warps)]
    assert compiled[0].shared_bytes <= gpu.block_shared_bytes


def test_heads_count_as_work(monkeypatch):
    one, eight = (
        build(monkeypatch, EDGE_CASES["n_multiple_of_16"](), InputSpec(HALF, 256, heads))[0].schedule.warps
        for heads in (1, 1000)
    )
    assert (one, eight) == (WARPS, FEW_WARPS)


def test_nothing_is_compiled_before_the_inputs_are_known(monkeypatch):
    for inputs in (InputSpec(), InputSpec(dtype=HALF), InputSpec(head_dim=64)):
        data, compiled = build(monkeypatch, SMALL(), inputs)
        assert data.schedule.num_blocks > 0
        assert compiled == []


def test_instances_with_two_warps_fit_every_gpu():
    for dim in range(8, 257, 8):
        assert FusedKernelSpec(HALF, FLOAT, dim, FEW_WARPS).shared_bytes <= RTX_4090.block_shared_bytes


@pytest.mark.parametrize(
    ("gpu", "dim", "blocks"),
    [(H200, 64, 4), (H200, 128, 3), (H200, 256, 1), (RTX_4090, 64, 2), (RTX_4090, 128, 1)],
)
def test_blocks_of_an_sm_follow_its_shared_memory_and_registers(gpu, dim, blocks):
    assert FusedKernelSpec(HALF, FLOAT, dim).blocks_per_sm(gpu.sm_shared_bytes) == blocks


def test_row_ids_pad_the_last_window_with_no_row(monkeypatch):
    graph = EDGE_CASES["n_one_past_16"]()
    perm = torch.randperm(65).int()
    data, _ = build(monkeypatch, graph, InputSpec(), perm=perm)
    assert data.row_ids.tolist() == [*perm.tolist(), *[65] * 15]
    assert build(monkeypatch, graph, InputSpec())[0].row_ids is None


def test_scalars_follow_the_strides():
    query, key, _ = torch.zeros(5, 3, 2, 16, dtype=HALF).unbind(1)
    packed = _scalars(5, -0.5, 2, query.stride(), key.stride(), torch.zeros(5, 2, 16).stride())
    heads, rows, rest = struct.unpack("<3q", packed[:24]), struct.unpack("<3i", packed[24:36]), packed[36:]
    assert (heads, rows) == ((16, 16, 16), (192, 192, 64))
    assert struct.unpack("<iIf", rest) == (5, 0x80008000, pytest.approx(0.5 * math.log2(math.e)))
    with pytest.raises(OverflowError):
        _scalars(1, 1.0, 2, *[(2**30, 16, 1)] * 3)


@pytest.mark.parametrize(
    "spec",
    [FusedKernelSpec(HALF, HALF, 64, FEW_WARPS), FusedKernelSpec(HALF, HALF, 72), FusedKernelSpec(BFLOAT, BFLOAT, 64)],
    ids=["warps", "dim", "dtype"],
)
def test_an_instance_that_does_not_fit_tensors_and_schedule_is_refused(monkeypatch, spec):
    graph = SMALL()
    data, _ = build(monkeypatch, graph, InputSpec())
    data = replace(data, schedule=make_schedule(data.kv_tiles, data.tile_offset, WARPS, SplitHeuristic(4, 16, 32)))
    q = torch.zeros(graph.shape[0], 1, 64, dtype=HALF)
    with pytest.raises(ValueError, match=r"^spec: got .*; the tensors have torch.float16, d = 64, .* 4 warps$"):
        fused3s.launch(spec, data, q, q, q, 1.0)
    with pytest.raises(ValueError, match=r"out_dtype: got torch.bfloat16"):
        fused3s.launch(FusedKernelSpec(HALF, BFLOAT, 64), data, q, q, q, 1.0)


@pytest.mark.parametrize(("gpu", "warps"), [(H200, WARPS), (RTX_4090, FEW_WARPS)])
def test_a_plan_of_unknown_width_runs_with_the_widest(monkeypatch, gpu, warps):
    data, _ = build(monkeypatch, SMALL(), InputSpec(), gpu)
    assert data.schedule.warps == warps
    assert FusedKernelSpec(HALF, FLOAT, 256, warps).shared_bytes <= gpu.block_shared_bytes
