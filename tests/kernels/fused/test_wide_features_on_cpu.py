"""Features of more than 16 columns on the CPU (tests/cuda_shim): cuda/features/wide_features.cu around both passes of
the edge-by-edge kernels, against float64."""

from contextlib import nullcontext
from dataclasses import replace

import edge_calls
import pytest
import torch
from edge_calls import EdgeCall
from edge_cases import EDGE_LISTS

from fused3s.fused.edges import wide_features
from tests.cuda_shim.cuda_on_cpu import ON_SHIM, cuda_on_cpu

pytestmark = ON_SHIM

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
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


@pytest.mark.parametrize("case", CASES)
def test_results_match_float64(monkeypatch, case):
    heads, dim, dtype, out_dtype, kinds, rate, features = CASES[case]
    for kind in kinds:
        for name in GRAPHS:
            for part_edges, mode, reordered, scale in ((1000, "late", False, 0.4), (5, "random", True, -0.3)):
                shape = (EDGE_LISTS[name](), heads, dim, dtype)
                call = EdgeCall.make(*shape, kind, rate, part_edges, reordered, scale, out_dtype, rank=features)
                call.check(call.run(monkeypatch, mode), f"{name}, {kind}, parts of {part_edges} edges")


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
    with monkeypatch.context() as patch, cuda_on_cpu() as gpu:
        patch.setattr(edge_calls, "cuda_on_cpu", lambda mode: nullcontext())
        results = call.run(monkeypatch)
    call.check(results, f"{heads} heads")
    assert sum(name.startswith("feature_sums") for name in gpu.launched) == 2 * launches


def assert_same_bits(found, expected, label):
    """Output, log-sum-exp and gradients of two runs."""
    for left, right in zip((*found[:2], *found[2]), (*expected[:2], *expected[2]), strict=True):
        assert left is right is None or torch.equal(left, right), label


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
