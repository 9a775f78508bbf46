"""Times of attention of groups of query heads that share one KV head and one list of selected keys for each query, the
selected branch of Native Sparse Attention. Forward with what the backward pass needs, and backward.

    fused3s          a plan of G query heads on one KV head: a window of 16 rows is 16 / G queries, whose keys are
                     gathered once for all their heads
    flex_attention   dense blocks of 128 queries x 128 keys with `enable_gqa`: every block in which one of the queries
                     selects a key is computed for all heads, and a mask function looks each element up

Both compute the same function. Of random selections nearly all blocks before a query are in the second's list, so that
its work grows with N * N; the first's grows with the number of selected keys. The shape is query heads x columns.
"16x128/1" is a group of 16. Output and gradients are checked, and both passes timed, as in `bench.backward`.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch.nn.attention.flex_attention import flex_attention

import fused3s
from bench.backward import ALLOWED_OVER_TORCH
from bench.baselines import REGISTRY
from bench.baselines.flex_attention import graph_block_mask
from bench.checks import checked_columns, float64_attention, largest_row_error
from bench.gradients import Gradients, float64_gradients, largest_gradient_error, torch_gradients
from bench.kernels import kernel_case, normal_inputs, of_query_heads, refuse_impossible
from bench.runner import Case, Context, UnsupportedInputsError
from common.records import Row
from common.timers import time_kernels_by_turns
from configs.bench import BenchConfig, Shape
from fused3s.graph.csr import CSRPattern
from fused3s.graph.edges import rows_of_edges

FLEX = "flex_attention"
Passes = tuple[Callable[[], torch.Tensor], Callable[[], Gradients]]  # forward and backward of one attention


def cases(config: BenchConfig, device: torch.device) -> list[Case]:
    alone = [kernel_case(name, shape, config) for shape in config.head_shapes for name in config.backends]
    return [replace(case, region=region) for case in alone for region in ("forward", "backward")]


class Problem:
    """Inputs of one group, and what is correct.

    Attributes:
        inputs: q [N, G, d], k and v [N, KV heads, d], and the gradient of the output [N, G, d]: float16.
        output: [N, G, d]; gradients: in the shapes of q, k and v.
        torch_error: error of plain torch's gradients in the inputs' type.
    """

    def __init__(self, context: Context, shape: Shape) -> None:
        pattern, scale = context.pattern, context.config.scale_of(shape.dim)
        self.inputs = normal_inputs(context, shape, 4, torch.float16)
        *_, grad = self.inputs
        every_head, num_kv_heads = of_query_heads(*self.inputs[:3]), shape.kv_heads or shape.heads
        self.output = float64_attention(*every_head, pattern.indptr, pattern.indices, scale)
        self.gradients = _of_kv_heads(float64_gradients(*every_head, grad, pattern, scale), num_kv_heads)
        by_torch = _of_kv_heads(torch_gradients(*every_head, grad, pattern, scale), num_kv_heads)
        self.torch_error = largest_gradient_error(by_torch, self.gradients)


def _of_kv_heads(gradients: Gradients, num_kv_heads: int) -> Gradients:
    """The gradients of k and v, of the query's number of heads, added up over each group."""
    query, *others = gradients
    return query, *(gradient.unflatten(1, (num_kv_heads, -1)).sum(2) for gradient in others)


def measure(context: Context, case: Case) -> list[Row]:
    refuse_impossible(case, context.device)
    problem = context.keep("problem", case.shape, lambda: Problem(context, case.shape))
    make = flex_passes if case.backend == FLEX else plan_passes
    given = (context.pattern, case, problem.inputs, context.config.scale_of(case.dim))
    forward, backward = context.keep("passes", (case.backend, case.shape), lambda: make(*given))
    if case.region == "forward":
        checked = checked_columns(largest_row_error(forward(), problem.output), torch.float16)
    else:
        error = largest_gradient_error(backward(), problem.gradients)
        checked = checked_columns(error, torch.float16, ALLOWED_OVER_TORCH * problem.torch_error)
    runs = {"forward": forward, "backward": backward}
    spreads, timer = time_kernels_by_turns(runs, device=context.device, repeats=context.config.repeats)
    note = f"{timer}; plain torch's gradients have an error of {problem.torch_error:.1e}"
    return [context.row(case, **spreads[case.region].columns(), **checked, note=note)]


def plan_passes(pattern: CSRPattern, case: Case, inputs: Sequence[torch.Tensor], scale: float) -> Passes:
    """With a plan of a backend that has a backward pass of its own."""
    backend = REGISTRY[case.backend]
    if not (backend.has_backward and backend.writes_lse):
        raise UnsupportedInputsError("it has no backward pass of its own")
    query, key, value, grad = inputs
    options = {"dtype": query.dtype, "head_dim": case.dim, "num_heads": case.heads, "backward": True}
    options |= {"num_kv_heads": case.kv_heads} if case.kv_heads else {}
    plan = fused3s.plan_attention(pattern, backend=case.backend, device=query.device, **options)

    def forward() -> tuple[torch.Tensor, torch.Tensor]:
        return plan(query, key, value, scale=scale, return_lse=True)

    output, lse = forward()

    def backward() -> Gradients:
        found = plan.backward(grad, query, key, value, output, lse, scale=scale)
        return found.query, found.key, found.value

    return lambda: forward()[0], backward


def flex_passes(pattern: CSRPattern, case: Case, inputs: Sequence[torch.Tensor], scale: float) -> Passes:
    """With FlexAttention, compiled; the backward pass through autograd."""
    query, key, value, grad = (tensor.transpose(0, 1)[None].contiguous() for tensor in inputs)
    leaves = [tensor.requires_grad_() for tensor in (query, key, value)]
    mask = graph_block_mask(rows_of_edges(pattern.indptr), pattern.indices.long(), pattern.shape)
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    def forward() -> torch.Tensor:
        return compiled(query, key, value, block_mask=mask, scale=scale, enable_gqa=True)

    output = forward()

    def backward() -> Gradients:
        found = torch.autograd.grad(output, leaves, grad, retain_graph=True)
        return tuple(gradient[0].transpose(0, 1) for gradient in found)

    return lambda: forward()[0].transpose(0, 1), backward
