"""What a run of `scripts/infer.py` computes: a model over one graph (or batch), or over all batches of a collection.

Those of several ranks: `parallel.inference`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from rich.table import Table
from rich.text import Text
from torch import Tensor

import data
import fused3s
from common.cli import console, errors, progress
from common.timers import Spread
from configs import Config
from data import LoadedGraph
from data.csr_batches import CsrBatches, GraphRange
from fused3s.runtime.cuda_graph import CapturedGraph, CaptureError, capture
from inference.batches import Passes, SetRun, eager_passes, replays, run_pass, run_set
from inference.memory import memory_for
from models import Execution, GraphInputs, GraphModel
from models.build import build_model
from models.graph_inputs import Attention as AnyAttention
from models.graph_inputs import pattern_of
from models.machine import check_machine, resolve_device, resolve_dtype
from models.padded_batches import PaddedBatches, make_room, padding_refused
from models.trained_weights import find_weights, load_weights, named_weights


class Attention(AnyAttention, Protocol):
    """A plan, or the attention of a part of a graph."""

    backend: str


@dataclass(frozen=True)
class Cost:
    """Time and memory on one process."""

    forward: Spread  # ms of a forward pass; of the first batch, where there are several
    attention_share: Spread | None  # of it spent in attention, 0 to 1; None for layers that call a plan themselves
    waited: float | None  # share of the time in which threads waited for a core meanwhile, see `common.host_load`
    format_build: float  # ms to build the sparse format, once per graph or batch
    peak_memory: float  # MiB


class Source:
    """One graph, or one batch of graphs, that a plan is made for once.

    On several ranks all of them call each method, in the same order.

    Attributes:
        loaded: all graphs of the run.
        rows: labels and splits of all rows that are predicted; None on a rank that reports nothing.
        weights: what the models load.
        model: the one that is measured, on `device` and in `dtype`.
        dense: implementation of the layers around attention, as `runtime.dense`.
        why_eager: why a pass cannot be a CUDA graph, once `inputs` were made; None if it can.
        exchanges: whether a pass waits for other ranks: all of them must run as many.
    """

    why_eager: str | None = None
    exchanges = False

    def __init__(self, config: Config, device: torch.device, loaded: LoadedGraph) -> None:
        self.config, self.device, self.loaded = config, device, loaded
        self.dtype = resolve_dtype(config.attention.dtype, device)
        self.rows: LoadedGraph | None = loaded
        self.weights = find_weights(config, loaded.meta)
        self.model = self.new_model(self.dtype)
        self.dense = config.runtime.dense

    def new_model(self, dtype: torch.dtype) -> GraphModel:
        """A model of its own on the device, for inference."""
        config, meta = self.config, self.loaded.meta
        with memory_for("building the model", config):
            model = build_model(config, meta, config.runtime.seed)
            if self.weights.path:
                load_weights(model, self.weights.path, config, meta)
            return model.to(self.device).cast(dtype).eval()

    def plan_on(self, graph: Any, backend: str = "", dtype: torch.dtype | None = None) -> fused3s.AttentionPlan:
        """Attention of the model's head shape over a graph (or batch); as configured, where nothing else is given."""
        attention, model = self.config.attention, self.config.model
        return fused3s.plan_attention(
            graph,
            backend=backend or attention.backend,
            device=self.device,
            dtype=dtype or self.dtype,
            head_dim=model.head_dim,
            num_heads=model.heads,
            reorder="none" if backend == "reference" else attention.reorder,
            edge_data=model.edge_features != "none",
            check=False,  # the loader did
        )

    def plan(self) -> Attention:
        """Attention over the graph, or over the first batch, by the configured backend."""
        return self.plan_on(self.loaded.graph)

    def inputs(self, attention: Attention) -> GraphInputs | Callable[[], GraphInputs]:
        """Inputs of the graph, or of the first batch; a function that makes those of the batch that is loaded, if one
        CUDA graph can run for all of them."""
        return self.model.prepare(self.loaded.graph, attention)

    def capture(self, run: Callable[[], Tensor], device: torch.device) -> CapturedGraph[Tensor]:
        """A pass as a CUDA graph, see `fused3s.runtime.cuda_graph.capture`."""
        return capture(run, device)

    def predict(self, execution: Execution, attention: Attention) -> tuple[Tensor | None, SetRun | None]:
        """Logits [rows, classes] of all rows in their order, float32 on the CPU, None on a rank that reports nothing;
        of batches also their times."""
        return execution.run().float().cpu(), None

    def reference(self, model: GraphModel, dtype: torch.dtype) -> Tensor | None:
        """Logits as of `predict`, of a model of this dtype by the backend "reference" and plain layers. Call it under
        `torch.inference_mode()`."""
        return self._reference(model, dtype, self.loaded.graph)

    def costs(self, own: Cost) -> list[Cost]:
        """The cost of this process, or those of all ranks in their order."""
        return [own]

    def ranks_table(self, costs: Sequence[Cost]) -> Table | None:
        """A report about the ranks; None for one process."""
        return None

    def columns(self) -> dict[str, object]:
        """Columns of a row of results about the ranks."""
        return {}

    def _reference(self, model: GraphModel, dtype: torch.dtype, graph: Any) -> Tensor:
        return model(model.prepare(graph, self.plan_on(graph, "reference", dtype))).float().cpu()


class AllBatches(Source):
    """All graphs of a collection, a plan for each batch.

    Args:
        share: the graphs that this process runs; all if None.

    Raises:
        ValueError: the features do not fit the model.
    """

    def __init__(
        self, config: Config, device: torch.device, loaded: LoadedGraph, share: LoadedGraph | None = None
    ) -> None:
        super().__init__(config, device, loaded)
        self.model.check_features(loaded.graph)
        own = share or loaded
        size = config.data.graphs_per_batch(own.meta.num_graphs, own.meta.num_nodes)
        self._batches = CsrBatches(own, size, device)
        self._first = next(iter(self._batches))
        self._padded: PaddedBatches | None = None
        # One stream for all passes: torch keeps the memory of each stream apart. Its small kernels come first.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def plan(self) -> fused3s.AttentionPlan:
        return self.plan_on(pattern_of(self._first))

    def inputs(self, attention: fused3s.AttentionPlan) -> GraphInputs | Callable[[], GraphInputs]:
        asked = self.config.runtime.cuda_graph
        if asked is False:
            self.why_eager = "as configured"
        elif not self.why_eager and (refused := self._make_padded(attention.backend)):
            self.why_eager = f"chosen by auto; {refused}"
            if asked is True:
                raise ValueError(f"runtime.cuda_graph = True with several batches: {refused}; use auto or false")
        return self._padded.inputs if self._padded else self.model.prepare_batch(self._first, attention)

    def _make_padded(self, backend: str) -> str | None:
        """Why there are no padded batches; None if there are."""
        batches, model = self._batches, self.config.model
        if self.device.type != "cuda":
            return f"a CUDA graph needs an NVIDIA GPU, and the model is on {self.device}"
        if refused := padding_refused(self.model, backend, self.config.attention.reorder, batches):
            return refused
        size = batches.largest_size([np.arange(each.first, each.last) for each in batches.ranges()])
        shape = {"dtype": self.dtype, "head_dim": model.head_dim, "num_heads": model.heads, "backward": False}
        shape["edge_data"] = model.edge_features != "none"
        try:
            padded = PaddedBatches(batches, size, self.model, make_room(size, device=self.device, **shape))
        except CaptureError as error:
            return str(error)
        padded.load(np.arange(self._first.first, self._first.last))
        self._padded = padded
        return None

    def predict(self, execution: Execution, attention: fused3s.AttentionPlan) -> tuple[Tensor | None, SetRun | None]:
        """The logits; then up to `runtime.repeats` passes are timed."""
        dense, batches = execution.dense, self._batches
        if execution.captured:
            passes = partial(replays, batches, self._padded, execution)
        else:
            plan = partial(self.plan_on, backend=attention.backend)
            passes = partial(self._eager, execution.model, plan, dense.forward)
        dense.check_weights()
        console.print(Text(f"predicting {batches.num_graphs:,} graphs in {len(batches):,} batches"))
        parts: list[Tensor] = []
        step = max(1, len(batches) // 20)  # a batch takes a millisecond
        with progress(len(batches)) as advance:

            def take(batch: GraphRange, logits: Tensor) -> None:
                parts.append(logits)
                if len(parts) % step == 0 or len(parts) == len(batches):
                    advance(f"graph {batch.last:,} of {batches.num_graphs:,}", (len(parts) - 1) % step + 1)

            timed = run_set(passes, take, self.device, self.config.runtime.repeats)
        run = SetRun(timed, batches.num_graphs, len(batches), batches.batch_size, batches.kept_on)
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
        by_thread = self._batches.kept_on.type == "cpu"
        return eager_passes(self._batches, model, plan, forward, self._stream, by_thread=by_thread)


def load_source(config: Config) -> Source:
    """Load the graphs and the weights of a configuration.

    Raises:
        ValueError: before anything is loaded, if this machine cannot run the configuration.
    """
    device = resolve_device(config.runtime.device)
    check_machine(config, device, resolve_dtype(config.attention.dtype, device))
    named_weights(config)  # a missing file is found before a long load
    name, batches = config.data.name, config.data.batches
    errors.print(Text(f"loading {name}"))
    with memory_for(f"loading {name}", config):
        loaded = data.load(**config.load_arguments())
    if batches == 1:
        return Source(config, device, loaded)
    if loaded.meta.num_graphs == 1:
        raise ValueError(f"data.batches = {batches!r}: {loaded.meta.origin} holds one graph; only 1 is allowed")
    return AllBatches(config, device, loaded)
