"""Training tasks: one graph with training nodes, or batches of graphs, with labels of graphs or of nodes, with one plan
each."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from data import LoadedGraph
from data.batches import BatchSize, GraphSet, to_device
from data.packed import rows_of
from fused3s.runtime.cuda_graph import capture
from models import Attention, GraphInputs, GraphModel
from models.graph_inputs import pattern_of
from models.metrics import OF_TARGETS, UNKNOWN, known, labels_of
from models.padded_batches import PaddedBatches, Room
from models.training.targets import Targets

PARTS = ("train", "valid", "test")
EVALUATED = 4  # ratio of batches of evaluation, whose activations are not kept, to those of a step
Plan = Callable[[Any], Attention]  # of a DGLGraph or a CSRPattern


@dataclass(frozen=True)
class Batch:
    """Inputs of a step and the labels of its rows (`models.metrics`; UNKNOWN for rows that are not trained on)."""

    inputs: GraphInputs
    labels: Tensor


class LazyBatch:
    """A `Batch` whose tensors are made on first use: a captured step reads the key alone.

    Attributes:
        key: what decides them: ids of graphs [B], or a sample.
    """

    def __init__(self, key: Any, inputs: Callable[[], GraphInputs], labels: Callable[[], Tensor]) -> None:
        self.key, self._inputs, self._labels = key, inputs, labels

    @cached_property
    def inputs(self) -> GraphInputs:
        return self._inputs()

    @cached_property
    def labels(self) -> Tensor:
        return self._labels()


Forward = Callable[[Batch], Tensor]
# Of a captured step. Load queues the copy of a batch's ids; it returns False, without a change, if the batch does not
# fit. Assemble gives what was loaded last, in tensors of one size.
Load, Assemble = Callable[[LazyBatch], bool], Callable[[], Batch]
MakeRoom = Callable[[BatchSize, bool], Room]  # a plan for batches of a size, with its backward pass if True


class Task(Protocol):
    """A data set as batches for training and evaluation.

    Attributes:
        metric: a name of `models.metrics.METRICS`.
        steps: batches per epoch.
        sizes: number of rows with a prediction in each of PARTS.
        static: the only batch; None if batches change.
        targets: of regression, whose labels are standardised by them; None for classes.
    """

    metric: str
    steps: int
    sizes: dict[str, int]
    static: Batch | None
    targets: Targets | None

    def batches(self, seed: list[int]) -> Iterator[Batch]:
        """The batches of an epoch; `seed` decides their order."""

    def predict(self, forward: Forward, part: str) -> tuple[Tensor, Tensor]:
        """Logits and labels of the rows of one of PARTS."""


class NodesTask:
    """Nodes of one graph: each step runs the whole graph, and the loss counts the training nodes."""

    steps = 1
    targets = None

    def __init__(self, loaded: LoadedGraph, labels: Tensor, metric: str, model: GraphModel, plan: Plan) -> None:
        self.metric, self.model, self.plan = metric, model, plan
        device = model.device
        self.ids = {part: loaded.splits[part].to(device) for part in PARTS}
        self.sizes = {part: len(ids) for part, ids in self.ids.items()}
        self.labels = labels.to(device)
        targets = torch.full_like(self.labels, UNKNOWN)
        targets[self.ids["train"]] = self.labels[self.ids["train"]]
        self.whole = Batch(self._prepared(loaded), targets)

    def _prepared(self, loaded: LoadedGraph) -> GraphInputs:
        return self.model.prepare(loaded.graph, self.plan(loaded.graph))

    @property
    def static(self) -> Batch | None:
        return self.whole

    def batches(self, seed: list[int]) -> Iterator[Batch]:
        yield self.whole

    def predict(self, forward: Forward, part: str) -> tuple[Tensor, Tensor]:
        return forward(self.whole)[self.ids[part]], self.labels[self.ids[part]]


class GraphsTask:
    """Labels of whole graphs: batches in a new random order each epoch."""

    static = None

    def __init__(
        self, loaded: LoadedGraph, labels: Tensor, metric: str, model: GraphModel, plan: Plan, batch_size: int
    ) -> None:
        self.metric = metric
        model.check_features(loaded.graph)
        self.device = model.device
        self.graphs = GraphSet(loaded, self.device)
        self.sizes = {part: len(ids) for part, ids in loaded.splits.items()}
        self.ids = self._graphs_of(loaded)
        self.targets = Targets.of(labels[loaded.splits["train"]]) if metric in OF_TARGETS else None
        labels = self.targets.standardised(labels) if self.targets else labels
        unknown = torch.full_like(labels[:1], torch.nan if labels.is_floating_point() else UNKNOWN)
        self.labels = torch.cat([labels, unknown]).to(self.device)  # the last row belongs to no graph or node
        self.model, self.plan, self.batch_size = model, plan, batch_size
        self.steps = -(-len(self.ids["train"]) // batch_size)
        self.kept = list(self._batches("valid", None))  # the same in each epoch
        self.inputs(self.ids["train"][:1].numpy())  # a backend that cannot run is an error now

    def batches(self, seed: list[int]) -> Iterator[LazyBatch]:
        return self._batches("train", seed)

    def predict(self, forward: Forward, part: str) -> tuple[Tensor, Tensor]:
        batches = self.kept if part == "valid" else self._batches(part, None)
        found = [(forward(batch), batch.labels) for batch in batches]
        return torch.cat([logits for logits, _ in found]), torch.cat([labels for _, labels in found])

    def labels_of(self, ids: np.ndarray) -> Tensor:
        """Labels of the rows of the output for the graphs `ids` [B]."""
        return self.labels[to_device(torch.from_numpy(ids), self.device)]

    def padded_labels(self, batch: PaddedBatches) -> Tensor:
        """Labels of the rows of the output for a padded batch, after its inputs were made."""
        labels, further = self.labels[batch.ids], batch.size.all_graphs - batch.size.graphs
        return torch.cat([labels, self.labels[-1:].expand(further, *labels.shape[1:])])

    def likely_size(self) -> BatchSize:
        """Room for nearly all batches of a step."""
        return self.graphs.likely_size(self.ids["train"].numpy(), self.batch_size)

    def slot(self, size: BatchSize, room: Room) -> tuple[Load, Assemble]:
        """Batches that are assembled and planned in memory of their own, with one that fits loaded."""
        padded = PaddedBatches(self.graphs, size, self.model, room)
        padded.load(self.ids["train"][:1].numpy())
        return lambda batch: padded.load(batch.key), lambda: Batch(padded.inputs(), self.padded_labels(padded))

    def evaluation(self, evaluate: Forward, make_room: MakeRoom) -> Callable[[LazyBatch], Tensor]:
        """Logits of the batches of validation and test, by a CUDA graph."""
        size = self.graphs.largest_size([*self.order("valid", None), *self.order("test", None)])
        load, assemble = self.slot(size, make_room(size, False))
        captured = capture(lambda: evaluate(assemble()), self.device)

        def run(batch: LazyBatch) -> Tensor:
            load(batch)
            return captured.replay()[: self.graphs.num_rows(batch.key)].clone()  # the next replay overwrites it

        return run

    def _graphs_of(self, loaded: LoadedGraph) -> dict[str, Tensor]:
        """Ids of the graphs of each split."""
        return loaded.splits

    def inputs(self, ids: np.ndarray) -> GraphInputs:
        """Inputs of the graphs `ids` [B], with a plan of their own."""
        batch = self.graphs.picked(ids)
        return self.model.prepare_batch(batch, self.plan(pattern_of(batch)))

    def order(self, part: str, seed: list[int] | None) -> list[np.ndarray]:
        """Graphs of each batch of a split: shuffled for training, in equal batches in order if the seed is None."""
        ids = self.ids[part].numpy()
        if seed is None:
            return np.array_split(ids, -(-len(ids) // (EVALUATED * self.batch_size)))
        ids = np.random.default_rng(seed).permutation(ids)
        return [ids[first : first + self.batch_size] for first in range(0, len(ids), self.batch_size)]

    def _batches(self, part: str, seed: list[int] | None) -> Iterator[LazyBatch]:
        for ids in self.order(part, seed):
            yield LazyBatch(ids, partial(self.inputs, ids), partial(self.labels_of, ids))


class NodesOfGraphsTask(GraphsTask):
    """Labels of the nodes of a collection, whose splits hold all nodes of their graphs."""

    def labels_of(self, ids: np.ndarray) -> Tensor:
        return super().labels_of(rows_of(ids, self.graphs.sizes))

    def padded_labels(self, batch: PaddedBatches) -> Tensor:
        return self.labels[batch.node_ids]

    def _graphs_of(self, loaded: LoadedGraph) -> dict[str, Tensor]:
        sizes = self.graphs.sizes
        found = {}
        for part, nodes in loaded.splits.items():
            counts = np.bincount(np.repeat(np.arange(sizes.size), sizes)[nodes.numpy()], minlength=sizes.size)
            wrong = np.flatnonzero((counts > 0) & (counts != sizes))
            if wrong.size:
                raise ValueError(
                    f"{loaded.meta.name}: the {part} split holds {counts[wrong[0]]} of the {sizes[wrong[0]]} nodes of "
                    f"graph {wrong[0]}; the splits of a collection take whole graphs"
                )
            found[part] = torch.from_numpy(np.flatnonzero(counts))
        return found


def checked_labels(loaded: LoadedGraph) -> tuple[Tensor, str]:
    """`labels_of` a data set that has known ones in all splits.

    Raises:
        ValueError: labels or splits are missing.
    """
    labels, metric = labels_of(loaded)
    meta = loaded.meta
    if loaded.splits is None:
        raise ValueError(
            f"{meta.name}: has no training, validation and test split ({meta.source}: {meta.origin}); an .npz file of "
            "your own needs train_ids, valid_ids and test_ids, a table of nodes the column split"
        )
    for part in PARTS:
        if not len(loaded.splits[part]):
            raise ValueError(f"{meta.name}: the {part} split is empty; each split needs at least one row")
        if not known(labels[loaded.splits[part]]).any():
            raise ValueError(f"{meta.name}: no label of the {part} split is known; each split needs at least one")
    return labels, metric
