"""One step of training and one evaluation pass, eager or as CUDA graphs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import Tensor, nn

from fused3s import capture_step
from fused3s.runtime.cuda_graph import CapturedGraph
from models import GraphModel
from models.fast import Forward
from models.training.averages import Averages
from models.training.losses import Loss
from models.training.precision import WorkingCopy
from models.training.tasks import Batch, Task


class Step:
    """Forward pass, backward pass and optimiser. It only queues work on the GPU.

    Args:
        working: the copy of `model` that computes.
        forward: forward pass of the copy, see `models.fast.training_forward`.
        clip_norm: largest norm of the gradient; None: no limit.
        loss_of: loss of outputs and labels.
        ema: decay of the average of the weights (`models.training.averages`); 0: none.

    Attributes:
        model: model with float32 weights.
        averages: their average; None without one.
        scaler: loss scaler; active in float16 only, where small gradients would underflow.
    """

    def __init__(
        self,
        model: GraphModel,
        working: WorkingCopy,
        forward: Forward,
        optimiser: torch.optim.Optimizer,
        clip_norm: float | None,
        loss_of: Loss,
        ema: float = 0.0,
    ) -> None:
        self.model, self.working, self.forward, self.optimiser = model, working, forward, optimiser
        self.clip_norm, self.loss_of = clip_norm, loss_of
        self.device = working.model.device
        self.averages = Averages(model, ema) if ema else None
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=working.model.dtype == torch.float16)

    def __call__(self, batch: Batch, following: Batch | None = None) -> Tensor:
        """The loss before the step, on the device. `CapturedBatches` prepares the batch `following`."""
        self.working.model.train()
        self.working.refresh()
        loss = self.loss(batch)
        self.scaler.scale(loss).backward()
        self.working.collect_gradients()
        weights = [vector for group in self.optimiser.param_groups for vector in group["params"]]
        self.reduce(weights)
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimiser)
            nn.utils.clip_grad_norm_(weights, self.clip_norm)
        self.scaler.step(self.optimiser)
        self.scaler.update()
        if self.averages:
            self.averages.update()
        return loss.detach()

    def loss(self, batch: Batch) -> Tensor:
        return self.loss_of(self.forward(batch.inputs), batch.labels)

    def reduce(self, weights: list[nn.Parameter]) -> None:
        """Complete the gradients of the optimiser's vectors; nothing to do on one process."""

    def predict(self, task: Task, part: str) -> tuple[Tensor, Tensor]:
        """Logits and labels of a split, as `Task.predict`, of the evaluated model without dropout."""
        with self.evaluating():
            return task.predict(self.evaluate, part)

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        """Inside, `evaluate` computes with the evaluated model. A CUDA graph can capture it."""
        with self.averages.in_place() if self.averages else nullcontext():
            self.working.refresh()
            yield

    @torch.no_grad()
    def evaluate(self, batch: Batch) -> Tensor:
        """Logits without dropout."""
        self.working.model.eval()
        return self.forward(batch.inputs)

    @property
    def evaluated(self) -> GraphModel:
        """The model that is evaluated and kept: the average, or `model` without one."""
        return self.averages.model if self.averages else self.model

    def captured(self, run: Callable[[], Tensor], shares: CapturedGraph[Tensor] | None = None) -> CapturedGraph[Tensor]:
        """A CUDA graph of a step or an evaluation; weights, their average and the optimiser are restored afterwards.

        Args:
            shares: as of `fused3s.capture_step`.

        Raises:
            CaptureError: a backend or layer waits for the GPU.
        """
        return capture_step(run, self.model, self.evaluated, self.optimiser, self.scaler, shares=shares)


class CapturedStep:
    """`Step` on one batch as two CUDA graphs, for a step and for an evaluation.

    Raises:
        CaptureError: a backend or layer waits for the GPU.
    """

    def __init__(self, step: Step, batch: Batch) -> None:
        self.step, self.batch = step, batch
        self.train: CapturedGraph = step.captured(lambda: step(batch))
        self.evaluation: CapturedGraph = step.captured(self._evaluated)

    def __call__(self, batch: Batch, following: Batch | None = None) -> Tensor:
        self._check(batch)
        return self.train.replay()

    def predict(self, task: Task, part: str) -> tuple[Tensor, Tensor]:
        return task.predict(self._evaluate, part)

    def _evaluate(self, batch: Batch) -> Tensor:
        self._check(batch)
        return self.evaluation.replay()

    def _evaluated(self) -> Tensor:
        with self.step.evaluating():
            return self.step.evaluate(self.batch)

    def _check(self, batch: Batch) -> None:
        if batch.inputs is not self.batch.inputs:
            raise ValueError("batch: a captured step runs on the batch that it was captured for")
