"""Measuring attention kernels on one graph: every cell, a back end at a head dimension, becomes rows of the CSV.

The inputs are normal random numbers. A cell's output is compared with float64, every row, before its time is kept. What
a back end cannot do, and whatever goes wrong in it, is a row with a status and a reason.
"""

import gc
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

import data
import kernels
from configs.bench_schema import VARIANTS, BenchConfig
from kernels.backends import REGISTRY
from kernels.backends.fused3s_paper import PaperKernelSpec, launch
from kernels.backends.reference import edge_softmax_attention
from kernels.jit import get_kernel
from results.measure import Spread, peak_memory_mib, reset_peak_memory, time_kernel
from results.provenance import Provenance
from results.records import Row

# The back ends that compute in float32 get float32, as in the paper: 16-bit inputs they would only convert, or (pyg)
# round every intermediate result. All others get float16.
FLOAT32 = ("csr_unfused", "dfgnn_hyper", "dfgnn_tiling", "dgl", "pyg", "reference")
OUT_DTYPE = torch.float32
# Largest relative error of a row, in norm: about two roundings of E in float16; rounded scores in float32.
ALLOWED_ERROR = {torch.float16: 2e-3, torch.float32: 1e-4}
BUILDS = 11  # the first one warms up
ROWS_AT_A_TIME = 1 << 16

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

    @property
    def dtype(self) -> torch.dtype:
        return torch.float32 if self.backend in FLOAT32 else torch.float16


def finished_cells(rows: Iterable[Row]) -> set[CellKey]:
    """Keys of the cells that need not be measured again: they have a good time, or never will have one."""
    return {
        (r.dataset, r.data_sha256, r.dim, r.dtype, r.out_dtype, r.backend, r.device, r.config_sha)
        for r in rows
        if (r.scope, r.metric) == ("kernel", "time") and r.status in ("ok", "unsupported")
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
        cells = [Cell(backend, dim) for dim in kernel.dims for backend in kernel.backends]
        return sorted(cells, key=lambda cell: (kernel.dims.index(cell.dim), cell.dtype == torch.float32))

    def measure(self, finished: Collection[CellKey]) -> Iterator[tuple[Cell, list[Row]]]:
        """Each cell with its rows as soon as they are measured, the kernel's time first; none if it is `finished`."""
        problem = None
        for cell in self.cells():
            row = self._row_of(cell)
            key = (row["dataset"], row["data_sha256"], cell.dim, row["dtype"], row["out_dtype"], cell.backend)
            if (*key, row["device"], row["config_sha"]) in finished:
                yield cell, []
                continue
            if problem is None or (problem.dim, problem.dtype) != (cell.dim, cell.dtype):
                problem = None  # frees the inputs before others are made
                problem = Problem(self.loaded.graph, cell.dim, cell.dtype, self.config.measure.scale, self.device)
            yield cell, self._measure_cell(cell, problem)
            gc.collect()
            if self.device.type == "cuda":
                self._free_gpu(cell)

    def _measure_cell(self, cell: Cell, problem: "Problem") -> list[Row]:
        try:
            return self._measured_rows(cell, problem)
        except Exception as error:  # whatever it is, the other cells go on
            status, reason = classify(error)
        numbers = {"value": None, "p10": None, "p90": None, "repeats": 0}
        failed = {"scope": "kernel", "metric": "time", "unit": "ms", "status": status, "reason": reason}
        return [Row(**self._row_of(cell), **numbers, **failed)]

    def _free_gpu(self, cell: Cell) -> None:
        try:
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # CuPy and cuSPARSE allocate beside torch
        except RuntimeError as error:
            raise DeviceLostError(
                f"{self.environment.device} cannot be used any more after {cell.backend} on {self.loaded.meta.name} "
                f"(dim {cell.dim}): {str(error).partition(chr(10))[0]}\n"
                "to measure the rest, run again without that back end (kernel.backends) or graph (data.names)"
            ) from error

    def _measured_rows(self, cell: Cell, problem: "Problem") -> list[Row]:
        refuse_impossible(cell, self.device)
        expected = problem.expected
        attention = plan(cell, self.loaded.graph, self.device, problem.scale)

        def run() -> torch.Tensor:
            return attention(*problem.inputs)

        error = largest_row_error(run(), expected)  # the first call may compile
        reset_peak_memory(self.device)
        run()
        memory = Spread.of([peak_memory_mib(self.device)])
        allowed = ALLOWED_ERROR[cell.dtype]
        checked: dict[str, Any] = {"status": "ok", "relative_error": error}
        if not error <= allowed:  # NaN is wrong too
            checked |= {"status": "wrong", "reason": f"relative error {error:.1e} of a row, allowed {allowed:.1e}"}

        def row(scope: str, metric: str, unit: str, spread: Spread, note: str, **check: Any) -> Row:
            numbers = {"value": spread.median, "p10": spread.p10, "p90": spread.p90, "repeats": spread.repeats}
            return Row(**self._row_of(cell), scope=scope, metric=metric, unit=unit, note=note, **numbers, **check)

        spread, how = time_kernel(run, device=self.device, repeats=self.config.measure.repeats)
        rows = [
            row("kernel", "time", "ms", spread, f"{how}; L2 warm; scale {problem.scale:g}", **checked),
            row("kernel", "peak_memory", "MiB", memory, "inputs, format and one run; torch's allocator", **checked),
        ]
        if cell.backend == "fused3s_paper":
            build = time_builds(self.loaded.graph, self.device)
            note = "CSR on the device to BSB, tile (16, 8); wall clock, synchronised"
            rows.append(row("build", "time", "ms", build, note, status="unchecked"))
        return rows

    def _row_of(self, cell: Cell) -> dict[str, Any]:
        """The columns that all rows of a cell share."""
        meta = self.loaded.meta
        return {
            **self.environment.model_dump(),
            "dataset": meta.name,
            "data_sha256": meta.sha256,
            "data_source": meta.source,
            "nodes": meta.num_nodes,
            "nnz": meta.num_edges,
            "graphs": meta.num_graphs,
            "dim": cell.dim,
            "heads": 1,
            "blocks": 0,
            "dtype": str(cell.dtype).removeprefix("torch."),
            "out_dtype": str(OUT_DTYPE).removeprefix("torch."),
            "backend": cell.backend,
            "config": self.config_path,
            "config_sha": self.config.measure.sha(),
        }


@dataclass(frozen=True, eq=False)
class Problem:
    """Inputs on a graph and their right output, made when the first cell needs them."""

    graph: Any
    dim: int
    dtype: torch.dtype
    scale: float
    device: torch.device

    @cached_property
    def inputs(self) -> tuple[torch.Tensor, ...]:
        """q, k and v: [N, d]."""
        generator = torch.Generator(self.device).manual_seed(0)
        shape = (self.graph.num_nodes(), self.dim)
        return tuple(
            torch.randn(shape, generator=generator, device=self.device).to(self.dtype) for _ in ("q", "k", "v")
        )

    @cached_property
    def expected(self) -> torch.Tensor:
        """[N, d] float64 on the CPU, where it takes no memory from the back ends."""
        try:
            return self._reference(self.device)
        except torch.OutOfMemoryError:
            pass  # out of the handler first: the error holds what was allocated
        gc.collect()
        return self._reference(torch.device("cpu"))

    def _reference(self, device: torch.device) -> torch.Tensor:
        key, query = (ends.to(device).long() for ends in self.graph.edges())
        q, k, v = (tensor.to(device)[:, None] for tensor in self.inputs)
        return edge_softmax_attention(q, k, v, query, key, self.scale)[:, 0].cpu()


def refuse_impossible(cell: Cell, device: torch.device) -> None:
    """Raise if the cell's back end cannot run on the device (BackendUnavailableError), or not in the cell's dimension
    and type (UnsupportedInputsError)."""
    backend = REGISTRY["fused3s_paper" if cell.backend in VARIANTS else cell.backend]
    if reason := backend.unavailable(device):
        raise kernels.BackendUnavailableError(reason)
    if reason := backend.unsupported(cell.dtype, cell.dim):
        raise UnsupportedInputsError(reason)


def plan(cell: Cell, graph: Any, device: torch.device, scale: float) -> Attention:
    """The cell's kernel with its sparse format built.

    Raises:
        UnsupportedGraphError: it cannot take this graph.
    """
    if cell.backend in VARIANTS:
        bsb = kernels.BSB.from_graph(graph, device=device)
        spec = PaperKernelSpec(cell.dtype, OUT_DTYPE, cell.dim, **VARIANTS[cell.backend])
        get_kernel(spec, device.index)
        return lambda q, k, v: launch(spec, bsb, q[:, None], k[:, None], v[:, None], scale)[:, 0]
    planned = kernels.plan_attention(graph, backend=cell.backend, device=device, dtype=cell.dtype, head_dim=cell.dim)
    return lambda q, k, v: planned(q, k, v, scale=scale, out_dtype=OUT_DTYPE)


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


def largest_row_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest norm of a row's difference over the norm of the row; a row that should be 0 must be 0. NaN for a NaN."""
    errors = []
    for got, right in zip(output.split(ROWS_AT_A_TIME), expected.split(ROWS_AT_A_TIME), strict=True):
        right = right.to(got.device)
        difference, size = (got.double() - right).norm(dim=-1), right.norm(dim=-1)
        error = torch.where(size > 0, difference / size, torch.where(difference == 0, 0.0, torch.inf))
        errors.append(error.max())
    return torch.stack(errors).max().item() if errors else 0.0


def time_builds(graph: Any, device: torch.device) -> Spread:
    """Milliseconds to build BSB from CSR arrays that are on the device."""
    indptr, indices, _ = (array.to(device) for array in graph.adj_tensors("csc"))
    milliseconds = []
    for _ in range(BUILDS):
        start = time.perf_counter()
        kernels.BSB.from_csr(indptr, indices)
        if device.type == "cuda":
            torch.cuda.synchronize()
        milliseconds.append((time.perf_counter() - start) * 1e3)
    return Spread.of(milliseconds[1:])
