"""Times of attention kernels on a graph, without a model around them.

Inputs are normal random numbers. Every row of the output is compared with float64 before a time is kept. Each cell also
records its peak memory and the bytes of `bench.traffic`; rates are computed when drawing.
"""

from collections.abc import Callable, Iterable
from functools import cached_property

import torch

import kernels
from bench.checks import float64_attention, largest_row_error
from bench.records import Row
from bench.runner import Cell, GraphBench, UnsupportedInputsError, dtype_name, input_dtype
from bench.timers import Spread, l2_flusher, peak_memory_mib, reset_peak_memory, time_kernel
from bench.traffic import compulsory_bytes, gathered_bytes, gathered_columns
from configs.bench_schema import REORDERED, VARIANTS, BenchConfig
from kernels.backends import REGISTRY
from kernels.backends.fused3s_paper import PaperKernelSpec, launch
from kernels.formats.csr import CSRPattern
from kernels.formats.row_order import RowOrder
from kernels.runtime.jit import get_kernel

FINISHED = ("ok", "unsupported", "oom")  # statuses that are not measured again
# Largest relative error of a row, in norm: about two roundings of E in float16; rounded scores in float32.
ALLOWED_ERROR = {torch.float16: 2e-3, torch.float32: 1e-4}

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class KernelBench(GraphBench):
    """Every backend and variant at every head dimension."""

    bench = "kernels"

    @staticmethod
    def cells(config: BenchConfig) -> list[Cell]:
        """Cells ordered by dimension and then by type: only the inputs of one type are in memory."""
        kernel = config.kernel
        cells = [make_cell(name, dim, config) for dim in kernel.dims for name in kernel.backends]
        return sorted(cells, key=lambda cell: (kernel.dims.index(cell.dim), cell.dtype == "float32"))

    @cached_property
    def gathered_columns(self) -> int:
        return gathered_columns(self.pattern)

    @cached_property
    def flush(self) -> Callable[[], None] | None:
        return l2_flusher(self.device) if self.config.measure.l2 == "cold" else None

    _problem: "Problem | None" = None

    def problem(self, dim: int) -> "Problem":
        """Inputs of a head dimension; those of the one before are freed first."""
        if self._problem is None or self._problem.dim != dim:
            self._problem = None
            self._problem = Problem(self, dim)
        return self._problem

    def measure_cell(self, cell: Cell) -> list[Row]:
        refuse_impossible(cell, self.device)
        dtype, measure, problem = cell.torch_dtype, self.config.measure, self.problem(cell.dim)
        inputs, expected = problem.inputs(dtype), problem.expected
        flush, columns = self.flush, self.gathered_columns  # made before memory is looked at
        besides = self._bytes_besides(inputs)
        attention, order = plan(cell, self.pattern, self.device, measure.scale)

        def run() -> torch.Tensor:
            return attention(*inputs)

        error = largest_row_error(run(), expected)  # the first call may compile
        reset_peak_memory(self.device)
        run()
        memory = peak_memory_mib(self.device) - besides / 2**20
        checked = checked_columns(error, dtype)
        spread, timer = time_kernel(run, device=self.device, repeats=measure.repeats, flush=flush)
        note = "inputs, format and one run; torch's allocator"
        rows = [
            self.row(cell, **spread.columns(), **checked, note=f"{timer}; scale {measure.scale:g}"),
            self.row(cell, metric="peak_memory", unit="MiB", **Spread.of([memory]).columns(), **checked, note=note),
        ]
        if order:
            found = {"order_found": order.method, "status": "unchecked"}
            note = f"columns {order.columns_before} to {order.columns_after}; once per graph, on the CPU"
            spread = Spread.of([order.seconds * 1e3])
            rows.append(self.row(cell, metric="order_time", **spread.columns(), **found, note=note))
        out_dtype = getattr(torch, cell.out_dtype)
        traffic = {
            "gathered_bytes": gathered_bytes(columns, cell.dim, dtype),
            "compulsory_bytes": compulsory_bytes(self.pattern.shape[0], cell.dim, dtype, out_dtype),
        }
        for metric, size in traffic.items():
            rows.append(self.row(cell, metric=metric, unit="B", **Spread.of([size]).columns(), status="unchecked"))
        return rows

    def _bytes_besides(self, inputs: Iterable[torch.Tensor]) -> int:
        """GPU memory of the measurement itself; the peak of a CPU is of the whole process."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.memory_allocated(self.device) - sum(tensor.nbytes for tensor in inputs)


def make_cell(name: str, dim: int, config: BenchConfig) -> Cell:
    """The cell of an entry of `kernel.backends`."""
    backend, variant, order = name, "none", "none"
    if name in VARIANTS:
        backend, variant = "fused3s_paper", name
    elif name == REORDERED:
        backend, order = "fused3s", "auto"
    dtype, out_dtype = dtype_name(input_dtype(backend)), config.kernel.out_dtype
    return Cell(dim, backend, dtype, out_dtype, "kernel", variant=variant, order=order, l2=config.measure.l2)


class Problem:
    """Inputs of one head dimension on a graph and their correct output, made when the first cell needs them.

    All backends get the same numbers. float16 holds them exactly, so that one reference serves all types.
    """

    def __init__(self, bench: KernelBench, dim: int) -> None:
        self.bench, self.dim = bench, dim
        self._inputs: tuple[torch.Tensor, ...] = ()

    def inputs(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """q, k and v: [N, d]. Those of another type are dropped."""
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
            raise MemoryError(f"the float64 reference, not the backend, ran out of memory: {text}") from None


def checked_columns(error: float, dtype: torch.dtype) -> dict[str, str | float]:
    """Columns status, reason and relative_error of an output, from its `largest_row_error`."""
    allowed = ALLOWED_ERROR[dtype]
    if error <= allowed:
        return {"status": "ok", "relative_error": error}
    reason = f"relative error {error:.1e} of a row, allowed {allowed:.1e}"  # NaN is wrong too
    return {"status": "wrong", "reason": reason, "relative_error": error}


def refuse_impossible(cell: Cell, device: torch.device) -> None:
    """Raise a BackendUnavailableError or UnsupportedInputsError if the backend cannot run the cell on the device."""
    backend = REGISTRY[cell.backend]
    if reason := backend.unavailable(device):
        raise kernels.BackendUnavailableError(reason)
    if reason := backend.unsupported(cell.torch_dtype, cell.dim):
        raise UnsupportedInputsError(reason)
    if cell.out_dtype not in ("float32", cell.dtype):
        raise UnsupportedInputsError(f"it computes in {cell.dtype}, and kernel.out_dtype is {cell.out_dtype}")


def plan(cell: Cell, pattern: CSRPattern, device: torch.device, scale: float) -> tuple[Attention, RowOrder | None]:
    """The kernel of a cell with its sparse format built, and the order of its rows. The first call may compile.

    Raises:
        UnsupportedGraphError: the backend does not take this graph.
    """
    out_dtype = getattr(torch, cell.out_dtype)
    if cell.variant != "none":
        bsb = kernels.BSB.from_graph(pattern, device=device)
        spec = PaperKernelSpec(cell.torch_dtype, out_dtype, cell.dim, **VARIANTS[cell.variant])
        get_kernel(spec, device.index)
        return lambda q, k, v: launch(spec, bsb, q[:, None], k[:, None], v[:, None], scale)[:, 0], None
    inputs = {"dtype": cell.torch_dtype, "head_dim": cell.dim, "out_dtype": out_dtype}
    planned = kernels.plan_attention(pattern, backend=cell.backend, device=device, reorder=cell.order, **inputs)
    return lambda q, k, v: planned(q, k, v, scale=scale, out_dtype=out_dtype), planned.order
