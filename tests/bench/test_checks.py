"""Float64 attention of large graphs against the dense one, and errors of rows."""

import pytest
import torch
from attention_cases import EDGE_CASES, dense_attention, mask_of

from bench import checks
from bench.checks import float64_attention, largest_row_error, row_errors, row_parts
from bench.edge_inputs import EdgeInputs
from configs.bench import PLAIN_EDGES, Shape
from fused3s.graph.csr import CSRPattern


@pytest.mark.parametrize("elements", [72, 1000, 1 << 25])  # an edge; less than a row of edges
@pytest.mark.parametrize("name", EDGE_CASES)
def test_every_graph_and_any_part_agrees_with_dense_attention(name, monkeypatch, elements):
    monkeypatch.setattr(checks, "ELEMENTS", elements)
    monkeypatch.setattr(checks, "ROWS", 5)
    graph = EDGE_CASES[name]().tocsr()
    torch.manual_seed(0)
    (rows, cols), dim = graph.shape, 72
    q, k, v = (torch.randn(size, dim).half() for size in (rows, cols, cols))
    indptr, indices = (torch.from_numpy(array.copy()) for array in (graph.indptr, graph.indices))
    output = float64_attention(q[:, None], k[:, None], v[:, None], indptr.long(), indices, 0.3)[:, 0]
    expected = dense_attention(q[:, None], k[:, None], v[:, None], mask_of(graph), 0.3)[:, 0]
    assert output.dtype == torch.float32
    assert largest_row_error(output, expected) < 1e-7


def test_parts_of_rows_hold_at_most_so_many_rows_and_edges():
    edges = torch.tensor([4] * 3 + [0] * 20 + [50] + [3] * 4)
    parts = [*row_parts(torch.cat([edges.new_zeros(1), edges.cumsum(0)]), 10)]
    rows = [(0, 2), (2, 12), (12, 22), (22, 23), (23, 24), (24, 27), (27, 28)]  # a longer row is alone
    assert [(part.start, part.stop) for part, _ in parts] == rows
    assert [part.stop - part.start for _, part in parts] == [8, 4, 0, 0, 50, 9, 3]


@pytest.mark.parametrize("kind", [*PLAIN_EDGES, "low_rank_1", "low_rank_11", "types_4"])
@pytest.mark.parametrize("name", ["no_edges", "one_node_self_loop", "wide", "empty_rows_and_windows"])
def test_heads_and_edge_data_agree_with_dense_attention(name, kind, monkeypatch):
    monkeypatch.setattr(checks, "ELEMENTS", 1000)
    graph, shape = EDGE_CASES[name]().tocsr(), Shape(3, 70)
    indptr, indices = (torch.from_numpy(array.copy()) for array in (graph.indptr, graph.indices))
    (rows, cols), edges = graph.shape, EdgeInputs.random(kind, shape, CSRPattern(indptr, indices, graph.shape))
    torch.manual_seed(0)
    q, k, v = (torch.randn(size, *shape[:2]).half() for size in (rows, cols, cols))
    output = float64_attention(q, k, v, indptr.long(), indices, 0.3, edges)
    assert output.shape == q.shape
    assert largest_row_error(output, dense_with_edges(q, k, v, graph, 0.3, edges, kind)) < 1e-7


def dense_with_edges(q, k, v, graph, scale, edges, kind):
    """The formulas of `fused3s.terms.edge_data` with keys, values and biases of all pairs: [N, H, d] float64."""
    q, k, v = q.double(), k.double(), v.double()
    row, col = map(torch.from_numpy, graph.nonzero())
    keys = k.expand(len(q), *k.shape).clone()  # [N, M, H, d]
    values, bias = v.expand(len(q), *v.shape).clone(), q.new_zeros(len(q), len(k), q.shape[1])
    if edges and edges.type_weight is not None:
        keys[row, col] *= edges.type_weight.double()[edges.types.long()]
    if edges and edges.features is not None:
        keys[row, col] += torch.einsum("er,hdr->ehd", edges.features.double(), edges.weight.double())
        values[row, col] += torch.einsum("er,hdr->ehd", edges.features.double(), edges.weight.double())
    if edges and edges.bias is not None:
        bias[row, col] = edges.bias.double().expand(-1, q.shape[1])
    score = torch.einsum("nhd,nmhd->nmh", q, keys) * scale + bias
    if edges and edges.additive_weight is not None:  # GATv2
        hidden = torch.nn.functional.leaky_relu(q[:, None] + k, 0.2)
        score = torch.einsum("nmhd,hd->nmh", hidden, edges.additive_weight.double()) * scale
    if kind == "column":
        score = score + edges.column.double()
    if kind == "soft_cap":
        score = torch.tanh(score / 2) * 2
    if kind == "gat":
        score = torch.nn.functional.leaky_relu(edges.row.double()[:, None] + edges.column.double(), 0.2)
    score = score.masked_fill(~mask_of(graph)[..., None], -torch.inf)
    weight = torch.nan_to_num(torch.softmax(score, 1))
    return torch.einsum("nmh,nmhd->nhd", weight, values)


def test_the_error_of_a_row_is_that_of_all_its_heads():
    expected = torch.tensor([[[3.0], [4.0]], [[0.0], [2.0]]])  # two rows of two heads
    output = expected + torch.tensor([[[0.5], [0.0]], [[0.0], [0.0]]])
    assert row_errors(output, expected).tolist() == [0.1, 0.0]
    assert largest_row_error(output, expected) == 0.1


def test_scores_that_float32_cannot_tell_apart_are_told_apart():
    q, k = torch.tensor([[4096.0]]), torch.tensor([[4096.0], [4096.0 + 2**-10]])
    v = torch.tensor([[0.0], [1.0]])
    q, k, v = q[:, None], k[:, None].double(), v[:, None]
    output = float64_attention(q, k, v, torch.tensor([0, 2]), torch.tensor([0, 1]), 1.0)
    assert output.item() == pytest.approx(torch.sigmoid(torch.tensor(4.0)).item())


def test_largest_row_error_sees_every_row_and_every_nan():
    expected = torch.ones(200_000, 2, dtype=torch.float64)
    expected[3] = 0
    output = expected.float()
    assert largest_row_error(output, expected) == 0
    output[150_000, 1] = 1.5
    assert largest_row_error(output, expected) == pytest.approx(0.5 / 2**0.5)
    assert row_errors(output, expected).nonzero().flatten().tolist() == [150_000]
    output[3, 0] = 1e-30
    assert largest_row_error(output, expected) == float("inf")
    output[70_000, 0] = float("nan")
    assert largest_row_error(output, expected) != largest_row_error(output, expected)
    assert largest_row_error(torch.zeros(0, 2), torch.zeros(0, 2)) == 0
