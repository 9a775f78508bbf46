"""Times of training steps as people run them: PyG's TransformerConv, and ours with nothing else changed.

A step is forward pass, loss, backward pass and fused AdamW of a few layers with LayerNorm and ReLU between them, the
host included: rows of steps between two synchronisations, of both layers by turns. Batches are drawn before timing and
are on the GPU; every step of a workload with new graphs gets its edge_index as a tensor of its own, cloned before the
row of steps begins, for both layers. A captured loop (`bench.captured_loop`) copies each batch and plans it within the
timed steps.

    backend  launch      layer
    auto     eager       models.FusedTransformerConv; the note names the attention backend that ran
    auto     cuda_graph  the same, the loop captured
    pyg      eager       torch_geometric.nn.TransformerConv

`dtype` is the type of parameters and features, `out_dtype` that of q, k and v: bfloat16 over float32 under autocast.
`nodes` and `nnz` are rows of x and edges of all blocks of a step, the mean over the batches.

Before a layer is timed, its output and the gradients of its weights on the first block are compared with PyG's layer in
float64; of a captured loop the output of the whole model, on two batches. A time counts only if they agree. PyG's own
error is recorded in the same way: its time stays the baseline where it is large, since the work is the same.
"""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from itertools import cycle
from typing import Any

import torch
from torch import nn

from baselines import REGISTRY
from bench.captured_loop import CapturedLoop
from bench.checks import largest_row_error
from bench.gpu_trace import trace_gpu
from bench.layer_batches import LayerBatch, LoadedWorkload, draw_batches
from bench.layer_model import TYPES, LayerErrors, LayerModel, TrainingStep, Types, first_layer_errors
from bench.records import NONE, Row
from bench.runner import Cell, GraphBench, classify, dtype_name
from bench.timers import Spread, time_rounds_by_turns
from configs.layers_bench_schema import LayersBenchConfig, Precision
from kernels import BackendUnavailableError
from models import FusedTransformerConv

FINISHED = ("ok", "unsupported", "oom")  # statuses that are not measured again
PYG, OURS, CAPTURED = ("pyg", "eager"), ("auto", "eager"), ("auto", "cuda_graph")  # backend and launch
FEWEST_STEPS = 4  # in a row: the host of a slow step runs ahead of the GPU as in a loop
CHECKED_BATCHES = 2  # of a captured loop: the one it was captured for, and another
# Largest error of a row, and of all gradients: of one layer, by type of q, k and v. float32: of
# torch.get_float32_matmul_precision() "highest".
ALLOWED = {torch.float32: LayerErrors(1e-4, 1e-4), torch.bfloat16: LayerErrors(0.05, 0.1)}
ALLOWED_MODEL = {torch.float32: 1e-3, torch.bfloat16: 0.15}  # of a row of the whole model


@dataclass(frozen=True, eq=False)
class Side:
    """One way to run steps.

    Attributes:
        run: a step; its output, or nothing.
        checked: columns status, reason and relative_error.
        note: what was checked and what ran.
    """

    run: Callable[[LayerBatch], Any]
    checked: dict[str, Any]
    note: str


class LayersBench(GraphBench):
    """A workload in every precision; a cell has the rows of all layers."""

    bench = "layers"
    loaded: LoadedWorkload

    @property
    def blocks(self) -> int:
        return len(self.loaded.workload.fan_out) or self.config.model.layers

    @staticmethod
    def cells(config: LayersBenchConfig) -> list[Cell]:
        shape, (backend, launch) = config.model.head_shape, OURS
        return [
            Cell(
                shape.width,
                backend,
                dtype_name(TYPES[precision].parameters),
                dtype_name(TYPES[precision].inputs),
                "model",
                heads=shape.heads,
                region="step",
                launch=launch,
            )
            for precision in config.run.precisions
        ]

    def columns(self, cell: Cell) -> dict[str, Any]:
        workload, batches = self.loaded.workload, self.batches
        return super().columns(cell) | {
            "variant": self.loaded.name,
            "edges": f"features_{workload.edge_dim}" if workload.edge_dim else NONE,
            "plan": "rebuilt" if workload.is_new else "fixed",
            "nodes": round(sum(len(batch.x) for batch in batches) / len(batches)),
            "nnz": round(sum(batch.num_edges for batch in batches) / len(batches)),
            "graphs": workload.batch or 1,
        }

    @cached_property
    def batches(self) -> list[LayerBatch]:
        """On the CPU, in float32."""
        measure, width = self.config.measure, self.config.model.head_shape.width
        options = {"layers": self.blocks, "columns": width, "count": measure.pool, "seed": measure.seed}
        return draw_batches(self.loaded, **options)

    def measure_cell(self, cell: Cell) -> list[Row]:
        types = TYPES[precision_of(cell)]
        batches = [batch.to(self.device, types.parameters) for batch in self.batches]
        models = Models(self.config, self.blocks, self.loaded.workload.edge_dim, self.device)
        makers = {OURS: self._ours, PYG: self._pyg} | (
            {CAPTURED: self._captured} if self.loaded.workload.captured else {}
        )
        sides: dict[tuple[str, str], Side] = {}
        failed: dict[tuple[str, str], Row] = {}
        for key, make in makers.items():
            try:
                side = make(models, batches, types)
                for batch in batches:  # compiles kernels and fills torch's cache of memory
                    side.run(self._renewed(batch))
                sides[key] = side
            except Exception as error:  # the other layer is still timed
                failed[key] = self._row(cell, key, **failure(error))
        timed = self._time(sides, batches) if sides else {}
        rows = {key: [row] for key, row in failed.items()}
        for key, side in sides.items():
            rounds, steps = timed[key]
            note = f"{side.note}; {steps} steps in a row, by turns{rounds.warning}"
            rows[key] = [self._row(cell, key, **rounds.columns(), **side.checked, note=note)]
            if self.device.type == "cuda":
                try:
                    rows[key] += self._traced(cell, key, side, batches)
                except Exception as error:  # the times stay
                    rows[key].append(self._row(cell, key, metric="gpu_busy", **failure(error)))
        return [row for key in makers for row in rows[key]]

    def _row(self, cell: Cell, key: tuple[str, str], **columns: Any) -> Row:
        backend, launch = key
        return self.row(cell, **({"backend": backend, "launch": launch} | columns))

    def _renewed(self, batch: LayerBatch) -> LayerBatch:
        return batch.with_new_edges() if self.loaded.workload.is_new else batch

    def _time(self, sides: dict[tuple[str, str], Side], batches: list[LayerBatch]) -> dict:
        """Rounds and steps in a row, by side."""
        turns = {key: cycle(batches) for key in sides}
        measure = self.config.measure

        def row_of_steps(key: tuple[str, str], steps: int) -> float:
            """Milliseconds of a step."""
            own = [self._renewed(next(turns[key])) for _ in range(steps)]
            run = sides[key].run
            self._wait()
            start = time.perf_counter()
            for batch in own:
                run(batch)
            self._wait()
            return (time.perf_counter() - start) * 1e3 / steps

        fewest = min(FEWEST_STEPS, measure.steps)
        steps = {
            key: max(fewest, min(measure.steps, int(measure.budget_ms / row_of_steps(key, fewest)))) for key in sides
        }

        def time_round() -> dict[tuple[str, str], list[float]]:
            times: dict[tuple[str, str], list[float]] = {key: [] for key in sides}
            for _ in range(measure.repeats):
                for key, found in times.items():
                    found.append(row_of_steps(key, steps[key]))
            return times

        gc.collect()
        return {key: (rounds, steps[key]) for key, rounds in time_rounds_by_turns(time_round).items()}

    def _traced(self, cell: Cell, key: tuple[str, str], side: Side, batches: list[LayerBatch]) -> Iterator[Row]:
        """Rows of what the GPU did in a step, the mean over all batches."""
        steps = max(FEWEST_STEPS, len(batches))
        own = [self._renewed(batches[nth % len(batches)]) for nth in range(steps)]
        trace = trace_gpu(lambda: [side.run(batch) for batch in own])
        for metric, unit, total in (
            ("gpu_busy", "ms", trace.busy_ms),
            ("gpu_kernels", "1", trace.kernels),
            ("host_waits", "1", trace.waits),
        ):
            columns = Spread.of([total / steps]).columns() | {"metric": metric, "unit": unit}
            yield self._row(cell, key, **columns, **side.checked, note=f"trace of {steps} steps")

    def _wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _ours(self, models: "Models", batches: list[LayerBatch], types: Types) -> Side:
        model = models.of(FusedTransformerConv, types.parameters)
        errors = first_layer_errors(model.layers[0], models.exact.layers[0], batches[0], types)
        note = f"attention by {attention_backend(model, batches[0], types)}"
        return Side(TrainingStep(model, types), checked(errors, types), described(errors, note))

    def _pyg(self, models: "Models", batches: list[LayerBatch], types: Types) -> Side:
        model = models.of(pyg_layer(), types.parameters)
        errors = first_layer_errors(model.layers[0], models.exact.layers[0], batches[0], types)
        note = f"torch_geometric {metadata.version('torch_geometric')}"
        return Side(TrainingStep(model, types), checked(errors, types), described(errors, note))

    def _captured(self, models: "Models", batches: list[LayerBatch], types: Types) -> Side:
        model = models.of(FusedTransformerConv, types.parameters)
        before = {name: weight.clone() for name, weight in model.state_dict().items()}
        models.exact.load_state_dict(before)
        loop = CapturedLoop(
            TrainingStep(model, types, capturable=True), batches, self.config.model.head_shape, types.inputs
        )
        errors = []
        for batch in batches[:CHECKED_BATCHES]:
            model.load_state_dict(before)  # in place: the capture and the last replay were steps
            output = loop(batch)
            with torch.no_grad():
                errors.append(largest_row_error(output, models.exact(batch.to(self.device, torch.float64))))
        error, allowed = max(errors, key=lambda one: (one != one, one)), ALLOWED_MODEL[types.inputs]
        note = "error: of the whole model's output"
        if error <= allowed:
            return Side(loop, {"status": "ok", "relative_error": error}, note)
        reason = f"relative error {error:.1e} of a row of the model's output, allowed {allowed:.1e}"
        return Side(loop, {"status": "wrong", "reason": reason, "relative_error": error}, note)


class Models:
    """Models with the same weights.

    Attributes:
        exact: PyG's in float64.
    """

    def __init__(self, config: LayersBenchConfig, layers: int, edge_dim: int | None, device: torch.device) -> None:
        self._arguments, self._device = (config.model.head_shape, layers, edge_dim), device
        torch.manual_seed(config.measure.seed)
        self.exact = LayerModel(pyg_layer(), *self._arguments).to(device, torch.float64)
        self._weights = {name: weight.clone() for name, weight in self.exact.state_dict().items()}

    def of(self, layer: type[nn.Module], dtype: torch.dtype) -> LayerModel:
        model = LayerModel(layer, *self._arguments).to(self._device, dtype)
        model.load_state_dict(self._weights)
        return model


def pyg_layer() -> type[nn.Module]:
    """PyG's TransformerConv.

    Raises:
        BackendUnavailableError: PyG is not installed.
    """
    if reason := REGISTRY["pyg"].unavailable(torch.device("cpu")):
        raise BackendUnavailableError(reason)
    from torch_geometric.nn import TransformerConv

    return TransformerConv


def precision_of(cell: Cell) -> Precision:
    """The precision whose types a cell has."""
    names = (cell.dtype, cell.out_dtype)
    return next(
        precision
        for precision, types in TYPES.items()
        if names == (dtype_name(types.parameters), dtype_name(types.inputs))
    )


def attention_backend(model: LayerModel, batch: LayerBatch, types: Types) -> str:
    """Attention backend that our first layer takes for a batch."""
    block = batch.blocks[0]
    with torch.autocast(batch.x.device.type, torch.bfloat16, enabled=types.autocast):
        return model.layers[0].plan(block.edge_index, (block.num_sources, block.num_targets)).backend


def checked(errors: LayerErrors, types: Types) -> dict[str, Any]:
    """Columns status, reason and relative_error of a layer."""
    allowed = ALLOWED[types.inputs]
    columns: dict[str, Any] = {"status": "ok", "relative_error": errors.output}
    if not (errors.output <= allowed.output and errors.gradients <= allowed.gradients):  # NaN is wrong too
        reason = (
            f"relative error {errors.output:.1e} of a row, {errors.gradients:.1e} of the gradients; allowed "
            f"{allowed.output:.1e} and {allowed.gradients:.1e}"
        )
        columns |= {"status": "wrong", "reason": reason}
    return columns


def failure(error: Exception) -> dict[str, str]:
    """Columns status and reason of what raised an error."""
    status, reason = classify(error)
    return {"status": status, "reason": reason}


def described(errors: LayerErrors, note: str) -> str:
    return f"{note}; error: of the first layer's output, of its gradients {errors.gradients:.1e}"
