"""The benchmark of attention on the sphere, on the CPU with a backend that has a backward pass there."""

from dataclasses import replace

import pytest
import torch
from bench_runs import add_dataset, config, context, stand_in

import data
from bench import backward, gradients, kernels
from bench.edge_inputs import EdgeInputs
from bench.gradients import float64_gradients, torch_gradients
from bench.runner import Measure, measured
from data.sources.sphere import Sphere
from fused3s.graph.csr import CSRPattern

RECTANGULAR = "sphere-6x8-from-11x16"


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """A backend with a backward pass in place of fused3s, and a small rectangular graph."""
    stand_in(monkeypatch)
    small = Sphere(6, 8, 0.6, (11, 16))
    entry = data.info("sphere-24x48-0.15")
    fields = {"name": RECTANGULAR, "num_nodes": 48, "nnz": 2_000, "official": small}
    add_dataset(monkeypatch, replace(entry, **fields))


def rows_of(graph, *overrides):
    settings = ("source=official", "backends=[fused3s]", f"graphs=[{graph}]", "repeats=2")
    one = context(config("sphere", *settings, *overrides))
    return [row for _, rows in measured(Measure(backward.cases, backward.measure), one) for row in rows]


@pytest.mark.parametrize("graph", ["sphere-24x48-0.15", RECTANGULAR])
def test_both_passes_with_and_without_weights(graph):
    rows = rows_of(graph, "shapes=[2x8]")
    times = [row for row in rows if row.metric == "time"]
    assert [(row.edges, row.region, row.status) for row in times] == [
        (edges, region, "ok")
        for edges in ("none", "log_weight", "log_weight_bias")
        for region in ("forward", "backward")
    ]
    num_keys = data.load(graph, features=False).meta.shape[1]
    sizes = {(row.edges, row.region, row.metric): row.value for row in rows if row.unit == "B"}
    nodes = times[0].nodes
    assert sizes["none", "forward", "compulsory_bytes"] == 2 * nodes * 16 * 2
    assert sizes["none", "backward", "compulsory_bytes"] == 4 * (nodes + num_keys) * 16 * 2
    assert sizes["log_weight_bias", "backward", "plan_bytes"] > sizes["none", "backward", "plan_bytes"] > 0


def test_wrong_weights_are_a_wrong_output_and_wrong_gradients(monkeypatch):
    weighted = EdgeInputs.weighted
    monkeypatch.setattr(EdgeInputs, "weighted", lambda kind, weight, pattern: weighted(kind, 0 * weight, pattern))
    times = [row for row in rows_of(RECTANGULAR, "shapes=[1x8]") if row.metric == "time"]
    assert {row.status for row in times if row.edges == "none"} == {"ok"}
    assert {row.status for row in times if row.edges != "none"} == {"wrong"}


def test_other_graphs_have_no_weights():
    one = context(config("sphere", "shapes=[1x8]", "edges=[log_weight]", "backends=[fused3s]"))
    rows = [row for _, rows in measured(Measure(backward.cases, backward.measure), one) for row in rows]
    assert {row.status for row in rows} == {"unsupported"}
    assert "a grid on the sphere" in rows[0].reason


@pytest.mark.parametrize("elements", [1, 300, 1 << 30])
def test_gradients_with_a_value_of_the_column_are_those_of_dense_attention(monkeypatch, elements):
    monkeypatch.setattr(gradients, "TORCH_ELEMENTS", elements)
    graph = Sphere(6, 8, 0.6, (11, 16)).load(None, None)
    indptr, col = torch.from_numpy(graph.indptr).long(), torch.from_numpy(graph.col)
    pattern = CSRPattern(indptr, col, (48, 176))
    torch.manual_seed(0)
    sizes = (48, 176, 176, 48)
    q, k, v, grad = (torch.randn(size, 2, 5, dtype=torch.float64) for size in sizes)
    column = torch.randn(176, dtype=torch.float64)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    score = torch.einsum("nhd,mhd->nmh", *leaves[:2]) * 0.4 + column[:, None]
    dense = torch.zeros(48, 176, dtype=torch.bool)
    dense[torch.from_numpy(graph.row).long(), col.long()] = True
    weight = torch.softmax(score.masked_fill(~dense[..., None], -torch.inf), 1)
    expected = torch.autograd.grad(torch.einsum("nmh,mhd->nhd", weight, leaves[2]), leaves, grad)
    for found in (float64_gradients, torch_gradients):
        for got, right in zip(found(q, k, v, grad, pattern, 0.4, column), expected, strict=True):
            torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-6)


def test_a_gpu_that_cannot_be_traced_leaves_the_other_rows(monkeypatch):
    def fails(run):
        raise RuntimeError("the trace holds no kernel")

    monkeypatch.setattr(kernels, "trace_gpu", fails)
    one = context(config("sphere", "source=official", f"graphs=[{RECTANGULAR}]", "shapes=[1x8]", "backends=[fused3s]"))
    case, *_ = backward.cases(one.config, one.device)
    row = kernels.kernel_time_row(one, case, lambda: None, {"status": "ok", "relative_error": 0.0})
    assert (row.metric, row.status) == ("kernel_time", "error")
    assert "the trace holds no kernel" in row.reason
