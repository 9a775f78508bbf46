"""cuda/fused3s_edges.cu on the CPU (tests/cuda_shim): the real source and the real plans against dense float64."""

import pytest
import torch
from edge_cases import EDGE_LISTS, FORMS, KINDS, assert_edge_attention, edge_inputs, qkv
from poison import poisoned_buffers

from kernels import plan_attention
from kernels.backends import fused3s_edges
from kernels.backends.fused3s_edges import EdgeKernelData, heads_of_lane_group, launch_edge_kernel
from kernels.formats.csr import csr_pattern
from kernels.formats.edges import distinct_csr
from kernels.formats.row_items import make_row_items
from kernels.formats.row_order import permute_rows
from tests.cuda_shim.cuda_on_cpu import COMPILER, MODES, cuda_on_cpu
from tests.cuda_shim.oracle import GRAPHS, assert_attention, inputs

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)"),
    pytest.mark.usefixtures("one_thread"),
]

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
# heads, dimensions, types: loads of 4, 8 and 16 bytes, idle lanes and heads, one lane to a whole warp a head.
SHAPES = [
    (1, 2, HALF, FLOAT),
    (8, 8, HALF, HALF),
    (3, 10, HALF, HALF),
    (5, 12, BFLOAT, BFLOAT),
    (8, 16, BFLOAT, FLOAT),
    (3, 24, HALF, FLOAT),
    (4, 32, HALF, HALF),
    (2, 100, HALF, HALF),
    (1, 128, HALF, HALF),
    (1, 256, BFLOAT, BFLOAT),
    (32, 8, HALF, HALF),
]


def run(monkeypatch, graph, tensors, scale, out_dtype, part_edges, mode="late", reordered=False, edges=None):
    """Output and lse of a launch with items of at most `part_edges` edges."""
    pattern, perm = csr_pattern(graph), None
    if reordered:
        perm = torch.randperm(graph.shape[0], generator=torch.Generator().manual_seed(3)).int()
        pattern = permute_rows(pattern, perm)
    indptr, indices = distinct_csr(pattern, tensors[0].device)
    data = EdgeKernelData(indices, make_row_items(indptr, perm, part_edges))
    with cuda_on_cpu(MODES[mode]), poisoned_buffers(monkeypatch):
        lse = torch.empty(tensors[0].shape[:2], dtype=FLOAT, device=tensors[0].device)
        return launch_edge_kernel(data, *tensors, scale, out_dtype, lse, edges), lse


@pytest.mark.parametrize(("heads", "dim", "dtype", "out_dtype"), SHAPES)
def test_every_case_matches_float64(monkeypatch, heads, dim, dtype, out_dtype):
    for name, make_graph in GRAPHS.items():
        graph = make_graph()
        for part_edges, mode, scale, strided, reordered in (
            (1000, "late", 0.3, False, False),
            (3, "random", -0.2, True, True),
            (16, "late", 0.0, False, True),
        ):
            tensors = inputs(graph, heads, dim, dtype, strided)
            output, lse = run(monkeypatch, graph, tensors, scale, out_dtype, part_edges, mode, reordered)
            assert output.dtype == out_dtype
            label = f"{name}, parts of {part_edges} edges"
            assert_attention(output, tensors, graph, scale, label, lse=lse)


def test_lanes_of_a_group():
    assert heads_of_lane_group(8, 8) == 8
    assert heads_of_lane_group(16, 64) == 2
    assert heads_of_lane_group(12, 16) == 4
    assert heads_of_lane_group(1, 256) == 1
    assert heads_of_lane_group(3, 8) == 1 or heads_of_lane_group(3, 8) == 4


# Narrow and wide heads, which take different kernels; all of them with all terms at once.
EDGE_SHAPES = [(3, 5, HALF), (2, 64, HALF), (8, 8, HALF), (4, 16, BFLOAT), (1, 136, BFLOAT)]
EDGE_CASES = [(kind, *shape) for kind in KINDS for shape in (EDGE_SHAPES if kind == "all" else EDGE_SHAPES[:2])]


@pytest.mark.parametrize(("kind", "heads", "dim", "dtype"), EDGE_CASES)
def test_edge_data_matches_float64(monkeypatch, heads, dim, dtype, kind):
    for name in ("repeated", "hub", "one_node_self_loop", "empty_rows_and_windows", "wide", "no_edges"):
        graph = EDGE_LISTS[name]()
        tensors = qkv(graph.shape, heads, dim, dtype)
        made, order = FORMS["dgl" if name == "repeated" else "scipy_coo"](graph)
        edges = edge_inputs(kind, graph.num_edges, heads, dim, dtype)
        for reorder, mode in (("none", "late"), ("rcm", "random")):
            with cuda_on_cpu(MODES[mode]):
                plan = plan_attention(
                    made, backend="fused3s", device="cpu", dtype=dtype, head_dim=dim, num_heads=heads, edge_data=True,
                    reorder=reorder,
                )  # fmt: skip
                arguments = edges.in_order(order)
                if "edges" in arguments:
                    arguments["edges"] = plan.bind_edges(arguments["edges"])
                with poisoned_buffers(monkeypatch):
                    output = plan(*tensors, scale=0.4, **arguments)
            assert_edge_attention(output, graph, tensors, edges, 0.4, f"{name}, {kind}, reorder {reorder}")


@pytest.mark.parametrize("kind", ["all", "features"])
def test_parts_of_a_row_keep_their_edge_data(monkeypatch, kind):
    graph = EDGE_LISTS["hub"]()
    tensors = qkv(graph.shape, 2, 24, HALF)
    edges = edge_inputs(kind, graph.num_edges, 2, 24, HALF)
    made, order = FORMS["scipy_coo"](graph)
    monkeypatch.setattr(fused3s_edges, "LEAST_PART_EDGES", 4)
    with cuda_on_cpu(MODES["random"]):
        plan = plan_attention(
            made, backend="fused3s", device="cpu", dtype=HALF, head_dim=24, num_heads=2, edge_data=True
        )
        assert plan.data.by_edge.work.parts.shape[0] > 10
        arguments = edges.in_order(order)
        with poisoned_buffers(monkeypatch):
            output, again = (plan(*tensors, scale=-0.4, **arguments) for _ in range(2))
    assert torch.equal(output, again)
    assert_edge_attention(output, graph, tensors, edges, -0.4, kind)
