"""The benchmark of both passes, on the CPU with a backend that has a backward pass there."""

from types import SimpleNamespace

import pytest
import torch
from bench_runs import config, context, stand_in

from bench import backward, gradients
from bench.backward import plan_passes
from bench.gradients import float64_gradients, torch_gradients
from bench.runner import Measure, measured
from fused3s.graph.csr import CSRPattern


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """A backend with a backward pass in place of fused3s."""
    stand_in(monkeypatch)


def context_of(*overrides):
    return context(config("backward", "repeats=2", *overrides))


def rows_of(*overrides):
    return [
        row for _, rows in measured(Measure(backward.cases, backward.measure), context_of(*overrides)) for row in rows
    ]


def test_both_passes_of_each_shape():
    rows = rows_of("shapes=[1x8, 2x8]")
    times = [row for row in rows if row.metric == "time"]
    assert [(row.heads, row.region, row.status) for row in times] == [
        (heads, region, "ok") for heads in (1, 2) for region in ("forward", "backward")
    ]
    sizes = {(row.heads, row.region, row.metric): row.value for row in rows if row.unit == "B"}
    nodes = times[0].nodes
    assert sizes[2, "forward", "compulsory_bytes"] == 2 * nodes * 16 * 2
    assert sizes[2, "backward", "compulsory_bytes"] == 8 * nodes * 16 * 2


def test_a_wrong_graph_is_wrong_in_both_passes(monkeypatch):
    def shifted(one, *given):
        pattern = one.pattern
        halved = CSRPattern(pattern.indptr, pattern.indices // 2, pattern.shape)
        return plan_passes(SimpleNamespace(**vars(one) | {"pattern": halved}), *given)

    monkeypatch.setattr(backward, "plan_passes", shifted)
    times = [row for row in rows_of("shapes=[4x8]") if row.metric == "time"]
    assert [row.status for row in times] == ["wrong", "wrong"]


@pytest.mark.parametrize("size", [1, 2400, 1 << 31])
def test_gradients_are_those_of_dense_attention(monkeypatch, size):
    monkeypatch.setattr(gradients, "BYTES", size)
    torch.manual_seed(0)
    queries, keys = 48, 176
    dense = torch.rand(queries, keys) < 0.25
    indptr = torch.cat([torch.zeros(1, dtype=torch.long), dense.sum(1).cumsum(0)])
    pattern = CSRPattern(indptr, dense.nonzero()[:, 1].int(), (queries, keys))
    sizes = (queries, keys, keys, queries)
    q, k, v, grad = (torch.randn(size, 2, 5, dtype=torch.float64) for size in sizes)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    score = torch.einsum("nhd,mhd->nmh", *leaves[:2]) * 0.4
    weight = torch.softmax(score.masked_fill(~dense[..., None], -torch.inf), 1)
    expected = torch.autograd.grad(torch.einsum("nmh,mhd->nhd", weight, leaves[2]), leaves, grad)
    for found in (float64_gradients, torch_gradients):
        for got, right in zip(found(q, k, v, grad, pattern, 0.4), expected, strict=True):
            torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-6)
