"""The steps of an inference run, each by itself; tests/scripts runs them in their order."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from bench.records import read_rows
from bench.timers import Spread
from configs import load_config
from inference.report import report_table, write_results
from inference.run import Cost, Request, check, cost_of_all, measure
from inference.source import load_source
from kernels.formats.row_order import RowOrder

SIZES = np.array([3, 5, 2, 7, 4])  # nodes of the graphs, which are chains
CLASSES = 2


@pytest.fixture
def request_for(tmp_path):
    """A function that gives the request for a run on five small graphs."""
    u = np.concatenate([np.arange(size - 1) for size in SIZES])
    features = np.random.default_rng(0).normal(size=(SIZES.sum(), 6))
    labels = np.random.default_rng(1).normal(size=(len(SIZES), CLASSES))
    counts = {"node_counts": SIZES, "edge_counts": SIZES - 1}
    np.savez(tmp_path / "mine.npz", u=u, v=u + 1, feat=features, graph_label=labels, **counts)
    path = tmp_path / "mine.yaml"
    path.write_text(
        f"""
        data: {{name: mine, source: file, path: '{tmp_path}/mine.npz', batch_size: 5}}
        model: {{dim: 8, heads: 2, blocks: 2, checkpoint: null}}
        runtime: {{device: cpu, warmup: 1, repeats: 4}}
        """
    )

    def request_for(*overrides):
        config = load_config(path, overrides)
        return Request(path, config, verify=True, accuracy=True, profile=False, output=None, results=tmp_path / "r.csv")

    return request_for


def test_batches_predict_what_one_graph_predicts(request_for):
    batched = request_for("data.batches=all", "data.batch_size=2")
    source, batches = load_source(request_for().config), load_source(batched.config)
    with torch.inference_mode():
        one, some = measure(source, request_for()), measure(batches, batched)
        expected = source.reference(source.model, torch.float32)
        torch.testing.assert_close(batches.reference(source.model, torch.float32), expected, rtol=0, atol=1e-6)
    for found in (one, some):
        torch.testing.assert_close(found.logits, expected, rtol=0, atol=1e-6)
    assert one.whole is None
    assert (some.whole.num_graphs, some.whole.num_batches) == (5, 3)
    assert some.execution.graph_reason == "chosen by auto; a CUDA graph needs an NVIDIA GPU, and the model is on cpu"


@pytest.mark.parametrize("factor", [1.0, 1.01])
def test_predictions_are_compared_with_both_references(request_for, factor):
    source = load_source(request_for().config)
    with torch.inference_mode():
        run = measure(source, request_for())
        exact = source.reference(source.model, torch.float32)
        run.logits = exact * factor
        check(run)
    assert run.agreement.passed == (factor == 1)
    assert run.accuracy.max_abs == pytest.approx(exact.abs().max().item() * (factor - 1), rel=1e-3, abs=1e-9)
    assert run.score is None  # random weights


def test_all_ranks_cost_what_the_slowest_takes_and_the_fullest_holds():
    costs = [
        Cost(Spread(median, 0, 0, 1), Spread(0.5, 0, 0, 1), None, format_build=build, peak_memory=memory)
        for median, build, memory in ((1, 10, 300), (3, 20, 100), (2, 30, 200))
    ]
    found = cost_of_all(costs)
    assert (found.forward.median, found.format_build, found.peak_memory) == (3, 20, 300)


def test_report_and_rows_of_a_run(request_for, capsys, monkeypatch):
    request = request_for()
    source = load_source(request.config)
    with torch.inference_mode():
        run = measure(source, request)
        check(run)
        run.logits[0, 0] = torch.nan
    counts = {"columns_before": 40, "columns_after": 30, "tiles_before": 3, "tiles_after": 2}
    run.attention = replace(run.attention, order=RowOrder(torch.arange(21), "communities", 0.5, **counts))
    monkeypatch.setattr(source, "columns", lambda: {"ranks": 3, "variant": "halo"})
    write_results(run)
    assert "1 of 10 outputs are NaN or infinite" in capsys.readouterr().err
    rows = read_rows(request.results)
    assert {(row.ranks, row.variant, row.status, row.backend) for row in rows} == {(3, "halo", "ok", "csr_unfused")}
    times = {(row.scope, row.metric): row.value for row in rows}
    assert times["model", "time"] == pytest.approx(run.cost.forward.median)
    assert times["build", "time"] == pytest.approx(run.cost.format_build)
    names, texts = ([str(cell) for cell in column.cells] for column in report_table(run).columns)
    assert names[-3:] == ["row order", "verification", "accuracy"]
    assert texts[-3] == "communities: 25.0% fewer gathered columns, found in 0.50 s"
