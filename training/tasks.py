"""Training tasks: one graph with training nodes, or batches of graphs with one plan each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data import LoadedGraph
from data.csr_batches import CsrBatches, to_device
from models import Attention, GraphInputs, GraphModel
from models.graph_inputs import pattern_of
from training.metrics import UNKNOWN, labels_of

PARTS = ("train", "valid", "test")
Plan = Callable[[Any], Attention]  # of a DGLGraph or a CSRPattern


@dataclass(frozen=True)
class Batch:
    """Inputs of a step and the labels of its rows (`training.metrics`; UNKNOWN for rows that are not trained on)."""

    inputs: GraphInputs
    labels: Tensor


Forward = Callable[[Batch], Tensor]


class Task(Protocol):
    """A data set as batches for training and evaluation.

    Attributes:
        metric: a name of `training.metrics.METRICS`.
        steps: batches per epoch.
        sizes: number of rows with a prediction in each of PARTS.
        static: the only batch; None if batches change.
    """

    metric: str
    steps: int
    sizes: dict[str, int]
    static: Batch | None

    def batches(self, seed: list[int]) -> Iterator[Batch]:
        """The batches of an epoch; `seed` decides their order."""

    def predict(self, forward: Forward, part: str) -> tuple[Tensor, Tensor]:
        """Logits and labels of the rows of one of PARTS."""


def make_task(loaded: LoadedGraph, model: GraphModel, plan: Plan, batch_size: int) -> Task:
    """The task of a data set; `plan` makes the attention of a graph.

    Raises:
        ValueError: labels or splits are missing, or the task is not implemented.
    """
    meta = loaded.meta
    labels, metric = labels_of(loaded)
    if loaded.splits is None:
        raise ValueError(
            f"{meta.name}: has no training, validation and test split ({meta.source}: {meta.origin}); an .npz file of "
            "your own needs train_ids, valid_ids and test_ids"
        )
    for part in PARTS:
        if not len(loaded.splits[part]):
            raise ValueError(f"{meta.name}: the {part} split is empty; each split needs at least one row")
        chosen = labels[loaded.splits[part]]
        if not (~chosen.isnan() if chosen.is_floating_point() else chosen >= 0).any():
            raise ValueError(f"{meta.name}: no label of the {part} split is known; each split needs at least one")
    if meta.task == "graph":
        return GraphsTask(loaded, labels, metric, model, plan, batch_size)
    if meta.num_graphs > 1:
        raise ValueError(f"{meta.name}: nodes of {meta.num_graphs} graphs; node tasks are trained on a single graph")
    return NodesTask(loaded, labels, metric, model, plan)


class NodesTask:
    """Nodes of one graph: each step runs the whole graph, and the loss counts the training nodes."""

    steps = 1

    def __init__(self, loaded: LoadedGraph, labels: Tensor, metric: str, model: GraphModel, plan: Plan) -> None:
        self.metric = metric
        device = model.device
        self.ids = {part: loaded.splits[part].to(device) for part in PARTS}
        self.sizes = {part: len(ids) for part, ids in self.ids.items()}
        self.labels = labels.to(device)
        targets = torch.full_like(self.labels, UNKNOWN)
        targets[self.ids["train"]] = self.labels[self.ids["train"]]
        self.static = Batch(model.prepare(loaded.graph, plan(loaded.graph)), targets)

    def batches(self, seed: list[int]) -> Iterator[Batch]:
        yield self.static

    def predict(self, forward: Forward, part: str) -> tuple[Tensor, Tensor]:
        return forward(self.static)[self.ids[part]], self.labels[self.ids[part]]


class GraphsTask:
    """Labels of whole graphs: batches in a new random order each epoch."""

    static = None

    def __init__(
        self, loaded: LoadedGraph, labels: Tensor, metric: str, model: GraphModel, plan: Plan, batch_size: int
    ) -> None:
        self.metric = metric
        model.check_features(loaded.graph)
        self.device = model.device
        self.graphs = CsrBatches(loaded, batch_size, self.device)
        self.ids = loaded.splits
        unknown = torch.full_like(labels[:1], torch.nan if labels.is_floating_point() else UNKNOWN)
        self.labels = torch.cat([labels, unknown]).to(self.device)  # the last row belongs to no graph
        self.sizes = {part: len(ids) for part, ids in self.ids.items()}
        self.model, self.plan, self.batch_size = model, plan, batch_size
        self.steps = -(-self.sizes["train"] // batch_size)
        self.kept = list(self._batches("valid", None))  # the same in each epoch
        self.inputs(self.ids["train"][:1].numpy())  # a backend that cannot run is an error now

    def batches(self, seed: list[int]) -> "Iterator[GraphsBatch]":
        return self._batches("train", seed)

    def predict(self, forward: Forward, part: str) -> tuple[Tensor, Tensor]:
        batches = self.kept if part == "valid" else self._batches(part, None)
        found = [(forward(batch), batch.labels) for batch in batches]
        return torch.cat([logits for logits, _ in found]), torch.cat([labels for _, labels in found])

    def inputs(self, ids: np.ndarray) -> GraphInputs:
        """Inputs of the graphs `ids` [B], with a plan of their own."""
        batch = self.graphs.picked(ids)
        return self.model.prepare_batch(batch, self.plan(pattern_of(batch)))

    def order(self, part: str, seed: list[int] | None) -> list[np.ndarray]:
        """Graphs of each batch of a split, shuffled unless the seed is None."""
        ids = self.ids[part].numpy()
        ids = ids if seed is None else np.random.default_rng(seed).permutation(ids)
        return [ids[first : first + self.batch_size] for first in range(0, len(ids), self.batch_size)]

    def _batches(self, part: str, seed: list[int] | None) -> "Iterator[GraphsBatch]":
        return (GraphsBatch(self, ids) for ids in self.order(part, seed))


class GraphsBatch:
    """A `Batch` of the graphs `ids` [B] with lazy tensors: a captured step reads the ids alone."""

    def __init__(self, task: GraphsTask, ids: np.ndarray) -> None:
        self._task, self.ids = task, ids

    @cached_property
    def inputs(self) -> GraphInputs:
        return self._task.inputs(self.ids)

    @cached_property
    def labels(self) -> Tensor:
        return self._task.labels[to_device(torch.from_numpy(self.ids), self._task.device)]
