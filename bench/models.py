"""Measuring whole forward passes on one graph: every cell, a model's width with an attention back end and a mode of
running it, becomes rows of the CSV.

All cells of a width have the same weights. A cell's logits are compared with those of a slow back end, in the same
precision, before its time is kept. What cannot run, and whatever goes wrong, is a row with a status and a reason.
The mode ("plain", "fused+graph", ...) is the first part of a row's note: see `report.model_frames`. One more cell
of a back end, "accuracy", compares its logits in float16 and bfloat16 with float32.
"""

import gc
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

import data
import kernels
from bench.accuracy import accuracy
from bench.kernels import FLOAT32, UnsupportedInputsError, classify, free_gpu
from bench.model_regions import time_attention, time_regions
from bench.provenance import Provenance
from bench.records import Row, graph_columns
from bench.timers import NOT_MEASURED, Spread, peak_memory_mib, reset_peak_memory, time_passes
from bench.verify import compare
from configs.end_to_end_schema import EndToEndConfig
from kernels.backends import REGISTRY
from kernels.formats.csr import CSRPattern, csr_pattern
from models import CudaGraphError, DenseUnavailableError, GraphInputs, GraphTransformer, prepare_execution
from models.dense import fused_unavailable
from report.model_frames import mode_of

ACCURACY_DTYPES = (torch.float16, torch.bfloat16)
# Above this many multiplications a block the float64 back end takes seconds a pass, and float32 checks float16 as well.
REFERENCE_ELEMENTS = 2**31
ACCURACY = "accuracy"
TIME, ERROR = ("time", "ms"), ("output_error", "1")  # the first row's metric and unit, in both kinds of cells
FAST_REFERENCES = ("csr_unfused", "dfgnn_tiling")  # the first that is not the back end to check

CellKey = tuple[str | int, ...]


@dataclass(frozen=True)
class Cell:
    """One width, back end and mode, which may be ACCURACY."""

    dim: int
    backend: str
    mode: str

    @property
    def dtype(self) -> torch.dtype:
        """The precision of the whole model; of an accuracy cell the first that is compared."""
        if self.mode == ACCURACY:
            return ACCURACY_DTYPES[0]
        return torch.float32 if self.backend in FLOAT32 else torch.float16

    @property
    def dense(self) -> str:
        return self.mode.removesuffix("+graph")

    @property
    def cuda_graph(self) -> bool:
        return self.mode.endswith("+graph")


def finished_cells(rows: Iterable[Row]) -> set[CellKey]:
    """Keys of the cells that need not be measured again: they have a good time, or never will have one."""
    return {
        (r.dataset, r.data_sha256, r.dim, r.heads, r.blocks, r.dtype, r.backend, mode_of(r), r.device, r.config_sha)
        for r in rows
        if r.scope == "model" and (r.metric, r.unit) in (TIME, ERROR) and r.status in ("ok", "unsupported", "oom")
    }


class GraphBench:
    """All cells of a configuration on one graph."""

    def __init__(
        self,
        loaded: data.LoadedGraph,
        config: EndToEndConfig,
        config_path: str,
        environment: Provenance,
        device: torch.device,
    ) -> None:
        self.loaded, self.config, self.config_path = loaded, config, config_path
        self.environment, self.device = environment, device
        self._features: dict[torch.dtype, GraphInputs] = {}

    @cached_property
    def pattern(self) -> CSRPattern:
        """The edges on the device, from where every back end takes them."""
        edges = csr_pattern(self.loaded.graph)
        indptr, indices = (torch.as_tensor(array).to(self.device) for array in (edges.indptr, edges.indices))
        return CSRPattern(indptr, indices, edges.shape)

    def measure(self, finished: Collection[CellKey]) -> Iterator[tuple[Cell, list[Row]]]:
        """Each cell with its rows as soon as they are measured, the model's time first; none if it is `finished`."""
        for dim in self.config.model.dims:
            width = Width(self, dim)
            for backend, modes in self.config.run.modes.items():
                planned = Planned(width, backend)
                for mode in (*modes, *([ACCURACY] if backend in self.config.run.accuracy else ())):
                    cell = Cell(dim, backend, mode)
                    if self.key(cell) in finished:
                        yield cell, []
                        continue
                    yield cell, self._measure_cell(cell, planned)
                    torch.compiler.reset()  # torch keeps a few versions of what it compiled; no cell needs an older one
                    if self.device.type == "cuda":
                        after = f"{backend}, {mode}, on {self.loaded.meta.name} (dim {dim})"
                        culprits = "it (run.modes) or without that graph (data.names)"
                        free_gpu(self.environment.device, after, culprits)

    def inputs(self, model: GraphTransformer, attention: Any) -> GraphInputs:
        """For a model of any width: the features are put on the device once in each precision."""
        dtype = model.readout.classes.weight.dtype
        if dtype not in self._features:
            self._features[dtype] = model.prepare(self.loaded.graph, attention)
        return replace(self._features[dtype], attention=attention)

    def key(self, cell: Cell) -> CellKey:
        row = self.columns_of(cell, cell.dtype)
        names = ("dataset", "data_sha256", "dim", "heads", "blocks", "dtype", "backend")
        return (*(row[name] for name in names), cell.mode, row["device"], row["config_sha"])

    def _measure_cell(self, cell: Cell, planned: "Planned") -> list[Row]:
        try:
            with torch.inference_mode():
                rows = self._accuracy_rows if cell.mode == ACCURACY else self._measured_rows
                return rows(cell, planned)
        except Exception as error:  # whatever it is, the other cells go on
            if isinstance(error, DenseUnavailableError | CudaGraphError):
                status, reason = "unsupported", " ".join(str(error).split())
            else:
                status, reason = classify(error)
        gc.collect()  # the error held what was allocated
        metric, unit = ERROR if cell.mode == ACCURACY else TIME
        failed = {"scope": "model", "metric": metric, "unit": unit, "status": status, "reason": reason}
        return [Row(**self.columns_of(cell, cell.dtype), **NOT_MEASURED, **failed, note=cell.mode)]

    def _measured_rows(self, cell: Cell, planned: "Planned") -> list[Row]:
        width, device = planned.width, self.device
        model = width.model(cell.dtype)
        inputs = self.inputs(model, planned.attention)
        before = memory_mib(device)
        reset_peak_memory(device)
        execution = prepare_execution(model, inputs, backend=cell.backend, dense=cell.dense, cuda_graph=cell.cuda_graph)
        logits = execution.run().clone()  # the first pass may compile
        # Other precisions and formats wait on the GPU: they do not count.
        own = planned.format_mib + tensors_mib(model.parameters()) + tensors_mib(vars(inputs).values())
        memory = Spread.of([peak_memory_mib(device) - before + (own if before else 0)])
        forward = time_passes(execution.run, device=device, repeats=2)
        repeats = min(self.config.measure.repeats, int(self.config.measure.budget_ms / forward.p10))
        expected = width.expected(cell.dtype, cell.backend)
        agreement = compare(logits, expected.logits)
        checked: dict[str, Any] = {"status": "ok", "relative_error": agreement.relative}
        if not agreement.passed:
            checked |= {"status": "wrong", "reason": agreement.describe()}

        def row(scope: str, metric: str, unit: str, spread: Spread, note: str) -> Row:
            shared = self.columns_of(cell, cell.dtype) | checked | spread.columns()
            return Row(**shared, scope=scope, metric=metric, unit=unit, note=f"{cell.mode}; {note}")

        if repeats > forward.repeats:
            forward = time_passes(execution.run, device=device, repeats=repeats)
        attention = time_attention(execution, device=device, repeats=max(1, repeats // 3))
        how = "replays of one block's, times the blocks" if cell.cuda_graph else "CUDA events around each call"
        rows = [
            row("model", "time", "ms", forward, f"checked against {expected.backend}"),
            row("attention", "time", "ms", attention, how),
            row("model", "peak_memory", "MiB", memory, "weights, inputs, format and passes; torch's allocator"),
        ]
        if not cell.cuda_graph and cell.backend in self.config.run.regions:
            regions = time_regions(execution, eager_ms=forward.median, device=device, repeats=max(1, repeats // 3))
            rows += [
                row("model", f"time in {region}", "ms", spread, "eager pass") for region, spread in regions.items()
            ]
        return rows

    def _accuracy_rows(self, cell: Cell, planned: "Planned") -> list[Row]:
        """Logits in 16 bits against float32, by the fused dense part where it can run."""
        width = planned.width
        exact = width.expected(torch.float32, cell.backend)
        rows = []
        for dtype in ACCURACY_DTYPES:
            model = width.model(dtype)
            dense = "plain" if fused_unavailable(model) else "fused"
            inputs = self.inputs(model, width.plan(cell.backend, dtype))
            execution = prepare_execution(model, inputs, backend=cell.backend, dense=dense, cuda_graph=False)
            found = accuracy(execution.run(), exact.logits)
            for (metric, unit), value in ((ERROR, found.relative), (("argmax_agreement", "1"), found.argmax_agreement)):
                if value is not None:  # a single output has no argmax
                    numbers = {"value": value, "p10": value, "p90": value, "repeats": 1}
                    checked = {"status": "ok", "relative_error": found.relative}
                    note = f"{ACCURACY}; dense {dense}; against float32 with {exact.backend}"
                    shared = self.columns_of(cell, dtype) | checked
                    rows.append(Row(**shared, **numbers, scope="model", metric=metric, unit=unit, note=note))
        return rows

    def columns_of(self, cell: Cell, dtype: torch.dtype) -> dict[str, Any]:
        """The columns that all rows of a cell share."""
        model, name = self.config.model, str(dtype).removeprefix("torch.")
        return {
            **self.environment.model_dump(),
            **graph_columns(self.loaded.meta),
            "dim": cell.dim,
            "heads": model.heads,
            "blocks": model.blocks,
            "dtype": name,
            "out_dtype": name,
            "backend": cell.backend,
            "config": self.config_path,
            "config_sha": self.config.measure.sha(),
        }


@dataclass(frozen=True, eq=False)
class Expected:
    """Logits to compare with, and the attention back end that they come from."""

    logits: Tensor
    backend: str


class Width:
    """The model of one width in every precision, always with the same weights, and what it should give."""

    def __init__(self, bench: GraphBench, dim: int) -> None:
        self.bench, self.dim = bench, dim
        self.head_dim = dim // bench.config.model.heads
        self._models: dict[torch.dtype, GraphTransformer] = {}
        self._expected: dict[tuple[torch.dtype, str], Expected] = {}

    @torch.inference_mode(False)  # parameters of a usual kind, which torch.compile takes
    def model(self, dtype: torch.dtype) -> GraphTransformer:
        if dtype not in self._models:
            meta, model = self.bench.loaded.meta, self.bench.config.model
            torch.manual_seed(self.bench.config.measure.seed)
            made = GraphTransformer(
                in_features=meta.feature_cardinalities or meta.feature_dim,
                num_classes=meta.num_classes,
                task=meta.task,
                dim=self.dim,
                heads=model.heads,
                blocks=model.blocks,
            )
            self._models[dtype] = made.to(self.bench.device, dtype).eval()
        return self._models[dtype]

    def plan(self, backend: str, dtype: torch.dtype) -> kernels.AttentionPlan:
        """Attention with its format built.

        Raises:
            BackendUnavailableError, UnsupportedInputsError, UnsupportedGraphError: why there is none.
        """
        if reason := REGISTRY[backend].unavailable(self.bench.device):
            raise kernels.BackendUnavailableError(reason)
        if reason := REGISTRY[backend].unsupported(dtype, self.head_dim):
            raise UnsupportedInputsError(reason)
        return kernels.plan_attention(
            self.bench.pattern, backend=backend, device=self.bench.device, dtype=dtype, head_dim=self.head_dim
        )

    def expected(self, dtype: torch.dtype, checked_backend: str) -> Expected:
        """Logits in a precision by plain modules, with an attention that is not `checked_backend`'s."""
        small = self.bench.loaded.meta.num_edges * self.dim <= REFERENCE_ELEMENTS
        slow = [name for name in FAST_REFERENCES if name != checked_backend]
        backend = "reference" if small else slow[0]
        if (dtype, backend) not in self._expected:
            model, attention = self.model(dtype), in_float32(self.plan(backend, torch.float32))
            self._expected[dtype, backend] = Expected(model(self.bench.inputs(model, attention)), backend)
        return self._expected[dtype, backend]


class Planned:
    """One back end's attention for one width, planned when its first cell is measured."""

    def __init__(self, width: Width, backend: str) -> None:
        self.width, self.backend = width, backend
        self.format_mib = 0.0

    @cached_property
    def attention(self) -> kernels.AttentionPlan:
        before = memory_mib(self.width.bench.device)
        plan = self.width.plan(self.backend, Cell(self.width.dim, self.backend, "plain").dtype)
        self.format_mib = memory_mib(self.width.bench.device) - before
        return plan


def in_float32(attention: kernels.AttentionPlan) -> Callable[..., Tensor]:
    """Attention computed in float32 whatever the precision of q, k and v."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float, out_dtype: torch.dtype) -> Tensor:
        return attention(q.float(), k.float(), v.float(), scale=scale).to(out_dtype)

    return attend


def memory_mib(device: torch.device) -> float:
    """What torch's allocator holds on a GPU; 0 on the CPU, which keeps no account."""
    return torch.cuda.memory_allocated(device) / 2**20 if device.type == "cuda" else 0.0


def tensors_mib(values: Iterable[Any]) -> float:
    return sum(value.nbytes for value in values if isinstance(value, Tensor)) / 2**20
