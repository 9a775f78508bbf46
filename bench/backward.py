"""Times of the backward pass of attention kernels, beside those of the forward pass that keeps the LSE.

Rows differ in `region`: forward, or backward, which is all kernels from the gradient of the output to those of q, k and
v. Launched back to back with the L2 cache warm, as in `bench.kernels`, both passes by turns, so that their ratio is of
one clock; the format of both passes is built once. Inputs and the gradient of the output are normal random numbers. A
time of the forward pass is kept if the output agrees with float64, one of the backward pass if the gradients do: twice
the error of plain torch in the same type is allowed.

`sphere` measures the same on grids of the sphere, where the score may contain the log of the quadrature weight of its
key. On a GPU it also records the sum of the durations of a pass's kernels (`kernel_time`), each pass alone, as
published times of such kernels are taken.

`nsa` measures groups of query heads that share one KV head and one list of selected keys for each query, the selected
branch of Native Sparse Attention; "16x128/1" is a group of 16.

    fused3s          a plan of G query heads on one KV head: a window of 16 rows is 16 / G queries, whose keys are
                     gathered once for all their heads
    flex_attention   dense blocks of 128 queries x 128 keys with `enable_gqa`: every block in which one of the queries
                     selects a key is computed for all heads, and a mask function looks each element up

Of random selections nearly all blocks before a query are in the second's list, so that its work grows with N * N; the
first's grows with the number of selected keys.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch.nn.attention.flex_attention import flex_attention

import data
import fused3s
from bench.baselines import REGISTRY
from bench.baselines.flex_attention import graph_block_mask
from bench.checks import checked_columns, float64_attention, largest_row_error
from bench.edge_inputs import EdgeInputs
from bench.gradients import Gradients, float64_gradients, largest_gradient_error, torch_gradients
from bench.kernels import byte_row, kernel_case, kernel_time_row, normal_inputs, of_query_heads, refuse_impossible
from bench.runner import Case, Context, UnsupportedInputsError
from bench.traffic import gathered_bytes, gathered_columns
from common.records import NONE, Row
from common.timers import Spread, peak_memory_mib, reset_peak_memory, time_kernels_by_turns
from configs.bench import NO_EDGES, BenchConfig, Shape
from data.sources.sphere import Sphere
from fused3s.graph.csr import CSRPattern, as_tensor, csr_from_edges
from fused3s.graph.edge_list import EdgeList
from fused3s.graph.edges import canonical_csr, rows_of_edges

ALLOWED_OVER_TORCH = 2.0  # error over that of plain torch
FLEX = "flex_attention"
# Forward pass, with what the backward pass needs, and backward pass of one attention; bytes of the plan.
Passes = tuple[Callable[[], torch.Tensor], Callable[[], Gradients], int | None]


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    alone = [
        kernel_case(name, shape, config, edges)
        for shape in config.head_shapes
        for edges in config.edges
        for name in config.backends
    ]
    return [replace(case, region=region) for case in alone for region in ("forward", "backward")]


class Problem:
    """Inputs of one shape, with or without a weight of each key.

    Attributes:
        inputs: q, k, v and the gradient of the output: [num_rows or num_cols, H or KV heads, d] float16.
        log_weight: [num_cols] float32 or None, added to the scores.
        output, gradients: the correct ones; gradients in the shapes of q, k and v.
        torch_error: error of plain torch's gradients in the inputs' type.
    """

    def __init__(self, context: Context, shape: Shape, is_weighted: bool) -> None:
        self.inputs = tuple(normal_inputs(context, shape, 4, torch.float16))
        self.log_weight = log_weights(context) if is_weighted else None
        pattern, scale = context.pattern, context.config.scale_of(shape.dim)
        data_of_score = EdgeInputs.of_keys(self.log_weight) if is_weighted else None
        every_head, num_kv_heads = of_query_heads(*self.inputs[:3]), shape.kv_heads or shape.heads
        given = (*every_head, self.inputs[3], pattern, scale, self.log_weight)
        self.output = float64_attention(*every_head, pattern.indptr, pattern.indices, scale, data_of_score)
        self.gradients = _of_kv_heads(float64_gradients(*given), num_kv_heads)
        by_torch = _of_kv_heads(torch_gradients(*given), num_kv_heads)
        self.torch_error = largest_gradient_error(by_torch, self.gradients)


def _of_kv_heads(gradients: Gradients, num_kv_heads: int) -> Gradients:
    """The gradients of k and v, of the query's number of heads, added up over each group."""
    query, *others = gradients
    return query, *(gradient.unflatten(1, (num_kv_heads, -1)).sum(2) for gradient in others)


def log_weights(context: Context) -> torch.Tensor:
    """[num_cols] float32: log of the quadrature weight of each key over the largest one, rounded to float16, so that
    all types hold the same numbers."""
    source = data.info(context.name).official if context.loaded.meta.source == "official" else None
    if not isinstance(source, Sphere):
        raise UnsupportedInputsError("quadrature weights are those of a grid on the sphere, a set of the reader Sphere")
    weights = torch.from_numpy(source.quadrature_weights())
    return (weights / weights.max()).log().half().float().to(context.device)


def measure(context: Context, case: Case) -> list[Row]:
    refuse_impossible(case, context.device)
    device, is_weighted = context.device, case.edges != NO_EDGES
    problem = context.keep("problem", (case.shape, is_weighted), lambda: Problem(context, case.shape, is_weighted))
    make = flex_passes if case.backend == FLEX else plan_passes
    identity = (case.backend, case.shape, case.edges)
    forward, backward, plan_bytes = context.keep("passes", identity, lambda: make(context, case, problem))
    if case.region == "forward":
        checked = checked_columns(largest_row_error(forward(), problem.output), case.torch_dtype)
    else:
        error = largest_gradient_error(backward(), problem.gradients)
        checked = checked_columns(error, case.torch_dtype, ALLOWED_OVER_TORCH * problem.torch_error)
    runs: dict[str, Callable] = {"forward": forward, "backward": backward}
    run = runs[case.region]
    run()
    reset_peak_memory(device)
    before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    run()
    memory = Spread.of([peak_memory_mib(device) - before / 2**20])
    spreads, timer = time_kernels_by_turns(runs, device=device, repeats=context.config.repeats)
    scale = context.config.scale_of(case.dim)
    note = f"{timer}; scale {scale:g}; plain torch's gradients have an error of {problem.torch_error:.1e}"
    untimed = replace(case, launch=NONE, plan=NONE)
    contents = "one run, without inputs and format; torch's allocator"
    sizes = {} if plan_bytes is None else {"plan_bytes": plan_bytes}
    if not case.kv_heads:
        columns = context.keep("columns", None, lambda: columns_of_both_passes(context.pattern))
        sizes = traffic(case, columns, context.pattern.shape) | sizes
    rows = [
        context.row(case, **spreads[case.region].columns(), **checked, note=note),
        context.row(untimed, metric="peak_memory", unit="MiB", **memory.columns(), **checked, note=contents),
        *(byte_row(context, untimed, metric, size) for metric, size in sizes.items()),
    ]
    if device.type == "cuda" and context.config.measure == "sphere":
        rows.append(kernel_time_row(context, untimed, run, checked))
    return rows


def plan_passes(context: Context, case: Case, problem: Problem) -> Passes:
    """With a plan of a backend that has a backward pass of its own."""
    backend = REGISTRY[case.backend]
    if not backend.has_backward:
        raise UnsupportedInputsError("it has no backward pass of its own")
    query, key, value, grad = problem.inputs
    inputs = {"dtype": query.dtype, "head_dim": case.dim, "num_heads": case.heads, "backward": True}
    inputs |= {"num_kv_heads": case.kv_heads} if case.kv_heads else {}
    is_weighted = problem.log_weight is not None
    weights = EdgeInputs.weighted(case.edges, problem.log_weight, context.pattern) if is_weighted else None
    inputs |= {"edge_data": True} if weights and weights.is_of_edges else {}
    plan = fused3s.plan_attention(context.pattern, backend=case.backend, device=context.device, **inputs)
    options = {"scale": context.config.scale_of(case.dim), **(weights.bind(plan) if weights else {})}

    def forward() -> tuple[torch.Tensor, torch.Tensor | None]:
        found = plan(query, key, value, return_lse=backend.writes_lse, **options)
        return found if backend.writes_lse else (found, None)

    output, lse = forward()

    def backward() -> Gradients:
        found = plan.backward(grad, query, key, value, output, lse, **options)
        return found.query, found.key, found.value

    return lambda: forward()[0], backward, plan.nbytes


def flex_passes(context: Context, case: Case, problem: Problem) -> Passes:
    """With FlexAttention, compiled; the backward pass through autograd."""
    pattern, scale = context.pattern, context.config.scale_of(case.dim)
    query, key, value, grad = (tensor.transpose(0, 1)[None].contiguous() for tensor in problem.inputs)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    mask = graph_block_mask(rows_of_edges(pattern.indptr), pattern.indices.long(), pattern.shape)
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def forward() -> torch.Tensor:
        return compiled(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)

    output = forward()

    def backward() -> Gradients:
        found = torch.autograd.grad(output, leaves, grad, retain_graph=True)
        return tuple(gradient[0].transpose(0, 1) for gradient in found)

    return lambda: forward()[0].transpose(0, 1), backward, None


def traffic(case: Case, columns: tuple[int, int], shape: tuple[int, int]) -> dict[str, int]:
    """Bytes of a pass by the model of `bench.traffic`. Backward: over A, K and V are gathered for dQ; over its
    transpose Q and dO, for dK and dV; besides, rows of eight tensors, with O for the row sums of dO * O.

    Args:
        columns: see `columns_of_both_passes`.
        shape: (num_rows, num_cols) of A.
    """
    is_backward = case.region == "backward"
    rows = 4 * sum(shape) if is_backward else 2 * shape[0]
    return {
        "gathered_bytes": gathered_bytes(
            sum(columns) if is_backward else columns[0], case.shape.width, case.torch_dtype
        ),
        "compulsory_bytes": rows * case.shape.width * case.torch_dtype.itemsize,
    }


def columns_of_both_passes(pattern: CSRPattern) -> tuple[int, int]:
    """Gathered columns of A, and of its transpose."""
    indptr, indices = canonical_csr(pattern, as_tensor(pattern.indices).device)
    reversed_edges = torch.stack([rows_of_edges(indptr), indices.long()])
    back = csr_from_edges(EdgeList(reversed_edges, pattern.shape[::-1]))
    return gathered_columns(pattern), gathered_columns(back)
