"""Whole plans of `fused3s` on a GPU: the bits of the oracle's plans, and the waits of the host."""

from functools import partial

import pytest
import scipy.sparse as sp
import torch
from gpu_calls import no_waits
from plan_cases import INPUTS, LISTS, PATTERNS, assert_equal_plans, edge_list, random_graph, symmetric
from plan_oracle import expected_plan, plan_on_cpu

from fused3s import plan_attention
from fused3s.fused import backend as fused3s
from fused3s.fused.planning.plan import plan_graph
from fused3s.fused.tuning import CUT_PASSES
from fused3s.graph.csr import CSRPattern, csr_pattern
from fused3s.graph.edge_list import EdgeList
from fused3s.runtime.cuda_graph import capture
from fused3s.runtime.device import gpu_limits

pytestmark = pytest.mark.gpu

CPU, HALF = torch.device("cpu"), torch.float16
LARGE = {
    "symmetric": lambda: symmetric(random_graph(50_000, 50_000, 10, 1)),
    "directed": lambda: random_graph(30_000, 30_000, 30, 2),
    "hubs": lambda: symmetric(
        sp.csr_array(sp.vstack([random_graph(3, 40_000, 20_000, 3), sp.csr_array((39_997, 40_000))]))
    ),
    "a list with copies": lambda: edge_list(3_000, 400, 2_000_000, 4),
}
ALL = PATTERNS | LISTS | {f"large, {name}": make for name, make in LARGE.items()}


def on_gpu(graph):
    if isinstance(graph, EdgeList):
        return EdgeList(graph.edge_index.cuda(), graph.shape)
    pattern = csr_pattern(graph)
    indptr, indices = (torch.as_tensor(each).cuda() for each in (pattern.indptr, pattern.indices))
    return CSRPattern(indptr, indices, pattern.shape)


@pytest.fixture
def device():
    return torch.device("cuda", torch.cuda.current_device())


@pytest.mark.parametrize("key", INPUTS)
@pytest.mark.parametrize("name", ALL)
def test_a_plan_has_the_bits_of_the_oracles(monkeypatch, device, name, key):
    graph, inputs = ALL[name](), INPUTS[key]
    limits = gpu_limits(device)
    forward = partial(fused3s.forward_schedule, limits, inputs, device.index)
    made = plan_graph(on_gpu(graph), device, inputs, forward)
    plan_on_cpu(monkeypatch, limits)
    expected = expected_plan(graph if isinstance(graph, EdgeList) else csr_pattern(graph), CPU, inputs, forward)
    assert_equal_plans(made.exact(), expected.arrays, f"{name}, {key}")


@pytest.mark.parametrize(
    ("graph", "saved"), [(random_graph(200, 40_000, 3_000, 5), 0), (LARGE["directed"](), 16)], ids=["large", "small"]
)
def test_a_csr_of_many_edges_has_sort_keys_for_its_large_windows_alone(monkeypatch, device, graph, saved):
    """`saved`: bytes of scratch memory per edge. A CUDA graph cannot wait for the number of those edges."""
    pattern, plans, peaks = on_gpu(graph), [], []
    forward = partial(fused3s.forward_schedule, gpu_limits(device), INPUTS["forward"], device.index)

    def plan():
        return plan_graph(pattern, device, INPUTS["forward"], forward)

    for fewest in (graph.nnz + 1, graph.nnz):
        monkeypatch.setattr("fused3s.fused.planning.gpu_csr.COUNTED_EDGES", fewest)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        plans.append(plan().exact())
        peaks.append(torch.cuda.max_memory_allocated() - before)
    assert_equal_plans(plans[1], plans[0], "many edges")
    assert abs(peaks[0] - peaks[1] - saved * graph.nnz) < 2**20
    tiles = capture(plan, device).replay().arrays.kv_tiles
    assert torch.equal(tiles[: len(plans[0].kv_tiles)], plans[0].kv_tiles)


@pytest.mark.parametrize(("num_heads", "dim"), [(1, 128), (4, 16), (8, 16)])
def test_a_plan_of_an_edge_list_does_not_wait(num_heads, dim):
    """Molecules: the host decides between the kernels without the number of KV tiles."""
    graph = edge_list(22_000, 22_000, 46_000)
    edges, options = graph.edge_index.cuda(), {"dtype": HALF, "head_dim": dim, "num_heads": num_heads, "backward": True}
    plan_attention(edges, shape=graph.shape, check=False, **options)  # compiles
    with no_waits():
        plan = plan_attention(edges, shape=graph.shape, check=False, **options)
    query, key, value = (torch.randn(22_000, num_heads, dim, device="cuda", dtype=HALF) for _ in range(3))
    bounded = plan.data.arrays
    first = plan(query, key, value)
    torch.cuda.synchronize()
    assert plan.data.arrays is bounded
    for _ in range(CUT_PASSES):
        assert torch.equal(plan(query, key, value), first), "the exact plan has other bits than the bounded one"
    assert plan.data.arrays is not bounded


def test_a_plan_survives_use_on_another_stream():
    """The memory of a plan that is dropped while another stream still reads it is not given to others."""
    graph = edge_list(20_000, 20_000, 400_000)
    edges = graph.edge_index.cuda()
    query, key, value = (torch.randn(20_000, 128, device="cuda", dtype=HALF) for _ in range(3))
    plan = plan_attention(edges, shape=graph.shape, dtype=HALF, head_dim=128)
    expected = plan(query, key, value)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(20_000_000)
        output = plan(query, key, value)
    size = plan.nbytes
    del plan
    for _ in range(20):
        torch.full((size // 4,), -1, dtype=torch.int32, device="cuda")
    torch.cuda.synchronize()
    assert torch.equal(output, expected)


@pytest.mark.parametrize("on_gpu", [False, True])
def test_a_settled_plan_holds_no_more_memory_than_it_needs(on_gpu):
    graph = edge_list(400, 400, 1_000_000)  # full KV tiles
    edges = graph.edge_index.cuda() if on_gpu else graph.edge_index
    query, key, value = (torch.randn(400, 64, device="cuda", dtype=HALF) for _ in range(3))
    options = {"shape": graph.shape, "device": "cuda", "dtype": HALF, "head_dim": 64, "backward": True}
    expected = plan_attention(edges.cuda(), check=False, **options)(query, key, value)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    plan = plan_attention(edges, check=True, **options)
    held = torch.cuda.memory_allocated() - before
    assert held <= plan.nbytes + 512 * 32, "more than the arrays of the plan, each rounded up to 512 bytes"
    assert held < 4 * graph.edge_index.shape[1]
    assert torch.equal(plan(query, key, value), expected)


def test_a_plan_that_would_wait_leaves_the_capture_as_it_is():
    graph = edge_list(40, 40, 100)
    edges, x = graph.edge_index.cuda(), torch.zeros(5, device="cuda")
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        with pytest.raises(ValueError, match="graph: on the CPU while a CUDA graph is captured"):
            plan_attention(graph.edge_index, shape=graph.shape, device="cuda", backend="fused3s")
        with pytest.raises(ValueError, match="check: got True while a CUDA graph is captured"):
            plan_attention(edges, shape=graph.shape, check=True)
        x += 1
    captured.replay()
    assert x.tolist() == [1] * 5


def test_a_capture_follows_eager_calls_that_did_not_wait():
    """The GPU has finished the plan by the time of the capture, but no call has noticed."""
    graph = edge_list(20_000, 20_000, 400_000)
    edges = graph.edge_index.cuda()  # a copy behind the sleep would wait for it
    query, key, value = (torch.randn(20_000, 64, device="cuda", dtype=HALF) for _ in range(3))
    warm = plan_attention(edges, shape=graph.shape, dtype=HALF, head_dim=64)
    expected = warm(query, key, value)
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # half a second, for a busy host
    plan = plan_attention(edges, shape=graph.shape, dtype=HALF, head_dim=64, check=False)
    bounded, stream = plan.data.arrays, torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            plan(query, key, value)
    torch.cuda.synchronize()
    assert plan.data.arrays is bounded
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured, stream=stream):
        output = plan(query, key, value)
    captured.replay()
    assert torch.equal(output, expected)
