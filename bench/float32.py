"""Times of attention in float32 beside float16, forward and backward, with other kernels in float32 beside.

    backend       dtype    variant            pass
    fused3s       float16                     both
    fused3s       float32  highest, high      both: torch.get_float32_matmul_precision()
    dfgnn_tiling  float32                     forward, one head
    csr_unfused   float32                     forward

The backends of the configuration run by turns, all of a shape and pass, back to back with the L2 cache warm. Inputs are
normal random float32 numbers, rounded for float16. Errors are of the worst row, against float64 with the inputs that a
kernel got; for float32 "highest" the row `error_over_torch` has it as a multiple of that of plain torch in float32. A
forward pass of `fused3s` keeps the LSE.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

import kernels
from baselines import REGISTRY
from bench.checks import float64_attention, largest_row_error
from bench.gradients import float64_gradients, largest_gradient_error, torch_gradients
from bench.kernels import ALLOWED_ERROR, checked_columns
from bench.records import Row
from bench.runner import Cell, GraphBench, classify, dtype_name
from bench.timers import Spread, time_kernels_by_turns
from configs.bench_schema import BenchConfig, Shape
from kernels import BackendUnavailableError

FORWARD, BACKWARD = "forward", "backward"
HIGHEST, HIGH = "highest", "high"
OURS, PER_HEAD = "fused3s", "dfgnn_tiling"
TF32_ERROR = ALLOWED_ERROR[torch.float16]  # a fraction of 10 bits, as in float16


@dataclass(frozen=True)
class Kernel:
    """One kernel: backend, type of q, k and v, and float32 matmul precision ("none": no choice)."""

    backend: str
    dtype: torch.dtype
    precision: str = "none"


EXACT = Kernel(OURS, torch.float32, HIGHEST)
OURS_ALL = (EXACT, Kernel(OURS, torch.float32, HIGH), Kernel(OURS, torch.float16))
OTHERS = (Kernel(PER_HEAD, torch.float32), Kernel("csr_unfused", torch.float32))


class Float32Bench(GraphBench):
    """Both passes with every shape of heads; a cell has the rows of all kernels."""

    bench = "float32"

    @staticmethod
    def cells(config: BenchConfig) -> list[Cell]:
        float32 = dtype_name(torch.float32)
        options = {"variant": HIGHEST, "launch": "back_to_back", "plan": "fixed", "l2": "warm"}
        return [
            Cell(shape.dim, OURS, float32, float32, "kernel", heads=shape.heads, region=region, **options)
            for shape in config.kernel.head_shapes
            for region in (FORWARD, BACKWARD)
        ]

    def measure_cell(self, cell: Cell) -> list[Row]:
        problem = Problem(self, Shape(cell.heads, cell.dim), cell.region)
        names = self.config.kernel.backends
        runs, checked, failed = {}, {}, []
        for kernel in [kernel for kernel in problem.kernels if kernel.backend in names]:
            try:
                run = problem.run_of(kernel)
                checked[kernel] = problem.checked(kernel, run())
                runs[kernel] = run
            except Exception as error:  # the others are still timed
                status, reason = classify(error)
                failed.append(self.row(self._cell(cell, kernel), status=status, reason=reason))
        spreads, timer = time_kernels_by_turns(runs, device=self.device, repeats=self.config.measure.repeats)
        rows = [
            self.row(self._cell(cell, kernel), **spreads[kernel].columns(), **checked[kernel], note=timer)
            for kernel in runs
        ]
        if highest := checked.get(EXACT):
            untimed = replace(cell, metric="error_over_torch", unit="1", launch="none", plan="none", l2="none")
            ratio = Spread.of([highest["relative_error"] / problem.torch_error]).columns()
            note = f"error of plain torch: {problem.torch_error:.1e}"
            rows.append(self.row(untimed, **ratio, status="unchecked", note=note))
        return sorted(rows + failed, key=lambda row: row.variant != HIGHEST)  # the first is the cell's own

    @staticmethod
    def _cell(cell: Cell, kernel: Kernel) -> Cell:
        dtype = dtype_name(kernel.dtype)
        return replace(cell, backend=kernel.backend, dtype=dtype, out_dtype=dtype, variant=kernel.precision)


class Problem:
    """Inputs of a shape and pass.

    Attributes:
        kernels: to be timed.
        torch_error: of plain torch in float32.
    """

    def __init__(self, bench: Float32Bench, shape: Shape, region: str) -> None:
        self._pattern, self._device, self._shape, self._region = bench.pattern, bench.device, shape, region
        self._scale = bench.config.measure.scale_of(shape.dim)
        generator = torch.Generator(self._device).manual_seed(0)
        size = (self._pattern.shape[0], *shape)
        self._inputs = tuple(torch.randn(size, generator=generator, device=self._device) for _ in range(4))
        self._expected = {torch.float32: self._float64(self._inputs)}
        if region == BACKWARD:
            self.kernels = OURS_ALL
            plain = torch_gradients(*self._inputs, self._pattern, self._scale)
        else:
            self.kernels = (*OURS_ALL, *(kernel for kernel in OTHERS if shape.heads == 1 or kernel.backend != PER_HEAD))
            by_torch = kernels.plan_attention(self._pattern, backend="scatter", device=self._device)
            plain = by_torch(*self._inputs[:3], scale=self._scale)
        self.torch_error = self._error(plain, torch.float32)

    def run_of(self, kernel: Kernel) -> Callable[[], object]:
        """A pass of a kernel."""
        backend, is_ours, scale = REGISTRY[kernel.backend], kernel.backend == OURS, self._scale
        if reason := backend.unavailable(self._device):
            raise BackendUnavailableError(reason)
        plan = kernels.plan_attention(
            self._pattern,
            backend=kernel.backend,
            device=self._device,
            dtype=kernel.dtype,
            head_dim=self._shape.dim,
            num_heads=self._shape.heads,
            backward=is_ours,
        )
        query, key, value, grad_output = (each.to(kernel.dtype) for each in self._inputs)

        def forward() -> object:
            return plan(query, key, value, scale=scale, return_lse=is_ours)

        output, lse = with_precision(kernel.precision, forward) if is_ours else (None, None)

        def backward() -> object:
            found = plan.backward(grad_output, query, key, value, output, lse, scale=scale)
            return found.query, found.key, found.value

        run = backward if self._region == BACKWARD else forward
        return lambda: with_precision(kernel.precision, run)

    def checked(self, kernel: Kernel, result: object) -> dict:
        """Columns status, reason and relative_error of a result."""
        if self._region == FORWARD and kernel.backend == OURS:
            result = result[0]
        if kernel.dtype not in self._expected:
            self._expected[kernel.dtype] = self._float64([each.to(kernel.dtype) for each in self._inputs])
        error = self._error(result, kernel.dtype)
        is_exact = kernel.dtype == torch.float32 and kernel.precision != HIGH
        allowed = ALLOWED_ERROR[torch.float32] if is_exact else TF32_ERROR
        if self._region == BACKWARD and not is_exact:
            allowed *= 10  # rows in which large terms cancel
        return checked_columns(error, kernel.dtype, allowed)

    def _float64(self, inputs) -> object:
        query, key, value, grad_output = inputs
        if self._region == BACKWARD:
            return float64_gradients(query, key, value, grad_output, self._pattern, self._scale)
        return float64_attention(query, key, value, self._pattern.indptr, self._pattern.indices, self._scale)

    def _error(self, result: object, dtype: torch.dtype) -> float:
        is_backward = self._region == BACKWARD
        return (largest_gradient_error if is_backward else largest_row_error)(result, self._expected[dtype])


def with_precision(precision: str, run: Callable[[], object]) -> object:
    """A call under a float32 matmul precision; "none": "highest"."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(HIGHEST if precision == "none" else precision)
    try:
        return run()
    finally:
        torch.set_float32_matmul_precision(before)
