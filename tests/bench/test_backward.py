"""Benchmarks of both passes: attention on the sphere, and selected keys of groups of heads; on the CPU with a backend
that has a backward pass there."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from bench_runs import add_dataset, config, context, stand_in

import data
from bench import backward, gradients, kernels
from bench.backward import Problem, plan_passes
from bench.edge_inputs import EdgeInputs
from bench.gradients import float64_gradients, torch_gradients
from bench.runner import Measure, measured
from configs.bench import Shape
from data.sources.sequence_masks import SelectedBlocks
from data.sources.sphere import Sphere
from fused3s.graph.csr import CSRPattern

RECTANGULAR, SELECTED = "sphere-6x8-from-11x16", "nsa-64"


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """A backend with a backward pass in place of fused3s, a small rectangular graph and a small mask."""
    stand_in(monkeypatch)
    fields = {"name": RECTANGULAR, "num_nodes": 48, "nnz": 2_000, "official": Sphere(6, 8, 0.6, (11, 16))}
    add_dataset(monkeypatch, replace(data.info("sphere-24x48-0.15"), **fields))
    fields = {"name": SELECTED, "num_nodes": 64, "nnz": 1, "official": SelectedBlocks(64, 8, 3)}
    add_dataset(monkeypatch, replace(data.info("nsa-8192"), **fields))


def context_of(graph, *overrides):
    name = "nsa" if graph == SELECTED else "sphere"
    return context(config(name, "source=official", f"graphs=[{graph}]", "repeats=2", *overrides))


def rows_of(graph, *overrides, backends="[fused3s]"):
    one = context_of(graph, f"backends={backends}", *overrides)
    return [row for _, rows in measured(Measure(backward.cases, backward.measure), one) for row in rows]


def times_of(graph, *overrides, **options):
    return [row for row in rows_of(graph, *overrides, **options) if row.metric == "time"]


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
    times = times_of(RECTANGULAR, "shapes=[1x8]")
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
    one = context_of(RECTANGULAR, "shapes=[1x8]", "backends=[fused3s]")
    case, *_ = backward.cases(one.config, one.device)
    row = kernels.kernel_time_row(one, case, lambda: None, {"status": "ok", "relative_error": 0.0})
    assert (row.metric, row.status) == ("kernel_time", "error")
    assert "the trace holds no kernel" in row.reason


def test_both_passes_of_each_group():
    rows = times_of(SELECTED, "shapes=[1x8, 4x8/1]", backends="[fused3s, flex_attention]")
    ours = [(row.heads, row.region, row.status) for row in rows if row.backend == "fused3s"]
    assert ours == [(heads, region, "ok") for heads in (1, 4) for region in ("forward", "backward")]
    assert {row.status for row in rows if row.backend == "flex_attention"} == {"unavailable"}


def test_a_wrong_mask_is_wrong_in_both_passes(monkeypatch):
    def shifted(one, *given):
        pattern = one.pattern
        halved = CSRPattern(pattern.indptr, pattern.indices // 2, pattern.shape)
        return plan_passes(SimpleNamespace(**vars(one) | {"pattern": halved}), *given)

    monkeypatch.setattr(backward, "plan_passes", shifted)
    assert [row.status for row in times_of(SELECTED, "shapes=[4x8/1]")] == ["wrong", "wrong"]


def test_the_reference_is_dense_attention_with_one_kv_head():
    one = context_of(SELECTED, "shapes=[3x5/1]")
    problem = Problem(one, Shape(3, 5, 1), False)
    q, k, v, grad = (tensor.double() for tensor in problem.inputs)
    leaves = [tensor.requires_grad_() for tensor in (q, k, v)]
    row = torch.repeat_interleave(torch.arange(64), one.pattern.indptr.diff())
    dense = torch.zeros(64, 64, dtype=torch.bool)
    dense[row, one.pattern.indices.long()] = True
    tensors = [tensor.transpose(0, 1)[None] for tensor in leaves]
    output = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=dense, enable_gqa=True)[0].transpose(
        0, 1
    )
    expected = torch.autograd.grad(output, leaves, grad)
    torch.testing.assert_close(problem.output.double(), output, rtol=1e-6, atol=1e-6)
    for got, right in zip(problem.gradients, expected, strict=True):
        torch.testing.assert_close(got.double(), right, rtol=1e-5, atol=1e-6)


@pytest.mark.gpu
def test_flex_attention_agrees_on_a_gpu():
    settings = ("source=official", "graphs=[nsa-8192]", "shapes=[1x128, 4x128/1]", "backends=[flex_attention]")
    one = context(config("nsa", *settings, "repeats=2"))  # its compiler refuses masks of less than a block
    one.device = torch.device("cuda", 0)
    rows = [row for _, rows in measured(Measure(backward.cases, backward.measure), one) for row in rows]
    assert [row.status for row in rows if row.metric == "time"] == ["ok"] * 4, [row.reason for row in rows]
