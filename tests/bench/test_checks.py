"""The large-graph oracle against the dense one, and errors of rows."""

import pytest
import torch
from attention_cases import EDGE_CASES, dense_attention, mask_of

from bench import checks as oracle
from bench.checks import float64_attention, largest_row_error, row_errors


@pytest.mark.parametrize("elements", [1000, 1 << 25])
@pytest.mark.parametrize("name", EDGE_CASES)
def test_every_graph_and_any_chunk_agrees_with_dense_attention(name, monkeypatch, elements):
    monkeypatch.setattr(oracle, "ELEMENTS", elements)  # also less than a row of edges, and not a divisor
    graph = EDGE_CASES[name]().tocsr()
    torch.manual_seed(0)
    (rows, cols), dim = graph.shape, 72  # two slices of V, the second partial
    q, k, v = (torch.randn(size, dim).half() for size in (rows, cols, cols))
    indptr, indices = (torch.from_numpy(array.copy()) for array in (graph.indptr, graph.indices))
    output = float64_attention(q, k, v, indptr.long(), indices, 0.3)
    expected = dense_attention(q[:, None], k[:, None], v[:, None], mask_of(graph), 0.3)[:, 0]
    assert output.dtype == torch.float32
    assert largest_row_error(output, expected) < 1e-7


def test_scores_that_float32_cannot_tell_apart_are_told_apart():
    q, k = torch.tensor([[4096.0]]), torch.tensor([[4096.0], [4096.0 + 2**-10]])
    v = torch.tensor([[0.0], [1.0]])
    output = float64_attention(q, k.double(), v, torch.tensor([0, 2]), torch.tensor([0, 1]), 1.0)
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
