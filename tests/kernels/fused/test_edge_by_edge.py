"""The kernels that go edge by edge, cuda/edges/*.cu and cuda/features/*.cu, on the CPU (tests/cuda_shim) and on a GPU:
both passes against float64; rows and columns of many parts, streams, CUDA graphs."""

from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from devices import kernels_of, on_cpu, on_gpu
from edge_calls import ROWS, EdgeCall, assert_same_bits
from edge_cases import EDGE_LISTS, KINDS, RANK, EdgeList
from gpu_calls import assert_streams_agree, no_waits
from plan_oracle import row_item_arrays
from poison import poisoned_buffers
from tolerance import FLOOR

from fused3s import EdgeData, PlanRoom, plan_attention
from fused3s.backends.base import Call, Gradients
from fused3s.backends.reference import edge_softmax_attention
from fused3s.fused.choice import GraphSize
from fused3s.fused.data import Fused3SData
from fused3s.fused.edges import wide_features
from fused3s.fused.edges.forward import launch_edge_kernel
from fused3s.graph.csr import csr_pattern
from fused3s.graph.edges import canonical_csr
from fused3s.graph.reorder.row_order import permute_rows
from fused3s.runtime.cuda_graph import capture
from tests.cuda_shim.oracle import GRAPHS, MULTIGRAPHS, assert_attention, inputs

pytestmark = pytest.mark.usefixtures("one_thread")

GPU = torch.device("cuda", 0)
HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
# heads, dimensions, types of inputs and output, kinds of edge data, dropout: loads of 4, 8 and 16 bytes, idle lanes and
# heads, one lane to a whole warp a head. Kinds of a shape share an instance.
CASES = {
    "plain": (1, 2, HALF, FLOAT, (None,), None),
    "all terms, a lane a head": (8, 8, HALF, HALF, ("all",), 0.4),
    "bias": (3, 10, HALF, HALF, ("bias", "bias_per_head", "bias_minus_infinity"), None),
    "value features": (4, 16, BFLOAT, BFLOAT, ("value_features",), None),
    "multiplier": (5, 24, HALF, FLOAT, ("multiplier", "multiplier_per_head"), 0.2),
    "all terms": (2, 64, HALF, HALF, ("all",), 0.4),
    "types": (1, 128, BFLOAT, FLOAT, ("types",), None),
    "factors": (2, 24, BFLOAT, FLOAT, ("key_factor",), 0.4),
    "factors and features": (4, 16, HALF, HALF, ("key_factor_and_features",), None),
    "added features": (8, 16, BFLOAT, BFLOAT, ("additive_features",), 0.4),
    "added features, two head groups": (10, 16, HALF, FLOAT, ("additive_features",), None),
    "added features, no packed heads": (4, 10, HALF, HALF, ("additive_features",), None),
    "added and value features": (2, 64, BFLOAT, BFLOAT, ("additive_and_value_features",), 0.2),
    "packed factors": (4, 13, HALF, HALF, ("key_factor",), None),
    "packed": (4, 13, HALF, HALF, (None,), 0.3),
    "packed, float32 output": (2, 13, HALF, FLOAT, ("bias", "types"), None),
    "packed, 8-byte loads": (8, 10, BFLOAT, BFLOAT, (None, "multiplier_per_head"), None),
    "packed, all terms": (4, 10, HALF, FLOAT, ("all",), 0.4),
    "packed, whole blocks": (3, 12, BFLOAT, FLOAT, (None,), None),
    "packed, heads of three": (8, 3, HALF, HALF, (None, "types"), None),
    "packed, heads of seven": (4, 7, BFLOAT, FLOAT, (None,), 0.5),
    "clamp": (1, 256, HALF, HALF, ("bias_minus_infinity_clamped",), 0.5),
    # Features on tensor cores, two and four rows of a warp, several head groups.
    "pairs": (8, 16, HALF, HALF, ("features", "key_features", "value_features", "all"), None),
    "pairs, four rows": (4, 16, BFLOAT, BFLOAT, ("features",), 0.3),
    "pairs, two head groups": (16, 16, HALF, HALF, ("features",), None),
    "pairs, idle heads": (12, 16, HALF, HALF, ("all",), None),
    "pairs, ten columns": (8, 10, BFLOAT, BFLOAT, ("features",), None),
    "pairs, twelve columns": (4, 12, HALF, HALF, ("features",), None),
    "pairs, ten columns, two head groups": (16, 10, HALF, HALF, ("features",), None),
}
# Each kind in 16 bits, with narrow and wide heads in turn.
CASES |= {
    f"{kind}, {heads} x {dim}": (heads, dim, HALF, HALF, (kind,), None)
    for index, kind in enumerate(KINDS)
    for heads, dim in [((8, 8), (2, 64))[index % 2]]
}
FLOAT_SHAPES = [(1, 2), (16, 4), (3, 6), (8, 10), (5, 12), (8, 16), (2, 30), (3, 36), (2, 66), (1, 130), (1, 256)]
# Each kind of edge data with a lane a head, with several and with a wide head, in turn; all terms with each.
FLOAT_KINDS = [(kind, *((8, 8), (3, 10), (2, 64))[index % 3], None) for index, kind in enumerate(KINDS)]
FLOAT_KINDS += [("all", 8, 8, None), ("all", 3, 10, 0.4), ("all", 16, 2, None), (None, 8, 16, 0.4)]
CASES |= {f"float32, {heads} x {dim}": (heads, dim, FLOAT, FLOAT, (None,), None) for heads, dim in FLOAT_SHAPES}
CASES |= {
    f"float32, {kind}, {heads} x {dim}, dropout {rate}": (heads, dim, FLOAT, FLOAT, (kind,), rate)
    for kind, heads, dim, rate in FLOAT_KINDS
}
# heads, columns of a head, types of inputs and output, kinds of edge data, dropout, features: 8, 16 and 32 lanes a row,
# some without columns, and two launches; head groups of 1, 2, 4 and 8, with idle heads, and several.
WIDE = {
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
LISTS = ("repeated", "hub", "one_node_self_loop", "empty_rows_and_windows", "wide", "tall", "no_edges")
# Edges of a part, mode, reordered rows, scale: of whole rows and of parts, in turn.
LAUNCHES = ((1000, "late", False, 0.4), (5, "random", True, -0.3))
ALL = {name: (*case, RANK) for name, case in CASES.items()} | WIDE
both_types = pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)


@pytest.mark.parametrize(
    ("device", "case"), [*(on_cpu(case, id=case) for case in ALL), *(on_gpu(case, id=f"cuda-{case}") for case in WIDE)]
)
def test_results_match_float64(monkeypatch, device, case):
    heads, dim, dtype, out_dtype, kinds, rate, rank = ALL[case]
    for kind in kinds:
        for number, name in enumerate(LISTS, list(ALL).index(case)):
            part_edges, mode, reordered, scale = LAUNCHES[number % 2]
            shape = (EDGE_LISTS[name](), heads, dim, dtype)
            call = EdgeCall.make(*shape, kind, rate, part_edges, reordered, scale, out_dtype, rank)
            label = f"{name}, {kind}, parts of {part_edges} edges"
            call.check(call.run(monkeypatch, mode, device=device), label)


# heads, columns of a head, types, kind, dropout, features
SPLIT = [
    *((8, 8, dtype, "all", 0.4, RANK) for dtype in (HALF, FLOAT)),
    *((10, 16, dtype, "additive_features", None, RANK) for dtype in (HALF, FLOAT)),
    *((8, 8, dtype, "features", 0.4, 144) for dtype in (BFLOAT, FLOAT)),
]


@pytest.mark.parametrize(("heads", "dim", "dtype", "kind", "rate", "rank"), SPLIT)
def test_split_rows_and_columns_have_the_same_bits_in_every_order(monkeypatch, heads, dim, dtype, kind, rate, rank):
    call = EdgeCall.make(EDGE_LISTS["hub"](), heads, dim, dtype, kind, rate, part_edges=4, rank=rank)
    assert min(len(call.data.row_parts), len(call.data.column_parts)) > 10
    expected = call.run(monkeypatch, "late")
    for mode in ("early", "random"):
        assert_same_bits(call.run(monkeypatch, mode), expected, mode)


@both_types
@pytest.mark.parametrize("rank", [1, 8, 17, 40])
def test_added_features_of_every_width(monkeypatch, rank, dtype):
    """In steps of 4 and of 8 columns, and rows of 16, 32 and 48."""
    for name in ("repeated", "empty_rows_and_windows", "no_edges"):
        call = EdgeCall.make(EDGE_LISTS[name](), 4, 8, dtype, "additive_features", part_edges=5, rank=rank)
        call.check(call.run(monkeypatch, "random"), f"{name}, {rank} features")


@pytest.mark.parametrize(("kind", "rank"), [("all", RANK), ("additive_features", RANK), ("features", 40)])
def test_only_wanted_gradients(monkeypatch, kind, rank):
    call = EdgeCall.make(EDGE_LISTS["directed"](), 8, 8, HALF, kind, 0.4, rank=rank)
    _, _, expected = call.run(monkeypatch)
    for name in call.leaves():
        _, _, gradients = call.run(monkeypatch, wanted={name})
        assert isinstance(gradients, Gradients)
        assert {field for field, gradient in gradients._asdict().items() if gradient is not None} == {name}
        assert torch.equal(getattr(gradients, name), getattr(expected, name)), name


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_rows_that_are_not_connected_never_meet(monkeypatch, value):
    call = EdgeCall.make(EDGE_LISTS["empty_rows_and_windows"](), 1, 2, HALF)
    no_row = torch.ones(len(call.tensors["query"]), dtype=torch.bool).index_fill_(0, call.row, False)
    no_col = torch.ones(len(call.tensors["key"]), dtype=torch.bool).index_fill_(0, call.col, False)
    assert no_row[0]
    assert no_col.any()
    alone = {"query": no_row, "key": no_col, "value": no_col, "grad_output": no_row}
    changed = {name: tensor.masked_fill(alone[name][:, None, None], value) for name, tensor in call.tensors.items()}
    found, expected = replace(call, tensors=changed).run(monkeypatch), call.run(monkeypatch)
    assert_same_bits((found[0], found[0], found[2]), (expected[0], expected[0], expected[2]))


@both_types
def test_key_0_that_is_not_a_number_reaches_its_own_rows_alone(monkeypatch, dtype):
    """Edges that do not exist have key 0."""
    call = EdgeCall.make(EDGE_LISTS["n_one_past_16"](), 1, 2, dtype)
    key, value = (call.tensors[name].clone() for name in ("key", "value"))
    key[0], value[0] = torch.nan, torch.inf
    changed = replace(call, tensors=call.tensors | {"key": key, "value": value})
    (output, _, gradients), (expected, _, expected_gradients) = changed.run(monkeypatch), call.run(monkeypatch)
    neighbours = call.row[call.col == 0]
    others = torch.ones(len(output), dtype=torch.bool).index_fill_(0, neighbours, False)
    assert others.any()
    for found, right in ((output, expected), (gradients.query, expected_gradients.query)):
        assert torch.equal(found[others], right[others])
        assert found[neighbours].isnan().all()


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


@pytest.mark.parametrize(
    ("dtype", "kind", "rank"), [(HALF, "all", RANK), (FLOAT, "all", RANK), (FLOAT, "features", 40)]
)
def test_strided_tensors_and_edge_data(monkeypatch, dtype, kind, rank):
    """Values of edges, and wide features with their weights."""
    call = EdgeCall.make(EDGE_LISTS["wide"](), 2, 24, dtype, kind, rank=rank)
    strided = {name: torch.stack([torch.full_like(x, torch.nan), x], 1)[:, 1] for name, x in call.tensors.items()}
    strided["grad_output"] = call.tensors["grad_output"].transpose(0, 2).contiguous().transpose(0, 2)
    names = ("edge_values",) if kind == "all" else ("key_weight", "value_weight", "padded_features")
    axes = (0, 2) if kind == "all" else (0, 1)
    changed = {name: getattr(call.edges, name).transpose(*axes).contiguous().transpose(*axes) for name in names}
    assert not any(each.is_contiguous() for each in (*changed.values(), strided[ROWS[0]]))
    found = replace(call, tensors=strided, edges=replace(call.edges, **changed)).run(monkeypatch)
    assert_same_bits(found, call.run(monkeypatch))


@pytest.mark.parametrize(("heads", "dim"), [(8, 16), (1, 130)])
def test_scores_far_from_zero(monkeypatch, heads, dim):
    """Weights from 1 down to 0, and a log-sum-exp of hundreds, whose error is that of plain torch's scores."""
    call = EdgeCall.make(EDGE_LISTS["hub"](), heads, dim, FLOAT, "bias", part_edges=16)
    for bias in (call.edges.edge_values - 300, call.edges.edge_values * 30 + 200):
        shifted = replace(call, edges=replace(call.edges, edge_values=bias))
        shifted.check(shifted.run(monkeypatch), "bias")
    long = replace(call, tensors=call.tensors | {"query": call.tensors["query"] * 20})
    long.check(long.run(monkeypatch), "long queries")


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


# heads, dimensions, types: loads of 4, 8 and 16 bytes, idle lanes and heads, one lane to a whole warp a head; packed
# heads, whose blocks have dimensions of up to two heads, or none to spare.
FORWARD_SHAPES = [
    (1, 2, HALF, FLOAT),
    (8, 8, HALF, HALF),
    (3, 10, HALF, HALF),
    (8, 10, BFLOAT, BFLOAT),
    (4, 13, HALF, HALF),
    (6, 13, BFLOAT, FLOAT),
    (8, 3, HALF, FLOAT),
    (12, 5, HALF, HALF),
    (4, 11, HALF, HALF),
    (2, 14, HALF, FLOAT),
    (5, 12, BFLOAT, BFLOAT),
    (8, 16, BFLOAT, FLOAT),
    (3, 24, HALF, FLOAT),
    (4, 32, HALF, HALF),
    (2, 100, HALF, HALF),
    (1, 128, HALF, HALF),
    (1, 256, BFLOAT, BFLOAT),
    (32, 8, HALF, HALF),
]


def run_forward(monkeypatch, graph, tensors, scale, out_dtype, part_edges, mode="late", reordered=False):
    """Output and lse of a launch with items of at most `part_edges` edges."""
    pattern, perm = csr_pattern(graph), None
    if reordered:
        perm = torch.randperm(graph.shape[0], generator=torch.Generator().manual_seed(3)).int()
        pattern = permute_rows(pattern, perm)
    indptr, indices = canonical_csr(pattern, tensors[0].device)
    items = row_item_arrays(indptr, perm, part_edges)
    data = Fused3SData(GraphSize(*graph.shape, len(indices)), indices=indices, **items)
    with kernels_of("cpu", mode), poisoned_buffers(monkeypatch):
        lse = torch.empty(tensors[0].shape[:2], dtype=FLOAT, device=tensors[0].device)
        return launch_edge_kernel(data, Call(*tensors, scale, out_dtype, lse)), lse


# Edges of a part, mode, scale, strided inputs, reordered rows.
FORWARD_LAUNCHES = [(1000, "late", 0.3, False, False), (3, "random", -0.2, True, True), (16, "late", 0.0, False, True)]


@pytest.mark.parametrize(("heads", "dim", "dtype", "out_dtype"), FORWARD_SHAPES)
def test_forward_passes_match_float64(monkeypatch, heads, dim, dtype, out_dtype):
    for number, (name, make_graph) in enumerate(MULTIGRAPHS.items(), heads + dim):
        graph = make_graph()
        part_edges, mode, scale, strided, reordered = FORWARD_LAUNCHES[number % 3]
        tensors = inputs(graph, heads, dim, dtype, strided)
        output, lse = run_forward(monkeypatch, graph, tensors, scale, out_dtype, part_edges, mode, reordered)
        assert output.dtype == out_dtype
        label = f"{name}, parts of {part_edges} edges"
        assert_attention(output, tensors, graph, scale, label, lse=lse)


def test_features_of_pairs_far_from_zero(monkeypatch):
    """u beyond the range of fp16, which the features bring back; views of a joint projection."""
    call = EdgeCall.make(EDGE_LISTS["hub"](), 8, 16, HALF, "features")
    weight, features = call.edges.key_weight * 4096, call.edges.padded_features / 4096
    edges = replace(call.edges, key_weight=weight, padded_features=features, value_weight=call.edges.value_weight * 64)
    query, key, value = torch.stack([call.tensors[each] * 8 for each in ROWS], 1).unbind(1)
    assert (query[:, :, None].double() @ weight.double()).abs().max() > torch.finfo(HALF).max
    tensors = call.tensors | {"query": query, "key": key, "value": value}
    output, _, _ = replace(call, tensors=tensors, edges=edges, scale=0.1).run(monkeypatch, wanted={"query"})
    expected, _ = edge_softmax_attention(query, key, value, call.row, call.col, 0.1, edges)
    error = (output.double() - expected).norm(dim=-1).max() / expected.norm(dim=-1).max()
    assert error <= 2 * torch.finfo(HALF).eps + FLOOR, f"off by {error:.2e}"


@pytest.mark.parametrize(("heads", "dim"), [(4, 13), (8, 10)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_heads_that_share_a_block_never_meet(monkeypatch, heads, dim, value):
    graph = GRAPHS["hub"]()
    tensors = inputs(graph, heads, dim, HALF)
    expected, _ = run_forward(monkeypatch, graph, tensors, 0.3, HALF, 16)
    changed = [each.clone() for each in tensors]
    for each in changed:
        each[:, 1] = value
    output, _ = run_forward(monkeypatch, graph, changed, 0.3, HALF, 16)
    others = torch.arange(heads) != 1
    assert torch.equal(output[:, others], expected[:, others])
    assert not output[:, 1].isfinite().all()


def test_packed_heads_with_strides_that_do_not_fit_are_copied(monkeypatch):
    """Heads 16 columns apart, and rows that start inside of a block."""
    graph = GRAPHS["hub"]()
    tensors = inputs(graph, 4, 13, HALF)
    expected, _ = run_forward(monkeypatch, graph, tensors, 0.3, HALF, 16)
    apart = [torch.nn.functional.pad(each, (0, 3))[..., :13] for each in tensors]
    shifted = [torch.nn.functional.pad(each.flatten(1), (1, 3))[:, 1:53].view(-1, 4, 13) for each in tensors]
    for given in (apart, shifted):
        assert not any(each.is_contiguous() for each in given)
        output, _ = run_forward(monkeypatch, graph, given, 0.3, HALF, 16)
        assert torch.equal(output, expected)


GPU_SHAPES = [(8, 16), (4, 12), (12, 8), (1, 128)]
OPTIONS = {"dtype": FLOAT, "head_dim": 16, "num_heads": 8, "edge_data": True, "backward": True}


def hub() -> EdgeList:
    """A row and a column of 5,000 edges each, empty rows, repeated edges."""
    generator = torch.Generator().manual_seed(1)
    row, col = torch.randint(1_000, (2, 3_000), generator=generator)
    other = torch.randint(1_500, (2, 5_000), generator=generator)
    row, col = torch.cat([row, torch.full((5_000,), 7), other[0]]), torch.cat([col, other[1], torch.full((5_000,), 9)])
    return EdgeList(row, col, (1_600, 1_500))


def run_twice(monkeypatch, call: EdgeCall):
    """On a GPU, the same bits twice."""
    found, again = (call.run(monkeypatch, device="cuda") for _ in range(2))
    assert_same_bits(found, again, "other bits the second time")
    return found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [FLOAT, BFLOAT, HALF], ids=str)
@pytest.mark.parametrize("features", [17, 32, 100, 128, 256, 300])
@pytest.mark.parametrize(("heads", "dim"), GPU_SHAPES)
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
        torch.testing.assert_close(captured.replay(), step_of(plan, tensors, data), rtol=1e-5, atol=1e-5)
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
        torch.testing.assert_close(captured.replay(), step(rooms[1]), rtol=1e-5, atol=1e-5)
        assert (captured.result[4][used:] == 0).all()
