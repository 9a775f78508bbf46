"""The graph of grouped queries against A kron ones(G, 1), its edge ids, and what happens to ids out of range."""

from functools import partial

import pytest
import torch
from gpu_plan_on_cpu import gpu_on_cpu
from plan_cases import assert_equal_plans

from fused3s import KeyLists
from fused3s.backends.base import InputSpec
from fused3s.fused import backend as fused3s
from fused3s.fused.planning.plan import plan_graph, queue_plan
from fused3s.graph import grouped as grouped_graph
from fused3s.graph.csr import CSRPattern
from fused3s.graph.edge_list import EdgeList
from fused3s.graph.grouped import grouped_edges, grouped_ids, grouped_rows
from tests.cuda_shim.cuda_on_cpu import NEEDS_COMPILER, cuda_on_cpu

CPU, HALF = torch.device("cpu"), torch.float16


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_out_of_range_stay_out_of_range(dtype):
    limits = torch.iinfo(dtype)
    row = torch.tensor([limits.max, limits.min, -1, 7, 6], dtype=dtype)
    col = torch.tensor([limits.min, 3, -1, limits.max, 0], dtype=dtype)
    found = grouped_ids(torch.stack([col, row]), 7, 4).view(2, 5, 4)
    assert found.dtype == dtype
    assert torch.equal(found[0], col[:, None].expand(-1, 4))
    assert (found[1, [0, 3]] >= 28).all()
    assert (found[1, 1] < 0).all()
    assert (found[:, 2] == -1).all()
    assert found[1, 4].tolist() == [24, 25, 26, 27]


def test_rows_that_do_not_fit_into_32_bits():
    graph = EdgeList(torch.zeros((2, 0), dtype=torch.int32), ((1 << 31) - 1, 5))
    with pytest.raises(ValueError, match=r"graph: got 2147483647 rows for 2 .* up to 1073741822 rows are allowed"):
        grouped_edges(graph, 2)


def test_an_order_of_rows_keeps_the_heads_of_a_query_together():
    assert grouped_rows(torch.tensor([2, 0, 1], dtype=torch.int32), 2).tolist() == [4, 5, 0, 1, 2, 3]


@NEEDS_COMPILER
@pytest.mark.parametrize("inputs", [InputSpec(HALF, 64, 1), InputSpec(HALF, 8, 8, backward=True)])
def test_errors_that_the_planning_kernels_find_name_the_callers_entry(monkeypatch, inputs):
    """As of a graph on a GPU, whose ids are not checked before it is repeated for the group."""
    lists, pairs = torch.arange(12).view(6, 2) % 9, torch.stack([torch.arange(12) % 9, torch.arange(12) % 6])
    offsets = torch.arange(7) * 2
    bad_lists, bad_pairs, bad_offsets = lists.clone(), pairs.clone(), offsets.clone()
    bad_lists[3, 1], bad_pairs[1, 5], bad_offsets[2] = 9, 6, 13
    shape = (6, 9)
    damaged = {
        r"KeyLists: entry \[3, 1\] is 9; 0 to 8 are allowed": KeyLists(bad_lists).edges(9),
        r"edge_index: row 1 \(targets\) holds ids from 0 to 6; the graph of shape \(6, 9\)": EdgeList(bad_pairs, shape),
        r"indptr: decreases at row 2 \(13 to 6\)": CSRPattern(bad_offsets, lists.flatten(), shape),
    }
    right = {"lists": KeyLists(lists).edges(9), "csr": CSRPattern(offsets, lists.flatten(), shape)}
    with cuda_on_cpu(), gpu_on_cpu(monkeypatch):
        forward = partial(fused3s.forward_schedule, fused3s.gpu_limits(CPU), inputs, CPU.index)
        with monkeypatch.context() as patch:
            patch.setattr(grouped_graph, "check_csr", lambda *arguments: None)
            patch.setattr(grouped_graph, "check_graph", lambda *arguments: None)
            damaged = {message: grouped_edges(graph, 4) for message, graph in damaged.items()}
        for message, graph in damaged.items():
            with pytest.raises(ValueError, match=message):
                plan_graph(graph, CPU, inputs, forward)
        plans = [plan_graph(grouped_edges(graph, 4), CPU, inputs, forward).arrays for graph in right.values()]
        assert plans[0].size.num_rows == 24
        assert_equal_plans(*plans, "lists and their CSR")
        padded = lists.clone()
        padded[1] = -1
        plan_graph(KeyLists(padded).edges(9), CPU, inputs, forward)  # raises for no entry
        memory, _ = queue_plan(KeyLists(padded).edges(9), CPU, inputs, forward)
    assert memory.csr.offsets[0].tolist() == [0, 2, 2, 4, 6, 8, 10]
    assert memory.csr.indices.tolist() == [*lists[[0, 2, 3, 4, 5]].sort().values.flatten().tolist(), 0, 0]
