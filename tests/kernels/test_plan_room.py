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

ROWS, HEADS, DIM, SCALE = 200, 2, 32, 0.3
on_the_shim = pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)")


def graph(seed: int, density: float, rows: int = ROWS - 30) -> sp.csr_array:
    """`rows` rows with edges among them, then empty rows."""
    mask = np.zeros((ROWS, ROWS), bool)
    mask[:rows, :rows] = np.random.default_rng(seed).random((rows, rows)) < density
    return sp.csr_array(mask)


# The second has fewer KV tiles and blocks than the first, the third more of both; the last has none.
GRAPHS = [graph(0, 0.1), graph(1, 0.02, 60), graph(2, 0.2, ROWS), sp.csr_array((ROWS, ROWS))]


def planned(matrix, device="cpu", **options):
    arguments = {"dtype": torch.float16, "head_dim": DIM, "num_heads": HEADS} | options
    return plan_attention(matrix, backend="fused3s", device=device, **arguments)


@on_the_shim
@pytest.mark.parametrize("mode", ["late", "random"])
def test_one_plan_serves_graphs_of_other_sizes(monkeypatch, mode):
    with cuda_on_cpu(MODES[mode]):
        room = with_room(planned(GRAPHS[0]), num_tiles=400, num_blocks=40)
        addresses = [each.data_ptr() for each in (room.data.kv_tiles, room.data.schedule.work_items)]
        for number in (0, 1, 2, 3, 1, 0):
            plan = planned(GRAPHS[number])
            assert refill_(room, plan)
            tensors = inputs(GRAPHS[number], HEADS, DIM, torch.float16)
            with poisoned_buffers(monkeypatch):
                output, lse = room(*tensors, scale=SCALE, return_lse=True)
                expected = plan(*tensors, scale=SCALE)
            assert torch.equal(output, expected)
            assert_attention(output, tensors, GRAPHS[number], SCALE, f"graph {number}", lse=lse)
        assert addresses == [each.data_ptr() for each in (room.data.kv_tiles, room.data.schedule.work_items)]


@on_the_shim
def test_a_graph_that_does_not_fit_changes_nothing():
    with cuda_on_cpu():
        small, large = planned(GRAPHS[1]), planned(GRAPHS[2])
        room = with_room(small, small.data.num_tiles, small.data.schedule.num_blocks)
        before = room.data.kv_tiles.clone()
        assert not refill_(room, large)
        assert torch.equal(room.data.kv_tiles, before)
        with pytest.raises(ValueError, match=r"num_tiles, num_blocks: got 3 and 1; the plan has \d+ and \d+"):
            with_room(large, 3, 1)
        with pytest.raises(ValueError, match=r"plan: got \(16, 16\) on cpu.*the plan with room is \(200, 200\)"):
            refill_(room, planned(sp.csr_array(np.eye(16))))


@on_the_shim
@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"backward": True}, "a backward pass"),
        ({"edge_data": True}, "edge data"),
        ({"reorder": "rcm"}, "rows in an order of their own"),
        ({"head_dim": 8, "num_heads": 8}, "passes edge by edge"),
    ],
)
def test_plans_with_other_arrays_have_no_room(options, reason):
    with cuda_on_cpu(), pytest.raises(ValueError, match=f"plan: .*{reason}.*a plan with room is of fused3s"):
        with_room(planned(GRAPHS[1], **options), 400, 40)


def test_other_backends_have_no_room():
    plan = plan_attention(GRAPHS[0], backend="reference", device="cpu")
    with pytest.raises(ValueError, match="plan: of backend reference"):
        with_room(plan, 400, 40)


@on_the_shim
def test_a_window_that_several_blocks_share_has_no_room():
    hub = sp.csr_array(np.ones((16, 16 * 600), bool))
    with cuda_on_cpu():
        plan = planned(hub)
        assert plan.data.schedule.num_splits
        with pytest.raises(ValueError, match="windows that several blocks share"):
            with_room(plan, 10_000, 100)


@pytest.mark.gpu
def test_gpu_one_cuda_graph_runs_for_every_graph():
    room = with_room(planned(GRAPHS[0], "cuda"), num_tiles=2000, num_blocks=200)
    tensors = [each.cuda() for each in inputs(GRAPHS[0], HEADS, DIM, torch.float16)]
    captured = capture(lambda: room(*tensors, scale=SCALE), tensors[0].device)
    for number in (2, 1, 3, 0):
        plan = planned(GRAPHS[number], "cuda")
        assert refill_(room, plan)
        captured.result.fill_(torch.nan)
        assert torch.equal(captured.replay(), plan(*tensors, scale=SCALE))
