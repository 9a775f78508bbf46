"""Measuring attention kernels on one graph: every cell, a back end at a head dimension, becomes rows of the CSV.

The inputs are normal random numbers. A cell's output is compared with float64, every row, before its time is kept. What
a back end cannot do, and whatever goes wrong in it, is a row with a status and a reason. Beside the time stand the
memory of a run and the bytes of `report.traffic`; rates and shares of a ceiling are computed when drawing.
"""

import gc
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

import data
import kernels
from bench.checks import float64_attention, largest_row_error
from bench.provenance import Provenance
from bench.records import Row, graph_columns
from bench.timers import NOT_MEASURED, Spread, l2_flusher, peak_memory_mib, reset_peak_memory, time_kernel
from configs.bench_schema import REORDERED, VARIANTS, BenchConfig
from kernels.backends import REGISTRY
from kernels.backends.fused3s_paper import PaperKernelSpec, launch
from kernels.formats.csr import CSRPattern
from kernels.formats.row_order import RowOrder
from kernels.runtime.jit import get_kernel
from report.traffic import compulsory_bytes, gathered_bytes, gathered_columns

# The back ends that compute in float32 get float32, as in the paper: 16-bit inputs they would only convert, or (pyg)
# round every intermediate result. All others get float16.
FLOAT32 = ("csr_unfused", "dfgnn_hyper", "dfgnn_tiling", "dgl", "pyg", "reference")
# Largest relative error of a row, in norm: about two roundings of E in float16; rounded scores in float32.
ALLOWED_ERROR = {torch.float16: 2e-3, torch.float32: 1e-4}
# Warm and cold times are metrics of their own, so that nothing compares one with the other by mistake.
TIME_METRIC = {"warm": "time", "cold": "time_l2_cold"}

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
Failure = tuple[str, str]  # status and reason
CellKey = tuple[str | int, ...]


class DeviceLostError(RuntimeError):
    """A kernel left the GPU in a state in which this process cannot use it."""


class UnsupportedInputsError(ValueError):
    """A back end does not take the type or the head dimension of a cell."""


@dataclass(frozen=True)
class Cell:
    """One back end, or variant of the paper's kernel, at one head dimension."""

    backend: str
    dim: int
    out_dtype: torch.dtype

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.backend in FLOAT32 else torch.float16


def finished_cells(rows: Iterable[Row]) -> set[CellKey]:
    """Keys of the cells that need not be measured again: they have a good time, or never will have one."""
    return {
        (r.dataset, r.data_sha256, r.dim, r.dtype, r.out_dtype, r.backend, r.device, r.config_sha)
        for r in rows
        if r.scope == "kernel" and r.metric in TIME_METRIC.values() and r.status in ("ok", "unsupported", "oom")
    }


@dataclass(frozen=True, eq=False)
class GraphBench:
    """All cells of a configuration on one graph."""

    loaded: data.LoadedGraph
    config: BenchConfig
    config_path: str
    environment: Provenance
    device: torch.device

    def cells(self) -> list[Cell]:
        """By dimension, and then by type, so that only the inputs of one type are in memory at a time."""
        kernel = self.config.kernel
        out_dtype = getattr(torch, kernel.out_dtype)
        cells = [Cell(backend, dim, out_dtype) for dim in kernel.dims for backend in kernel.backends]
        return sorted(cells, key=lambda cell: (kernel.dims.index(cell.dim), cell.dtype == torch.float32))

    @cached_property
    def pattern(self) -> CSRPattern:
        """The graph on the device, from which every back end builds its format."""
        return pattern_on(self.device, self.loaded)

    @cached_property
    def gathered_columns(self) -> int:
        return gathered_columns(self.pattern)

    @cached_property
    def flush(self) -> Callable[[], None] | None:
        return l2_flusher(self.device) if self.config.measure.l2 == "cold" else None

    def measure(self, finished: Collection[CellKey]) -> Iterator[tuple[Cell, list[Row]]]:
        """Each cell with its rows as soon as they are measured, the kernel's time first; none if it is `finished`."""
        problem = None
        for cell in self.cells():
            row = self.columns_of(cell)
            key = (row["dataset"], row["data_sha256"], cell.dim, row["dtype"], row["out_dtype"], cell.backend)
            if (*key, row["device"], row["config_sha"]) in finished:
                yield cell, []
                continue
            if problem is None or problem.dim != cell.dim:
                problem = None  # frees the inputs before others are made
                problem = Problem(self, cell.dim)
            held = torch.cuda.memory_allocated() if self.device.type == "cuda" else 0
            yield cell, self._measure_cell(cell, problem)
            if self.device.type == "cuda":
                after = f"{cell.backend} on {self.loaded.meta.name} (dim {cell.dim})"
                culprits = "that back end (kernel.backends) or graph (data.names)"
                free_gpu(self.environment.device, after, culprits, held)

    def _measure_cell(self, cell: Cell, problem: "Problem") -> list[Row]:
        try:
            return self._measured_rows(cell, problem)
        except Exception as error:  # whatever it is, the other cells go on
            status, reason = classify(error)
        failed = {"metric": self._time_metric, "unit": "ms", "status": status, "reason": reason}
        return [Row(**self.columns_of(cell), **NOT_MEASURED, **failed)]

    @property
    def _time_metric(self) -> str:
        return TIME_METRIC[self.config.measure.l2]

    def _measured_rows(self, cell: Cell, problem: "Problem") -> list[Row]:
        refuse_impossible(cell, self.device)
        inputs, expected = problem.inputs(cell.dtype), problem.expected
        measure = self.config.measure
        flush, columns = self.flush, self.gathered_columns  # made before memory is looked at
        own = self._bytes_held_besides(inputs)
        attention, order = plan(cell, self.pattern, self.device, measure.scale)

        def run() -> torch.Tensor:
            return attention(*inputs)

        error = largest_row_error(run(), expected)  # the first call may compile
        reset_peak_memory(self.device)
        run()
        memory = peak_memory_mib(self.device) - own / 2**20
        checked = checked_columns(error, cell.dtype)

        def row(metric: str, unit: str, spread: Spread, note: str, check: dict[str, Any]) -> Row:
            return Row(**self.columns_of(cell), metric=metric, unit=unit, note=note, **spread.columns(), **check)

        spread, how = time_kernel(run, device=self.device, repeats=measure.repeats, flush=flush)
        note = f"{how}; L2 {measure.l2}; scale {measure.scale:g}"
        rows = [
            row(self._time_metric, "ms", spread, note, checked),
            row("peak_memory", "MiB", Spread.of([memory]), "inputs, format and one run; torch's allocator", checked),
        ]
        traffic = {
            "gathered_bytes": gathered_bytes(columns, cell.dim, cell.dtype),
            "compulsory_bytes": compulsory_bytes(self.pattern.shape[0], cell.dim, cell.dtype, cell.out_dtype),
        }
        unchecked = {"status": "unchecked"}
        if order:
            about = f"{order.method}; columns {order.columns_before} to {order.columns_after}; once a graph, on the CPU"
            rows.append(row("order_time", "ms", Spread.of([order.seconds * 1e3]), about, unchecked))
        rows += [row(key, "B", Spread.of([x]), "report/traffic.py", unchecked) for key, x in traffic.items()]
        return rows

    def _bytes_held_besides(self, inputs: Iterable[torch.Tensor]) -> int:
        """What the measurement itself keeps on a GPU; a CPU's peak is of the whole process."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.memory_allocated(self.device) - sum(tensor.nbytes for tensor in inputs)

    def columns_of(self, cell: Cell) -> dict[str, Any]:
        """The columns that all rows of a cell share."""
        return {
            **self.environment.model_dump(),
            **graph_columns(self.loaded.meta),
            "dim": cell.dim,
            "heads": 1,
            "blocks": 0,
            "dtype": str(cell.dtype).removeprefix("torch."),
            "out_dtype": str(cell.out_dtype).removeprefix("torch."),
            "backend": cell.backend,
            "scope": "kernel",
            "config": self.config_path,
            "config_sha": self.config.measure.sha(),
        }


@dataclass(eq=False)
class Problem:
    """Inputs of one head dimension on a graph and their right output, made when the first cell needs them.

    All back ends get the same numbers, which float16 holds exactly, so that one reference serves all types.
    """

    bench: GraphBench
    dim: int
    _inputs: tuple[torch.Tensor, ...] = field(default=(), init=False)

    def inputs(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """q, k and v: [N, d]; those of another type are dropped."""
        if not self._inputs:
            device = self.bench.device
            generator = torch.Generator(device).manual_seed(0)
            shape = (self.bench.pattern.shape[0], self.dim)
            self._inputs = tuple(torch.randn(shape, generator=generator, device=device).half() for _ in ("q", "k", "v"))
        if self._inputs[0].dtype != dtype:
            self._inputs = tuple(tensor.to(dtype) for tensor in self._inputs)
        return self._inputs

    @cached_property
    def expected(self) -> torch.Tensor:
        """[N, d] float32, computed in float64."""
        pattern, scale = self.bench.pattern, self.bench.config.measure.scale
        try:
            return float64_attention(*self._inputs, pattern.indptr, pattern.indices, scale)
        except torch.OutOfMemoryError as error:
            text = str(error).partition("\n")[0]
            raise MemoryError(f"the float64 reference, not the back end, ran out of memory: {text}") from None


def checked_columns(error: float, dtype: torch.dtype) -> dict[str, Any]:
    """The columns that say whether an output of a cell of type `dtype` is right, from its `largest_row_error`."""
    allowed = ALLOWED_ERROR[dtype]
    if error <= allowed:
        return {"status": "ok", "relative_error": error}
    reason = f"relative error {error:.1e} of a row, allowed {allowed:.1e}"  # NaN is wrong too
    return {"status": "wrong", "reason": reason, "relative_error": error}


def pattern_on(device: torch.device, loaded: data.LoadedGraph) -> CSRPattern:
    """A graph as CSR arrays on a device, offsets in int64."""
    if device.type == "cuda" and "cupy" in sys.modules:  # a stand-in is made with CuPy, which keeps the memory
        sys.modules["cupy"].get_default_memory_pool().free_all_blocks()
    indptr, indices, _ = (array.to(device) for array in loaded.graph.adj_tensors("csc"))
    return CSRPattern(indptr.long(), indices, (loaded.meta.num_nodes, loaded.meta.num_nodes))


def free_gpu(device_name: str, after: str, culprits: str, held: int | None = None) -> None:
    """Give the GPU's unused memory back between two cells: CuPy and cuSPARSE allocate beside torch.

    Args:
        after: which cell was measured.
        culprits: what to leave out if that broke the GPU.
        held: bytes that tensors took before the cell; None where it may leave some.

    Raises:
        DeviceLostError: it did.
    """
    try:
        torch.cuda.synchronize()
        if held is not None and torch.cuda.memory_allocated() > held:  # by a cycle of references, perhaps
            gc.collect()
        torch.cuda.empty_cache()
    except RuntimeError as error:
        raise DeviceLostError(
            f"{device_name} cannot be used any more after {after}: {str(error).partition(chr(10))[0]}\n"
            f"to measure the rest, run again without {culprits}"
        ) from error


def refuse_impossible(cell: Cell, device: torch.device) -> None:
    """Raise if the cell's back end cannot run on the device (BackendUnavailableError), or not in the cell's dimension
    and type (UnsupportedInputsError)."""
    varied = "fused3s_paper" if cell.backend in VARIANTS else "fused3s" if cell.backend == REORDERED else cell.backend
    backend = REGISTRY[varied]
    if reason := backend.unavailable(device):
        raise kernels.BackendUnavailableError(reason)
    if reason := backend.unsupported(cell.dtype, cell.dim):
        raise UnsupportedInputsError(reason)
    if cell.out_dtype not in (torch.float32, cell.dtype):
        raise UnsupportedInputsError(f"it computes in {cell.dtype}, and kernel.out_dtype is {cell.out_dtype}")


def plan(cell: Cell, pattern: CSRPattern, device: torch.device, scale: float) -> tuple[Attention, RowOrder | None]:
    """The cell's kernel with its sparse format built, the first call may compile; and the order that its rows got.

    Raises:
        UnsupportedGraphError: it cannot take this graph.
    """
    if cell.backend in VARIANTS:
        bsb = kernels.BSB.from_graph(pattern, device=device)
        spec = PaperKernelSpec(cell.dtype, cell.out_dtype, cell.dim, **VARIANTS[cell.backend])
        get_kernel(spec, device.index)
        return lambda q, k, v: launch(spec, bsb, q[:, None], k[:, None], v[:, None], scale)[:, 0], None
    backend, reorder = ("fused3s", "auto") if cell.backend == REORDERED else (cell.backend, "none")
    # Without the type, for which a kernel with an output of that type would be compiled now.
    planned = kernels.plan_attention(pattern, backend=backend, device=device, head_dim=cell.dim, reorder=reorder)
    return lambda q, k, v: planned(q, k, v, scale=scale, out_dtype=cell.out_dtype), planned.order


def classify(error: Exception) -> Failure:
    """The status of a cell that raised `error`, and the reason in one line."""
    text = " ".join(str(error).split())[:500] or type(error).__name__
    if isinstance(error, kernels.BackendUnavailableError):
        return "unavailable", text
    if isinstance(error, (kernels.UnsupportedGraphError, UnsupportedInputsError)):
        return "unsupported", text
    # torch and CuPy have a class each; cuSPARSE and compiled code only say so.
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError" or "out of memory" in text.lower():
        return "oom", text
    return "error", f"{type(error).__name__}: {text}"
