"""Features of more than 16 columns on a GPU: the kernels against float64, hubs of many parts, streams, CUDA graphs."""

import pytest
import torch
from edge_calls import ROWS, EdgeCall
from edge_cases import EDGE_LISTS, EdgeList
from gpu_calls import assert_streams_agree, no_waits
from poison import poisoned_buffers

from fused3s import EdgeData, PlanRoom, plan_attention
from fused3s.backends.base import BackwardCall, Call
from fused3s.fused.edges.backward import launch_edge_backward
from fused3s.fused.edges.forward import launch_edge_kernel
from fused3s.runtime.cuda_graph import capture
from fused3s.torch_side.tensor_record import map_tensors

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda", 0)
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
SHAPES = [(8, 16), (4, 12), (12, 8), (1, 128)]
OPTIONS = {"dtype": FLOAT, "head_dim": 16, "num_heads": 8, "edge_data": True, "backward": True}


def hub() -> EdgeList:
    """A row and a column of 5,000 edges each, empty rows, repeated edges."""
    generator = torch.Generator().manual_seed(1)
    row, col = torch.randint(1_000, (2, 3_000), generator=generator)
    other = torch.randint(1_500, (2, 5_000), generator=generator)
    row, col = torch.cat([row, torch.full((5_000,), 7), other[0]]), torch.cat([col, other[1], torch.full((5_000,), 9)])
    return EdgeList(row, col, (1_600, 1_500))


def run_on_gpu(monkeypatch, call: EdgeCall):
    """As `EdgeCall.run`, with results on the CPU; the same bits twice."""
    tensors = {name: each.to(GPU) for name, each in call.tensors.items()}
    edges = call.edges.with_tensors([None if each is None else each.to(GPU) for each in call.edges.tensors()])
    data, wanted = map_tensors(call.data, lambda each: each.to(GPU)), frozenset(call.leaves())
    found = []
    for _ in range(2):
        with poisoned_buffers(monkeypatch):
            query, key, value = (tensors[name] for name in ROWS)
            lse = torch.empty(tuple(query.shape[:2]), dtype=FLOAT, device=GPU)
            given = Call(query, key, value, call.scale, call.out_dtype, lse, edges)
            output = launch_edge_kernel(data, given)
            gradients = launch_edge_backward(data, BackwardCall(given, output, tensors["grad_output"], wanted))
        found.append((output, lse, gradients))
    for left, right in zip(*((*each[:2], *each[2]) for each in found), strict=True):
        assert left is right is None or torch.equal(left, right), "other bits the second time"
    output, lse, gradients = found[0]
    return output.cpu(), lse.cpu(), type(gradients)(*[None if each is None else each.cpu() for each in gradients])


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF], ids=str)
@pytest.mark.parametrize("features", [17, 32, 100, 128, 256, 300])
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_results_match_float64(monkeypatch, heads, dim, features, dtype):
    kinds = ("key_features", "features", "value_features", "all")
    names = ("repeated", "hub", "one_node_self_loop", "empty_rows_and_windows", "wide", "no_edges")
    for index, name in enumerate(names):
        shape, rate = (EDGE_LISTS[name](), heads, dim, dtype), (None, 0.4)[index % 2]
        call = EdgeCall.make(*shape, kinds[index % 4], rate, part_edges=20, rank=features)
        call.check(run_on_gpu(monkeypatch, call), name)


@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT], ids=str)
@pytest.mark.parametrize("features", [17, 128, 256])
def test_a_hub_of_many_parts_matches_float64(monkeypatch, features, dtype):
    call = EdgeCall.make(hub(), 8, 16, dtype, "features", 0.3, part_edges=64, scale=0.1, rank=features)
    assert min(len(call.data.row_parts), len(call.data.column_parts)) > 70
    call.check(run_on_gpu(monkeypatch, call), "hub")


def problem(features: int):
    """edge_index of 20,000 edges over 500 nodes, [q, k, v], and EdgeData; autograd records them."""
    generator = torch.Generator(GPU).manual_seed(features)

    def normal(*shape):
        return torch.randn(shape, generator=generator, device=GPU).requires_grad_()

    edge_index = torch.randint(500, (2, 20_000), generator=generator, device=GPU)
    weights = {"key_weight": normal(8, 16, features), "value_weight": normal(8, 16, features)}
    return edge_index, [normal(500, 8, 16) for _ in range(3)], EdgeData(features=normal(20_000, features), **weights)


def step_of(plan, tensors, data):
    """Output and all gradients of a call with scores of moderate size."""
    leaves = [*tensors, data.features, data.key_weight, data.value_weight]
    out = plan(*tensors, scale=0.02, edges=plan.bind_edges(data, check_values=False))
    return [out, *torch.autograd.grad(out.float().sum(), leaves)]


@pytest.mark.parametrize("features", [32, 200])
def test_a_step_in_a_cuda_graph_on_streams_and_without_a_wait(features):
    edge_index, tensors, data = problem(features)
    plan = plan_attention(edge_index, shape=(500, 500), backend="fused3s", **OPTIONS)
    step_of(plan, tensors, data)  # compiles
    with no_waits():
        step_of(plan, tensors, data)
    captured = capture(lambda: step_of(plan, tensors, data), GPU)
    for _ in range(2):
        for each in (*tensors, data.features, data.key_weight):
            each.detach().normal_()
        for got, expected in zip(captured.replay(), step_of(plan, tensors, data), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    calls = [[[torch.randn_like(each).requires_grad_() for each in tensors]] for _ in range(3)]
    assert_streams_agree(lambda given: step_of(plan, given, data), calls)


def test_a_plan_room_in_a_cuda_graph():
    """The results of a room that is filled eagerly, and gradients of 0 for edges that the last fill did not use."""
    edge_index, tensors, data = problem(40)
    rooms = [PlanRoom((500, 500), edge_index.shape[1], device=GPU, **OPTIONS) for _ in range(2)]

    def step(room):
        room.fill(edge_index)
        return step_of(room.plan, tensors, data)

    captured = capture(lambda: step(rooms[0]), GPU)
    for used in (15_000, 3, 15_000):
        edge_index.random_(500)
        edge_index[:, used:] = -1
        for got, expected in zip(captured.replay(), step(rooms[1]), strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
        assert (captured.result[4][used:] == 0).all()
