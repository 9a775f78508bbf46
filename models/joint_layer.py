"""A graph transformer's projections, attention and root term as one autograd function, for backends with a backward
pass of their own.

    x [N, F]  -> GEMM ->  q | k | v | root  -> attention ->  output [N, H, C]  (+ root)

Backward, gradients of q, k and v in the rows of one tensor, which the root's are copied into; then one GEMM for x, one
for all weights and a sum for all biases. On small graphs a step takes as long as the host's work for it: one node
instead of four, and nothing is checked or reshaped twice.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from kernels import AttentionPlan, BoundEdges
from kernels.autograd import NO_TERMS, gradients, split_terms
from kernels.backends import REGISTRY
from kernels.once_differentiable import refuse_double_backward
from kernels.side_by_side import RowParts
from models.joint_projection import JointMemory, joint_product, parameter_gradients

OF_ROWS = (True, True, True, False, False)  # wanted of DIFFERENTIABLE: query, key and value; not bias and multiplier


class LayerCall(NamedTuple):
    """What autograd does not differentiate.

    Attributes:
        plan: of a backend with `has_backward`.
        parts: columns of query, key and value, (H, C) each, and of the root or none.
        memory: of the parameters, if they are in it.
        dtype: of the products.
        scale, dropout: of the plan's call.
        edges: features alone, of type `dtype`; None without.
        adds_root: whether the result is output + root; else it is (output, root), or the output alone.
    """

    plan: AttentionPlan
    parts: RowParts
    memory: JointMemory
    dtype: torch.dtype
    scale: float
    dropout: float
    edges: BoundEdges | None
    adds_root: bool


def takes_layer(plan: AttentionPlan, x: Tensor, dtype: torch.dtype, head_dim: int, edges: BoundEdges | None) -> bool:
    """Whether `attend_jointly` takes such a call; for others the plan's own call has the way, or the error."""
    backend = REGISTRY[plan.backend]
    num_rows = x.shape[0]
    return (
        backend.has_backward
        and plan.shape == (num_rows, num_rows)
        and plan.device == x.device
        and backend.unsupported(dtype, head_dim) is None
        and (edges is None or (edges.bias is edges.multiplier is edges.types is None and _is_of(edges, dtype)))
    )


def _is_of(edges: BoundEdges, dtype: torch.dtype) -> bool:
    return edges.padded_features is not None and edges.padded_features.dtype is dtype


def attend_jointly(
    call: LayerCall, x: Tensor, parameters: Sequence[Tensor], edge_weight: Tensor | None
) -> Tensor | tuple[Tensor, ...]:
    """[N, H C], or [N, H, C] and [N, columns] of the root, see `LayerCall`; for calls that `takes_layer` holds for and
    parameters from `joint_projection.joint_parameters`.

    Args:
        x: [N, F].
        parameters: weights of the parts, then as many biases or none.
        edge_weight: [H C, r], of key and value for the features of `call.edges`.
    """
    plan, edges = call.plan, call.edges
    features = edges.features if edges is not None and edges.padded_features.requires_grad else None
    given = (x, features, edge_weight, *parameters)
    if torch.is_grad_enabled():
        for each in given:
            if each is not None and each.requires_grad:
                if not plan.inputs.backward:
                    call = call._replace(plan=plan.differentiable())
                return _apply_layer(call, *given)
    return _forward(call, None, *given)


def _forward(
    call: LayerCall, ctx: Any, x: Tensor, features: Tensor | None, edge_weight: Tensor | None, *parameters: Tensor
) -> Tensor | tuple[Tensor, ...]:
    """The result; with `ctx` also what the backward pass reads."""
    plan, parts, memory, dtype, scale, dropout, bound, adds_root = call
    if x.dtype is not dtype:
        x = x.to(dtype)
    weight, bias = memory.join(parameters, parts, dtype)
    query, key, value, *roots = parts.split(joint_product(x, weight, bias))
    edges = ()
    if bound is not None or dropout:
        of_heads = None if edge_weight is None else edge_weight.to(dtype).view(*query.shape[1:], -1)
        weights = {"edge_key_weight": of_heads, "edge_value_weight": of_heads}
        edges = (plan.edge_terms(query, edges=bound, dropout=dropout, **weights),)
    lse = None if ctx is None else query.new_empty(query.shape[:2], dtype=torch.float32)
    output = REGISTRY[plan.backend].attend(plan.data, query, key, value, scale, dtype, lse, *edges)
    if ctx is not None:
        ctx.call, ctx.dtypes = call, (parameters[0].dtype, None if edge_weight is None else edge_weight.dtype)
        terms = split_terms(*edges)[0] if edges else NO_TERMS
        # The weights themselves, too: autograd notices there that they changed in the meantime.
        ctx.save_for_backward(x, weight, query, key, value, output, lse, *terms, *parameters[: len(parts.sizes)])
    if not adds_root:
        return output, *roots
    (root,) = roots
    return torch.add(output.view(root.shape), root)


def _backward(
    call: LayerCall,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    needed: Sequence[bool],
    grad_output: Tensor,
    grad_root: Tensor | None,
    x: Tensor,
    weight: Tensor,
    *saved: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the tensors that `_forward` takes."""
    plan, parts = call.plan, call.parts
    of_x, of_features, of_edges, *of_parameters = needed
    saved = saved[: -len(parts.sizes)]
    wanted = (*OF_ROWS, of_features, of_edges, of_edges, False)
    settings = (REGISTRY[plan.backend], plan.data, call.scale, None, call.dropout, wanted, True)
    found = gradients(*settings, grad_output.view(saved[0].shape), *saved)
    of_rows = found[:3] if grad_root is None else (*found[:3], grad_root)
    joint = parts.join(of_rows)
    dtype, edge_dtype = dtypes
    return (
        torch.mm(joint, weight) if of_x else None,
        found[5],
        torch.add(found[6], found[7]).flatten(0, 1).to(edge_dtype) if of_edges else None,
        *parameter_gradients(joint, x, dtype, parts, of_parameters),
    )


class _Layer(torch.autograd.Function):
    """(call, x, features, edge_weight, *parameters) -> the result of `_forward`."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, *given: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        return _forward(call, ctx, *given)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_root: Tensor | None = None) -> tuple[Tensor | None, ...]:
        call = ctx.call
        run = _LayerGradients.apply if torch.is_grad_enabled() else _backward
        if call.adds_root:
            grad_root = grad_output
        return None, *run(call, ctx.dtypes, ctx.needs_input_grad[1:], grad_output, grad_root, *ctx.saved_tensors)


class _LayerGradients(torch.autograd.Function):
    """`_backward` with an error in place of its derivative."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, *given: Any) -> tuple[Tensor | None, ...]:
        ctx.name = call.plan.backend
        return _backward(call, *given)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> NoReturn:
        refuse_double_backward(ctx.name)


# Function.apply in the C++ of torch: in front of it comes a search for the dead wrappers of torch.func among the
# arguments, which takes as long as a launch. `joint_parameters` is None where torch.func runs.
_apply_layer = super(torch.autograd.Function, _Layer).apply
