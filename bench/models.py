"""Times of whole forward passes on a graph: widths, attention backends, and ways to run the model around them.

All layers outside attention have the precision of the configuration, whatever the backend. A backend that computes in
another type gets its queries, keys and values cast, and its output cast back; the casts count as its time.

All cells of a width have the same weights. Logits are compared with those of a slow backend in the same precision
before a time is kept. Accuracy cells compare logits in float16 and bfloat16 with float32.
"""

from collections.abc import Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

import kernels
from baselines import REGISTRY
from bench.checks import accuracy, compare
from bench.model_regions import time_attention, time_eager, time_regions
from bench.records import HOST_BOUND, Row, key
from bench.runner import Cell, GraphBench, UnsupportedInputsError, classify, dtype_name, input_dtype
from bench.timers import Spread, pass_times, peak_memory_mib, reset_peak_memory, time_rounds
from configs.end_to_end_schema import EndToEndConfig
from models import Attention, Execution, GraphInputs, GraphTransformer, prepare_execution
from models.fast import fused_unavailable

FINISHED = ("ok", "unsupported", "oom")  # statuses that are not measured again
ACCURACY_DTYPES = (torch.float16, torch.bfloat16)
# With more multiplications per block the float64 backend takes seconds a pass; float32 also checks float16.
REFERENCE_ELEMENTS = 2**31
FEW = 3  # replays of one block's attention at least; they take a fraction of a pass
FAST_REFERENCES = ("csr_unfused", "dfgnn_tiling")  # the first that is not the backend to check


class ModelBench(GraphBench):
    """Every width, backend and way to run the model, and the accuracy of some backends."""

    bench = "end_to_end"

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.blocks = self.config.model.blocks
        self._features: dict[torch.dtype, GraphInputs] = {}
        self._planned: Planned | None = None

    @staticmethod
    def cells(config: EndToEndConfig) -> list[Cell]:
        cells, dtype, heads = [], config.model.dtype, config.model.heads
        for dim in config.model.dims:
            for backend, modes in config.run.modes.items():
                for mode in sorted(modes, key=lambda mode: "+graph" not in mode):  # see _time_rows
                    dense, _, graph = mode.partition("+")
                    launch = "cuda_graph" if graph else "eager"
                    cells.append(Cell(dim, backend, dtype, dtype, "model", heads=heads, dense=dense, launch=launch))
                if backend in config.run.accuracy:
                    first = dtype_name(ACCURACY_DTYPES[0])
                    options = {"metric": "output_error", "unit": "1", "dense": "auto", "launch": "eager"}
                    cells.append(Cell(dim, backend, first, first, "model", heads=heads, **options))
        return cells

    def measure_cell(self, cell: Cell) -> list[Row]:
        planned = self._planned
        if planned is None or (planned.width.dim, planned.backend) != (cell.dim, cell.backend):
            same_width = planned is not None and planned.width.dim == cell.dim
            width = planned.width if same_width else Width(self, cell.dim)
            self._planned = planned = Planned(width, cell.backend, getattr(torch, self.config.model.dtype))
        try:
            with torch.inference_mode():
                measure = self._accuracy_rows if cell.metric == "output_error" else self._time_rows
                return measure(cell, planned)
        finally:
            if cell.dense == "compiled":
                torch.compiler.reset()  # torch keeps a few versions of what it compiled; no cell needs an older one

    def inputs(self, model: GraphTransformer, attention: Any) -> GraphInputs:
        """Inputs for a model of any width: the features are put on the device once per precision."""
        dtype = model.dtype
        if dtype not in self._features:
            self._features[dtype] = model.prepare(self.loaded.graph, attention)
        return replace(self._features[dtype], attention=attention)

    def _time_rows(self, cell: Cell, planned: "Planned") -> list[Row]:
        captured = cell.launch == "cuda_graph"
        model = planned.width.model(cell.torch_dtype)
        inputs = self.inputs(model, planned.attention)
        expected = planned.width.expected(cell.torch_dtype, cell.backend)  # before a CUDA graph takes its memory
        before = memory_mib(self.device)
        reset_peak_memory(self.device)
        execution = prepare_execution(model, inputs, backend=cell.backend, dense=cell.dense, cuda_graph=captured)
        outputs: list[Tensor] = []
        first = pass_times(lambda: outputs.append(execution.run()), device=self.device, repeats=1)
        logits = outputs.pop().clone()
        # Other precisions and formats stay on the GPU: they do not count.
        own = planned.format_mib + tensors_mib(model.parameters()) + tensors_mib(vars(inputs).values())
        memory = Spread.of([peak_memory_mib(self.device) - before + (own if before else 0)])
        agreement = compare(logits, expected.logits, model.dtype, planned.dtype)
        checked: dict[str, Any] = {"status": "ok", "relative_error": agreement.relative}
        if not agreement.passed:
            checked |= {"status": "wrong", "reason": agreement.describe()}

        def row(note: str, measured: dict[str, Any], **columns: str) -> Row:
            return self.row(cell, **(checked | {"note": note} | measured | columns))

        if not captured:  # the first pass may have compiled; a capture has run the pass before
            first = pass_times(execution.run, device=self.device, repeats=1)
        set_by_host: dict[str, str] = {}
        measure = self.config.measure
        passes = max(1, min(measure.repeats, int(measure.budget_ms / first[0])))
        first_round = first if passes == 1 else None
        if captured:
            forward = time_rounds(lambda: pass_times(execution.run, device=self.device, repeats=passes), first_round)
            how, inside = "replays of one block's, times the blocks", self._replays(execution, max(FEW, passes))
        else:
            forward, attention = time_eager(execution, device=self.device, repeats=passes, first=first_round)
            how, inside = f"CUDA events around each call{attention.warning}", attention.columns()
            by_graph = self.known.get(key(self.columns(replace(cell, launch="cuda_graph"))))
            if by_graph and by_graph.value and forward.spread.median >= HOST_BOUND * by_graph.value:
                set_by_host = {"disturbed": "yes"}
        contents = "weights, inputs, format and passes; torch's allocator"
        rows = [
            row(f"checked against {expected.backend}{forward.warning}", forward.columns() | set_by_host),
            row(how, inside | set_by_host, scope="attention"),
            row(contents, memory.columns(), metric="peak_memory", unit="MiB"),
        ]
        if not captured and cell.backend in self.config.run.regions:
            few, eager_ms = max(1, passes // 2), forward.spread.median
            regions = time_regions(execution, eager_ms=eager_ms, device=self.device, repeats=few)
            columns = {"disturbed": rows[0].disturbed}
            rows += [row("eager pass", spread.columns(), region=name, **columns) for name, spread in regions.items()]
        return rows

    def _replays(self, execution: Execution, repeats: int) -> dict[str, Any]:
        """Columns of the attention beside a CUDA graph, which keeps the memory of a pass: there may be too little."""
        try:
            return time_attention(execution, device=self.device, repeats=repeats).columns()
        except torch.OutOfMemoryError as error:
            status, reason = classify(error)
            return {"status": status, "reason": reason, "relative_error": None}

    def _accuracy_rows(self, cell: Cell, planned: "Planned") -> list[Row]:
        """Errors of logits in 16 bits against float32, with fused non-attention layers where they can run."""
        width = planned.width
        exact = width.expected(torch.float32, cell.backend)
        rows = []
        for dtype in ACCURACY_DTYPES:
            model = width.model(dtype)
            dense = "plain" if fused_unavailable(model) else "fused"
            inputs = self.inputs(model, width.plan(cell.backend, dtype, dtype))
            execution = prepare_execution(model, inputs, backend=cell.backend, dense=dense, cuda_graph=False)
            found = accuracy(execution.run(), exact.logits)
            typed = replace(cell, dtype=dtype_name(dtype), out_dtype=dtype_name(dtype))
            note = f"dense {dense}; against float32 with {exact.backend}"
            checked = {"status": "ok", "relative_error": found.relative, "note": note}
            for metric, value in (("output_error", found.relative), ("argmax_agreement", found.argmax_agreement)):
                if value is not None:  # a single output has no argmax
                    rows.append(self.row(typed, metric=metric, **Spread.of([value]).columns(), **checked))
        return rows


class Expected(NamedTuple):
    """Logits to compare with, and the attention backend that they come from."""

    logits: Tensor
    backend: str


class Width:
    """The model of one width in every precision, always with the same weights, and its expected output."""

    def __init__(self, bench: ModelBench, dim: int) -> None:
        self.bench, self.dim = bench, dim
        self.heads = bench.config.model.heads
        self.head_dim = dim // self.heads
        self._models: dict[torch.dtype, GraphTransformer] = {}
        self._expected: dict[tuple[torch.dtype, str], Expected] = {}

    @torch.inference_mode(False)  # torch.compile does not take inference tensors as parameters
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
            self._models[dtype] = made.to(self.bench.device).cast(dtype).eval()
        return self._models[dtype]

    def plan(self, backend: str, dtype: torch.dtype, out_dtype: torch.dtype) -> Attention:
        """Attention that computes in `dtype` and writes `out_dtype`, with its format built.

        Raises:
            BackendUnavailableError, UnsupportedInputsError, UnsupportedGraphError: the backend cannot run.
        """
        if reason := REGISTRY[backend].unavailable(self.bench.device):
            raise kernels.BackendUnavailableError(reason)
        if reason := REGISTRY[backend].unsupported(dtype, self.head_dim):
            raise UnsupportedInputsError(reason)
        inputs = {"dtype": dtype, "head_dim": self.head_dim, "num_heads": self.heads}
        inputs["out_dtype"] = written_dtype(dtype, out_dtype)
        return kernels.plan_attention(self.bench.pattern, backend=backend, device=self.bench.device, **inputs)

    def expected(self, dtype: torch.dtype, checked_backend: str) -> Expected:
        """Logits in a precision by plain modules, with an attention other than `checked_backend`'s."""
        small = self.bench.loaded.meta.num_edges * self.dim <= REFERENCE_ELEMENTS
        slow = [name for name in FAST_REFERENCES if name != checked_backend]
        backend = "reference" if small else slow[0]
        if (dtype, backend) not in self._expected:
            model = self.model(dtype)
            try:
                attention = cast(self.plan(backend, torch.float32, dtype), torch.float32)
                self._expected[dtype, backend] = Expected(model(self.bench.inputs(model, attention)), backend)
            except torch.OutOfMemoryError as error:
                text = f"the reference {backend}, not {checked_backend}, ran out of memory: {error}"
                raise MemoryError(text) from None
        return self._expected[dtype, backend]


class Planned:
    """The attention of one backend for one width, planned when its first cell is measured.

    Attributes:
        dtype: the type that it computes in.
        format_mib: memory of its format.
    """

    def __init__(self, width: Width, backend: str, model_dtype: torch.dtype) -> None:
        self.width, self.backend, self.model_dtype = width, backend, model_dtype
        self.dtype = attention_dtype(backend, model_dtype)
        self.format_mib = 0.0

    @cached_property
    def attention(self) -> Attention:
        before = memory_mib(self.width.bench.device)
        plan = self.width.plan(self.backend, self.dtype, self.model_dtype)
        self.format_mib = memory_mib(self.width.bench.device) - before
        return plan if self.dtype == self.model_dtype else cast(plan, self.dtype)


def attention_dtype(backend: str, model_dtype: torch.dtype) -> torch.dtype:
    """Type that a backend computes in: float32 if that is its own, else the model's if that has 16 bits."""
    own = input_dtype(backend)
    return own if torch.float32 in (own, model_dtype) else model_dtype


def written_dtype(dtype: torch.dtype, out_dtype: torch.dtype) -> torch.dtype:
    """Type that attention in `dtype` writes for a result in `out_dtype`: kernels write float32 or their own type."""
    return out_dtype if out_dtype == torch.float32 else dtype


def cast(attention: Attention, dtype: torch.dtype) -> Attention:
    """`attention` computed in `dtype`, for q, k and v and an output of any type."""

    def attend(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None, out_dtype: torch.dtype) -> Tensor:
        written = written_dtype(dtype, out_dtype)
        return attention(q.to(dtype), k.to(dtype), v.to(dtype), scale=scale, out_dtype=written).to(out_dtype)

    return attend


def memory_mib(device: torch.device) -> float:
    """Memory held by torch's allocator on a GPU; 0 on the CPU, where it is not counted."""
    return torch.cuda.memory_allocated(device) / 2**20 if device.type == "cuda" else 0.0


def tensors_mib(values: Iterable[Any]) -> float:
    return sum(value.nbytes for value in values if isinstance(value, Tensor)) / 2**20
