"""cuda/edges/forward.cu and backward.cu on the CPU (tests/cuda_shim): the real sources against float64."""

from dataclasses import replace

import pytest
import torch
from edge_calls import ROWS, EdgeCall, assert_same_bits
from edge_cases import EDGE_LISTS, KINDS

from fused3s.backends.base import Gradients
from tests.cuda_shim.cuda_on_cpu import ON_SHIM

pytestmark = ON_SHIM

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
GRAPHS = ("repeated", "hub", "one_node_self_loop", "empty_rows_and_windows", "wide", "tall", "no_edges")
# Edges of a part, mode, reordered rows, scale: of whole rows and of parts, in turn.
LAUNCHES = ((1000, "late", False, 0.4), (5, "random", True, -0.3))
both_types = pytest.mark.parametrize("dtype", [HALF, FLOAT], ids=str)


@pytest.mark.parametrize("case", CASES)
def test_results_match_float64(monkeypatch, case):
    heads, dim, dtype, out_dtype, kinds, rate = CASES[case]
    for kind in kinds:
        for number, name in enumerate(GRAPHS, list(CASES).index(case)):
            part_edges, mode, reordered, scale = LAUNCHES[number % 2]
            shape = (EDGE_LISTS[name](), heads, dim, dtype)
            call = EdgeCall.make(*shape, kind, rate, part_edges, reordered, scale, out_dtype)
            call.check(call.run(monkeypatch, mode), f"{name}, {kind}, parts of {part_edges} edges")


@both_types
def test_split_rows_and_columns_have_the_same_bits_in_every_order(monkeypatch, dtype):
    call = EdgeCall.make(EDGE_LISTS["hub"](), 8, 8, dtype, "all", 0.4, part_edges=4)
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


@both_types
def test_gradients_of_added_features_have_the_same_bits_in_every_order(monkeypatch, dtype):
    call = EdgeCall.make(EDGE_LISTS["hub"](), 10, 16, dtype, "additive_features", part_edges=4)
    expected = call.run(monkeypatch, "late")
    for mode in ("early", "random"):
        assert_same_bits(call.run(monkeypatch, mode), expected, mode)


@pytest.mark.parametrize("kind", ["all", "additive_features"])
def test_only_wanted_gradients(monkeypatch, kind):
    call = EdgeCall.make(EDGE_LISTS["directed"](), 8, 8, HALF, kind, 0.4)
    for name in call.leaves():
        _, _, gradients = call.run(monkeypatch, wanted={name})
        assert isinstance(gradients, Gradients)
        assert {field for field, gradient in gradients._asdict().items() if gradient is not None} == {name}


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


@both_types
def test_strided_tensors_and_edge_data(monkeypatch, dtype):
    call = EdgeCall.make(EDGE_LISTS["wide"](), 2, 24, dtype, "all")
    strided = {name: torch.stack([torch.full_like(x, torch.nan), x], 1)[:, 1] for name, x in call.tensors.items()}
    strided["grad_output"] = call.tensors["grad_output"].transpose(0, 2).contiguous().transpose(0, 2)
    values = call.edges.edge_values  # [nnz, H, 2]
    edges = replace(call.edges, edge_values=values.transpose(0, 2).contiguous().transpose(0, 2))
    assert not edges.edge_values.is_contiguous()
    assert not strided[ROWS[0]].is_contiguous()
    assert_same_bits(replace(call, tensors=strided, edges=edges).run(monkeypatch), call.run(monkeypatch))


@pytest.mark.parametrize(("heads", "dim"), [(8, 16), (1, 130)])
def test_scores_far_from_zero(monkeypatch, heads, dim):
    """Weights from 1 down to 0, and a log-sum-exp of hundreds, whose error is that of plain torch's scores."""
    call = EdgeCall.make(EDGE_LISTS["hub"](), heads, dim, FLOAT, "bias", part_edges=16)
    for bias in (call.edges.edge_values - 300, call.edges.edge_values * 30 + 200):
        shifted = replace(call, edges=replace(call.edges, edge_values=bias))
        shifted.check(shifted.run(monkeypatch), "bias")
    long = replace(call, tensors=call.tensors | {"query": call.tensors["query"] * 20})
    long.check(long.run(monkeypatch), "long queries")
