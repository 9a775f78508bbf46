"""Training steps, scores and learning curves in table, README and figure: numbers worked out by hand."""

import pandas as pd
import pytest
from kernel_rows import row

from report.frames import frame
from report.plots.training import draw
from report.readme import BLOCKS
from report.tables.training import training_tables
from report.training import PYG, Score, StepTimes, Trained, curves, inference_changes, scores


def step(dataset, backend, ms, dense, launch, status="ok", **changes):
    same = {"bench": "training", "region": "step", "scope": "model", "blocks": 10, "plan": "none", "l2": "none"}
    return row(dataset, backend, ms, status, dense=dense, launch=launch, heads=1, **same, **changes)


def run(variant, metric, value, backend="fused3s", **changes):
    same = {"bench": "train", "scope": "model", "blocks": 3, "heads": 1, "unit": "1", "plan": "none", "l2": "none"}
    same |= {"variant": variant, "metric": metric, "checkpoint": f"runs/{backend}/{variant}"}
    return row(changes.pop("dataset", "cora"), backend, value, "unchecked", **(same | changes))


ROWS = [
    step("cora", "fused3s", 2.0, "fused", "cuda_graph"),
    step("cora", "pyg", 8.0, "plain", "eager"),
    step("ogbn-arxiv", "fused3s", 10.0, "fused", "cuda_graph", nnz=1_166_243),
    step("ogbn-arxiv", "pyg", 90.0, "plain", "eager", "wrong", nnz=1_166_243, reason="bf16 sums"),
    *(run(f"seed {seed}", "test_accuracy", value) for seed, value in enumerate((0.7, 0.8, 0.75))),
    *(run("3 seeds", "valid_accuracy", 0.1 * epoch, region=f"epoch {epoch}") for epoch in range(1, 12)),
]
EXACT = [
    run(f"seed {seed}", "test_accuracy", value, "reference", dtype="float32") for seed, value in enumerate((0.8, 0.9))
]


def used(name, value, backend="fused3s", **changes):
    """A score of `scripts/infer.py`."""
    changes = {"bench": "infer", "checkpoint": f"runs/{name}"} | changes
    return run("none", "test_accuracy", value, backend, **changes)


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
    assert (score.metric, score.mean.seeds) == ("accuracy", 3)
    assert (score.mean.value, score.mean.error) == pytest.approx((0.75, 0.05 / 3**0.5))


def test_the_difference_from_the_reference_by_hand():
    found = scores(frame(ROWS + EXACT))
    half, exact = (found[run_of] for run_of in sorted(found))
    # 0.05 is the standard error of 0.8 and 0.9; the differences of seeds 0 and 1 are both 0.1
    assert half.minus(exact) == pytest.approx((-0.1, (0.05**2 / 3 + 0.05**2) ** 0.5))
    by_seed = half.minus_by_seed(exact)
    assert (by_seed.value, by_seed.error, by_seed.seeds) == (pytest.approx(-0.1), pytest.approx(0), 2)
    assert half.minus_by_seed(Score("accuracy", {"seed 7": 0.5})) is None
    text = training_tables(frame(ROWS + EXACT))
    assert "| 0.7500 | 0.0289 | -0.1000 ± 0.0577 | -0.1000 ± 0.0000 (n = 2) |" in text
    assert "| reference, float32 | accuracy | 2 | 0.8500 | 0.0500 | - | - |" in text


def test_a_change_in_inference_is_of_the_same_weights():
    inferred = [
        used("reference/seed 0", 0.7),  # superseded
        used("reference/seed 0", 0.79),
        used("reference/seed 1", 0.93),
        used("reference/seed 1", 0.9, "reference", dtype="float32"),  # as trained
        used("fused3s/seed 2", 0.85, "reference", dtype="float32"),
        used("someone else's", 0.1),
        used("none", 0.1, checkpoint="none"),
    ]
    changed = inference_changes(frame(ROWS + EXACT + inferred))
    exact, half = (Trained("cora", 128, 3, *kind) for kind in (("reference", "float32"), ("fused3s", "float16")))
    assert sorted(changed) == [(half, "reference, float32"), (exact, "fused3s, float16")]
    metric, mean = changed[exact, "fused3s, float16"]
    assert (metric, mean.seeds) == ("accuracy", 2)
    assert (mean.value, mean.error, mean.largest) == pytest.approx((0.01, 0.02, 0.03))
    metric, mean = changed[half, "reference, float32"]
    assert (mean.value, mean.error, mean.seeds) == pytest.approx((0.1, 0.0, 1))
    line = "| cora | reference, float32 | fused3s, float16 | accuracy | 2 | +0.01000 | 0.02000 | +0.03000 |"
    assert line in training_tables(frame(ROWS + EXACT + inferred))
    assert line in BLOCKS["inference-scores"](frame(ROWS + EXACT + inferred))


def test_epochs_are_in_the_order_of_their_numbers(rows):
    (curve,) = curves(rows).values()
    assert curve.epochs == [*range(1, 12)]
    assert curve.median == pytest.approx([0.1 * epoch for epoch in range(1, 12)])


def test_tables(rows):
    text = training_tables(rows)
    assert "| 1 | 6.00 (n = 2; 4.00 on cora) |" in text
    assert "| ogbn-arxiv | 1,166,243 | 10.00 | wrong |" in text
    assert "| cora | 3 blocks, d = 128 | fused3s, float16 | accuracy | 3 | 0.7500 | 0.0289 | - | - |" in text
    assert "| 1 | 2.00 | 10.00 | 6.00 (n = 2; 4.00 on cora) |" in BLOCKS["training-steps"](rows)
    assert "| cora | 3 blocks, d = 128 |" in BLOCKS["training-scores"](rows)


def test_figures(rows):
    assert sorted(draw(rows)) == ["learning-curves_nvidia-h200", "training-steps_nvidia-h200_1-heads"]


def test_each_panel_of_learning_curves_names_its_own_metric():
    both = [*ROWS, run("3 seeds", "valid_rocauc", 0.7, dataset="ogbg-molhiv", region="epoch 1")]
    figure = draw(frame(both))["learning-curves_nvidia-h200"]
    assert [axes.get_ylabel() for axes in figure.axes] == ["validation accuracy", "validation rocauc"]
