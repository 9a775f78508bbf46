"""Training of one model by several ranks: the differences from `training.Trainer` on one GPU.

A node task is trained on the parts of its graph; of a graph task each rank takes an equal share of every batch. The
loss is the mean over the labels of all ranks, and gradients are summed over the ranks in rank order: weights and
decisions have the same bits on all ranks, and equal those of one process within rounding. Dropout masks differ by rank,
from the seed, the epoch and the rank.
"""

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import data
from configs import TrainConfig
from data import LoadedGraph
from fused3s.runtime.cuda_graph import CapturedGraph
from models import Attention, GraphInputs, GraphModel
from models.metrics import UNKNOWN, labels_of
from parallel.capture import capture_together
from parallel.collectives import gather_uneven, sum_in_rank_order
from parallel.cost_model import LINKS, Choice
from parallel.datasets import loaded_part, open_part
from parallel.group import Group, all_values, check_agreement, on_first_rank
from parallel.inputs import plan_model_attention, prepare_part, refuse_on_ranks, refuse_settings, runs_on_one_gpu
from parallel.part import Part
from parallel.report import partition_lines
from training.log import EpochRecord
from training.loop import Trainer
from training.losses import balanced_cross_entropy
from training.setup import resolve_precision
from training.step import Step
from training.tasks import PARTS, Batch, Forward, GraphsTask, NodesOfGraphsTask, Plan, Task


@dataclass(frozen=True)
class Share(Batch):
    """A rank's share of a batch.

    Attributes:
        inputs: None for a rank without a graph of this batch.
        weight: share of this rank's labels among the known labels of all ranks.
    """

    inputs: GraphInputs | None
    weight: float


def load_on_ranks(
    config: TrainConfig, group: Group, say: Callable[[str], None]
) -> tuple[LoadedGraph, Part | None] | None:
    """What this rank trains on: the labels and splits of its part of a graph, and the part; or a whole collection of
    graphs; or None if rank 0 is to train alone.

    Raises:
        RankError: the ranks have different configurations.
        ValueError, OSError, MemoryError: as `data.load`, `open_part` and `refuse_settings`.
    """
    check_agreement(group, {"configuration": config.sha()})
    part = open_part(config.data, config.runtime.seed, group, say)
    if part is not None:
        precision = resolve_precision(config.training.precision, group.device)
        if runs_on_one_gpu(part, group, config, precision, say):
            return None
        refuse_settings(config)
        return loaded_part(part), part
    arguments = config.load_arguments()
    # Rank 0 alone downloads.
    loaded = on_first_rank(group, lambda: data.load(**arguments)) or data.load(**arguments)
    return loaded, None


class RankTrainer(Trainer):
    """`Trainer` on one rank. Rank 0 writes the files, and all ranks read them to resume.

    Args:
        part: of the graph; None for a collection of graphs.
        others: as of `Trainer`.

    Attributes:
        choice: the scheme of the exchange, once it is planned; None for a collection.

    Raises:
        RankError: the ranks have different settings, weights or states.
        ValueError: also for a model that needs the whole graph or batch on one rank.
    """

    def __init__(self, group: Group, part: Part | None, *others: Any, **options: Any) -> None:
        self.group, self.part, self.writes = group, part, group.is_first
        self.choice: Choice | None = None
        self._all_stop = False
        super().__init__(*others, device=group.device, **options)
        texts = self.identity | {"epochs done": self.done, "attention": self.backend}
        weights = {"weights": hash_of_weights(self.step.model)}
        check_agreement(group, {name: str(value) for name, value in texts.items()} | weights)

    def lines(self) -> dict[str, str]:
        """Lines of the report about the ranks."""
        if self.part is None:
            return {"data parallel": f"{self.group.size} ranks over {self.group.link}, an equal share of each batch"}
        return partition_lines(self.part, self.group, self.choice)

    def columns(self) -> dict[str, object]:
        """Columns of a row of results."""
        columns = {"ranks": self.group.size, "link": LINKS[self.group.link].name}
        return columns if self.part is None else columns | {"order": self.part.partition.method}

    def _make_task(self, loaded: LoadedGraph, model: GraphModel) -> Task:
        if self.part is None:
            return SharedGraphsTask(super()._make_task(loaded, model), self.group)
        refuse_on_ranks(model, training=True)
        return PartTask(self.part, loaded, model, self._plan, self.group)

    def _make_step(self, *arguments: Any) -> Step:
        return RankStep(self.group, *arguments)

    def _plan(self, graph: Any) -> Attention:
        """Attention over a part, or over a rank's graphs of a batch."""
        if not isinstance(graph, Part):
            return super()._plan(graph)
        attention = plan_model_attention(graph, self.group, self.config, self.precision, backward=True)
        self.choice, self.backend = attention.choice, attention.backend
        return attention

    def _epoch(self, epoch: int) -> EpochRecord:
        """Rank 0's record, used by all ranks: a rank that decided differently would block the others."""
        self._draw_masks(epoch)
        found = all_values(self.group, (super()._epoch(epoch), self.stop))
        self._all_stop = any(stop for _, stop in found)
        return found[0][0]

    def _draw_masks(self, epoch: int) -> None:
        """Set the random numbers of an epoch's dropout: a resumed run draws the same."""
        state = np.random.SeedSequence([self.seed, epoch, self.group.rank]).generate_state(1, np.uint64)
        torch.manual_seed(int(state[0] >> np.uint64(1)))
        if (seeds := getattr(self.step.model, "dropout_seeds", None)) is not None:
            seeds.copy_(torch.randint(2**63 - 1, seeds.shape))

    def _total(self, losses: Tensor) -> Tensor:
        total = losses.clone()
        sum_in_rank_order([total], self.group)
        return total

    def _is_stopped(self) -> bool:
        """Whether to stop: all ranks stop after the same epoch."""
        return self._all_stop

    def _capture_refused(self) -> str | None:
        if self.device.type == "cuda" and self.part is None:
            return "the ranks take shares of batches of different sizes"
        return super()._capture_refused()


class RankStep(Step):
    """`training.step.Step` on this rank's share of a batch, with the gradient summed over the ranks. It returns the
    rank's part of the loss: their sum over the ranks is the loss."""

    def __init__(self, group: Group, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.loss_of is balanced_cross_entropy:
            raise ValueError("the weights of the classes would be of one rank's rows; train on one process")
        self.group = group

    def loss(self, batch: Share) -> Tensor:
        if batch.inputs is None:
            return torch.zeros((), device=self.device, requires_grad=True)
        if batch.weight:
            return super().loss(batch) * batch.weight
        # Without labels the mean would be NaN; the backward pass must still run, to exchange gradients.
        return 0.0 * self.forward(batch.inputs).float().sum()

    def captured(self, run: Callable[[], Tensor], shares: CapturedGraph[Tensor] | None = None) -> CapturedGraph[Tensor]:
        return capture_together(lambda: super(RankStep, self).captured(run, shares), self.group)

    def reduce(self, weights: list[nn.Parameter]) -> None:
        sum_in_rank_order([weight.grad for weight in weights], self.group)


class PartTask:
    """`training.tasks.NodesTask` for one part of a graph. `loaded` holds labels and splits of the part's rows."""

    steps = 1
    targets = None

    def __init__(self, part: Part, loaded: LoadedGraph, model: GraphModel, plan: Plan, group: Group) -> None:
        labels, self.metric = labels_of(loaded)
        if loaded.splits is None:
            raise ValueError(
                f"{loaded.meta.name}: has no training, validation and test split ({loaded.meta.source}: "
                f"{loaded.meta.origin}); an .npz file of your own needs train_ids, valid_ids and test_ids"
            )
        self.group = group
        of_ranks = all_values(group, {name: len(loaded.splits[name]) for name in PARTS})
        self.sizes = {name: sum(sizes[name] for sizes in of_ranks) for name in PARTS}
        for name, size in self.sizes.items():
            if not size:
                raise ValueError(f"{loaded.meta.name}: the {name} split is empty; each split needs at least one row")
        self.ids = {name: loaded.splits[name].to(group.device) for name in PARTS}
        self.labels = labels.to(group.device)
        targets = torch.full_like(self.labels, UNKNOWN)
        targets[self.ids["train"]] = self.labels[self.ids["train"]]
        weight = weight_of(known_labels(targets), group)
        self.static = Share(prepare_part(model, part, plan(part)), targets, weight)

    def batches(self, seed: list[int]) -> Iterator[Share]:
        yield self.static

    def predict(self, forward: Forward, part: str) -> tuple[Tensor, Tensor]:
        """Logits and labels of the split's rows of all ranks, on all ranks."""
        own = forward(self.static)[self.ids[part]], self.labels[self.ids[part]]
        logits, labels = (gather_uneven(each, self.group) for each in own)
        return logits, labels


class SharedGraphsTask:
    """A `GraphsTask` with the graphs of each batch divided over the ranks."""

    static = None

    def __init__(self, task: GraphsTask, group: Group) -> None:
        if any(isinstance(layer, nn.BatchNorm1d) for layer in task.model.modules()):
            raise ValueError(
                "model.norm = 'batch' on several ranks, or model.random_walk, which is normalised, too: the statistics "
                "would be of one rank's graphs; use 'layer' and 0"
            )
        if isinstance(task, NodesOfGraphsTask):
            raise ValueError("nodes of a collection of graphs on several ranks: train on one process")
        self.task, self.group = task, group
        self.metric, self.steps, self.sizes, self.targets = task.metric, task.steps, task.sizes, task.targets
        self.kept: dict[str, list[Share]] = {}  # of evaluation, which are the same in each epoch

    def batches(self, seed: list[int]) -> Iterator[Share]:
        return self._prepared("train", seed)

    def predict(self, forward: Forward, part: str) -> tuple[Tensor, Tensor]:
        """Logits and labels of the split's graphs, on all ranks."""
        if part == "valid" and part not in self.kept:
            self.kept[part] = list(self._prepared(part, None))
        classes = self.task.model.readout.classes.weight
        found = [(classes.new_empty(0, len(classes)), self.task.labels[:0])]
        for share in self.kept[part] if part in self.kept else self._prepared(part, None):
            if share.inputs is not None:
                found.append((forward(share), share.labels))
        logits, labels = (gather_uneven(torch.cat(each), self.group) for each in zip(*found, strict=True))
        return logits, labels

    def _prepared(self, part: str, seed: list[int] | None) -> Iterator[Share]:
        """Batches of the same graphs as one process has."""
        task = self.task
        for batch in task.order(part, seed):
            own = np.array_split(batch, self.group.size)[self.group.rank]
            labels, of_all = (task.labels[torch.from_numpy(ids).to(task.device)] for ids in (own, batch))
            weight = known_labels(labels) / max(known_labels(of_all), 1)
            yield Share(task.inputs(own) if own.size else None, labels, weight)


def known_labels(labels: Tensor) -> int:
    """Labels that a loss of `training.losses` counts."""
    known = ~labels.isnan() if labels.is_floating_point() else labels >= 0
    return int(known.sum())


def weight_of(known: int, group: Group) -> float:
    """This rank's share of the known labels of all ranks."""
    return known / max(sum(all_values(group, known)), 1)


def hash_of_weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]
