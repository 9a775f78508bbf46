"""What a run of `scripts/infer.py` computes: a model over one graph (or batch), or over all batches of a collection.

Those of several ranks: `parallel.inference`.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from rich.table import Table
from torch import Tensor

import fused3s
from common.timers import Spread
from configs import Config
from data import LoadedGraph
from models import Execution, GraphModel, prepare_execution
from models.build import build_model, plan_model
from models.graph_inputs import Attention as AnyAttention
from models.inference.memory import memory_for
from models.machine import resolve_dtype
from models.trained_weights import find_weights, load_weights


class Attention(AnyAttention, Protocol):
    """A plan, or the attention of a part of a graph."""

    backend: str  # never "auto"


class Source:
    """One graph, or one batch of graphs, that a plan is made for once.

    On several ranks all of them call each method, in the same order.

    Attributes:
        loaded: all graphs of the run.
        rows: labels and splits of all rows that are predicted; None on a rank that reports nothing.
        checkpoint: file of the weights that the models load; None for random ones.
        weights: a line about them.
        model: the one that is measured, on `device` and in `dtype`.
        dense: implementation of the layers around attention, as `runtime.dense`.
        exchanges: whether a pass waits for other ranks: all of them must run as many.
        kept_on: where the graphs are while all batches of them are predicted.
    """

    exchanges = False

    def __init__(self, config: Config, device: torch.device, loaded: LoadedGraph) -> None:
        self.config, self.device, self.loaded = config, device, loaded
        self.dtype = resolve_dtype(config.attention.dtype, device)
        self.rows: LoadedGraph | None = loaded
        self.checkpoint, self.weights = find_weights(config, loaded.meta)
        self.model = self.new_model(self.dtype)
        self.dense, self.kept_on = config.runtime.dense, device

    def new_model(self, dtype: torch.dtype) -> GraphModel:
        """A model of its own on the device, for inference."""
        config, meta = self.config, self.loaded.meta
        with memory_for("building the model", config):
            model = build_model(config, meta, config.runtime.seed)
            if self.checkpoint:
                load_weights(model, self.checkpoint, config, meta)
            return model.to(self.device).cast(dtype).eval()

    def plan_on(self, graph: Any, backend: str = "", dtype: torch.dtype | None = None) -> fused3s.AttentionPlan:
        """Attention of the model's head shape over a graph (or batch); as configured, where nothing else is given."""
        given = {"backend": backend} if backend else {}
        given |= {"reorder": "none"} if backend == "reference" else {}
        return plan_model(graph, self.config, device=self.device, dtype=dtype or self.dtype, **given)

    def plan(self) -> Attention:
        """Attention over the graph, or over the first batch, by the configured backend."""
        return self.plan_on(self.loaded.graph)

    def prepare(self, attention: Attention) -> Execution:
        """The forward pass over the graph, or over the first batch."""
        return self._execution(self.model.prepare(self.loaded.graph, attention), attention)

    def predict(self, execution: Execution) -> tuple[Tensor | None, dict[str, Spread]]:
        """Logits [rows, classes] of all rows in their order, float32 on the CPU, None on a rank that reports nothing;
        of several batches also the times, see `Run.whole`."""
        return execution.run().float().cpu(), {}

    def reference(self, model: GraphModel, dtype: torch.dtype) -> Tensor | None:
        """Logits as of `predict`, of a model of this dtype by the backend "reference" and plain layers. Call it under
        `torch.inference_mode()`."""
        return self._reference(model, dtype, self.loaded.graph)

    def all_values(self, value: Any) -> list[Any]:
        """The value of this process, or those of all ranks in their order."""
        return [value]

    def ranks_table(self, memory: Sequence[float]) -> Table | None:
        """A report about the ranks, with the MiB of each; None for one process."""
        return None

    def columns(self) -> dict[str, object]:
        """Columns of a row of results about the ranks."""
        return {}

    def _execution(self, inputs: Any, attention: Attention, **options: Any) -> Execution:
        options = {"cuda_graph": self.config.runtime.cuda_graph} | options
        return prepare_execution(self.model, inputs, backend=attention.backend, dense=self.dense, **options)

    def _reference(self, model: GraphModel, dtype: torch.dtype, graph: Any) -> Tensor:
        return model(model.prepare(graph, self.plan_on(graph, "reference", dtype))).float().cpu()
