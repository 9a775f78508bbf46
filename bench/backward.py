"""Times of the backward pass of attention kernels, beside those of the forward pass that keeps the LSE.

Rows differ in `region`: forward, or backward, which is all kernels from the gradient of the output to those of q, k and
v. Launched back to back with the L2 cache warm, as in `bench.kernels`, both passes by turns, so that their ratio is of
one clock; the format of both passes is built once. Inputs and the gradient of the output are normal random numbers. The
gradients of every row are compared with float64 before a time is kept: twice the error of plain torch in the same type
is allowed.
"""

from collections.abc import Callable
from dataclasses import replace

import torch

import kernels
from baselines import REGISTRY
from bench.checks import checked_columns
from bench.gradients import Gradients, float64_gradients, largest_gradient_error, torch_gradients
from bench.kernels import byte_row, kernel_case, normal_inputs, refuse_impossible
from bench.records import NONE, Row
from bench.runner import Case, Context, UnsupportedInputsError
from bench.timers import Spread, peak_memory_mib, reset_peak_memory, time_kernels_by_turns
from bench.traffic import gathered_bytes, gathered_columns
from configs.bench import BenchConfig, Shape
from kernels.formats.csr import CSRPattern, as_tensor, csr_from_edges
from kernels.formats.edge_list import EdgeList
from kernels.formats.edges import canonical_csr, rows_of_edges

ALLOWED_OVER_TORCH = 2.0  # error over that of plain torch


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    alone = [kernel_case(name, shape, config) for shape in config.head_shapes for name in config.backends]
    return [replace(case, region=region) for case in alone for region in ("forward", "backward")]


class Problem:
    """Inputs of one shape.

    Attributes:
        inputs: q, k, v and the gradient of the output: [N, H, d] float16.
        expected: the correct gradients.
        torch_error: error of plain torch in the inputs' type.
    """

    def __init__(self, context: Context, shape: Shape) -> None:
        self.inputs = tuple(normal_inputs(context, shape, 4, torch.float16))
        scale = context.config.scale_of(shape.dim)
        self.expected = float64_gradients(*self.inputs, context.pattern, scale)
        by_torch = torch_gradients(*self.inputs, context.pattern, scale)
        self.torch_error = largest_gradient_error(by_torch, self.expected)


def measure(context: Context, case: Case) -> list[Row]:
    refuse_impossible(case, context.device)
    if not REGISTRY[case.backend].has_backward:
        raise UnsupportedInputsError("it has no backward pass of its own")
    device, scale = context.device, context.config.scale_of(case.dim)
    problem = context.keep("problem", case.shape, lambda: Problem(context, case.shape))
    query, key, value, grad_output = problem.inputs
    inputs = {"dtype": query.dtype, "head_dim": case.dim, "num_heads": case.heads, "backward": True}
    plan = kernels.plan_attention(context.pattern, backend=case.backend, device=device, **inputs)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return plan(query, key, value, scale=scale, return_lse=True)

    output, lse = forward()

    def backward() -> Gradients:
        found = plan.backward(grad_output, query, key, value, output, lse, scale=scale)
        return found.query, found.key, found.value

    error = largest_gradient_error(backward(), problem.expected)
    runs: dict[str, Callable] = {"forward": forward, "backward": backward}
    reset_peak_memory(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    runs[case.region]()
    memory = Spread.of([peak_memory_mib(device) - before / 2**20])
    spreads, timer = time_kernels_by_turns(runs, device=device, repeats=context.config.repeats)
    checked = checked_columns(error, query.dtype, ALLOWED_OVER_TORCH * problem.torch_error)
    note = f"{timer}; scale {scale:g}; plain torch's gradients have an error of {problem.torch_error:.1e}"
    untimed = replace(case, launch=NONE, plan=NONE)
    contents = "one run, without inputs and format; torch's allocator"
    columns = context.keep("columns", None, lambda: columns_of_both_passes(context.pattern))
    return [
        context.row(case, **spreads[case.region].columns(), **checked, note=note),
        context.row(untimed, metric="peak_memory", unit="MiB", **memory.columns(), **checked, note=contents),
        *(byte_row(context, untimed, metric, size) for metric, size in traffic(case, columns, len(query)).items()),
    ]


def traffic(case: Case, columns: tuple[int, int], num_rows: int) -> dict[str, int]:
    """Bytes of a pass by the model of `bench.traffic`. Backward: over A, K and V are gathered for dQ; over its
    transpose Q and dO, for dK and dV; besides, rows of eight tensors, with O for the row sums of dO * O.

    Args:
        columns: see `columns_of_both_passes`.
    """
    gathered, tensors = (sum(columns), 8) if case.region == "backward" else (columns[0], 2)
    return {
        "gathered_bytes": gathered_bytes(gathered, case.shape.width, case.torch_dtype),
        "compulsory_bytes": tensors * num_rows * case.shape.width * case.torch_dtype.itemsize,
    }


def columns_of_both_passes(pattern: CSRPattern) -> tuple[int, int]:
    """Gathered columns of A, and of its transpose."""
    indptr, indices = canonical_csr(pattern, as_tensor(pattern.indices).device)
    reversed_edges = torch.stack([rows_of_edges(indptr), indices.long()])
    back = csr_from_edges(EdgeList(reversed_edges, pattern.shape[::-1]))
    return gathered_columns(pattern), gathered_columns(back)
