"""Metrics of a task, and the labels that they compare.

metric              labels                               score
accuracy            int64 [rows], -1 for unknown         share of rows whose largest output is the label
balanced_accuracy   the same                             mean over the classes of the share of their rows (recall)
f1                  the same                             mean over the classes of the F1 score
rocauc              float [rows, T], NaN for missing     mean over the T tasks of the area under the ROC
ap                  the same                             mean over the tasks of the average precision
mae                 the same                             mean over the T targets of the mean absolute error
rmse                the same                             mean over the targets of the root of the mean squared error

A class without rows, a target without labels and, as in ogb's evaluators, a task without a positive or without a
negative label are left out of the mean.
"""

import logging
from dataclasses import dataclass

import torch
from torch import Tensor

from data import LoadedGraph

logger = logging.getLogger(__name__)

METRICS = {  # with their names in a report
    "accuracy": "accuracy",
    "balanced_accuracy": "balanced accuracy",
    "f1": "F1",
    "rocauc": "ROC-AUC",
    "ap": "average precision",
    "mae": "mean absolute error",
    "rmse": "RMSE",
}
OF_CLASSES = ("accuracy", "balanced_accuracy", "f1")
OF_TARGETS = ("mae", "rmse")  # of regression: lower is better
UNKNOWN = -100  # cross_entropy's default of ignore_index


@dataclass(frozen=True)
class Score:
    """A metric over the rows of a split.

    Attributes:
        part: "test", or "all" for a data set without splits.
        rows: number of nodes or graphs with a label; kind: "nodes" or "graphs".
        unit: of the value; "" for none.
    """

    metric: str
    part: str
    value: float
    rows: int
    kind: str
    unit: str = ""

    @property
    def title(self) -> str:
        return METRICS[self.metric] if self.part == "all" else f"{self.part} {METRICS[self.metric]}"

    def describe(self) -> str:
        value = shown(self.metric, self.value, self.unit)
        return f"{value} {'of' if self.metric == 'accuracy' else 'over'} {self.rows:,} {self.kind}"


def shown(metric: str, value: float, unit: str) -> str:
    """The value of a metric in a report."""
    return f"{value:.2%}" if metric == "accuracy" else f"{value:.4f} {unit}".rstrip()


def is_better(metric: str, value: float, than: float) -> bool:
    return value < than if metric in OF_TARGETS else value > than


def known(labels: Tensor) -> Tensor:
    """Where labels of the table above are known, bool of their shape."""
    return ~labels.isnan() if labels.is_floating_point() else labels >= 0


def labels_of(loaded: LoadedGraph) -> tuple[Tensor, str]:
    """Labels in the form of the table above, and the name of the metric.

    Raises:
        ValueError: there are no labels, or no metric that is implemented here.
    """
    name = loaded.meta.name
    if loaded.labels is None:
        raise ValueError(
            f"{name}: has no labels ({loaded.meta.source}: {loaded.meta.origin}); a file of your own needs them as "
            "docs/datasets.md says"
        )
    labels, metric = loaded.labels, loaded.metric
    if metric is None and labels.dim() == 1 and not labels.is_floating_point():
        metric = "accuracy"
    single = labels.dim() == 1 or (metric in OF_CLASSES and labels.shape[1] == 1)
    if metric not in METRICS or (metric in OF_CLASSES) != single:
        raise ValueError(
            f"{name}: its metric is {metric} with labels {list(labels.shape)}; implemented are "
            f"{', '.join(OF_CLASSES)} (one label a row), and rocauc, ap, {', '.join(OF_TARGETS)} (a column for each "
            "task)"
        )
    if metric in ("rocauc", "ap"):
        import sklearn.metrics  # noqa: F401, takes a second: before a training whose time is taken
    return (labels.flatten().nan_to_num(-1).long(), metric) if single else (labels.float(), metric)


def score(metric: str, outputs: Tensor, labels: Tensor) -> float:
    """The value of the metric.

    Args:
        outputs: logits [rows, classes] or [rows, T], or predictions in the unit of the targets.

    Raises:
        ValueError: the metric is undefined for these labels.
    """
    if metric in OF_CLASSES:
        return _of_classes(metric, outputs, labels)
    return _of_targets(metric, outputs, labels) if metric in OF_TARGETS else _of_tasks(metric, outputs, labels)


def _of_classes(metric: str, outputs: Tensor, labels: Tensor) -> float:
    rows = known(labels)
    if not rows.any():
        raise ValueError(f"{metric}: none of the rows has a label")
    found, labels, classes = outputs.argmax(1)[rows], labels[rows], outputs.shape[1]
    if metric == "accuracy":
        return (found == labels).double().mean().item()
    confusion = torch.bincount(labels * classes + found, minlength=classes**2).view(classes, classes).double()
    right, of_label, of_output = confusion.diagonal(), confusion.sum(1), confusion.sum(0)
    total = of_label if metric == "balanced_accuracy" else (of_label + of_output) / 2
    return (right / total)[total > 0].mean().item()


def _of_targets(metric: str, outputs: Tensor, labels: Tensor) -> float:
    errors = (outputs.double() - labels.double()).where(known(labels), 0.0)
    count = known(labels).sum(0)
    if not count.any():
        raise ValueError(f"{metric}: none of the {len(labels)} rows has a label")
    found = errors.abs().sum(0) / count if metric == "mae" else (errors.square().sum(0) / count).sqrt()
    return found[count > 0].mean().item()


def _of_tasks(metric: str, logits: Tensor, labels: Tensor) -> float:
    from sklearn.metrics import average_precision_score, roc_auc_score

    function = {"rocauc": roc_auc_score, "ap": average_precision_score}[metric]
    found = []
    for task in range(labels.shape[1]):
        rows = known(labels[:, task])
        positive = labels[rows, task] > 0
        if 0 < positive.sum() < len(positive):
            found.append(float(function(positive.cpu().numpy(), logits[rows, task].detach().double().cpu().numpy())))
    if not found:
        raise ValueError(f"{metric}: no task has a positive and a negative label among the {len(labels)} rows")
    return sum(found) / len(found)


def score_on_test(logits: Tensor, loaded: LoadedGraph) -> Score | None:
    """The metric on the test split, given the logits of all rows; None if the loaded rows do not define it."""
    try:
        labels, metric = labels_of(loaded)
        part, ids = ("all", slice(None)) if loaded.splits is None else ("test", loaded.splits["test"])
        labels = labels[ids]
        value = score(metric, logits.float().cpu()[ids], labels)
    except ValueError as error:
        logger.warning("no test metric: %s", error)
        return None
    rows = int(known(labels).view(len(labels), -1).any(1).sum())
    kind, unit = "nodes" if loaded.meta.task == "node" else "graphs", loaded.meta.unit
    return Score(metric, part, value, rows, kind, unit if metric in OF_TARGETS else "")
