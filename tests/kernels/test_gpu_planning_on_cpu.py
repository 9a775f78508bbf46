"""Whole plans of `fused3s` by the planning kernels on the CPU (tests/cuda_shim), the transpose for the backward pass
included: the bits of the plans that torch makes."""

import pytest
import torch
from gpu_plan_on_cpu import gpu_on_cpu
from kernels.formats.gpu_reverse import find_reverse
from plan_cases import INPUTS, PATTERNS, assert_equal_plans

from kernels.backends import fused3s
from kernels.backends.fused3s_planning import plan_by_kernels, plan_graph
from kernels.formats.csr import CSRPattern, csr_pattern
from kernels.formats.row_order import permute_rows
from kernels.formats.transpose import is_symmetric, transpose_csr
from tests.cuda_shim.cuda_on_cpu import COMPILER, cuda_on_cpu
from tests.cuda_shim.oracle import GRAPHS

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)"),
    pytest.mark.usefixtures("one_thread"),
]

CPU = torch.device("cpu")


@pytest.fixture
def planned(monkeypatch):
    """A function that plans by the kernels and compares with torch; it returns the plan and the launches."""

    def compare(graph, inputs, label, perm=None, mode="late"):
        pattern = csr_pattern(graph)
        with cuda_on_cpu():
            shapes = fused3s._block_shapes(fused3s.gpu_limits(CPU), inputs)
            expected = plan_graph(pattern, CPU, inputs, shapes, perm)
            with gpu_on_cpu(monkeypatch, mode) as gpu, monkeypatch.context() as patch:
                patch.setattr("torch.Tensor.is_cuda", property(lambda tensor: True))
                made = plan_by_kernels(pattern, CPU, inputs, shapes, expected.row_ids)
        assert_equal_plans(made, expected, label)
        return made, gpu.launched

    return compare


@pytest.mark.parametrize("name", PATTERNS)
def test_a_plan_has_the_bits_of_torchs(planned, name):
    graph = PATTERNS[name]()
    for key, inputs in INPUTS.items():
        planned(graph, inputs, f"{name}, {key}")


@pytest.mark.parametrize("key", ["narrow_backward", "edge_data_backward"])
def test_a_plan_of_reordered_rows(planned, key):
    graph = PATTERNS["symmetric"]()
    perm = torch.randperm(graph.shape[0], generator=torch.Generator().manual_seed(1)).int()
    planned(permute_rows(csr_pattern(graph), perm), INPUTS[key], key, perm)


def test_a_symmetric_graph_has_one_format(planned):
    made, launched = planned(PATTERNS["symmetric"](), INPUTS["backward"], "symmetric")
    tiles = made.backward.tiles
    assert tiles.by_column.kv_tiles is tiles.by_row.kv_tiles is made.kv_tiles
    assert [name.partition("<")[0] for name in launched] == [
        *("plan_tiles", "plan_schedule", "plan_reverse", "plan_tiles"),
        *("plan_items", "plan_items", "plan_items"),
    ]


@pytest.mark.parametrize("mode", ["early", "random"])
def test_the_order_of_threads_does_not_matter(planned, mode):
    for name in ("symmetric", "directed"):
        for key in ("backward", "edge_data_backward"):
            planned(PATTERNS[name](), INPUTS[key], f"{name}, {key}, {mode}", mode=mode)


def test_the_reverse_of_each_edge(monkeypatch):
    for name in GRAPHS:
        pattern = csr_pattern(GRAPHS[name]())
        indptr, indices = (torch.from_numpy(each.copy()) for each in (pattern.indptr, pattern.indices))
        indptr, indices = indptr.long(), indices.int()
        if len(indptr) == 1 or pattern.shape[0] != pattern.shape[1]:
            continue
        transposed = transpose_csr(indptr, indices, pattern.shape[1])
        with gpu_on_cpu(monkeypatch, "random"):
            reverse = find_reverse(indptr, indices)
        assert (reverse is not None) == is_symmetric(indptr, indices, transposed), name
        assert reverse is None or torch.equal(reverse, transposed.edge), name


@pytest.mark.parametrize(
    ("what", "place", "value"),
    [("indptr", 0, 1), ("indptr", 5, 10**6), ("indptr", 8, -(2**33)), ("indptr", -1, 999), ("indices", 3, 2**30)],
)
def test_damaged_csr(monkeypatch, what, place, value):
    """Nothing is read or written out of bounds, and the torch path names what is wrong."""
    pattern = csr_pattern(PATTERNS["symmetric"]())
    arrays = {"indptr": torch.from_numpy(pattern.indptr).long(), "indices": torch.from_numpy(pattern.indices).long()}
    arrays[what][place] = value
    damaged = CSRPattern(*arrays.values(), pattern.shape)
    for key in ("narrow_backward", "edge_data_backward"):
        with cuda_on_cpu(), gpu_on_cpu(monkeypatch):
            shapes = fused3s._block_shapes(fused3s.gpu_limits(CPU), INPUTS[key])
            assert plan_by_kernels(damaged, CPU, INPUTS[key], shapes, None) is None
