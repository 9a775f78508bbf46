"""Training steps, scores and learning curves in table, README and figure: numbers worked out by hand."""

import pandas as pd
import pytest
from kernel_rows import row

from report.frames import frame
from report.plots.training import draw
from report.readme import BLOCKS
from report.tables.training import training_tables
from report.training import PYG, StepTimes, Trained, curves, scores


def step(dataset, backend, ms, dense, launch, status="ok", **changes):
    same = {"bench": "training", "region": "step", "scope": "model", "blocks": 10, "plan": "none", "l2": "none"}
    return row(dataset, backend, ms, status, dense=dense, launch=launch, heads=1, **same, **changes)


def run(variant, metric, value, **changes):
    same = {"bench": "train", "scope": "model", "blocks": 3, "heads": 1, "unit": "1", "plan": "none", "l2": "none"}
    return row("cora", "fused3s", value, "unchecked", variant=variant, metric=metric, **same, **changes)


ROWS = [
    step("cora", "fused3s", 2.0, "fused", "cuda_graph"),
    step("cora", "pyg", 8.0, "plain", "eager"),
    step("ogbn-arxiv", "fused3s", 10.0, "fused", "cuda_graph", nnz=1_166_243),
    step("ogbn-arxiv", "pyg", 90.0, "plain", "eager", "wrong", nnz=1_166_243, reason="bf16 sums"),
    *(run(f"seed {seed}", "test_accuracy", value) for seed, value in enumerate((0.7, 0.8, 0.75))),
    *(run("3 seeds", "valid_accuracy", 0.1 * epoch, region=f"epoch {epoch}") for epoch in range(1, 12)),
]


@pytest.fixture(scope="module")
def rows() -> pd.DataFrame:
    return frame(ROWS)


def test_ratios_count_wrong_gradients_too(rows):
    found = StepTimes.of(rows).over_ours(1, PYG, ("plain", "eager"))
    assert found.mean == pytest.approx(6.0)  # 4 and 9
    assert StepTimes.of(rows).over_ours(8, PYG, ("plain", "eager")) is None


def test_scores_by_hand(rows):
    ((run_of, score),) = scores(rows).items()
    assert run_of == Trained("cora", 128, 3, "fused3s", "float16")
    assert (score.metric, score.seeds) == ("accuracy", 3)
    assert (score.mean, score.error) == pytest.approx((0.75, 0.05 / 3**0.5))


def test_epochs_are_in_the_order_of_their_numbers(rows):
    (curve,) = curves(rows).values()
    assert curve.epochs == [*range(1, 12)]
    assert curve.median == pytest.approx([0.1 * epoch for epoch in range(1, 12)])


def test_tables(rows):
    text = training_tables(rows)
    assert "| 1 | 6.00 (n = 2; 4.00 on cora) |" in text
    assert "| ogbn-arxiv | 1,166,243 | 10.00 | wrong |" in text
    assert "| cora | 3 blocks, d = 128 | fused3s, float16 | accuracy | 3 | 0.7500 | 0.0289 |" in text
    assert "| 1 | 2.00 | 10.00 | 6.00 (n = 2; 4.00 on cora) |" in BLOCKS["training-steps"](rows)
    assert "| cora | 3 blocks, d = 128 |" in BLOCKS["training-scores"](rows)


def test_figures(rows):
    assert sorted(draw(rows)) == ["learning-curves_nvidia-h200", "training-steps_nvidia-h200_1-heads"]
