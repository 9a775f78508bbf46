"""The benchmark of selected keys of groups of heads, on the CPU with a backend that has a backward pass there."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from bench_runs import add_dataset, config, context, stand_in

import data
from bench import backward
from bench.backward import Problem, plan_passes
from bench.runner import Measure, measured
from configs.bench import Shape
from data.sources.sequence_masks import SelectedBlocks
from fused3s.graph.csr import CSRPattern

SMALL = "nsa-64"


@pytest.fixture(autouse=True)
def ours(monkeypatch):
    """A backend with a backward pass in place of fused3s, and a small mask."""
    stand_in(monkeypatch)
    entry = data.info("nsa-8192")
    fields = {"name": SMALL, "num_nodes": 64, "nnz": 1, "official": SelectedBlocks(64, 8, 3)}
    add_dataset(monkeypatch, replace(entry, **fields))


def small(*overrides):
    return context(config("nsa", "source=official", f"graphs=[{SMALL}]", "repeats=2", *overrides))


def rows_of(*overrides):
    found = measured(Measure(backward.cases, backward.measure), small(*overrides))
    return [row for _, rows in found for row in rows if row.metric == "time"]


def test_both_passes_of_each_group():
    rows = rows_of("shapes=[1x8, 4x8/1]")
    ours = [(row.heads, row.region, row.status) for row in rows if row.backend == "fused3s"]
    assert ours == [(heads, region, "ok") for heads in (1, 4) for region in ("forward", "backward")]
    assert {row.status for row in rows if row.backend == "flex_attention"} == {"unavailable"}


def test_a_wrong_mask_is_wrong_in_both_passes(monkeypatch):
    def shifted(one, *given):
        pattern = one.pattern
        halved = CSRPattern(pattern.indptr, pattern.indices // 2, pattern.shape)
        return plan_passes(SimpleNamespace(**vars(one) | {"pattern": halved}), *given)

    monkeypatch.setattr(backward, "plan_passes", shifted)
    assert [row.status for row in rows_of("shapes=[4x8/1]", "backends=[fused3s]")] == ["wrong", "wrong"]


def test_the_reference_is_dense_attention_with_one_kv_head():
    one = small("shapes=[3x5/1]")
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


def test_the_blocks_of_a_query_are_its_own_and_some_before_it():
    mask = SelectedBlocks(96, 8, 4)
    for query, blocks in enumerate(mask.block_mask()):
        chosen = np.flatnonzero(blocks)
        assert chosen.max() == query // 8
        assert len(chosen) == min(4, query // 8 + 1)
    dense = np.zeros((96, 96), bool)
    dense[mask.edges()] = True
    for query in range(96):
        expected = np.repeat(mask.block_mask()[query], 8) & (np.arange(96) <= query)
        np.testing.assert_array_equal(dense[query], expected)
