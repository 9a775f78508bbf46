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

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import fused3s
from bench.baselines import REGISTRY
from bench.checks import ALLOWED_ERROR, checked_columns, float64_attention, largest_row_error
from bench.gradients import float64_gradients, largest_gradient_error, torch_gradients
from bench.kernels import normal_inputs
from bench.runner import Case, Context
from common.columns import dtype_name
from common.records import NONE, Row
from common.timers import Spread, time_kernels_by_turns
from configs.bench import BenchConfig
from fused3s import BackendUnavailableError

BACKWARD, HIGHEST, HIGH = "backward", "highest", "high"
OURS, PER_HEAD = "fused3s", "dfgnn_tiling"
TF32_ERROR = ALLOWED_ERROR[torch.float16]  # a fraction of 10 bits, as in float16


@dataclass(frozen=True)
class Kernel:
    """One kernel: backend, type of q, k and v, and float32 matmul precision ("none": no choice)."""

    backend: str
    dtype: torch.dtype
    precision: str = NONE


EXACT = Kernel(OURS, torch.float32, HIGHEST)
OURS_ALL = (EXACT, Kernel(OURS, torch.float32, HIGH), Kernel(OURS, torch.float16))


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    """One for each shape and pass; it has the rows of all kernels."""
    options = {"variant": HIGHEST, "launch": "back_to_back", "plan": "fixed", "l2": "warm"}
    return [
        Case(OURS, "kernel", shape.dim, "float32", "float32", heads=shape.heads, region=region, **options)
        for shape in config.head_shapes
        for region in ("forward", BACKWARD)
    ]


def measure(context: Context, case: Case) -> list[Row]:
    problem = Problem(context, case)
    others = [name for name in context.config.backends if name != OURS and case.region != BACKWARD]
    others = [name for name in others if case.heads == 1 or name != PER_HEAD]
    runs, checked, failed = {}, {}, []
    for kernel in (*OURS_ALL, *(Kernel(name, torch.float32) for name in others)):
        try:
            run = problem.run_of(kernel)
            checked[kernel] = problem.checked(kernel, run())
            runs[kernel] = run
        except Exception as error:  # the others are still timed
            failed.append(context.failed(_of(case, kernel), error))
    spreads, timer = time_kernels_by_turns(runs, device=context.device, repeats=context.config.repeats)
    rows = [context.row(_of(case, one), **spreads[one].columns(), **checked[one], note=timer) for one in runs]
    if highest := checked.get(EXACT):
        untimed = replace(case, metric="error_over_torch", unit="1", launch=NONE, plan=NONE, l2=NONE)
        ratio = Spread.of([highest["relative_error"] / problem.torch_error]).columns()
        note = f"error of plain torch: {problem.torch_error:.1e}"
        rows.append(context.row(untimed, **ratio, status="unchecked", note=note))
    return sorted(rows + failed, key=lambda row: row.variant != HIGHEST)  # the first is the case's own


def _of(case: Case, kernel: Kernel) -> Case:
    dtype = dtype_name(kernel.dtype)
    return replace(case, backend=kernel.backend, dtype=dtype, out_dtype=dtype, variant=kernel.precision)


class Problem:
    """Inputs of a shape and pass.

    Attributes:
        torch_error: of plain torch in float32.
    """

    def __init__(self, context: Context, case: Case) -> None:
        self._pattern, self._device, self._case = context.pattern, context.device, case
        self._scale, self._is_backward = context.config.scale_of(case.dim), case.region == BACKWARD
        self._inputs = normal_inputs(context, case.shape, 4, torch.float32)
        self._expected = {torch.float32: self._float64(self._inputs)}
        if self._is_backward:
            plain = torch_gradients(*self._inputs, self._pattern, self._scale)
        else:
            by_torch = fused3s.plan_attention(self._pattern, backend="scatter", device=self._device)
            plain = by_torch(*self._inputs[:3], scale=self._scale)
        self.torch_error = self._error(plain, torch.float32)

    def run_of(self, kernel: Kernel) -> Callable[[], Any]:
        """A pass of a kernel."""
        is_ours, scale = kernel.backend == OURS, self._scale
        if reason := REGISTRY[kernel.backend].unavailable(self._device):
            raise BackendUnavailableError(reason)
        inputs = {"dtype": kernel.dtype, "head_dim": self._case.dim, "num_heads": self._case.heads, "backward": is_ours}
        plan = fused3s.plan_attention(self._pattern, backend=kernel.backend, device=self._device, **inputs)
        query, key, value, grad_output = (each.to(kernel.dtype) for each in self._inputs)

        def forward() -> Any:
            return plan(query, key, value, scale=scale, return_lse=is_ours)

        output, lse = with_precision(kernel.precision, forward) if is_ours else (None, None)

        def backward() -> Any:
            found = plan.backward(grad_output, query, key, value, output, lse, scale=scale)
            return found.query, found.key, found.value

        run = backward if self._is_backward else forward
        return lambda: with_precision(kernel.precision, run)

    def checked(self, kernel: Kernel, result: Any) -> dict[str, Any]:
        """Columns status, reason and relative_error of a result."""
        if not self._is_backward and kernel.backend == OURS:
            result = result[0]
        if kernel.dtype not in self._expected:
            self._expected[kernel.dtype] = self._float64([each.to(kernel.dtype) for each in self._inputs])
        is_exact = kernel.dtype == torch.float32 and kernel.precision != HIGH
        allowed = ALLOWED_ERROR[torch.float32] if is_exact else TF32_ERROR
        if self._is_backward and not is_exact:
            allowed *= 10  # rows in which large terms cancel
        return checked_columns(self._error(result, kernel.dtype), kernel.dtype, allowed)

    def _float64(self, inputs: Sequence[torch.Tensor]) -> Any:
        if self._is_backward:
            return float64_gradients(*inputs, self._pattern, self._scale)
        return float64_attention(*inputs[:3], self._pattern.indptr, self._pattern.indices, self._scale)

    def _error(self, result: Any, dtype: torch.dtype) -> float:
        return (largest_gradient_error if self._is_backward else largest_row_error)(result, self._expected[dtype])


def with_precision(precision: str, run: Callable[[], Any]) -> Any:
    """A call under a float32 matmul precision; "none": "highest"."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(HIGHEST if precision == NONE else precision)
    try:
        return run()
    finally:
        torch.set_float32_matmul_precision(before)
