"""cuda/edges/forward.cu on the CPU (tests/cuda_shim): the real source and the real plans against dense float64."""

from dataclasses import replace

import pytest
import torch
from edge_calls import ROWS, EdgeCall
from edge_cases import EDGE_LISTS, FORMS, KINDS, assert_edge_attention, edge_inputs, in_order, qkv
from plan_oracle import row_item_arrays
from poison import poisoned_buffers
from tolerance import FLOOR

from fused3s import plan_attention
from fused3s.backends.base import Call
from fused3s.backends.reference import edge_softmax_attention
from fused3s.fused.choice import GraphSize
from fused3s.fused.data import Fused3SData
from fused3s.fused.edges import forward as fused3s_edges
from fused3s.fused.edges.forward import launch_edge_kernel
from fused3s.fused.tuning import SM90
from fused3s.graph.csr import csr_pattern
from fused3s.graph.edges import canonical_csr, rows_of_edges
from fused3s.graph.reorder.row_order import permute_rows
from fused3s.terms.dropout import Dropout
from fused3s.terms.edge_data import BoundEdges
from tests.cuda_shim.cuda_on_cpu import MODES, ON_SHIM, cuda_on_cpu
from tests.cuda_shim.oracle import GRAPHS, MULTIGRAPHS, assert_attention, inputs

pytestmark = ON_SHIM

HALF, BFLOAT, FLOAT = torch.float16, torch.bfloat16, torch.float32
# heads, dimensions, types: loads of 4, 8 and 16 bytes, idle lanes and heads, one lane to a whole warp a head; packed
# heads, whose blocks have dimensions of up to two heads, or none to spare.
SHAPES = [
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


def run(monkeypatch, graph, tensors, scale, out_dtype, part_edges, mode="late", reordered=False, edges=None):
    """Output and lse of a launch with items of at most `part_edges` edges."""
    pattern, perm = csr_pattern(graph), None
    if reordered:
        perm = torch.randperm(graph.shape[0], generator=torch.Generator().manual_seed(3)).int()
        pattern = permute_rows(pattern, perm)
    indptr, indices = canonical_csr(pattern, tensors[0].device)
    items = row_item_arrays(indptr, perm, part_edges)
    data = Fused3SData(GraphSize(*graph.shape, len(indices)), indices=indices, **items)
    with cuda_on_cpu(MODES[mode]), poisoned_buffers(monkeypatch):
        lse = torch.empty(tensors[0].shape[:2], dtype=FLOAT, device=tensors[0].device)
        return launch_edge_kernel(data, Call(*tensors, scale, out_dtype, lse, edges)), lse


# Edges of a part, mode, scale, strided inputs, reordered rows.
LAUNCHES = [(1000, "late", 0.3, False, False), (3, "random", -0.2, True, True), (16, "late", 0.0, False, True)]


@pytest.mark.parametrize(("heads", "dim", "dtype", "out_dtype"), SHAPES)
def test_every_case_matches_float64(monkeypatch, heads, dim, dtype, out_dtype):
    for number, (name, make_graph) in enumerate(MULTIGRAPHS.items(), heads + dim):
        graph = make_graph()
        part_edges, mode, scale, strided, reordered = LAUNCHES[number % 3]
        tensors = inputs(graph, heads, dim, dtype, strided)
        output, lse = run(monkeypatch, graph, tensors, scale, out_dtype, part_edges, mode, reordered)
        assert output.dtype == out_dtype
        label = f"{name}, parts of {part_edges} edges"
        assert_attention(output, tensors, graph, scale, label, lse=lse)


# Narrow and wide heads, which take different kernels; all of them with all terms at once.
EDGE_SHAPES = [(3, 5, HALF), (2, 64, HALF), (8, 8, HALF), (4, 16, BFLOAT), (1, 136, BFLOAT)]
EDGE_CASES = [(kind, *shape) for kind in KINDS for shape in (EDGE_SHAPES if kind == "all" else EDGE_SHAPES[:2])]


@pytest.mark.parametrize(("kind", "heads", "dim", "dtype"), EDGE_CASES)
def test_edge_data_matches_float64(monkeypatch, heads, dim, dtype, kind):
    for name in ("repeated", "hub", "one_node_self_loop", "empty_rows_and_windows", "wide", "no_edges"):
        graph = EDGE_LISTS[name]()
        tensors = qkv(graph.shape, heads, dim, dtype)
        made, order = FORMS["dgl" if name == "repeated" else "scipy_coo"](graph)
        edges = edge_inputs(kind, graph.num_edges, heads, dim, dtype)
        for reorder, mode in (("none", "late"), ("communities", "random")):
            with cuda_on_cpu(MODES[mode]):
                plan = plan_attention(
                    made, backend="fused3s", device="cpu", dtype=dtype, head_dim=dim, num_heads=heads, edge_data=True,
                    reorder=reorder,
                )  # fmt: skip
                bound = plan.bind_edges(in_order(edges, order))
                with poisoned_buffers(monkeypatch):
                    output = plan(*tensors, scale=0.4, edges=bound)
            assert_edge_attention(output, graph, tensors, edges, 0.4, f"{name}, {kind}, reorder {reorder}")


@pytest.mark.parametrize("kind", ["all", "features"])
def test_parts_of_a_row_keep_their_edge_data(monkeypatch, kind):
    graph = EDGE_LISTS["hub"]()
    tensors = qkv(graph.shape, 2, 24, HALF)
    edges = edge_inputs(kind, graph.num_edges, 2, 24, HALF)
    made, order = FORMS["scipy_coo"](graph)
    monkeypatch.setattr(fused3s_edges, "tuning_for", lambda gpu: replace(SM90, least_part_edges=4))
    with cuda_on_cpu(MODES["random"]):
        plan = plan_attention(
            made, backend="fused3s", device="cpu", dtype=HALF, head_dim=24, num_heads=2, edge_data=True
        )
        assert plan.data.arrays.row_parts.shape[0] > 10
        ordered = in_order(edges, order)
        with poisoned_buffers(monkeypatch):
            output, again = (plan(*tensors, scale=-0.4, edges=ordered) for _ in range(2))
    assert torch.equal(output, again)
    assert_edge_attention(output, graph, tensors, edges, -0.4, kind)


@pytest.mark.parametrize(("heads", "dim", "features"), [(8, 8, False), (2, 64, True), (4, 13, False), (8, 16, True)])
def test_dropout_by_the_numbers_of_rows_in_the_graph(monkeypatch, heads, dim, features):
    """Weights are dropped after their sum, of features too; parts and the order of rows do not change the mask."""
    graph = GRAPHS["hub"]()
    tensors = inputs(graph, heads, dim, HALF)
    perm = torch.randperm(graph.shape[0], generator=torch.Generator().manual_seed(3)).int()
    indptr, col = canonical_csr(permute_rows(csr_pattern(graph), perm), perm.device)
    row = perm.long()[rows_of_edges(indptr)]
    edges = BoundEdges(dropout=Dropout(0.3, torch.tensor([-(2**35) + 77])))
    if features:
        generator = torch.Generator().manual_seed(5)
        of_edges, weight = (
            torch.randn(*shape, generator=generator).half() for shape in ((len(row), 16), (heads, dim, 16))
        )
        edges = replace(edges, padded_features=of_edges, num_features=16, value_weight=weight)
    expected, expected_lse = edge_softmax_attention(*tensors, row, col.long(), 0.3, edges)
    for part_edges, mode in ((1000, "late"), (3, "random")):
        output, lse = run(monkeypatch, graph, tensors, 0.3, HALF, part_edges, mode, reordered=True, edges=edges)
        error = (output.double() - expected).norm(dim=-1).max() / expected.norm(dim=-1).max()
        assert error <= 2 * torch.finfo(HALF).eps + FLOOR, f"parts of {part_edges} edges: off by {error:.2e}"
        torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)
    kept = (expected != 0).any(-1)
    assert torch.equal((output != 0).any(-1), kept)


# Heads and kinds: two and four rows of a warp, several head groups, either weight alone, other terms beside features.
PAIR_CASES = [
    *((8, 16, HALF, kind) for kind in ("features", "key_features", "value_features", "all")),
    *((4, 16, BFLOAT, "features"), (16, 16, HALF, "features"), (12, 16, HALF, "all")),
    *((8, 10, BFLOAT, "features"), (4, 12, HALF, "features"), (16, 10, HALF, "features")),
]


@pytest.mark.parametrize(("heads", "dim", "dtype", "kind"), PAIR_CASES)
def test_features_of_pairs_match_float64(monkeypatch, heads, dim, dtype, kind):
    """Features of heads of 10 to 16 columns on tensor cores; whole rows and parts, three edges and more a round."""
    for name in ("repeated", "hub", "one_node_self_loop", "empty_rows_and_windows", "wide", "no_edges"):
        for part_edges, mode, reordered, scale in ((1000, "late", False, 0.4), (5, "random", True, -0.3)):
            call = EdgeCall.make(EDGE_LISTS[name](), heads, dim, dtype, kind, None, part_edges, reordered, scale)
            tensors = [call.tensors[each] for each in ROWS]
            with cuda_on_cpu(MODES[mode]), poisoned_buffers(monkeypatch):
                lse = torch.empty(tensors[0].shape[:2], dtype=FLOAT, device="cpu")
                output = launch_edge_kernel(call.data, Call(*tensors, scale, dtype, lse, call.edges))
            expected, expected_lse = edge_softmax_attention(*tensors, call.row, call.col, scale, call.edges)
            label = f"{name}, parts of {part_edges} edges"
            error = (output.double() - expected).norm(dim=-1).max() / expected.norm(dim=-1).max().clamp(min=1e-30)
            assert error <= 2 * torch.finfo(dtype).eps + FLOOR, f"{label}: off by {error:.2e}"
            torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-4, msg=label)


def test_features_of_pairs_far_from_zero(monkeypatch):
    """u beyond the range of fp16, which the features bring back; views of a joint projection."""
    call = EdgeCall.make(EDGE_LISTS["hub"](), 8, 16, HALF, "features")
    weight, features = call.edges.key_weight * 4096, call.edges.padded_features / 4096
    edges = replace(call.edges, key_weight=weight, padded_features=features, value_weight=call.edges.value_weight * 64)
    query, key, value = torch.stack([call.tensors[each] * 8 for each in ROWS], 1).unbind(1)
    assert (query[:, :, None].double() @ weight.double()).abs().max() > torch.finfo(HALF).max
    with cuda_on_cpu(), poisoned_buffers(monkeypatch):
        output = launch_edge_kernel(call.data, Call(query, key, value, 0.1, HALF, None, edges))
    expected, _ = edge_softmax_attention(query, key, value, call.row, call.col, 0.1, edges)
    error = (output.double() - expected).norm(dim=-1).max() / expected.norm(dim=-1).max()
    assert error <= 2 * torch.finfo(HALF).eps + FLOOR, f"off by {error:.2e}"


@pytest.mark.parametrize(("heads", "dim"), [(4, 13), (8, 10)])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_heads_that_share_a_block_never_meet(monkeypatch, heads, dim, value):
    graph = GRAPHS["hub"]()
    tensors = inputs(graph, heads, dim, HALF)
    expected, _ = run(monkeypatch, graph, tensors, 0.3, HALF, 16)
    changed = [each.clone() for each in tensors]
    for each in changed:
        each[:, 1] = value
    output, _ = run(monkeypatch, graph, changed, 0.3, HALF, 16)
    others = torch.arange(heads) != 1
    assert torch.equal(output[:, others], expected[:, others])
    assert not output[:, 1].isfinite().all()


def test_packed_heads_with_strides_that_do_not_fit_are_copied(monkeypatch):
    """Heads 16 columns apart, and rows that start inside of a block."""
    graph = GRAPHS["hub"]()
    tensors = inputs(graph, 4, 13, HALF)
    expected, _ = run(monkeypatch, graph, tensors, 0.3, HALF, 16)
    apart = [torch.nn.functional.pad(each, (0, 3))[..., :13] for each in tensors]
    shifted = [torch.nn.functional.pad(each.flatten(1), (1, 3))[:, 1:53].view(-1, 4, 13) for each in tensors]
    for given in (apart, shifted):
        assert not any(each.is_contiguous() for each in given)
        output, _ = run(monkeypatch, graph, given, 0.3, HALF, 16)
        assert torch.equal(output, expected)
