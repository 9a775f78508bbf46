"""cuda/edges/forward.cu on the CPU (tests/cuda_shim) without a backward pass: multigraphs, packed heads. With edge data
and gradients: test_edge_backward_on_cpu.py."""

from dataclasses import replace

import pytest
import torch
from edge_calls import ROWS, EdgeCall
from edge_cases import EDGE_LISTS
from plan_oracle import row_item_arrays
from poison import poisoned_buffers
from tolerance import FLOOR

from fused3s.backends.base import Call
from fused3s.backends.reference import edge_softmax_attention
from fused3s.fused.choice import GraphSize
from fused3s.fused.data import Fused3SData
from fused3s.fused.edges.forward import launch_edge_kernel
from fused3s.graph.csr import csr_pattern
from fused3s.graph.edges import canonical_csr
from fused3s.graph.reorder.row_order import permute_rows
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


def run(monkeypatch, graph, tensors, scale, out_dtype, part_edges, mode="late", reordered=False):
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
        return launch_edge_kernel(data, Call(*tensors, scale, out_dtype, lse)), lse


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
