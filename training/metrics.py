"""Loss and metric of a task.

metric    labels                               loss                    score
accuracy  int64 [rows], -1 for unknown         cross entropy           share of rows whose largest output is the label
rocauc    float [rows, T], NaN for missing     binary cross entropy    mean over the T tasks of the area under the ROC
ap        the same                             the same                mean over the tasks of the average precision

As in ogb's evaluators, a task without a positive or without a negative label is left out of the mean.
"""

import logging
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from data import LoadedGraph

logger = logging.getLogger(__name__)

METRICS = {"accuracy": "accuracy", "rocauc": "ROC-AUC", "ap": "average precision"}  # with their names in a report
UNKNOWN = -100  # cross_entropy's default of ignore_index


@dataclass(frozen=True)
class Score:
    """A metric over the rows of a split.

    Attributes:
        part: "test", or "all" for a data set without splits.
        rows: number of nodes or graphs; kind: "nodes" or "graphs".
    """

    metric: str
    part: str
    value: float
    rows: int
    kind: str

    @property
    def title(self) -> str:
        return METRICS[self.metric] if self.part == "all" else f"{self.part} {METRICS[self.metric]}"

    def describe(self) -> str:
        value = f"{self.value:.2%} of" if self.metric == "accuracy" else f"{self.value:.4f} over"
        return f"{value} {self.rows:,} {self.kind}"


def labels_of(loaded: LoadedGraph) -> tuple[Tensor, str]:
    """Labels in the form of the table above, and the name of the metric.

    Raises:
        ValueError: there are no labels, or no metric that is implemented here.
    """
    name = loaded.meta.name
    if loaded.labels is None:
        raise ValueError(f"{name}: has no labels ({loaded.meta.source}: {loaded.meta.origin})")
    labels = loaded.labels
    single = labels.dim() == 1 or (loaded.metric == "accuracy" and labels.shape[1] == 1)
    metric = loaded.metric or ("accuracy" if single and not labels.is_floating_point() else None)
    if metric not in METRICS or (metric == "accuracy") != single:
        raise ValueError(
            f"{name}: its metric is {metric} with labels {list(labels.shape)}; implemented are accuracy (one label a "
            "row), rocauc and ap (a column for each task). graph_label of a file: classes as integers [graphs], or "
            "answers of 0, 1 and NaN [graphs, tasks]"
        )
    return (labels.flatten().long(), metric) if single else (labels.float(), metric)


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    """Mean loss over the known labels, without data-dependent shapes; labels as in `labels_of`, or UNKNOWN."""
    logits = logits.float()
    if not labels.is_floating_point():
        # A separate sum: torch's mean reduction of the loss runs in one thread block.
        losses = F.cross_entropy(logits, labels.where(labels >= 0, UNKNOWN), reduction="none")
        return losses.sum() / (labels >= 0).sum()
    known = ~labels.isnan()
    loss = F.binary_cross_entropy_with_logits(logits, labels.where(known, 0.0), weight=known.float(), reduction="sum")
    return loss / known.sum().clamp(min=1)


def score(metric: str, logits: Tensor, labels: Tensor) -> float:
    """The value of the metric, at most 1.

    Raises:
        ValueError: the metric is undefined for these labels.
    """
    if metric == "accuracy":
        known = labels >= 0
        if not known.any():
            raise ValueError("accuracy: none of the rows has a label")
        return (logits.argmax(1) == labels)[known].double().mean().item()
    # Importing torchmetrics takes seconds.
    from torchmetrics.functional.classification import binary_auroc, binary_average_precision

    function = {"rocauc": binary_auroc, "ap": binary_average_precision}[metric]
    found = []
    for task in range(labels.shape[1]):
        known = ~labels[:, task].isnan()
        target = labels[known, task].long()
        if 0 < target.sum() < len(target):
            found.append(function(logits[known, task].double().sigmoid(), target).item())
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
    return Score(metric, part, value, len(labels), "nodes" if loaded.meta.task == "node" else "graphs")
