"""`fused3s` with edge data and with narrow heads on a GPU: shapes and kinds against float64, streams, CUDA graphs."""

import pytest
import torch
from attention_cases import EDGE_CASES, load_real_graph
from edge_cases import (
    EDGE_LISTS,
    FORMS,
    KINDS,
    assert_edge_attention,
    edge_inputs,
    in_order,
    map_tensors,
    qkv,
)
from gpu_calls import assert_streams_agree, no_waits
from poison import poisoned_buffers
from tolerance import assert_within_bound, edges_of

from fused3s import AttentionPlan, EdgeData, plan_attention

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
SHAPES = [(1, 128), (8, 16), (8, 8), (4, 16), (4, 13), (8, 10), (16, 64), (32, 8), (1, 256), (1, 1)]
REAL_GRAPHS = ["cora", "ogbg-molhiv"]

every_shape = pytest.mark.parametrize(("heads", "dim"), SHAPES)


def on_gpu(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to(GPU) for tensor in tensors]


def moved(edges: EdgeData) -> EdgeData:
    """The edge data on the GPU."""
    return map_tensors(edges, lambda tensor: tensor.to(GPU))


def planned(graph, heads: int, dim: int, dtype: torch.dtype = HALF, **options) -> AttentionPlan:
    return plan_attention(graph, backend="fused3s", dtype=dtype, head_dim=dim, num_heads=heads, **options)


@every_shape
def test_every_kind_on_every_edge_list(monkeypatch, heads, dim):
    for index, (name, make_graph) in enumerate(EDGE_LISTS.items()):
        graph, dtype = make_graph(), (HALF, BFLOAT)[index % 2]
        made, order = FORMS["scipy_coo"](graph)
        plan = planned(made, heads, dim, dtype, edge_data=True, reorder=("none", "communities")[index // 2 % 2])
        tensors = qkv(graph.shape, heads, dim, dtype)
        given = on_gpu(tensors)
        for kind in KINDS:
            edges = edge_inputs(kind, graph.num_edges, heads, dim, dtype)
            bound = plan.bind_edges(in_order(moved(edges), order.to(GPU)))
            with poisoned_buffers(monkeypatch):
                output = plan(*given, scale=0.4, edges=bound)
            assert_edge_attention(output.cpu(), graph, tensors, edges, 0.4, f"{name}, {kind}, {dtype}")
            assert torch.equal(plan(*given, scale=0.4, edges=bound), output), f"{name}, {kind}: other bits"


@every_shape
@pytest.mark.parametrize("name", [*REAL_GRAPHS, "empty_rows_and_windows", "hub", "dense"])
def test_every_shape_without_edge_data(monkeypatch, real_graph_dir, name, heads, dim):
    graph = EDGE_CASES[name]() if name in EDGE_CASES else load_real_graph(real_graph_dir, name)
    for dtype, reorder in ((HALF, "none"), (BFLOAT, "communities")):
        plan = planned(graph, heads, dim, dtype, reorder=reorder)
        q, k, v = on_gpu(qkv(graph.shape, heads, dim, dtype))
        heads_last = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in (q, k, v)]
        with poisoned_buffers(monkeypatch):
            output = plan(q, k, v, scale=0.3)
        assert_within_bound(output, q, k, v, *edges_of(graph, "cuda"), 0.3, f"{name}, {dtype}, {reorder}")
        assert torch.equal(plan(*heads_last, scale=0.3), output)


@pytest.mark.parametrize("kind", ["bias_per_head", "all"])
@pytest.mark.parametrize(("heads", "dim"), [(1, 128), (8, 16), (4, 13)])
def test_cuda_graph_replays_with_bound_edges(real_graph_dir, kind, heads, dim):
    graph = load_real_graph(real_graph_dir, "cora")
    plan = planned(graph, heads, dim, edge_data=True)
    edges = moved(edge_inputs(kind, graph.nnz, heads, dim, HALF))
    bound = plan.bind_edges(edges)
    tensors = on_gpu(qkv(graph.shape, heads, dim, HALF))
    plan(*tensors, edges=bound)  # compiles
    cuda_graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(cuda_graph):
        output = plan(*tensors, edges=bound)
    for tensor in tensors:
        tensor.copy_(torch.randn_like(tensor))
    for _ in range(2):
        output.fill_(torch.nan)
        cuda_graph.replay()
        assert torch.equal(output, plan(*tensors, edges=bound))


@pytest.mark.parametrize("kind", [None, "bias_per_head", "all"])
@pytest.mark.parametrize(("heads", "dim"), [(1, 64), (8, 8)])
def test_streams_that_share_a_plan_do_not_disturb_each_other(kind, heads, dim):
    """Parts of the hub's row: partials belong to a call, semaphores to a stream."""
    graph = EDGE_CASES["hub"]()
    plan = planned(graph, heads, dim, edge_data=kind is not None)
    bound = None
    if kind is not None:
        edges = moved(edge_inputs(kind, graph.nnz, heads, dim, HALF))
        bound = plan.bind_edges(edges)
    if plan.data.arrays.row_items is not None:
        assert plan.data.arrays.row_parts.shape[0] > 1
    calls = [[torch.randn_like(each) for each in on_gpu(qkv(graph.shape, heads, dim, HALF))] for _ in range(4)]
    assert_streams_agree(lambda *tensors: [plan(*tensors, edges=bound)], calls)


def test_a_bound_call_does_not_wait_for_the_gpu(real_graph_dir):
    graph = load_real_graph(real_graph_dir, "cora")
    for heads, dim in ((1, 128), (8, 16), (4, 13)):
        plan = planned(graph, heads, dim, edge_data=True)
        edges = moved(edge_inputs("all", graph.nnz, heads, dim, HALF))
        bound = plan.bind_edges(edges)
        tensors = on_gpu(qkv(graph.shape, heads, dim, HALF))
        plan(*tensors, edges=bound)
        with no_waits():
            plan(*tensors, edges=bound)
