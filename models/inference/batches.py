"""All batches of a collection as the source of a run: by replays of a CUDA graph that assembles, plans and computes a
batch, or eagerly, where the next batch is loaded and planned while the GPU computes."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.text import Text
from torch import Tensor

import fused3s
from common.cli import console, progress
from common.timers import Spread, mark, milliseconds_between
from configs import Config
from data import LoadedGraph
from data.batches import GraphSet
from data.prefetch import made_ahead
from fused3s.graph.csr import CSRPattern
from fused3s.runtime.cuda_graph import CaptureError
from models import Execution, GraphInputs, GraphModel
from models.graph_inputs import pattern_of
from models.inference.source import Source
from models.padded_batches import PaddedBatches, make_room, padding_refused

MOST_QUEUED = 4  # batches whose logits the host has not taken yet: their memory is kept until then
MADE_AHEAD = 2  # batches that a thread makes ahead
SHORT_PASS_S = 5.0  # passes over a collection are repeated for so long

Passes = Iterator[tuple[range, Callable[[], Tensor]]]  # the graphs of each batch, and its forward pass
Take = Callable[[range, Tensor], None]  # of a batch and its logits [rows, classes], float32 on the CPU
Timed = tuple[float, list[float]]  # see `run_pass`


class AllBatches(Source):
    """All graphs of a collection, a plan for each batch.

    Raises:
        ValueError: the features do not fit the model.
    """

    def __init__(self, config: Config, device: torch.device, loaded: LoadedGraph) -> None:
        super().__init__(config, device, loaded)
        self.model.check_features(loaded.graph)
        size = config.data.graphs_per_batch(loaded.meta.num_graphs, loaded.meta.num_nodes)
        self._graphs = GraphSet(loaded, device)
        self.kept_on = self._graphs.kept_on
        count = len(self._graphs)
        self._ranges = [range(first, min(first + size, count)) for first in range(0, count, size)]
        self._first = self._graphs.slice(self._ranges[0])
        self._padded: PaddedBatches | None = None
        # One stream for all passes: torch keeps the memory of each stream apart. Its small kernels come first.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def plan(self) -> fused3s.AttentionPlan:
        return self.plan_on(pattern_of(self._first))

    def prepare(self, attention: fused3s.AttentionPlan) -> Execution:
        asked, reason = self.config.runtime.cuda_graph, "as configured"
        if asked is not False:
            if not (refused := self._make_padded(attention.backend)):
                return self._execution(self._padded.inputs, attention)
            if asked is True:
                raise ValueError(f"runtime.cuda_graph = True with several batches: {refused}; use auto or false")
            reason = f"chosen by auto; {refused}"
        eager = self._execution(self.model.prepare_batch(self._first, attention), attention, cuda_graph=False)
        return replace(eager, graph_reason=reason)

    def _make_padded(self, backend: str) -> str | None:
        """Why there are no padded batches; None if there are."""
        graphs = self._graphs
        if self.device.type != "cuda":
            return f"a CUDA graph needs an NVIDIA GPU, and the model is on {self.device}"
        if refused := padding_refused(self.model, backend, self.config.attention.reorder, graphs):
            return refused
        size = graphs.largest_size([*map(np.array, self._ranges)])
        try:
            room = make_room(size, self.config, device=self.device, dtype=self.dtype, backward=False)
            padded = PaddedBatches(graphs, size, self.model, room)
        except CaptureError as error:
            return str(error)
        padded.load(np.array(self._ranges[0]))
        self._padded = padded
        return None

    def predict(self, execution: Execution) -> tuple[Tensor | None, dict[str, Spread]]:
        """The logits; then up to `runtime.repeats` passes are timed."""
        graphs, num_batches = self._graphs, len(self._ranges)
        if execution.captured:
            passes = partial(replays, self._ranges, self._padded, execution)
        else:
            plan = partial(self.plan_on, backend=execution.inputs.attention.backend)
            passes = partial(self._eager, execution.model, plan, execution.forward)
        execution.check_weights()
        console.print(Text(f"predicting {len(graphs):,} graphs in {num_batches:,} batches"))
        parts: list[Tensor] = []
        step = max(1, num_batches // 20)  # a batch takes a millisecond
        with progress(num_batches) as advance:

            def take(batch: range, logits: Tensor) -> None:
                parts.append(logits)
                if len(parts) % step == 0 or len(parts) == num_batches:
                    advance(f"graph {batch.stop:,} of {len(graphs):,}", (len(parts) - 1) % step + 1)

            timed = run_set(passes, take, self.device, self.config.runtime.repeats)
        times = {
            "throughput": [len(graphs) / seconds for seconds, _ in timed],
            "share_in_forward_passes": [sum(forward) / 1e3 / seconds for seconds, forward in timed],
            "time": [milliseconds for _, forward in timed for milliseconds in forward],
        }
        return torch.cat(parts), {metric: Spread.of(values) for metric, values in times.items()}

    def reference(self, model: GraphModel, dtype: torch.dtype) -> Tensor | None:
        parts: list[Tensor] = []
        passes = self._eager(model, partial(self.plan_on, backend="reference", dtype=dtype), model)
        run_pass(passes, lambda batch, logits: parts.append(logits), self.device)
        return torch.cat(parts)

    def _eager(
        self,
        model: GraphModel,
        plan: Callable[[Any], fused3s.AttentionPlan],
        forward: Callable[[GraphInputs], Tensor],
    ) -> Passes:
        # A collection on a GPU leaves the host nothing but launches.
        by_thread = self.kept_on.type == "cpu"
        return eager_passes(self._graphs, self._ranges, model, plan, forward, self._stream, by_thread=by_thread)


def replays(ranges: Iterable[range], padded: PaddedBatches, execution: Execution) -> Passes:
    """Replays of one CUDA graph for all batches, which `padded` has room for."""

    def replay(batch: range) -> Tensor:
        ids = np.arange(batch.start, batch.stop)
        padded.load(ids)
        return execution.run()[: padded.graphs.num_rows(ids)]  # rows behind are padding

    return ((batch, partial(replay, batch)) for batch in ranges)


def eager_passes(
    graphs: GraphSet,
    ranges: Iterable[range],
    model: GraphModel,
    plan: Callable[[CSRPattern], fused3s.AttentionPlan],
    forward: Callable[[GraphInputs], Tensor],
    stream: torch.cuda.Stream | None = None,
    *,
    by_thread: bool,
) -> Passes:
    """Eager passes, with a plan for each batch.

    Args:
        graphs: whose batches are on the model's device, from arrays that the caller's stream wrote.
        ranges: the graphs of each batch.
        stream: on a GPU, the one that batches are assembled and planned on while passes run on the current one.
        by_thread: whether a thread assembles and plans ahead. Else the thread that queues the forward passes does so
            between them, which suits work that is launches only: two threads would wait for each other.
    """

    if stream:
        stream.wait_stream(torch.cuda.current_stream(stream.device))  # the arrays may not be there yet

    def prepared() -> Iterator[tuple[range, GraphInputs]]:
        for each in ranges:
            with torch.inference_mode(), torch.cuda.stream(stream):  # of the thread that takes the next batch
                batch = graphs.slice(each)
                inputs = model.prepare_batch(batch, plan(pattern_of(batch)))
                if stream:
                    stream.synchronize()  # the forward pass, on another stream, finds its inputs complete
            yield each, inputs

    with made_ahead(prepared(), MADE_AHEAD) if by_thread else nullcontext(prepared()) as each:
        for batch, inputs in each:
            yield batch, partial(forward, inputs)


def run_pass(passes: Passes, take: Take, device: torch.device) -> Timed:
    """Queue the forward pass of each batch; `take` gets its logits as soon as they are there, in the order of batches.

    Call it under `torch.inference_mode()`.

    Returns:
        Seconds from the first batch's assembly to the last output in host memory, and milliseconds of each batch's
        forward pass, on a GPU between two CUDA events: launch gaps count, and assembly and plan where the CUDA graph
        has them.
    """
    start = time.perf_counter()
    queued: deque[_Queued] = deque()
    times = []
    with closing(passes):
        for batch, forward in passes:
            queued.append(_Queued(batch, forward, device))
            while queued and (len(queued) > MOST_QUEUED or queued[0].done()):
                times.append(queued.popleft().give(take))
    while queued:
        times.append(queued.popleft().give(take))
    return time.perf_counter() - start, times


class _Queued:
    """A forward pass on the current stream, and the copy of its logits to the host."""

    def __init__(self, batch: range, forward: Callable[[], Tensor], device: torch.device) -> None:
        self._batch, self._forward = batch, forward  # other streams must not get its inputs' memory before it is over
        self._start = mark(device)
        logits = forward()
        self._stop = mark(device)
        self._logits, self._copied = logits.float(), None
        if device.type == "cuda":
            on_gpu, self._logits = self._logits, torch.empty(logits.shape, dtype=torch.float32, pin_memory=True)
            self._logits.copy_(on_gpu, non_blocking=True)
            self._copied: Any = torch.cuda.Event()
            self._copied.record()

    def done(self) -> bool:
        return self._copied is None or self._copied.query()

    def give(self, take: Take) -> float:
        """Hand over the logits, after waiting for them; milliseconds of the forward pass."""
        if self._copied:
            self._copied.synchronize()
        take(self._batch, self._logits)
        return milliseconds_between(self._start, self._stop)


def run_set(passes: Callable[[], Passes], take: Take, device: torch.device, repeats: int) -> list[Timed]:
    """A pass whose logits `take` gets, then up to `repeats` passes for the time alone, as many as SHORT_PASS_S allows.

    Where it allows none, the first pass is the timed one.
    """
    first = run_pass(passes(), take, device)
    more = min(repeats, int(SHORT_PASS_S / first[0]))
    return [run_pass(passes(), lambda batch, logits: None, device) for _ in range(more)] or [first]
