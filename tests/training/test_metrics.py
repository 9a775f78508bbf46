"""Losses and metrics against hand values and ogb's evaluators."""

import math

import numpy as np
import pytest
import torch

from data.sources.ogb_import import import_ogb
from training.metrics import loss_of, score, score_on_test


def test_accuracy_leaves_unknown_labels_out():
    logits = torch.tensor([[2.0, 1.0], [0.0, 3.0], [5.0, 4.0], [0.0, 1.0]])
    assert score("accuracy", logits, torch.tensor([0, 0, 0, -1])) == pytest.approx(2 / 3)


def test_cross_entropy_by_hand():
    logits = torch.tensor([[0.0, math.log(3.0)], [7.0, 7.0], [1.0, 0.0]], dtype=torch.float16)
    labels = torch.tensor([1, 0, -1])
    assert loss_of(logits, labels).item() == pytest.approx((math.log(4 / 3) + math.log(2)) / 2, rel=1e-3)


def test_binary_cross_entropy_counts_known_labels_only():
    logits = torch.tensor([[0.0, 5.0], [math.log(3.0), 0.0]], requires_grad=True)
    labels = torch.tensor([[1.0, torch.nan], [0.0, torch.nan]])
    loss = loss_of(logits, labels)
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
    assert (found.metric, found.part, found.rows, found.kind) == ("accuracy", "test", 12, "nodes")
    assert found.value < 1
    assert score_on_test(logits, replaced(nodes, splits=None)).part == "all"
    assert score_on_test(logits, replaced(nodes, labels=None)) is None
    assert score_on_test(graphs.labels.nan_to_num(), graphs).value == 1
