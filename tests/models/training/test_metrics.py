"""Losses and metrics against hand values and ogb's evaluators."""

import math
from functools import partial

import numpy as np
import pytest
import torch

from data.sources.ogb_import import import_ogb
from models.metrics import score, score_on_test
from models.training.losses import balanced_cross_entropy, binary_cross_entropy, cross_entropy, l1, l2, loss_for


def test_accuracy_leaves_unknown_labels_out():
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0], [0.0, 1.0]])
    assert score("accuracy", logits, torch.tensor([0, 0, 0, -1])) == pytest.approx(2 / 3)


def test_cross_entropy_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [7.0, 7.0], [1.0, 0.0]], dtype=torch.float16)
    labels = torch.tensor([1, 0, -1])
    assert cross_entropy(logits, labels).item() == pytest.approx((math.log(4 / 3) + math.log(2)) / 2, rel=1e-3)


def test_binary_cross_entropy_counts_known_labels_only():
    logits = torch.tensor([[0.0, 5.0], [math.log(3.0), 0.0]], requires_grad=True)
    labels = torch.tensor([[1.0, torch.nan], [0.0, torch.nan]])
    loss = binary_cross_entropy(logits, labels)
    assert loss.item() == pytest.approx((math.log(2) + math.log(4)) / 2)
    loss.backward()
    torch.testing.assert_close(logits.grad, torch.tensor([[-0.25, 0.0], [0.375, 0.0]]))


@pytest.mark.parametrize(("metric", "name"), [("rocauc", "ogbg-moltox21"), ("ap", "ogbg-molpcba")])
def test_metrics_of_several_tasks_agree_with_ogb(metric, name):
    evaluator = import_ogb("graphproppred").Evaluator(name)
    rng = np.random.default_rng(0)
    shape = (200, evaluator.num_tasks)
    logits = np.round(rng.standard_normal(shape), 1)  # with ties
    labels = (rng.random(shape) < 0.3).astype(np.float32)
    labels[rng.random(shape) < 0.2] = np.nan
    labels[:, 0] = 0  # a task without positives
    expected = evaluator.eval({"y_true": labels, "y_pred": logits})[metric]
    assert score(metric, torch.from_numpy(logits).float(), torch.from_numpy(labels)) == pytest.approx(expected)


def test_labels_and_splits_decide_what_inference_scores(nodes, graphs, replaced):
    logits = torch.nn.functional.one_hot(nodes.labels.clamp(min=0), 3).half()
    logits[nodes.splits["test"][0]] = torch.tensor([0.0, 0.0, 9.0]) - logits[nodes.splits["test"][0]] * 99
    found = score_on_test(logits, nodes)
    known = int((nodes.labels[nodes.splits["test"]] >= 0).sum())
    assert (found.metric, found.part, found.rows, found.kind) == ("accuracy", "test", known, "nodes")
    half = torch.where(torch.arange(37) % 2 == 0, nodes.labels, -1)
    assert score_on_test(logits, replaced(nodes, splits=None, labels=half)).rows == 18
    missing = replaced(graphs, splits=None, labels=torch.where(torch.arange(24)[:, None] < 5, torch.nan, graphs.labels))
    assert score_on_test(graphs.labels.nan_to_num(), missing).rows == int((~missing.labels.isnan()).any(1).sum()) < 20
    assert found.value < 1
    assert score_on_test(logits, replaced(nodes, splits=None)).part == "all"
    assert score_on_test(logits, replaced(nodes, labels=None)) is None
    assert score_on_test(graphs.labels.nan_to_num(), graphs).value == 1


@pytest.mark.parametrize("metric", ["balanced_accuracy", "f1"])
def test_means_over_classes_agree_with_scikit_learn(metric):
    from sklearn.metrics import balanced_accuracy_score, f1_score

    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(300, 5, generator=generator)
    logits[:, 4] -= 9  # a class without rows, and never the largest output
    labels = torch.multinomial(torch.tensor([0.6, 0.2, 0.15, 0.05]), 300, True, generator=generator)
    labels[:20] = -1
    oracle = {"balanced_accuracy": balanced_accuracy_score, "f1": partial(f1_score, average="macro")}[metric]
    expected = oracle(labels[20:], logits.argmax(1)[20:])
    assert score(metric, logits, labels) == pytest.approx(expected)
    with pytest.raises(ValueError, match=f"{metric}: none of the rows has a label"):
        score(metric, logits, torch.full((300,), -1))


def test_balanced_cross_entropy_is_that_of_torch_with_the_benchmarks_weights():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(50, 4, generator=generator), torch.randint(3, (50,), generator=generator)
    labels[labels == 2] = torch.randint(2, (int((labels == 2).sum()),), generator=generator)  # fewer, and none of 3
    labels[0] = 2
    counts = torch.bincount(labels, minlength=4)
    weights = torch.where(counts > 0, (50 - counts) / 50, 0.0)
    expected = torch.nn.CrossEntropyLoss(weight=weights)(logits, labels)
    with_unknown = torch.cat([labels, torch.tensor([-1, -100])]), torch.cat([logits, torch.full((2, 4), 9.0)])
    for some_labels, some_logits in ((labels, logits), with_unknown):
        assert balanced_cross_entropy(some_logits, some_labels).item() == pytest.approx(expected.item(), rel=1e-6)
    assert balanced_cross_entropy(logits, torch.zeros(50, dtype=torch.int64)).item() == 0


def test_losses_and_metrics_of_regression_count_known_labels_only():
    labels = torch.tensor([[1.0, torch.nan], [3.0, 5.0], [torch.nan, torch.nan]])
    outputs = torch.tensor([[2.0, 7.0], [0.0, 3.0], [4.0, 4.0]], requires_grad=True)
    assert score("mae", outputs, labels) == pytest.approx((4 / 2 + 2) / 2)
    assert score("rmse", outputs, labels) == pytest.approx((math.sqrt(10 / 2) + 2) / 2)
    assert l1(outputs, labels).item() == pytest.approx((1 + 3 + 2) / 3)
    loss = l2(outputs, labels)
    assert loss.item() == pytest.approx((1 + 9 + 4) / 3)
    loss.backward()
    torch.testing.assert_close(outputs.grad, torch.tensor([[2.0, 0.0], [-6.0, -4.0], [0.0, 0.0]]) / 3)
    with pytest.raises(ValueError, match="mae: none of the 3 rows has a label"):
        score("mae", outputs, torch.full((3, 2), torch.nan))


def test_a_loss_of_regression_is_refused_for_classes():
    with pytest.raises(ValueError, match=r"training\.loss = 'l2': it is of regression, and the metric here is rocauc"):
        loss_for("rocauc", "l2")
    assert (loss_for("rmse", "auto"), loss_for("rmse", "l1")) == (l2, l1)
