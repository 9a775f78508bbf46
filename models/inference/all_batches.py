"""All batches of a collection as the source of a run."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from rich.text import Text
from torch import Tensor

import fused3s
from common.cli import console, progress
from configs import Config
from data import LoadedGraph
from data.batches import GraphSet
from fused3s.runtime.cuda_graph import CaptureError
from models import Execution, GraphInputs, GraphModel
from models.graph_inputs import pattern_of
from models.inference.batches import Passes, eager_passes, replays, run_pass, run_set
from models.inference.cost import SetRun
from models.inference.source import Source
from models.padded_batches import PaddedBatches, make_room, padding_refused


class AllBatches(Source):
    """All graphs of a collection, a plan for each batch.

    Raises:
        ValueError: the features do not fit the model.
    """

    def __init__(self, config: Config, device: torch.device, loaded: LoadedGraph) -> None:
        super().__init__(config, device, loaded)
        self.model.check_features(loaded.graph)
        size = config.data.graphs_per_batch(loaded.meta.num_graphs, loaded.meta.num_nodes)
        self._graphs, self._size = GraphSet(loaded, device), size
        count = len(self._graphs)
        self._ranges = [range(first, min(first + size, count)) for first in range(0, count, size)]
        self._first = self._graphs.slice(self._ranges[0])
        self._padded: PaddedBatches | None = None
        # One stream for all passes: torch keeps the memory of each stream apart. Its small kernels come first.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def plan(self) -> fused3s.AttentionPlan:
        return self.plan_on(pattern_of(self._first))

    def inputs(self, attention: fused3s.AttentionPlan) -> GraphInputs | Callable[[], GraphInputs]:
        asked = self.config.runtime.cuda_graph
        if asked is False:
            self.why_eager = "as configured"
        elif refused := self._make_padded(attention.backend):
            self.why_eager = f"chosen by auto; {refused}"
            if asked is True:
                raise ValueError(f"runtime.cuda_graph = True with several batches: {refused}; use auto or false")
        return self._padded.inputs if self._padded else self.model.prepare_batch(self._first, attention)

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

    def predict(self, execution: Execution, attention: fused3s.AttentionPlan) -> tuple[Tensor | None, SetRun | None]:
        """The logits; then up to `runtime.repeats` passes are timed."""
        dense, graphs, num_batches = execution.dense, self._graphs, len(self._ranges)
        if execution.captured:
            passes = partial(replays, self._ranges, self._padded, execution)
        else:
            plan = partial(self.plan_on, backend=attention.backend)
            passes = partial(self._eager, execution.model, plan, dense.forward)
        dense.check_weights()
        console.print(Text(f"predicting {len(graphs):,} graphs in {num_batches:,} batches"))
        parts: list[Tensor] = []
        step = max(1, num_batches // 20)  # a batch takes a millisecond
        with progress(num_batches) as advance:

            def take(batch: range, logits: Tensor) -> None:
                parts.append(logits)
                if len(parts) % step == 0 or len(parts) == num_batches:
                    advance(f"graph {batch.stop:,} of {len(graphs):,}", (len(parts) - 1) % step + 1)

            timed = run_set(passes, take, self.device, self.config.runtime.repeats)
        run = SetRun(timed, len(graphs), num_batches, self._size, graphs.kept_on)
        return torch.cat(parts), run

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
        by_thread = self._graphs.kept_on.type == "cpu"
        return eager_passes(self._graphs, self._ranges, model, plan, forward, self._stream, by_thread=by_thread)
