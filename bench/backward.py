"""Times of the backward pass of attention kernels, beside those of the forward pass that keeps the LSE.

Rows differ in `region`: forward, or backward, which is all kernels from the gradient of the output to those of q, k and
v. Launched back to back with the L2 cache warm, as in `bench.kernels`, both passes by turns, so that their ratio is of
one clock; the format of both passes is built once. Inputs and the gradient of the output are normal random numbers. A
time of the forward pass is kept if the output agrees with float64, one of the backward pass if the gradients do: twice
the error of plain torch in the same type is allowed.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

import fused3s
from bench.baselines import REGISTRY
from bench.baselines.transposed import transposed
from bench.checks import checked_columns, float64_attention, largest_row_error
from bench.gradients import Gradients, float64_gradients, largest_gradient_error, torch_gradients
from bench.kernels import byte_row, kernel_case, normal_inputs, refuse_impossible
from bench.runner import Case, Context, UnsupportedInputsError
from bench.traffic import gathered_columns
from common.records import NONE, Row
from common.timers import time_kernels_by_turns
from configs.bench import BenchConfig, Shape
from fused3s.graph.csr import CSRPattern, as_tensor
from fused3s.graph.edges import canonical_csr

ALLOWED_OVER_TORCH = 2.0  # error over that of plain torch
# Forward pass, with what the backward pass needs, and backward pass of one attention.
Passes = tuple[Callable[[], torch.Tensor], Callable[[], Gradients]]


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    alone = [kernel_case(name, shape, config) for shape in config.head_shapes for name in config.backends]
    return [replace(case, region=region) for case in alone for region in ("forward", "backward")]


class Problem:
    """Inputs of one shape.

    Attributes:
        inputs: q, k, v and the gradient of the output: [num_rows or num_cols, H, d] float16.
        output, gradients: the correct ones; gradients in the shapes of q, k and v.
        torch_error: error of plain torch's gradients in the inputs' type.
    """

    def __init__(self, context: Context, shape: Shape) -> None:
        self.inputs = tuple(normal_inputs(context, shape, 4, torch.float16))
        pattern, scale = context.pattern, context.config.scale_of(shape.dim)
        self.output = float64_attention(*self.inputs[:3], pattern.indptr, pattern.indices, scale)
        self.gradients = float64_gradients(*self.inputs, pattern, scale)
        self.torch_error = largest_gradient_error(torch_gradients(*self.inputs, pattern, scale), self.gradients)


def measure(context: Context, case: Case) -> list[Row]:
    refuse_impossible(case, context.device)
    problem = context.keep("problem", case.shape, lambda: Problem(context, case.shape))
    identity = (case.backend, case.shape)
    forward, backward = context.keep("passes", identity, lambda: plan_passes(context, case, problem))
    if case.region == "forward":
        checked = checked_columns(largest_row_error(forward(), problem.output), case.torch_dtype)
    else:
        error = largest_gradient_error(backward(), problem.gradients)
        checked = checked_columns(error, case.torch_dtype, ALLOWED_OVER_TORCH * problem.torch_error)
    runs: dict[str, Callable] = {"forward": forward, "backward": backward}
    spreads, timer = time_kernels_by_turns(runs, device=context.device, repeats=context.config.repeats)
    scale = context.config.scale_of(case.dim)
    note = f"{timer}; scale {scale:g}; plain torch's gradients have an error of {problem.torch_error:.1e}"
    untimed = replace(case, launch=NONE, plan=NONE)
    columns = context.keep("columns", None, lambda: columns_of_both_passes(context.pattern))
    sizes = traffic(case, columns, context.pattern.shape)
    return [
        context.row(case, **spreads[case.region].columns(), **checked, note=note),
        *(byte_row(context, untimed, metric, size) for metric, size in sizes.items()),
    ]


def plan_passes(context: Context, case: Case, problem: Problem) -> Passes:
    """With a plan of a backend that has a backward pass of its own, or that autograd differentiates."""
    backend = REGISTRY[case.backend]
    if not backend.trains:
        raise UnsupportedInputsError("it computes no gradients")
    query, key, value, grad = problem.inputs
    inputs = {"dtype": query.dtype, "head_dim": case.dim, "num_heads": case.heads, "backward": True}
    plan = fused3s.plan_attention(context.pattern, backend=case.backend, device=context.device, **inputs)
    scale = context.config.scale_of(case.dim)
    if not backend.has_backward:
        leaves = [tensor.detach().requires_grad_() for tensor in (query, key, value)]
        kept = plan(*leaves, scale=scale)
        return (
            lambda: plan(*leaves, scale=scale).detach(),
            lambda: torch.autograd.grad(kept, leaves, grad, retain_graph=True),
        )

    def forward() -> tuple[torch.Tensor, torch.Tensor | None]:
        found = plan(query, key, value, return_lse=backend.writes_lse, scale=scale)
        return found if backend.writes_lse else (found, None)

    output, lse = forward()

    def backward() -> Gradients:
        found = plan.backward(grad, query, key, value, output, lse, scale=scale)
        return found.query, found.key, found.value

    return lambda: forward()[0], backward


def traffic(case: Case, columns: tuple[int, int], shape: tuple[int, int]) -> dict[str, int]:
    """Bytes of a pass by the model of `bench.traffic`. Backward: over A, K and V are gathered for dQ; over its
    transpose Q and dO, for dK and dV; besides, rows of eight tensors, with O for the row sums of dO * O.

    Args:
        columns: see `columns_of_both_passes`.
        shape: (num_rows, num_cols) of A.
    """
    is_backward = case.region == "backward"
    gathered, rows = (sum(columns), 4 * sum(shape)) if is_backward else (columns[0], 2 * shape[0])
    row_bytes = case.shape.width * case.torch_dtype.itemsize
    return {"gathered_bytes": 2 * gathered * row_bytes, "compulsory_bytes": rows * row_bytes}


def columns_of_both_passes(pattern: CSRPattern) -> tuple[int, int]:
    """Gathered columns of A, and of its transpose."""
    indptr, indices = canonical_csr(pattern, as_tensor(pattern.indices).device)
    return gathered_columns(pattern), gathered_columns(transposed(indptr, indices, pattern.shape))
