"""A model over all batches of a collection, by replays of a CUDA graph that assembles, plans and computes a batch; or
eagerly, where the next batch is loaded and planned while the GPU computes."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from bench.timers import Spread, mark, milliseconds_between
from data.csr_batches import CsrBatch, CsrBatches, GraphRange
from data.prefetch import made_ahead
from kernels import AttentionPlan
from kernels.formats.csr import CSRPattern
from models import Execution, GraphInputs, GraphTransformer
from models.graph_inputs import pattern_of
from training.padded_batches import PaddedBatches

# Batches whose outputs the host has not taken yet: a batch's memory is kept until the GPU is done with it.
MOST_QUEUED = 4
MADE_AHEAD = 2  # batches that a thread makes ahead
SHORT_PASS_S = 5.0  # passes over a collection are repeated for so long

Plan = Callable[[CSRPattern], AttentionPlan]
Forward = Callable[[GraphInputs], Tensor]
Take = Callable[[GraphRange, np.ndarray], None]  # of the logits [rows, classes] float32 of a batch


@dataclass(frozen=True)
class Pass:
    """One pass over a collection.

    Attributes:
        seconds: from the first batch's assembly to the last output in host memory.
        forward: milliseconds of each batch's forward pass, on a GPU between two CUDA events: launch gaps count, and
            assembly and plan where the CUDA graph has them.
    """

    seconds: float
    forward: tuple[float, ...]

    @property
    def share(self) -> float:
        """Share of the pass's time in which the GPU ran forward passes, 0 to 1."""
        return sum(self.forward) / 1e3 / self.seconds


class Runner(Protocol):
    """Runs a model over a collection."""

    def run(self, take: Take) -> Pass:
        """One pass; `take` gets the logits in the order of the batches. Call it under `torch.inference_mode()`."""


class ReplayRunner:
    """Replays one CUDA graph for each batch.

    Args:
        padded: batches that the graph assembles, with room for each of `graphs`.
        execution: the captured pass over them.
    """

    def __init__(self, graphs: CsrBatches, padded: PaddedBatches, execution: Execution) -> None:
        self._graphs, self._padded, self._execution = graphs, padded, execution

    def run(self, take: Take) -> Pass:
        passes = ((batch, partial(self._replay, batch)) for batch in self._graphs.ranges())
        return run_pass(passes, take, self._padded.ids.device)

    def _replay(self, batch: GraphRange) -> Tensor:
        self._padded.load(np.arange(batch.first, batch.last))
        return self._execution.run()


class BatchRunner:
    """Runs a model over a collection eagerly, with a plan for each batch.

    On a GPU batches are assembled and planned on a stream of their own, while forward passes run on the current one.

    Args:
        batches: on the model's device, assembled on its current stream; iterated for each pass.
        by_thread: whether a thread assembles and plans ahead. Else the thread that queues the forward passes does so
            between them, which suits work that is launches only: two threads would wait for each other.
    """

    def __init__(
        self, batches: Iterable[CsrBatch], model: GraphTransformer, plan: Plan, forward: Forward, *, by_thread: bool
    ) -> None:
        self.batches, self.model, self.plan, self.forward = batches, model, plan, forward
        self.by_thread = by_thread
        self.device = model.device
        # One stream for all passes: torch keeps the memory of each stream apart. Its small kernels come first.
        self._stream = torch.cuda.Stream(self.device, priority=-1) if self.device.type == "cuda" else None

    def run(self, take: Take) -> Pass:
        prepared = self._prepared()
        with made_ahead(prepared, MADE_AHEAD) if self.by_thread else nullcontext(prepared) as each:
            return run_pass(((batch, partial(self.forward, inputs)) for batch, inputs in each), take, self.device)

    def _prepared(self) -> Iterator[tuple[CsrBatch, GraphInputs]]:
        batches = iter(self.batches)
        while True:
            with torch.inference_mode(), torch.cuda.stream(self._stream):  # of the thread that takes the next batch
                batch = next(batches, None)
                if batch is None:
                    return
                inputs = self.model.prepare_batch(batch, self.plan(pattern_of(batch)))
                if self._stream:
                    self._stream.synchronize()  # the forward pass, on another stream, finds its inputs complete
            yield batch, inputs


def run_pass(passes: Iterable[tuple[GraphRange, Callable[[], Tensor]]], take: Take, device: torch.device) -> Pass:
    """Queue the forward pass of each batch, and hand over its logits as soon as they are there."""
    start = time.perf_counter()
    queued: deque[_Queued] = deque()
    times = []
    for batch, forward in passes:
        queued.append(_Queued(batch, forward, device))
        while queued and (len(queued) > MOST_QUEUED or queued[0].done()):
            times.append(queued.popleft().give(take))
    while queued:
        times.append(queued.popleft().give(take))
    return Pass(time.perf_counter() - start, tuple(times))


class _Queued:
    """A forward pass on the current stream, and the copy of its logits to the host."""

    def __init__(self, batch: GraphRange, forward: Callable[[], Tensor], device: torch.device) -> None:
        self._batch, self._forward = batch, forward  # other streams must not get its inputs' memory before it is over
        self._start = mark(device)
        logits = forward()
        self._stop = mark(device)
        self._copied: Any = None
        logits = logits[: batch.last_row - batch.first_row]  # those behind are of a padded batch
        if device.type == "cuda":
            self._logits = torch.empty(logits.shape, dtype=torch.float32, pin_memory=True)
            self._logits.copy_(logits.float(), non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._logits = logits.float()

    def done(self) -> bool:
        return self._copied is None or self._copied.query()

    def give(self, take: Take) -> float:
        """Hand over the logits, after waiting for them; milliseconds of the forward pass."""
        if self._copied:
            self._copied.synchronize()
        take(self._batch, self._logits.numpy())
        return milliseconds_between(self._start, self._stop)


@dataclass(frozen=True)
class SetRun:
    """A collection, predicted as a whole.

    Attributes:
        passes: those that are timed.
        num_graphs, num_batches, batch_size: of a pass.
        kept_on: where the collection was during a pass.
    """

    passes: tuple[Pass, ...]
    num_graphs: int
    num_batches: int
    batch_size: int
    kept_on: torch.device

    @property
    def graphs_per_second(self) -> Spread:
        return Spread.of([self.num_graphs / one.seconds for one in self.passes])

    @property
    def share(self) -> Spread:
        """Share of a pass's time in which the device ran forward passes, 0 to 1."""
        return Spread.of([one.share for one in self.passes])

    @property
    def forward(self) -> Spread:
        """Milliseconds of the forward pass of a batch."""
        return Spread.of([milliseconds for one in self.passes for milliseconds in one.forward])


def run_set(runner: Runner, take: Take, repeats: int) -> tuple[Pass, ...]:
    """A pass whose logits `take` gets, then up to `repeats` passes for the time alone, as many as SHORT_PASS_S allows.

    Where it allows none, the first pass is the timed one: what it took to write the predictions counts then.
    """
    first = runner.run(take)
    more = min(repeats, int(SHORT_PASS_S / first.seconds))
    return tuple(runner.run(lambda batch, logits: None) for _ in range(more)) or (first,)
