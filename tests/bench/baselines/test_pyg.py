"""Dropout of the backend `pyg`, which has masks of its own."""

import torch
from attention_cases import EDGE_CASES

from fused3s import plan_attention


def test_dropped_weights_and_their_gradients_are_those_of_the_dense_softmax():
    graph = EDGE_CASES["n_one_past_16"]()
    size, rate = graph.shape[0], 0.4
    plan = plan_attention(graph, backend="pyg", device="cpu")
    generator = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(size, 2, 8, generator=generator, dtype=torch.float64, requires_grad=True) for _ in range(3))
    scores = torch.einsum("ihd,jhd->hij", q, k) * 0.3
    weights = scores.masked_fill(torch.from_numpy(graph.toarray() == 0), -torch.inf).softmax(-1).nan_to_num()

    def run(values):
        return plan(q, k, values, scale=0.3, dropout=rate)

    torch.manual_seed(2)
    dropped = run(torch.eye(size, dtype=torch.float64)[:, None].expand(-1, 2, -1)).permute(1, 0, 2)
    kept = dropped != 0
    torch.testing.assert_close(dropped, (weights * kept / (1 - rate)))
    assert abs(kept.sum() / (weights != 0).sum() - (1 - rate)) < 0.1
    torch.manual_seed(2)
    output, expected = run(v), torch.einsum("hij,jhd->ihd", weights * kept / (1 - rate), v)
    torch.testing.assert_close(output, expected)
    assert not torch.equal(run(v), output)
    factors = torch.randn_like(output)
    found, expected = (torch.autograd.grad((each * factors).sum(), (q, k, v)) for each in (output, expected))
    for gradient, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, wanted)
