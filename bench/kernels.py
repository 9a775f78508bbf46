"""Times of attention kernels on a graph, without a model around them.

    plan     launch        l2     interval
    fixed    back_to_back  warm   up to ten runs in a row, which may overlap: `bench.timers.time_kernel`
    fixed    isolated      warm   one run, the GPU idle in front of it: `bench.timers.time_isolated`
    fixed    isolated      cold   the same with L2 evicted
    rebuilt  none          none   format, schedule and run at each call, from the CSR arrays on the GPU: a mask that
                                  changes at every call. CUDA events around each call, so that the host counts: it
                                  queues the steps one by one and waits for sizes in between

A row of plan "fixed" contains neither its format nor the binding of edge data to the plan. Inputs and edge data are
normal random numbers. Every row of the output is compared with float64 before a time is kept. With a fixed plan each
cell also records its peak memory and the bytes of `bench.traffic`; rates are computed when drawing.
"""

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

import kernels
from baselines import REGISTRY
from baselines.flex_attention import graph_block_mask
from baselines.fused3s_paper import launch, paper_instance
from bench.checks import float64_attention, largest_row_error
from bench.edge_inputs import EdgeInputs
from bench.records import Bench, Row
from bench.runner import Cell, GraphBench, UnsupportedInputsError, classify, dtype_name, input_dtype
from bench.timers import (
    LONG_REPEATS,
    Spread,
    l2_flusher,
    pass_times,
    peak_memory_mib,
    reset_peak_memory,
    time_isolated,
    time_kernel,
    time_passes,
    time_rounds,
)
from bench.traffic import compulsory_bytes, gathered_bytes, gathered_columns
from configs.bench_schema import NO_EDGES, REORDERED, SWITCHES, BenchConfig, Shape, edge_kind
from kernels.formats.csr import CSRPattern
from kernels.formats.edges import canonical_csr, rows_of_edges
from kernels.formats.row_order import RowOrder
from kernels.runtime.cuda_graph import CaptureError
from kernels.runtime.jit import get_kernel

FINISHED = ("ok", "unsupported", "oom")  # statuses that are not measured again
# Largest relative error of a row, in norm: about two roundings of E in float16; rounded scores in float32.
ALLOWED_ERROR = {torch.float16: 2e-3, torch.float32: 1e-4}

ANEMOI = "anemoi"  # reads an edge tensor [nnz, H, d], which is made before timing

REBUILT_MS = 1000.0  # a call that builds its format is repeated for so long, but at least LONG_REPEATS times

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


class KernelBench(GraphBench):
    """Every backend and variant with every shape of heads and every kind of edge data."""

    @property
    def bench(self) -> Bench:
        return self.config.kernel.bench

    @staticmethod
    def cells(config: BenchConfig) -> list[Cell]:
        """Cells ordered by shape, edge data and then type: only the inputs of one type are in memory."""
        kernel = config.kernel
        as_planned = {"fixed": {}, "rebuilt": {"plan": "rebuilt", "launch": "none", "l2": "none"}}
        cells = []
        for shape in kernel.head_shapes:
            for edges in kernel.edges:
                same_inputs = [make_cell(name, shape, edges, config) for name in kernel.backends]
                cells += sorted(same_inputs, key=lambda cell: cell.dtype == "float32")
        return [replace(cell, **as_planned[plan]) for cell in cells for plan in kernel.plans]

    @cached_property
    def gathered_columns(self) -> int:
        return gathered_columns(self.pattern)

    @cached_property
    def flush(self) -> Callable[[], None]:
        return l2_flusher(self.device)

    @cached_property
    def empty_ms(self) -> float:
        """Isolated time of a kernel that adds to one number: the part of every isolated time that is no work."""
        number = torch.zeros(1, device=self.device)
        options = {"device": self.device, "repeats": self.config.measure.repeats, "expected_ms": 0.0}
        times, _ = time_isolated(lambda: number.add_(1), **options, before={"warm": lambda: None})
        return times["warm"].median

    _problem: "Problem | None" = None

    def problem(self, cell: Cell) -> "Problem":
        """Inputs of a shape and a kind of edge data; those of the ones before are freed first."""
        shape = Shape(cell.heads, cell.dim)
        if self._problem is None or (self._problem.shape, self._problem.kind) != (shape, cell.edges):
            self._problem = None
            self._problem = Problem(self, shape, cell.edges)
        return self._problem

    def measure_cell(self, cell: Cell) -> list[Row]:
        refuse_impossible(cell, self.device)
        dtype, problem = cell.torch_dtype, self.problem(cell)
        inputs, expected = problem.inputs(dtype), problem.expected
        _ = self.flush, self.empty_ms, self.gathered_columns  # made before memory is looked at
        besides = self._bytes_besides(inputs)
        given = (cell, self.pattern, self.device, self.config.measure.scale_of(cell.dim))
        attention, order = plan(*given, problem.edges) if cell.plan == "fixed" else (replan(*given), None)

        def run() -> torch.Tensor:
            return attention(*inputs)

        error = largest_row_error(run(), expected)  # the first call may compile
        reset_peak_memory(self.device)
        run()
        memory = peak_memory_mib(self.device) - besides / 2**20
        checked = checked_columns(error, dtype)
        if cell.plan == "rebuilt":
            return [self._rebuilt_time(cell, run, checked)]
        rows = self._fixed_times(cell, run, checked)
        untimed = replace(cell, launch="none", plan="none")
        note = "inputs, format and one run; torch's allocator"
        rows.append(
            self.row(untimed, metric="peak_memory", unit="MiB", **Spread.of([memory]).columns(), **checked, note=note)
        )
        if order:
            found = {"order_found": order.method, "status": "unchecked"}
            note = f"columns {order.columns_before} to {order.columns_after}; once per graph, on the CPU"
            spread = Spread.of([order.seconds * 1e3])
            rows.append(self.row(untimed, metric="order_time", **spread.columns(), **found, note=note))
        out_dtype = getattr(torch, cell.out_dtype)
        width, of_edges = cell.heads * cell.dim, problem.edges.to(dtype).bytes_of_edges if problem.edges else 0
        traffic = {
            "gathered_bytes": gathered_bytes(self.gathered_columns, width, dtype),
            "compulsory_bytes": compulsory_bytes(self.pattern.shape[0], width, dtype, out_dtype) + of_edges,
        }
        for metric, size in traffic.items():
            rows.append(self.row(untimed, metric=metric, unit="B", **Spread.of([size]).columns(), status="unchecked"))
        return rows

    def _fixed_times(self, cell: Cell, run: Callable[[], torch.Tensor], checked: dict[str, Any]) -> list[Row]:
        """Back to back, then isolated with L2 warm and cold."""
        measure = self.config.measure
        spread, timer = time_kernel(run, device=self.device, repeats=measure.repeats)
        scale = f"scale {measure.scale_of(cell.dim):g}"
        rows = [self.row(cell, **spread.columns(), **checked, note=f"{timer}; {scale}")]
        options = {"device": self.device, "repeats": measure.repeats, "expected_ms": spread.median}
        cells = {l2: replace(cell, launch="isolated", l2=l2) for l2 in ("warm", "cold")}
        try:
            isolated, timer = time_isolated(run, **options, before={"warm": lambda: None, "cold": self.flush})
        except (CaptureError, torch.OutOfMemoryError) as error:  # the time back to back stands
            status, reason = classify(error)
            return rows + [self.row(one, status=status, reason=reason) for one in cells.values()]
        note = f"{timer}; an empty kernel takes {self.empty_ms * 1e3:.1f} us; {scale}"
        return rows + [self.row(cells[l2], **spread.columns(), **checked, note=note) for l2, spread in isolated.items()]

    def _rebuilt_time(self, cell: Cell, run: Callable[[], torch.Tensor], checked: dict[str, Any]) -> Row:
        measure = self.config.measure
        options = {"run": run, "device": self.device}
        once = time_passes(**options, repeats=2).p10
        repeats = min(measure.repeats, max(LONG_REPEATS, int(REBUILT_MS / once)))
        rounds = time_rounds(lambda: pass_times(**options, repeats=repeats))
        timer = "CUDA events around each call" if self.device.type == "cuda" else "clock"
        notes = [timer, f"scale {measure.scale_of(cell.dim):g}", rounds.warning]
        return self.row(cell, **rounds.columns(), **checked, note="; ".join(filter(None, notes)))

    def _bytes_besides(self, inputs: Iterable[torch.Tensor]) -> int:
        """GPU memory of the measurement itself; the peak of a CPU is of the whole process."""
        if self.device.type != "cuda":
            return 0
        return torch.cuda.memory_allocated(self.device) - sum(tensor.nbytes for tensor in inputs)


def make_cell(name: str, shape: Shape, edges: str, config: BenchConfig) -> Cell:
    """The cell of an entry of `kernel.backends` with a fixed plan."""
    backend, variant, order = name, "none", "none"
    if name in SWITCHES:
        backend, variant = "fused3s_paper", name
    elif name == REORDERED:
        backend, order = "fused3s", "auto"
    dtype, out_dtype = dtype_name(input_dtype(backend)), config.kernel.out_dtype
    out_dtype = dtype if out_dtype == "input" else out_dtype
    options = {"variant": variant, "order": order, "launch": "back_to_back", "plan": "fixed", "l2": "warm"}
    return Cell(shape.dim, backend, dtype, out_dtype, "kernel", heads=shape.heads, edges=edges, **options)


class Problem:
    """Inputs of one shape and kind of edge data on a graph and their correct output, made when the first cell needs
    them.

    All backends get the same numbers. float16 holds them exactly, so that one reference serves all types.
    """

    def __init__(self, bench: KernelBench, shape: Shape, kind: str) -> None:
        self.bench, self.shape, self.kind = bench, shape, kind
        self._inputs: tuple[torch.Tensor, ...] = ()

    def inputs(self, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
        """q, k and v: [N, H, d]. Those of another type are dropped."""
        if not self._inputs:
            device = self.bench.device
            generator = torch.Generator(device).manual_seed(0)
            shape = (self.bench.pattern.shape[0], *self.shape)
            self._inputs = tuple(torch.randn(shape, generator=generator, device=device).half() for _ in ("q", "k", "v"))
        if self._inputs[0].dtype != dtype:
            tensors, self._inputs = list(self._inputs), ()
            for nth in range(len(tensors)):  # one at a time: both types of all three may not fit
                tensors[nth] = tensors[nth].to(dtype)
            self._inputs = tuple(tensors)
        return self._inputs

    @cached_property
    def edges(self) -> EdgeInputs | None:
        """Edge data in the order of the pattern."""
        return EdgeInputs.random(self.kind, self.shape, self.bench.pattern.indices.numel(), self.bench.device)

    @cached_property
    def expected(self) -> torch.Tensor:
        """[N, H, d] float32, computed in float64."""
        pattern, scale = self.bench.pattern, self.bench.config.measure.scale_of(self.shape.dim)
        try:
            return float64_attention(*self._inputs, pattern.indptr, pattern.indices, scale, self.edges)
        except torch.OutOfMemoryError as error:
            text = str(error).partition("\n")[0]
            raise MemoryError(f"the float64 reference, not the backend, ran out of memory: {text}") from None


def checked_columns(error: float, dtype: torch.dtype, allowed: float | None = None) -> dict[str, str | float]:
    """Columns status, reason and relative_error of an output, from its `largest_row_error`; None: that of the type."""
    allowed = ALLOWED_ERROR[dtype] if allowed is None else allowed
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
    if cell.edges != NO_EDGES:
        if cell.variant != "none" or not backend.takes_edges:
            raise UnsupportedInputsError("it takes no edge data")
        if cell.backend == ANEMOI and edge_kind(cell.edges)[0] != "low_rank":
            raise UnsupportedInputsError("of edge data it takes features alone")
        if cell.plan == "rebuilt":
            raise UnsupportedInputsError("edge data is bound to a plan that is kept")
    if cell.plan == "rebuilt" and cell.order != "none":
        raise UnsupportedInputsError("rows are ordered once per graph, on the CPU: too slow for each call")


def plan(
    cell: Cell, pattern: CSRPattern, device: torch.device, scale: float, edges: EdgeInputs | None = None
) -> tuple[Attention, RowOrder | None]:
    """The kernel of a cell with its sparse format built and edge data bound to it, and the order of its rows. The first
    call may compile.

    Raises:
        UnsupportedGraphError: the backend does not take this graph.
    """
    out_dtype = getattr(torch, cell.out_dtype)
    if cell.variant != "none":
        bsb = kernels.BSB.from_graph(pattern, device=device)
        instance = paper_instance(cell.torch_dtype, out_dtype, cell.dim, **SWITCHES[cell.variant])
        get_kernel(instance, device.index)
        return lambda q, k, v: launch(instance, bsb, q, k, v, scale), None
    inputs = {"dtype": cell.torch_dtype, "head_dim": cell.dim, "num_heads": cell.heads, "out_dtype": out_dtype}
    inputs |= {"edge_data": True} if edges else {}
    planned = kernels.plan_attention(pattern, backend=cell.backend, device=device, reorder=cell.order, **inputs)
    bound = edges.to(cell.torch_dtype).bind(planned) if edges else {}
    if bound and cell.backend == ANEMOI:
        REGISTRY[ANEMOI].keep_edge_tensor(bound["edges"])
    return lambda q, k, v: planned(q, k, v, scale=scale, out_dtype=out_dtype, **bound), planned.order


def replan(cell: Cell, pattern: CSRPattern, device: torch.device, scale: float) -> Attention:
    """The kernel of a cell with the format and the schedule built anew at each call; without edge data.

    `flex_attention` builds its block mask anew; its compiled kernel, which takes any mask of this shape, stays.
    """
    if cell.backend != "flex_attention":
        return lambda q, k, v: plan(cell, pattern, device, scale)[0](q, k, v)
    out_dtype = getattr(torch, cell.out_dtype)
    planned = kernels.plan_attention(pattern, backend=cell.backend, device=device)

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        indptr, col = canonical_csr(pattern, device)
        mask = graph_block_mask(rows_of_edges(indptr), col.long(), pattern.shape)
        return replace(planned, data=replace(planned.data, block_mask=mask))(q, k, v, scale=scale, out_dtype=out_dtype)

    return attend
