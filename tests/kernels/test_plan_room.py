"""Plans with room, of which one serves many graphs: on the CPU (tests/cuda_shim) and, in a CUDA graph, on a GPU."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from poison import poisoned_buffers

from kernels import plan_attention
from kernels.plan_room import refill_, with_room
from kernels.runtime.cuda_graph import capture
from tests.cuda_shim.cuda_on_cpu import COMPILER, MODES, cuda_on_cpu
from tests.cuda_shim.oracle import assert_attention, inputs

ROWS, SCALE = 200, 0.3
on_the_shim = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)")


def graph(seed: int, density: float, rows: int = ROWS - 30) -> sp.csr_array:
    """`rows` rows with edges among them, then empty rows."""
    mask = np.zeros((ROWS, ROWS), bool)
    mask[:rows, :rows] = np.random.default_rng(seed).random((rows, rows)) < density
    return sp.csr_array(mask)


# The second has fewer KV tiles and blocks than the first, the third more of both; the last has none.
GRAPHS = [graph(0, 0.1), graph(1, 0.02, 60), graph(2, 0.2, ROWS), sp.csr_array((ROWS, ROWS))]
SPARSE = [graph(0, 0.02), graph(1, 0.02, 60), graph(2, 0.03, ROWS)]  # narrow heads run edge by edge


SHAPES = pytest.mark.parametrize(
    ("graphs", "heads", "dim"), [(GRAPHS, 2, 32), (GRAPHS, 1, 128), (SPARSE, 8, 16)], ids=["2x32", "1x128", "8x16"]
)


def planned(matrix, heads=2, dim=32, device="cpu", **options):
    shape = {"dtype": torch.float16, "head_dim": dim, "num_heads": heads}
    return plan_attention(matrix, backend="fused3s", device=device, **shape, **options)


def addresses(plan):
    data = plan.data
    arrays = [data.kv_tiles, data.schedule.work_items]
    if data.by_edge:
        arrays += [data.by_edge.indices, data.by_edge.work.items]
    return [array.data_ptr() for array in arrays]


@on_the_shim
@pytest.mark.parametrize("mode", ["late", "random"])
@SHAPES
def test_one_plan_serves_graphs_of_other_sizes(monkeypatch, graphs, heads, dim, mode):
    with cuda_on_cpu(MODES[mode]) as gpu:
        room = with_room(planned(graphs[0], heads, dim), 5.0)
        before = addresses(room)
        for number in (*range(len(graphs)), 1, 0):
            assert refill_(room, planned(graphs[number], heads, dim))
            tensors = inputs(graphs[number], heads, dim, torch.float16)
            with poisoned_buffers(monkeypatch):
                output, lse = room(*tensors, scale=SCALE, return_lse=True)
            assert gpu.launched[-1].startswith("fused3s_edges" if dim == 16 else "fused3s<")
            assert_attention(output, tensors, graphs[number], SCALE, f"graph {number}", lse=lse)
        assert addresses(room) == before


@on_the_shim
@SHAPES
def test_a_graph_that_does_not_fit_changes_nothing(graphs, heads, dim):
    with cuda_on_cpu():
        small, large = planned(graphs[1], heads, dim), planned(graphs[2], heads, dim)
        room = with_room(small, 1.0)
        before = room.data.kv_tiles.clone()
        assert not refill_(room, large)
        assert torch.equal(room.data.kv_tiles, before)
        with pytest.raises(ValueError, match=r"plan: got \(16, 16\) on cpu.*the plan with room is \(200, 200\)"):
            refill_(room, planned(sp.csr_array(np.eye(16)), heads, dim))


@on_the_shim
def test_a_graph_that_would_not_run_edge_by_edge_does_not_fit():
    with cuda_on_cpu():
        assert not refill_(with_room(planned(SPARSE[0], 8, 16), 9.0), planned(GRAPHS[2], 8, 16))


@on_the_shim
@pytest.mark.parametrize("factor", [0.9, -1, float("nan")])
def test_room_for_less_than_the_graph(factor):
    with cuda_on_cpu(), pytest.raises(ValueError, match=f"factor: got {factor}; 1 or more"):
        with_room(planned(GRAPHS[0]), factor)


@on_the_shim
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"backward": True}, "a backward pass"),
        ({"edge_data": True}, "edge data"),
        ({"reorder": "rcm"}, "rows in an order of their own"),
    ],
)
def test_plans_with_other_arrays_have_no_room(options, reason):
    with cuda_on_cpu(), pytest.raises(ValueError, match=f"plan: .*{reason}.*a plan with room is of fused3s"):
        with_room(planned(GRAPHS[1], **options), 2)


def test_other_backends_have_no_room():
    plan = plan_attention(GRAPHS[0], backend="reference", device="cpu")
    with pytest.raises(ValueError, match="plan: of backend reference"):
        with_room(plan, 2)


@on_the_shim
@pytest.mark.parametrize(
    ("rows", "heads", "dim", "reason"),
    [(16, 1, 128, "row windows that several blocks share"), (1, 8, 8, "rows that several warps share")],
)
def test_shared_windows_and_rows_have_no_room(rows, heads, dim, reason):
    hub = np.zeros((32, 9600), bool)
    hub[:rows] = True
    with cuda_on_cpu(), pytest.raises(ValueError, match=reason):
        with_room(planned(sp.csr_array(hub), heads, dim), 2)


@pytest.mark.gpu
@SHAPES
def test_gpu_one_cuda_graph_runs_for_every_graph(graphs, heads, dim):
    room = with_room(planned(graphs[0], heads, dim, "cuda"), 5.0)
    tensors = [each.cuda() for each in inputs(graphs[0], heads, dim, torch.float16)]
    captured = capture(lambda: room(*tensors, scale=SCALE), tensors[0].device)
    for matrix in reversed(graphs):
        plan = planned(matrix, heads, dim, "cuda")
        assert refill_(room, plan)
        captured.result.fill_(torch.nan)
        assert torch.equal(captured.replay(), plan(*tensors, scale=SCALE))
