"""Whole plans of `fused3s` on a GPU: the bits of the plans that torch makes on the CPU, and the waits of the host."""

import warnings

import pytest
import scipy.sparse as sp
import torch
from plan_cases import INPUTS, PATTERNS, assert_equal_plans, random_graph, symmetric

from kernels.backends import fused3s, fused3s_backward, fused3s_edges, fused3s_planning
from kernels.backends.fused3s_planning import plan_graph
from kernels.formats.csr import CSRPattern, csr_pattern
from kernels.runtime.device import gpu_limits

pytestmark = pytest.mark.gpu

CPU = torch.device("cpu")
LARGE = {
    "symmetric": lambda: symmetric(random_graph(50_000, 50_000, 10, 1)),
    "directed": lambda: random_graph(30_000, 30_000, 30, 2),
    "hubs": lambda: symmetric(
        sp.csr_array(sp.vstack([random_graph(3, 40_000, 20_000, 3), sp.csr_array((39_997, 40_000))]))
    ),
}


def on_gpu(graph) -> CSRPattern:
    pattern = csr_pattern(graph)
    indptr, indices = (torch.as_tensor(each).cuda() for each in (pattern.indptr, pattern.indices))
    return CSRPattern(indptr, indices, pattern.shape)


@pytest.mark.parametrize("key", INPUTS)
@pytest.mark.parametrize("name", [*PATTERNS, *(f"large, {name}" for name in LARGE)])
def test_a_plan_has_the_bits_of_torchs(monkeypatch, name, key):
    graph, inputs = ({f"large, {name}": make for name, make in LARGE.items()} | PATTERNS)[name](), INPUTS[key]
    device = torch.device("cuda", torch.cuda.current_device())
    limits = gpu_limits(device)
    for module in (fused3s, fused3s_backward, fused3s_edges):
        monkeypatch.setattr(module, "gpu_limits", lambda device: limits)
    monkeypatch.setattr(fused3s_backward, "get_kernel", lambda spec, device_index: None)  # none for the CPU
    monkeypatch.setattr("kernels.backends.fused3s_edges_backward.get_kernel", lambda spec, device_index: None)
    shapes = fused3s._block_shapes(limits, inputs)
    expected = plan_graph(csr_pattern(graph), CPU, inputs, shapes)
    assert_equal_plans(plan_graph(on_gpu(graph), device, inputs, shapes), expected, f"{name}, {key}")


@pytest.mark.parametrize(
    ("name", "key", "times"),
    [
        ("symmetric", "forward", 1),
        ("symmetric", "backward", 1),
        ("symmetric", "narrow_backward", 1),
        ("symmetric", "edge_data_backward", 1),
        ("directed", "backward", 2),
    ],
)
def test_the_host_reads_the_sizes_of_a_matrix_once(monkeypatch, name, key, times):
    """Besides, it waits at the end, which is left out here."""
    inputs, pattern = INPUTS[key], on_gpu(PATTERNS[name]())
    device = torch.device("cuda", torch.cuda.current_device())
    shapes = fused3s._block_shapes(gpu_limits(device), inputs)
    plan_graph(pattern, device, inputs, shapes)  # compiles
    monkeypatch.setattr(fused3s_planning, "wait_for", lambda device: None)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            plan_graph(pattern, device, inputs, shapes)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
    waits = [each for each in caught if "synchronizing" in str(each.message)]
    assert len(waits) == times, [str(each.message) for each in waits]
