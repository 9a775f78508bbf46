"""Switches of the paper's kernel for measurements: split rows (F3S_splitR), edge-parallel blocks and clocks."""

import math

import numpy as np
import pytest
import torch
from attention_cases import REAL_GRAPHS, load_real_graph
from gpu_calls import inputs, to_gpu
from poison import poisoned_buffers
from tolerance import assert_within_bound, edges_of

from bench.baselines import fused3s_paper
from bench.baselines.bsb import BSB
from bench.baselines.fused3s_paper import launch, paper_instance
from fused3s.runtime.jit import KernelInstance

HALF, BFLOAT, SINGLE = torch.float16, torch.bfloat16, torch.float32
TYPES = [(HALF, SINGLE), (HALF, HALF), (BFLOAT, SINGLE), (BFLOAT, BFLOAT)]
# One and two k-steps a warp, a last k-step of 8 dimensions, a last warp with one k-step, fewer k-steps than warps.
DIMS = [8, 16, 24, 64, 72, 128, 136, 200, 256]


SPLIT_ROWS, EDGE_PARALLEL = {"permuted": False, "split_rows": True}, {"reordered": False, "edge_parallel": True}
# Least TCBs of a block, and most blocks: windows of several blocks, blocks with parts of two windows, two blocks.
RUNS = [(1, 4096), (3, 4096), (1, 2)]
# Instance, heads, and runs of edge-parallel blocks.
SWITCHED = [(HALF, SINGLE, dim, SPLIT_ROWS | {"reordered": each}, 1, RUNS[0]) for dim in DIMS for each in (False, True)]
SWITCHED += [(HALF, SINGLE, dim, EDGE_PARALLEL, 1, runs) for dim in DIMS for runs in RUNS]
SWITCHED += [
    (*types, 136, EDGE_PARALLEL | more, 2, RUNS[0]) for types in TYPES for more in ({}, {"permuted": False}, SPLIT_ROWS)
]


def set_runs(monkeypatch, least_tcbs: int, most_blocks: int) -> None:
    monkeypatch.setattr(fused3s_paper, "LEAST_TCBS", least_tcbs)
    monkeypatch.setattr(fused3s_paper, "MOST_BLOCKS", most_blocks)


def check(monkeypatch, spec: KernelInstance, graph, heads: int, scale: float, label: str) -> float:
    tensors = inputs(*graph.shape, heads, spec.arguments.dim, spec.arguments.dtype)
    bsb = to_gpu(BSB.from_graph(graph))
    with poisoned_buffers(monkeypatch):
        output = launch(spec, bsb, *tensors, scale)
    assert output.dtype == spec.arguments.out_dtype
    # The parts of S and of O are added in one order, so different bits mean a race.
    assert all(torch.equal(launch(spec, bsb, *tensors, scale), output) for _ in range(3))
    return assert_within_bound(output, *tensors, *edges_of(graph, "cuda"), scale, f"{spec.name}, {label}")


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "out_dtype", "dim", "switches", "heads", "runs"), SWITCHED, ids=str)
def test_switches_on_edge_cases(monkeypatch, edge_case, dtype, out_dtype, dim, switches, heads, runs):
    set_runs(monkeypatch, *runs)
    check(monkeypatch, paper_instance(dtype, out_dtype, dim, **switches), edge_case, heads, 0.2, f"edge case, {runs}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", REAL_GRAPHS)
def test_split_rows_on_real_graphs(monkeypatch, real_graph_dir, name):
    graph = load_real_graph(real_graph_dir, name)
    spec = paper_instance(HALF, SINGLE, 128, reordered=False, **SPLIT_ROWS)
    assert check(monkeypatch, spec, graph, 1, 1.0, name) < 2e-3


@pytest.mark.gpu
@pytest.mark.parametrize(
    "switches",
    [
        {},
        {"reordered": False, "permuted": False},
        {"reordered": True, "permuted": False},
        SPLIT_ROWS | {"reordered": False},
        EDGE_PARALLEL,
    ],
    ids=str,
)
@pytest.mark.parametrize("dim", [64, 256])
def test_clocked_build_gives_the_same_bits_and_a_clock_for_each_block(edge_case, switches, dim):
    tensors = inputs(*edge_case.shape, 2, dim, HALF)
    bsb = to_gpu(BSB.from_graph(edge_case))
    spec = paper_instance(HALF, SINGLE, dim, **switches)
    expected = launch(spec, bsb, *tensors, 0.3)

    shape = (2, spec.arguments.num_blocks(bsb), 3)
    memory = torch.full((math.prod(shape) + 6,), -1, dtype=torch.int64, device="cuda")
    clocks = memory[3:-3].view(shape)
    before = torch.cuda.Event(enable_timing=True)
    after = torch.cuda.Event(enable_timing=True)
    before.record()
    output = launch(paper_instance(HALF, SINGLE, dim, **switches, clocked=True), bsb, *tensors, 0.3, clocks)
    after.record()
    torch.cuda.synchronize()

    assert torch.equal(output, expected)
    assert (memory[:3] == -1).all()
    assert (memory[-3:] == -1).all()
    sm, start, end = clocks.unbind(-1)
    assert (sm >= 0).all()
    assert len(sm.unique()) <= torch.cuda.get_device_properties(0).multi_processor_count
    assert (start > 0).all()
    cycles = end - start
    assert (cycles > 100).all()
    # At less than 5 GHz, no block lasts longer than the launch.
    assert (cycles < 5e6 * before.elapsed_time(after)).all()


def test_wrong_clocks_are_named():
    bsb = BSB.from_csr([0, 1], [0])
    tensors = inputs(1, 1, 1, 64, HALF, device="cpu")
    plain, clocked = (paper_instance(HALF, SINGLE, 64, clocked=clocked) for clocked in (False, True))
    right = torch.zeros(1, 1, 3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"clocks: got None; a clocked instance needs int64 \[1, 1, 3\]"):
        launch(clocked, bsb, *tensors, 1.0)
    with pytest.raises(ValueError, match="clocks: got a tensor, which only an instance with clocked=True fills"):
        launch(plain, bsb, *tensors, 1.0, right)
    for wrong in (right.int(), right[0], torch.zeros(1, 1, 6, dtype=torch.int64)[..., ::2]):
        with pytest.raises(ValueError, match=r"clocks: got .* contiguous int64 \[1, 1, 3\] on cpu is needed"):
            launch(clocked, bsb, *tensors, 1.0, wrong)


@pytest.mark.parametrize(("name", "place"), [("key", 1), ("value", 2)])
def test_rows_too_far_apart_are_named(name, place):
    tensors = inputs(1, 1, 1, 64, HALF, device="cpu")
    tensors[place] = tensors[place].as_strided((1, 1, 64), (2**30, 64, 1))
    with pytest.raises(ValueError, match=f"{name}: got rows 2147483648 bytes apart; at most 2147483647 are allowed"):
        launch(paper_instance(HALF, SINGLE, 64), BSB.from_csr([0, 1], [0]), *tensors, 1.0)


@pytest.mark.parametrize(
    ("num_tcbs", "least_tcbs", "most_blocks", "blocks"),
    [(0, 8, 4, 1), (1, 8, 4, 1), (8, 8, 4, 1), (9, 8, 4, 2), (32, 8, 4, 4), (33, 8, 4, 4), (37, 8, 4, 4)],
)
def test_edge_parallel_blocks_have_enough_tcbs_and_are_few(monkeypatch, num_tcbs, least_tcbs, most_blocks, blocks):
    set_runs(monkeypatch, least_tcbs, most_blocks)
    bsb = BSB.from_csr([0, 8 * num_tcbs], np.arange(8 * num_tcbs), num_cols=8 * max(num_tcbs, 1))
    assert bsb.num_tcbs == num_tcbs
    assert paper_instance(HALF, SINGLE, 64, **EDGE_PARALLEL).arguments.num_blocks(bsb) == blocks


def test_edge_parallel_and_reordered_exclude_each_other():
    with pytest.raises(ValueError, match=r"edge_parallel: got True with reordered=True; .* set reordered=False"):
        paper_instance(HALF, SINGLE, 64, edge_parallel=True)
