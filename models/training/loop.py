"""The training loop."""

import logging
import math
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import chain, pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from configs import TrainConfig
from data import LoadedGraph
from data.atomic import only_writer
from data.batches import BatchSize
from fused3s.runtime.cuda_graph import CaptureError
from models import Attention, GraphModel
from models.build import build_model, plan_model
from models.fast import training_forward, training_path
from models.machine import resolve_device, resolve_dtype
from models.metrics import score
from models.padded_batches import Room, make_room, padding_refused
from models.trained_weights import TrainedWeights, save_weights
from models.training.checkpoint import Best, identity, load_state, save_state
from models.training.errors import TrainingError
from models.training.log import LOG, EpochRecord, TrainingLog, is_log
from models.training.losses import loss_for
from models.training.optimiser import learning_rate, make_optimiser, set_learning_rate
from models.training.precision import WorkingCopy
from models.training.step import CapturedStep, Step
from models.training.tasks import GraphsTask, NodesOfGraphsTask, NodesTask, Task, checked_labels

INITIAL_SHARE = 0.05  # of the initial weights in the average at the end of a run, above which there is a warning
LAST, BEST = "last.pt", "best.safetensors"
logger = logging.getLogger(__name__)

if TYPE_CHECKING:
    from models.training.captured_batches import CapturedBatches

    Runner = Step | CapturedStep | CapturedBatches


@dataclass(frozen=True)
class TrainResult:
    """Result of a run.

    Attributes:
        epochs: number of epochs trained.
        best_epoch: epoch with the best validation metric; its weights are kept.
        metric: name of the metric.
        valid, test: metric on these splits with the kept weights; of regression in the unit of the targets.
        seconds: time of the training steps in seconds, per epoch of this process.
        total_seconds: time of all epochs and the test, with validation and files; None for a resumed run.
    """

    epochs: int
    best_epoch: int
    metric: str
    valid: float
    test: float
    seconds: tuple[float, ...]
    total_seconds: float | None = field(compare=False)


class Trainer:
    """One training run with one seed, in its own folder:

        last.pt                         state of the run, every training.checkpoint_seconds
        best.safetensors, best.json     weights of the epoch with the best validation metric (`models.trained_weights`)
        metrics.csv, tensorboard/       `models.training.log`

    Args:
        config: the resolved configuration.
        loaded: a data set with labels and splits; for graph tasks the whole collection.
        folder: folder of the run.
        seed: seed of weights, batches and dropout.
        resume: continue the run in `folder`, if there is one.
        device: device of the model; None: `runtime.device` of the configuration.

    A distributed run is a subclass, `parallel.training.RankTrainer`.

    Attributes:
        writes: whether this process writes the files.
        dense: implementation of the layers around attention: plain, compiled or fused.
        done: number of epochs trained.
        kept: number of epochs of the state in the folder; 0 without a state.
        best: the best epoch so far; None before the first.
        stop: set to True to end `run` after the current epoch, with its state saved.
        result: result of the run; None until `run` ends, and after a stop.

    Raises:
        TrainingError: the folder holds a run and `resume` is False, or another run, or files of the user's.
        ValueError: the data set, backend or device cannot train this model.
    """

    writes = True

    def __init__(
        self,
        config: TrainConfig,
        loaded: LoadedGraph,
        folder: Path,
        *,
        seed: int,
        resume: bool = False,
        device: torch.device | None = None,
    ) -> None:
        state = folder / LAST
        self._found = _stamp(state)
        if self._found and not resume:
            raise TrainingError(f"{folder}: holds a run; --resume continues it, --output names another folder")
        if not self._found and (others := _of_others(folder)):
            raise TrainingError(
                f"{folder}: holds {', '.join(others)} and no {LAST}, the state of a run; they would be replaced: move "
                "them away, or name another folder (--output)"
            )
        self.config, self.meta, self.folder, self.seed = config, loaded.meta, folder, seed
        self.device = device or resolve_device(config.runtime.device)
        self.precision = resolve_dtype(config.training.precision, self.device, in_training=True)
        model = build_model(config, loaded.meta, seed, pyg=config.attention.backend == "pyg").to(self.device)
        self.backend = ""
        working = WorkingCopy(model, self.precision)
        self.task = self._make_task(loaded, working.model)
        optimiser = make_optimiser(working.vectors, config.training, self.device)
        self.dense = training_path(working.model, config.runtime.dense)
        forward = training_forward(working.model, self.dense, dynamic=self.task.static is None)
        loss = loss_for(self.task.metric, config.training.loss)
        options = config.training.clip_norm, loss, config.training.ema
        self.step = self._make_step(model, working, forward, optimiser, *options)
        self.identity = identity(config, loaded.meta, seed)
        self._warn_of_a_slow_average()
        self.best: Best | None = None
        self.done = 0
        torch.manual_seed(seed)  # makes dropout of the first epoch independent of earlier draws
        if self._found:
            self.best, self.done = load_state(state, self.step, self.identity)
        self.kept, self.finished = self.done, self._is_over()
        self.runner: Runner
        self.runner, self.graph_reason = (self.step, "the run is over") if self.finished else self._captured()
        self.stop = False
        self.result: TrainResult | None = None

    def _warn_of_a_slow_average(self) -> None:
        """An average begins with the initial weights, whose share after n steps is ema**n."""
        ema, steps = self.config.training.ema, self.config.training.epochs * self.task.steps
        if (share := ema**steps) > INITIAL_SHARE:
            logger.warning(
                "training.ema = %s: after all %s steps the averaged weights are still to %.0f%% the initial ones; take "
                "at most %.3g, or more epochs",
                *(ema, f"{steps:,}", 100 * share, INITIAL_SHARE ** (1 / steps)),
            )

    @property
    def captured(self) -> bool:
        """Whether the step is a CUDA graph."""
        return not isinstance(self.runner, Step)

    @property
    def unit(self) -> str:
        """Unit of the metric; "" for none."""
        return self.meta.unit if self.task.targets else ""

    @property
    def weights_path(self) -> Path:
        return self.folder / BEST

    def lines(self) -> dict[str, str]:
        """Lines of the report about the ranks, where there are several."""
        return {}

    def columns(self) -> dict[str, object]:
        """Columns of a row of results about the ranks."""
        return {}

    def run(self) -> Iterator[EpochRecord]:
        """Train to the end; yields a record after each epoch.

        Raises:
            TrainingError: the loss is NaN or infinite, or another process has trained in the folder.
            OSError: another process trains there, or a file cannot be written.
        """
        start, seconds, interval = time.perf_counter(), [], self.config.training.checkpoint_seconds
        with ExitStack() as opened:
            log = self._open_log(opened) if self.writes else None
            is_stopped, saved = False, time.monotonic()
            while not (is_stopped or self._is_over()):
                record = self._epoch(self.done + 1)
                self.done += 1
                seconds.append(record.seconds)
                if record.is_best:
                    self.best = Best.of(self.step.evaluated, record.epoch, record.valid_metric, record.valid_loss)
                self.finished = self._is_over()
                if log:
                    log.add(record)
                    if self.finished or time.monotonic() - saved >= interval:
                        self._save(log)
                        saved = time.monotonic()
                is_stopped = True
                try:
                    yield record  # an error or Ctrl-C while it is reported closes this generator
                    is_stopped = self._is_stopped()  # maybe only since the record was made
                finally:
                    if is_stopped and log and self.kept < self.done:
                        self._save(log)
            if self.finished:
                self.result = self._finish(tuple(seconds), start)
                if log:
                    log.add_test(self.result.test, self.result.best_epoch)

    def _open_log(self, opened: ExitStack) -> TrainingLog | None:
        """Keep other processes out of the folder, and open the log of a run that is not over."""
        opened.enter_context(only_writer(self.folder))
        if _stamp(self.folder / LAST) != self._found:
            raise TrainingError(f"{self.folder}: another process has trained there since; start again with --resume")
        if self.finished:
            return None
        log = TrainingLog(self.folder, self.done)
        opened.callback(log.close)
        return log

    def _is_stopped(self) -> bool:
        return self.stop

    def _is_over(self) -> bool:
        training = self.config.training
        waited = self.done - (self.best.epoch if self.best else 0)
        return self.done >= training.epochs or (training.patience is not None and waited >= training.patience)

    def _epoch(self, epoch: int) -> EpochRecord:
        training, start = self.config.training, time.perf_counter()
        losses = torch.zeros((), dtype=torch.float64, device=self.device)
        batches = chain(self.task.batches([self.seed, epoch]), [None])
        for index, (batch, following) in enumerate(pairwise(batches)):
            rate = learning_rate(training, epoch - 1 + (index + 0.5) / self.task.steps)
            set_learning_rate(self.step.optimiser, rate)
            losses += self.runner(batch, following)
        loss = self._total(losses).item() / self.task.steps
        seconds = time.perf_counter() - start
        self._check_finite("training loss", loss, epoch)
        outputs, labels = self.runner.predict(self.task, "valid")
        valid_loss = self.step.loss_of(outputs, labels).item()
        self._check_finite("validation loss", valid_loss, epoch)
        metric = self._score(outputs, labels)
        is_best = self.best is None or self.best.is_beaten_by(self.task.metric, metric, valid_loss)
        return EpochRecord(epoch, rate, loss, valid_loss, metric, seconds, is_best)

    def _score(self, outputs: Tensor, labels: Tensor) -> float:
        """The metric, of regression in the unit of the targets."""
        targets = self.task.targets
        if targets:
            outputs, labels = targets.in_units(outputs), targets.in_units(labels)
        return score(self.task.metric, outputs, labels)

    def _check_finite(self, name: str, loss: float, epoch: int) -> None:
        if math.isfinite(loss):
            return
        kept = f"{self.folder} keeps epoch {self.kept}" if self.kept else "nothing was kept"
        higher = "" if self.precision == torch.float32 else ", training.precision=float32"
        training = self.config.training
        raise TrainingError(
            f"the {name} is {loss} in epoch {epoch}: try a lower training.lr (now {training.lr}), "
            f"training.warmup_epochs (now {training.warmup_epochs}), a lower training.clip_norm (now "
            f"{training.clip_norm}){higher}; are all features of the data finite? {kept}"
        )

    def _save(self, log: TrainingLog) -> None:
        log.flush()
        save_state(self.folder / LAST, self.step, self.best, self.done, self.identity)
        self.kept = self.done
        self._export(None)

    def _export(self, test: float | None) -> None:
        about = TrainedWeights(
            data=self.meta.name,
            data_sha256=self.meta.sha256,
            data_source=self.meta.source,
            graphs=self.meta.num_graphs,
            metric=self.task.metric,
            valid=self.best.metric,
            test=test,
            epoch=self.best.epoch,
            seed=self.seed,
            config_sha=self.config.sha(),
            config=self.config.model_dump(mode="json"),
            unit=self.unit,
        )
        targets, weights = self.task.targets, self.best.weights
        save_weights(self.weights_path, targets.folded(weights) if targets else weights, about)

    def _finish(self, seconds: tuple[float, ...], start: float) -> TrainResult:
        self.step.evaluated.load_state_dict(self.best.weights)
        test = self._score(*self.runner.predict(self.task, "test"))
        if self.writes:
            self._export(test)
        total = time.perf_counter() - start if len(seconds) == self.done else None
        return TrainResult(self.done, self.best.epoch, self.task.metric, self.best.metric, test, seconds, total)

    def _total(self, losses: Tensor) -> Tensor:
        """The sum of the losses of an epoch's steps, over all processes."""
        return losses

    def _make_task(self, loaded: LoadedGraph, model: GraphModel) -> Task:
        meta, batch_size, training = loaded.meta, self.config.data.batch_size, self.config.training
        labels, metric = checked_labels(loaded)
        is_collection = meta.task == "graph" or meta.num_graphs > 1
        if training.sampler == "neighbor":
            if is_collection:
                raise ValueError(
                    f"training.sampler = 'neighbor' and {meta.name}: a collection of graphs, whose batches are whole "
                    "graphs; use none"
                )
            from models.training.samples import SampledNodesTask  # on use

            return SampledNodesTask(batch_size, training.fan_out, loaded, labels, metric, model, self._plan)
        if not is_collection:
            return NodesTask(loaded, labels, metric, model, self._plan)
        kind = GraphsTask if meta.task == "graph" else NodesOfGraphsTask
        return kind(loaded, labels, metric, model, self._plan, batch_size)

    def _make_step(self, *arguments: Any) -> Step:
        return Step(*arguments)

    def _plan(self, graph: Any) -> Attention:
        """Attention over a graph; its backend is that of the report."""
        plan = plan_model(graph, self.config, device=self.device, dtype=self.precision, backward=True)
        self.backend = plan.backend
        return plan

    def _captured(self) -> "tuple[Runner, str]":
        """The step as a CUDA graph where runtime.cuda_graph and the task allow it, and the reason."""
        asked = self.config.runtime.cuda_graph
        if asked is False:
            return self.step, "as configured"
        chosen = "as configured" if asked is True else "chosen by auto"
        refused = self._capture_refused()
        if refused is None:
            try:
                if self.task.static is not None:
                    return CapturedStep(self.step, self.task.static), chosen
                from models.training.captured_batches import CapturedBatches  # on use: of several batches on a GPU

                runner = CapturedBatches(self.step, self.task, self._room)
                size = f"{runner.size.rows:,} nodes and {runner.size.edges:,} edges"
                return runner, f"{chosen}; batches are padded to {size}, and larger ones run eagerly"
            except CaptureError as error:
                refused = str(error)
        if asked is True:
            raise TrainingError(f"runtime.cuda_graph = True: {refused}; use auto or false")
        return self.step, f"{chosen}; {refused}"

    def _capture_refused(self) -> str | None:
        if self.device.type != "cuda":
            return f"a CUDA graph needs an NVIDIA GPU, and the model is on {self.device}"
        if self.task.static is None:
            model, reorder = self.step.working.model, self.config.attention.reorder
            return padding_refused(model, self.backend, reorder, self.task.graphs)
        return None

    def _room(self, size: BatchSize, backward: bool) -> Room:
        return make_room(size, self.config, device=self.device, dtype=self.precision, backward=backward)


def _of_others(folder: Path) -> list[str]:
    """Files that a new run would replace, but the log of a run that ended before its first state."""
    found = [name for name in (BEST, Path(BEST).with_suffix(".json").name) if (folder / name).exists()]
    return found + [LOG] * (not is_log(folder / LOG))


def _stamp(path: Path) -> tuple[int, int] | None:
    """Inode and modification time: a file that was replaced has others. None if there is no file."""
    return (path.stat().st_ino, path.stat().st_mtime_ns) if path.exists() else None
