"""Features of more than 16 columns, on the CPU (tests/cuda_shim) and on a GPU: both passes of the
edge-by-edge kernels with cuda/features/wide_features.cu against float64; hubs of
many parts, streams, CUDA graphs."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from devices import both_devices, kernels_of
from edge_calls import EdgeCall, assert_same_bits
from edge_cases import EDGE_LISTS, EdgeList
from gpu_calls import assert_streams_agree, no_waits

from fused3s import EdgeData, PlanRoom, plan_attention
from fused3s.fused.edges import wide_features
from fused3s.runtime.cuda_graph import capture

pytestmark = pytest.mark.usefixtures("one_thread")

GPU = torch.device("cuda", 0)
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
SHAPES = [(8, 16), (4, 12), (12, 8), (1, 128)]
OPTIONS = {"dtype": FLOAT, "head_dim": 16, "num_heads": 8, "edge_data": True, "backward": True}
# heads, columns of a head, types of inputs and output, kinds of edge data, dropout, features: 8, 16 and 32 lanes a row,
# some without columns, and two launches; head groups of 1, 2, 4 and 8, with idle heads, and several.
CASES = {
    "one column more than narrow ones": (8, 16, FLOAT, FLOAT, ("features",), None, 17),
    "32, one head": (1, 24, FLOAT, FLOAT, ("features", "key_features", "value_features"), 0.4, 32),
    "48, two heads": (2, 64, BFLOAT, BFLOAT, ("features", "bias_per_head"), None, 48),
    "64, packed heads": (4, 12, HALF, FLOAT, ("features", "value_features"), 0.4, 64),
    "100, idle heads": (3, 10, FLOAT, FLOAT, ("all",), 0.4, 100),
    "100, 16 bits": (8, 16, BFLOAT, BFLOAT, ("features", "key_features"), None, 100),
    "128, all terms": (8, 8, HALF, HALF, ("all",), 0.4, 128),
    "144, a second launch of 16": (2, 36, FLOAT, FLOAT, ("features",), 0.4, 144),
    "200, three groups of heads": (12, 8, HALF, HALF, ("features",), None, 200),
    "256, wide heads": (1, 256, BFLOAT, BFLOAT, ("features",), None, 256),
    "256, many heads": (20, 4, FLOAT, FLOAT, ("value_features",), None, 256),
    "factors alone": (2, 24, FLOAT, FLOAT, ("key_factor",), None, 40),
    "factors and features": (4, 16, BFLOAT, BFLOAT, ("key_factor_and_features",), None, 33),
}
GRAPHS = ("repeated", "hub", "one_node_self_loop", "empty_rows_and_windows", "wide", "tall", "no_edges")


def hub() -> EdgeList:
    """A row and a column of 5,000 edges each, empty rows, repeated edges."""
    generator = torch.Generator().manual_seed(1)
    row, col = torch.randint(1_000, (2, 3_000), generator=generator)
    other = torch.randint(1_500, (2, 5_000), generator=generator)
    row, col = torch.cat([row, torch.full((5_000,), 7), other[0]]), torch.cat([col, other[1], torch.full((5_000,), 9)])
    return EdgeList(row, col, (1_600, 1_500))


@both_devices
@pytest.mark.parametrize("case", CASES)
def test_results_match_float64(monkeypatch, case, device):
    heads, dim, dtype, out_dtype, kinds, rate, features = CASES[case]
    launches = ((1000, "late", False, 0.4), (5, "random", True, -0.3))  # whole rows and parts, in turn
    for kind in kinds:
        for number, name in enumerate(GRAPHS, list(CASES).index(case)):
            part_edges, mode, reordered, scale = launches[number % 2]
            shape = (EDGE_LISTS[name](), heads, dim, dtype)
            call = EdgeCall.make(*shape, kind, rate, part_edges, reordered, scale, out_dtype, rank=features)
            label = f"{name}, {kind}, parts of {part_edges} edges"
            call.check(call.run(monkeypatch, mode, device=device), label)


def run_twice(monkeypatch, call: EdgeCall):
    """On a GPU, the same bits twice."""
    found, again = (call.run(monkeypatch, device="cuda") for _ in range(2))
    assert_same_bits(found, again, "other bits the second time")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF], ids=str)
@pytest.mark.parametrize("features", [17, 32, 100, 128, 256, 300])
@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_every_width(monkeypatch, heads, dim, features, dtype):
    kinds = ("key_features", "features", "value_features", "all")
    names = ("repeated", "hub", "one_node_self_loop", "empty_rows_and_windows", "wide", "no_edges")
    for index, name in enumerate(names):
        shape, rate = (EDGE_LISTS[name](), heads, dim, dtype), (None, 0.4)[index % 2]
        call = EdgeCall.make(*shape, kinds[index % 4], rate, part_edges=20, rank=features)
        call.check(run_twice(monkeypatch, call), name)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT], ids=str)
@pytest.mark.parametrize("features", [17, 128, 256])
def test_a_hub_of_many_parts_matches_float64(monkeypatch, features, dtype):
    call = EdgeCall.make(hub(), 8, 16, dtype, "features", 0.3, part_edges=64, scale=0.1, rank=features)
    assert min(len(call.data.row_parts), len(call.data.column_parts)) > 70
    call.check(run_twice(monkeypatch, call), "hub")


def test_rows_that_lose_all_their_edges(monkeypatch):
    """By biases of -inf."""
    for name in ("hub", "directed"):
        shape = (EDGE_LISTS[name](), 3, 10, FLOAT)
        call, other = (EdgeCall.make(*shape, kind, rank=40) for kind in ("bias_minus_infinity", "features"))
        names = "padded_features", "num_features", "key_weight", "value_weight"
        edges = replace(call.edges, **{name: getattr(other.edges, name) for name in names})
        call = replace(call, edges=edges)
        _, lse, _ = results = call.run(monkeypatch)
        assert (lse[call.row] == -torch.inf).any()
        call.check(results, name)


@pytest.mark.parametrize(("heads", "launches"), [(1, 2), (4, 3), (64, 5)])
def test_few_edges_a_row_have_launches_of_fewer_columns(monkeypatch, heads, launches):
    """Of 144 columns by 128, 64 and 32, in both passes."""
    monkeypatch.setattr(wide_features, "SMALL_PROJECTION", 0)
    call = EdgeCall.make(EDGE_LISTS["tall"](), heads, 2, FLOAT, "features", 0.4, rank=136)
    with kernels_of("cpu") as gpu:
        results = call.run(monkeypatch, shim=nullcontext())
    call.check(results, f"{heads} heads")
    assert sum(name.startswith("feature_sums") for name in gpu.launched) == 2 * launches


@pytest.mark.parametrize("dtype", [BFLOAT, FLOAT], ids=str)
def test_parts_have_the_same_bits_in_every_order(monkeypatch, dtype):
    call = EdgeCall.make(EDGE_LISTS["hub"](), 8, 8, dtype, "features", 0.4, part_edges=4, rank=144)
    assert min(len(call.data.row_parts), len(call.data.column_parts)) > 10
    expected = call.run(monkeypatch, "late")
    for mode in ("early", "random"):
        assert_same_bits(call.run(monkeypatch, mode), expected, mode)


def test_only_wanted_gradients(monkeypatch):
    call = EdgeCall.make(EDGE_LISTS["directed"](), 8, 8, HALF, "features", rank=40)
    _, _, expected = call.run(monkeypatch)
    for name in call.leaves():
        _, _, gradients = call.run(monkeypatch, wanted={name})
        assert {field for field, gradient in gradients._asdict().items() if gradient is not None} == {name}
        assert torch.equal(getattr(gradients, name), getattr(expected, name)), name


@pytest.mark.parametrize("dtype", [BFLOAT, FLOAT], ids=str)
def test_a_feature_that_is_not_a_number_reaches_its_row_alone(monkeypatch, dtype):
    call = EdgeCall.make(EDGE_LISTS["n_one_past_16"](), 4, 8, dtype, "features", rank=24)
    features = call.edges.padded_features.clone()
    features[len(features) // 2, 17] = torch.nan
    row, col = (int(ends[len(features) // 2]) for ends in (call.row, call.col))
    changed = replace(call, edges=replace(call.edges, padded_features=features))
    (output, _, gradients), (expected, _, expected_gradients) = changed.run(monkeypatch), call.run(monkeypatch)
    others = torch.arange(len(output)) != row
    for found, right in ((output, expected), (gradients.query, expected_gradients.query)):
        assert torch.equal(found[others], right[others])
        assert found[row].isnan().all()
    of_others = torch.ones(len(gradients.key), dtype=torch.bool).index_fill_(0, call.col[call.row == row], False)
    assert not of_others[col]
    for found, right in ((gradients.key, expected_gradients.key), (gradients.value, expected_gradients.value)):
        assert torch.equal(found[of_others], right[of_others])
    of_edges = call.row != row
    assert torch.equal(gradients.padded_features[of_edges], expected_gradients.padded_features[of_edges])


def test_strided_tensors(monkeypatch):
    call = EdgeCall.make(EDGE_LISTS["wide"](), 2, 24, FLOAT, "features", rank=40)
    strided = {name: torch.stack([torch.full_like(x, torch.nan), x], 1)[:, 1] for name, x in call.tensors.items()}
    strided["grad_output"] = call.tensors["grad_output"].transpose(0, 2).contiguous().transpose(0, 2)
    weights = {name: getattr(call.edges, name) for name in ("key_weight", "value_weight", "padded_features")}
    transposed = {name: each.transpose(0, 1).contiguous().transpose(0, 1) for name, each in weights.items()}
    other = replace(call, tensors=strided, edges=replace(call.edges, **transposed))
    other.check(other.run(monkeypatch), "strided")


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


@pytest.mark.gpu
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


@pytest.mark.gpu
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
