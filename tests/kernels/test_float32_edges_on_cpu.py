"""float32 edge by edge on the CPU (tests/cuda_shim): the real kernels against float64, both passes."""

from dataclasses import replace

import pytest
import torch
from edge_cases import EDGE_LISTS, KINDS
from float32_cases import ROWS, Float32Call

from kernels.backends.base import Gradients
from tests.cuda_shim.cuda_on_cpu import COMPILER, MODES

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler found (g++ or clang++)"),
    pytest.mark.usefixtures("one_thread"),
]

# Loads of 8 and 16 bytes; idle lanes, loads past the end and idle heads; one lane to a whole warp a head.
SHAPES = [
    (1, 2),
    (16, 4),
    (3, 6),
    (8, 8),
    (8, 10),
    (5, 12),
    (8, 16),
    (2, 30),
    (4, 32),
    (3, 36),
    (2, 66),
    (1, 100),
    (1, 128),
    (1, 130),
    (1, 256),
]
GRAPHS = ("repeated", "hub", "one_node_self_loop", "empty_rows_and_windows", "wide", "tall", "no_edges")
# Each kind of edge data with a lane a head, with several and with a wide head, in turn; all terms with each.
EDGE_SHAPES = [(8, 8), (3, 10), (2, 64)]
EDGE_CASES = [(kind, *EDGE_SHAPES[index % 3]) for index, kind in enumerate(KINDS) if kind != "all"]
EDGE_CASES += [("all", *shape) for shape in (*EDGE_SHAPES, (1, 256), (16, 2))]


@pytest.mark.parametrize(("heads", "dim"), SHAPES)
def test_every_shape(monkeypatch, heads, dim):
    for name in GRAPHS:
        for part_edges, mode, reordered, scale in ((1000, "late", False, 0.4), (5, "random", True, -0.3)):
            call = Float32Call.make(EDGE_LISTS[name](), heads, dim, None, None, part_edges, reordered, scale)
            call.check(call.run(monkeypatch, mode), f"{name}, parts of {part_edges} edges")


@pytest.mark.parametrize(("kind", "heads", "dim"), EDGE_CASES)
def test_every_kind_of_edge_data(monkeypatch, kind, heads, dim):
    for name in GRAPHS:
        for part_edges, mode, reordered, scale in ((1000, "late", False, 0.4), (5, "random", True, -0.3)):
            call = Float32Call.make(EDGE_LISTS[name](), heads, dim, kind, None, part_edges, reordered, scale)
            call.check(call.run(monkeypatch, mode), f"{name}, {kind}, parts of {part_edges} edges")


@pytest.mark.parametrize(("kind", "heads", "dim"), [(None, 8, 16), ("all", 2, 24), ("value_features", 1, 128)])
def test_dropout(monkeypatch, kind, heads, dim):
    for name in ("hub", "repeated", "tall"):
        call = Float32Call.make(EDGE_LISTS[name](), heads, dim, kind, 0.4, 7, reordered=True)
        call.check(call.run(monkeypatch, "random"), name)


def test_the_same_bits_in_every_order(monkeypatch):
    call = Float32Call.make(EDGE_LISTS["hub"](), 8, 8, "all", 0.4, part_edges=4)
    assert call.data.row_parts.shape[0] > 10
    expected = call.run(monkeypatch, "late")
    for mode in MODES:
        output, lse, gradients = call.run(monkeypatch, mode)
        assert torch.equal(output, expected[0]), mode
        assert torch.equal(lse, expected[1]), mode
        for name in call.leaves(torch.float32):
            assert torch.equal(getattr(gradients, name), getattr(expected[2], name)), f"{name}, {mode}"


@pytest.mark.parametrize(("heads", "dim"), [(8, 16), (1, 130)])
def test_scores_far_from_zero(monkeypatch, heads, dim):
    """Weights from 1 down to 0, and a log-sum-exp of hundreds, whose error is that of plain torch's scores."""
    call = Float32Call.make(EDGE_LISTS["hub"](), heads, dim, "bias", part_edges=16)
    for bias in (call.edges.bias - 300, call.edges.bias * 30 + 200):
        shifted = replace(call, edges=replace(call.edges, bias=bias))
        shifted.check(shifted.run(monkeypatch), "bias")
    long = replace(call, tensors=call.tensors | {"query": call.tensors["query"] * 20})
    long.check(long.run(monkeypatch), "long queries")


@pytest.mark.parametrize(("heads", "dim"), [(1, 2), (8, 16)])
def test_numbers_that_are_not_finite_reach_their_own_rows_alone(monkeypatch, heads, dim):
    """Edges that do not exist have key 0."""
    call = Float32Call.make(EDGE_LISTS["n_one_past_16"](), heads, dim)
    key, value = (call.tensors[name].clone() for name in ("key", "value"))
    key[0], value[0] = torch.nan, torch.inf
    changed = replace(call, tensors=call.tensors | {"key": key, "value": value})
    (output, _, gradients), (expected, _, expected_gradients) = changed.run(monkeypatch), call.run(monkeypatch)
    neighbours = call.row[call.col == 0]
    others = torch.ones(len(output), dtype=torch.bool).index_fill_(0, neighbours, False)
    assert others.any()
    assert torch.equal(output[others], expected[others])
    assert torch.equal(gradients.query[others], expected_gradients.query[others])
    assert output[neighbours].isnan().all()
    assert gradients.query[neighbours].isnan().all()


def test_strided_tensors(monkeypatch):
    call = Float32Call.make(EDGE_LISTS["wide"](), 3, 6)
    expected = call.run(monkeypatch)
    strided = {name: torch.stack([torch.full_like(x, torch.nan), x], 1)[:, 1] for name, x in call.tensors.items()}
    strided["grad_output"] = call.tensors["grad_output"].transpose(0, 2).contiguous().transpose(0, 2)
    output, lse, gradients = replace(call, tensors=strided).run(monkeypatch)
    assert torch.equal(output, expected[0])
    assert torch.equal(lse, expected[1])
    for name in ROWS:
        assert torch.equal(getattr(gradients, name), getattr(expected[2], name)), name


def test_edge_data_with_strides(monkeypatch):
    """The kernels' own edge data has none."""
    call = Float32Call.make(EDGE_LISTS["directed"](), 2, 24, "all")
    multiplier = torch.stack([call.edges.multiplier, torch.full_like(call.edges.multiplier, torch.nan)], 2)[..., 0]
    strided = replace(call, edges=replace(call.edges, bias=call.edges.bias.t().contiguous().t(), multiplier=multiplier))
    assert not strided.edges.bias.is_contiguous()
    (output, _, gradients), (expected, _, expected_gradients) = strided.run(monkeypatch), call.run(monkeypatch)
    assert torch.equal(output, expected)
    for name in call.leaves(torch.float32):
        assert torch.equal(getattr(gradients, name), getattr(expected_gradients, name)), name


def test_only_wanted_gradients(monkeypatch):
    call = Float32Call.make(EDGE_LISTS["directed"](), 8, 8, "all", 0.4)
    for name in call.leaves(torch.float32):
        _, _, gradients = call.run(monkeypatch, wanted={name})
        assert {field for field, value in gradients._asdict().items() if value is not None} == {name}
        assert isinstance(gradients, Gradients)
