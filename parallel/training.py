"""Training of one model by several ranks: the differences from `training.Trainer` on one GPU.

Each rank has a part of the graph. The loss is the mean over the labels of all ranks, and gradients are summed over the
ranks in rank order: weights and decisions have the same bits on all ranks, and equal those of one process within
rounding. Dropout masks differ by rank, from the seed, the epoch and the rank.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data import LoadedGraph
from fused3s.runtime.cuda_graph import CapturedGraph
from models import Attention, GraphInputs, GraphModel
from models.metrics import known, labels_of
from models.training.log import EpochRecord
from models.training.loop import Trainer
from models.training.losses import balanced_cross_entropy
from models.training.step import Step
from models.training.tasks import Batch, Forward, NodesTask, Plan, Task
from parallel.capture import capture_together
from parallel.collectives import gather_uneven, sum_in_rank_order
from parallel.datasets import plan_model_attention, prepare_part
from parallel.group import Group, all_values, check_agreement
from parallel.partition import Part, describe


@dataclass(frozen=True)
class Share(Batch):
    """A rank's rows; `weight` is its share of the known labels of all ranks."""

    weight: float


class RankTrainer(Trainer):
    """`Trainer` on one rank. Rank 0 writes the files, and all ranks read them to resume.

    Args:
        part: of this rank; the loaded graph of `others`, the arguments of `Trainer`, has the data of its rows.

    Raises:
        RankError: the ranks have different settings, weights or states.
    """

    def __init__(self, group: Group, part: Part, *others: Any, **options: Any) -> None:
        self.group, self.part, self.writes = group, part, group.is_first
        self._all_stop = False
        super().__init__(*others, device=group.device, **options)
        texts = self.identity | {"epochs done": self.done, "attention": self.backend}
        weights = {"weights": hash_of_weights(self.step.model)}
        check_agreement(group, {name: str(value) for name, value in texts.items()} | weights)

    def lines(self) -> dict[str, str]:
        """Lines of the report about the ranks."""
        return {"ranks": f"{self.group.size} over {self.group.backend}", **describe(self.part.partition)}

    def columns(self) -> dict[str, object]:
        """Columns of a row of results."""
        return {"ranks": self.group.size, "link": self.group.link, "order": self.part.partition.method}

    def _make_task(self, loaded: LoadedGraph, model: GraphModel) -> Task:
        return PartTask(self.part, self.group, loaded, model, self._plan)

    def _make_step(self, *arguments: Any) -> Step:
        return RankStep(self.group, *arguments)

    def _plan(self, part: Part) -> Attention:
        attention = plan_model_attention(part, self.group, self.config, self.precision, backward=True)
        self.backend = attention.backend
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

    def _is_stopped(self) -> bool:  # all ranks stop after the same epoch
        return self._all_stop


class RankStep(Step):
    """`Step` on this rank's rows, with the gradient summed over the ranks. It returns the rank's part of
    the loss: their sum over the ranks is the loss."""

    def __init__(self, group: Group, *arguments: Any) -> None:
        super().__init__(*arguments)
        if self.loss_of is balanced_cross_entropy:
            raise ValueError("the weights of the classes would be of one rank's rows; train on one process")
        self.group = group

    def loss(self, batch: Share) -> Tensor:
        if batch.weight:
            return super().loss(batch) * batch.weight
        # Without labels the mean would be NaN; the backward pass must still run, to exchange gradients.
        return 0.0 * self.forward(batch.inputs).float().sum()

    def captured(self, run: Callable[[], Tensor], shares: CapturedGraph[Tensor] | None = None) -> CapturedGraph[Tensor]:
        return capture_together(lambda: super(RankStep, self).captured(run, shares), self.group)

    def reduce(self, weights: list[nn.Parameter]) -> None:
        sum_in_rank_order([weight.grad for weight in weights], self.group)


class PartTask(NodesTask):
    """`NodesTask` for one part of a graph; the loaded graph has labels and splits of its rows."""

    def __init__(self, part: Part, group: Group, loaded: LoadedGraph, model: GraphModel, plan: Plan) -> None:
        self.part, self.group = part, group
        super().__init__(loaded, *labels_of(loaded), model, plan)
        own = self.sizes, int(known(self.whole.labels).sum())
        sizes, counts = zip(*all_values(group, own), strict=True)
        self.sizes = {name: sum(of_rank[name] for of_rank in sizes) for name in self.sizes}
        self.whole = Share(self.whole.inputs, self.whole.labels, counts[group.rank] / max(sum(counts), 1))

    def _prepared(self, loaded: LoadedGraph) -> GraphInputs:
        return prepare_part(self.model, loaded.node_data["feat"], self.plan(self.part))

    def predict(self, forward: Forward, part: str) -> tuple[Tensor, Tensor]:
        """Logits and labels of the split's rows of all ranks, on all ranks."""
        logits, labels = (gather_uneven(each, self.group) for each in super().predict(forward, part))
        return logits, labels


def hash_of_weights(model: nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:12]
