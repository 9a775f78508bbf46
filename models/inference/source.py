"""What a run of `scripts/infer.py` computes: a model over one graph (or batch), or over all batches of a collection.

Those of several ranks: `parallel.inference`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from rich.table import Table
from torch import Tensor

import fused3s
from configs import Config
from data import LoadedGraph
from fused3s.runtime.cuda_graph import CapturedGraph, capture
from models import Execution, GraphInputs, GraphModel
from models.build import build_model, plan_model
from models.graph_inputs import Attention as AnyAttention
from models.inference.cost import Cost, SetRun
from models.inference.memory import memory_for
from models.machine import resolve_dtype
from models.trained_weights import find_weights, load_weights


class Attention(AnyAttention, Protocol):
    """A plan, or the attention of a part of a graph."""

    backend: str


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
        given = {"backend": backend} if backend else {}
        given |= {"reorder": "none"} if backend == "reference" else {}
        return plan_model(graph, self.config, device=self.device, dtype=dtype or self.dtype, **given)

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
