"""Inputs of a run of `scripts/infer.py`: one graph (or batch), or all batches of a collection.

Inputs of several ranks: `inference.rank_inputs`.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Protocol

import numpy as np
import torch
from rich.text import Text
from torch import Tensor

from bench import cli
from configs import Config
from data import LoadedGraph
from data.csr_batches import CsrBatches, GraphRange
from inference.batches import BatchRunner, Forward, Plan, ReplayRunner, SetRun, run_set
from inference.subject import Subject
from kernels import AttentionPlan
from kernels.runtime.cuda_graph import CaptureError
from models import Execution, GraphInputs, GraphTransformer
from models.graph_inputs import Attention as AnyAttention
from models.graph_inputs import pattern_of
from training.padded_batches import PaddedBatches, padding_refused

Write = Callable[[np.ndarray], None]  # of the next rows of the logits, float32


class Attention(AnyAttention, Protocol):
    """A plan, or the attention of a part of a graph."""

    backend: str


class Source(Protocol):
    """Graphs that a model runs on. On several ranks all of them call each method, in the same order.

    Attributes:
        model: the one that is measured, on the subject's device and in its dtype.
        all_rows: labels and splits of all rows that are predicted; None on a rank that reports nothing.
        dense: implementation of the layers around attention, as `runtime.dense`.
        why_eager: why a pass cannot be a CUDA graph, once `inputs` were made; None if it can.
    """

    subject: Subject
    model: GraphTransformer
    all_rows: LoadedGraph | None
    dense: str
    why_eager: str | None

    def plan(self) -> Attention:
        """Attention over the graph, or over the first batch, by the configured backend."""

    def inputs(self, attention: Attention) -> GraphInputs | Callable[[], GraphInputs]:
        """Inputs of the graph, or of the first batch; a function that makes those of the batch that is loaded, if one
        CUDA graph can run for all of them."""

    def predict(self, execution: Execution, attention: Attention, write: Write) -> SetRun | None:
        """`write` gets the logits of all rows in their order, where the run is reported. Of batches: their times."""

    def reference(self, model: GraphTransformer, dtype: torch.dtype) -> Tensor | None:
        """Logits [rows, classes] of a model of this dtype by the backend "reference" and plain layers, float32 on the
        CPU; None on a rank that reports nothing. Call it under `torch.inference_mode()`."""


def check_batches(config: Config) -> None:
    """Raise a ValueError for an execution that needs batches of one size, where they differ."""
    runtime = config.runtime
    if config.data.batches == 1:
        return
    if runtime.dense == "compiled":
        raise ValueError(
            f"runtime.dense = 'compiled' and data.batches = {config.data.batches!r}: batches differ in size, and this "
            "is made for one size; allowed are auto, plain and fused"
        )
    model = config.model
    if runtime.cuda_graph is True and (model.pos_enc or model.edge_features != "none"):
        raise ValueError(
            f"runtime.cuda_graph = True and data.batches = {config.data.batches!r}: a CUDA graph for all batches takes "
            "models without pos_enc and edge_features; allowed are auto and false"
        )


class OneGraph:
    """A graph, or a batch of graphs, that a plan is made for once."""

    why_eager = None

    def __init__(self, subject: Subject, model: GraphTransformer) -> None:
        self.subject, self.model, self.all_rows = subject, model, subject.loaded
        self.dense = subject.config.runtime.dense

    def plan(self) -> AttentionPlan:
        attention = self.subject.config.attention
        return self.subject.plan(self.all_rows.graph, attention.backend, self.subject.dtype, attention.reorder)

    def inputs(self, attention: AttentionPlan) -> GraphInputs:
        return self.model.prepare(self.all_rows.graph, attention)

    def predict(self, execution: Execution, attention: AttentionPlan, write: Write) -> None:
        write(execution.run().float().cpu().numpy())

    def reference(self, model: GraphTransformer, dtype: torch.dtype) -> Tensor:
        plan = self.subject.plan(self.all_rows.graph, "reference", dtype)
        return model(model.prepare(self.all_rows.graph, plan)).float().cpu()


class AllBatches:
    """All graphs of a collection, a plan for each batch.

    Args:
        why_eager: why the passes cannot be CUDA graphs, whatever the batches are.

    Raises:
        ValueError: the features do not fit the model.
    """

    def __init__(self, subject: Subject, model: GraphTransformer, why_eager: str | None = None) -> None:
        model.check_features(subject.loaded.graph)
        self.subject, self.model, self.all_rows = subject, model, subject.loaded
        self.dense, self.why_eager = subject.config.runtime.dense, why_eager
        self._batches = CsrBatches(subject.loaded, subject.batch_size, subject.device)
        self._first = next(iter(self._batches))
        self._padded: PaddedBatches | None = None

    def plan(self) -> AttentionPlan:
        attention = self.subject.config.attention
        return self.subject.plan(pattern_of(self._first), attention.backend, self.subject.dtype, attention.reorder)

    def inputs(self, attention: AttentionPlan) -> GraphInputs | Callable[[], GraphInputs]:
        """Of the padded batch that is loaded, at first the first one; of the first one as it is where a pass cannot be
        a CUDA graph."""
        asked = self.subject.config.runtime.cuda_graph
        if asked is False:
            self.why_eager = "as configured"
        elif not self.why_eager and (refused := self._make_padded(attention.backend)):
            self.why_eager = f"chosen by auto; {refused}"
            if asked is True:
                raise ValueError(f"runtime.cuda_graph = True with several batches: {refused}; use auto or false")
        return self._padded.inputs if self._padded else self.model.prepare_batch(self._first, attention)

    def _make_padded(self, backend: str) -> str | None:
        """Why there are no padded batches; None if there are."""
        subject, batches = self.subject, self._batches
        if subject.device.type != "cuda":
            return f"a CUDA graph needs an NVIDIA GPU, and the model is on {subject.device}"
        if refused := padding_refused(self.model, backend, subject.config.attention.reorder, batches):
            return refused
        size = batches.largest_size([np.arange(each.first, each.last) for each in batches.ranges()])
        try:
            padded = PaddedBatches(batches, size, self.model, subject.room(size))
        except CaptureError as error:
            return str(error)
        padded.load(np.arange(self._first.first, self._first.last))
        self._padded = padded
        return None

    def predict(self, execution: Execution, attention: AttentionPlan, write: Write) -> SetRun:
        """`write` gets the logits; then up to `runtime.repeats` passes are timed."""
        dense, config, batches = execution.dense, self.subject.config, self._batches
        plan = partial(
            self.subject.plan, backend=attention.backend, dtype=self.subject.dtype, reorder=config.attention.reorder
        )

        if execution.captured:
            runner = ReplayRunner(batches, self._padded, execution)
        else:
            runner = self._runner(execution.model, plan, dense.forward)
        dense.check_weights()
        num_graphs = batches.num_graphs
        cli.console.print(Text(f"predicting {num_graphs:,} graphs in {len(batches):,} batches"))
        with cli.progress(len(batches)) as advance:
            shown = _Throttle(advance)

            def take(batch: GraphRange, logits: np.ndarray) -> None:
                write(logits)
                shown.advance(f"graph {batch.last:,} of {num_graphs:,}", is_last=batch.last == num_graphs)

            passes = run_set(runner, take, config.runtime.repeats)
        return SetRun(passes, num_graphs, len(batches), batches.batch_size, batches.kept_on)

    def reference(self, model: GraphTransformer, dtype: torch.dtype) -> Tensor:
        parts = []
        runner = self._runner(model, partial(self.subject.plan, backend="reference", dtype=dtype), model)
        runner.run(lambda batch, logits: parts.append(torch.from_numpy(logits)))
        return torch.cat(parts)

    def _runner(self, model: GraphTransformer, plan: Plan, forward: Forward) -> BatchRunner:
        # A collection on a GPU leaves the host nothing but launches.
        return BatchRunner(self._batches, model, plan, forward, by_thread=self._batches.kept_on.type == "cpu")


class _Throttle:
    """Shows progress every tenth of a second on a terminal and every five seconds elsewhere: a batch takes a
    millisecond."""

    def __init__(self, advance: Callable[[str, int], None]) -> None:
        self._advance, self._shown, self._waiting = advance, time.monotonic(), 0
        self._pause = 0.1 if cli.console.is_terminal else 5.0

    def advance(self, description: str, *, is_last: bool) -> None:
        self._waiting += 1
        now = time.monotonic()
        if is_last or now - self._shown >= self._pause:
            self._advance(description, self._waiting)
            self._shown, self._waiting = now, 0
