"""Input of a run of `scripts/infer.py`: one graph (or batch), or all batches of a collection."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from rich.text import Text
from torch import Tensor

from bench import cli
from bench.batches import BatchRunner, Plan, SetRun, pattern_of, prepare, run_set
from data import LoadedGraph
from data.csr_batches import CsrBatch, CsrBatches
from kernels import AttentionPlan
from models import Execution, GraphInputs, GraphTransformer

Write = Callable[[np.ndarray], None]  # of the next rows of the logits, float32


class OneGraph:
    """A graph, or a batch of graphs, that a plan is made for once."""

    varies = False

    def __init__(self, loaded: LoadedGraph) -> None:
        self.graph = loaded.graph

    def inputs(self, model: GraphTransformer, attention: AttentionPlan) -> GraphInputs:
        return model.prepare(self.graph, attention)

    def predict(self, execution: Execution, plan: Plan, repeats: int, write: Write) -> None:
        write(execution.run().float().cpu().numpy())

    def logits(self, model: GraphTransformer, plan: Callable[[Any], AttentionPlan]) -> Tensor:
        """[rows, classes] float32 on the CPU, by plain layers. Call it under `torch.inference_mode()`."""
        return model(self.inputs(model, plan(self.graph))).float().cpu()


class AllBatches:
    """All graphs of a collection, a plan for each batch.

    Attributes:
        graph: CSR pattern of the first batch.
    """

    varies = True

    def __init__(self, loaded: LoadedGraph, model: GraphTransformer, batch_size: int, device: torch.device) -> None:
        model.embedding.check(loaded.graph.ndata["feat"])
        if model.edge_features != "none":
            model.edge_embedding.check(loaded.graph.edata["feat"], row="edge")
        self._batches = CsrBatches(loaded, batch_size, device)
        self._first = self._batches.batch(0, min(batch_size, self._batches.num_graphs))
        self.graph = pattern_of(self._first)

    def inputs(self, model: GraphTransformer, attention: AttentionPlan) -> GraphInputs:
        """Inputs of the first batch."""
        return prepare(model, self._first, attention)

    def predict(self, execution: Execution, plan: Plan, repeats: int, write: Write) -> SetRun:
        """`write` gets the logits of all graphs in their order; then up to `repeats` passes are timed."""
        dense, batches = execution.dense, self._batches
        runner = self._runner(execution.model, plan, lambda inputs: execution.model(inputs, dense.blocks, dense.embed))
        dense.check_weights()
        cli.console.print(Text(f"predicting {batches.num_graphs:,} graphs in {len(batches):,} batches"))
        with cli.progress(len(batches)) as advance:
            shown = _Throttle(advance)

            def take(batch: CsrBatch, logits: np.ndarray) -> None:
                write(logits)
                shown.advance(
                    f"graph {batch.last:,} of {batches.num_graphs:,}", is_last=batch.last == batches.num_graphs
                )

            passes = run_set(runner, take, repeats)
        return SetRun(passes, batches.num_graphs, len(batches), batches.batch_size, batches.kept_on)

    def logits(self, model: GraphTransformer, plan: Plan) -> Tensor:
        """As of `OneGraph`."""
        parts = []
        self._runner(model, plan, model).run(lambda batch, logits: parts.append(torch.from_numpy(logits)))
        return torch.cat(parts)

    def _runner(self, model: GraphTransformer, plan: Plan, forward: Callable[[GraphInputs], Tensor]) -> BatchRunner:
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
