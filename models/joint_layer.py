"""Projections, attention and root term of a layer as one autograd function, for backends with their own backward pass.

    x [N, F]                 -> GEMM ->  root | q | k | v  ->  attention -> output [N, H, C]  (+ root)
    targets, sources apart   -> GEMM ->  root | q,  GEMM ->  k | v

The backward pass writes the gradients of q, k, v and the root into joint rows; one GEMM gives the gradient of x, one
those of all weights, and one sum those of all biases. On small graphs a step is bound by the host: this is one autograd
node instead of four, without repeated checks and reshapes.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from kernels import AttentionPlan, BoundEdges
from kernels.autograd import names_of, with_tensors, without_tensors
from kernels.backends import REGISTRY
from kernels.backends.base import Call
from kernels.once_differentiable import refuse_double_backward
from kernels.side_by_side import RowParts
from models.joint_parameters import JointMemory, parameter_gradients

OF_ROWS = frozenset(("query", "key", "value"))


class LayerCall(NamedTuple):
    """The arguments of a layer that autograd does not differentiate.

    Attributes:
        plan: plan of a backend with `has_backward`.
        parts: columns of the GEMM of each input: root (or none), then query, key and value, (H, C) each.
        memory: joint memory of the parameters.
        dtype: type of the GEMMs.
        scale, dropout: arguments of the plan's call.
        edges: edge features of type `dtype`, or None.
        adds_root: whether the result is output + root; else it is (output, root), or the output alone.
    """

    plan: AttentionPlan
    parts: tuple[RowParts, ...]
    memory: JointMemory
    dtype: torch.dtype
    scale: float
    dropout: float
    edges: BoundEdges | None
    adds_root: bool


def takes_layer(
    plan: AttentionPlan, inputs: Sequence[Tensor], dtype: torch.dtype, head_dim: int, edges: BoundEdges | None
) -> bool:
    """Whether `attend_jointly` supports such a call; otherwise call the plan, which computes it or raises."""
    backend = REGISTRY[plan.backend]
    return (
        backend.has_backward
        and plan.shape == (inputs[0].shape[0], inputs[-1].shape[0])
        and plan.device == inputs[0].device == inputs[-1].device
        and backend.unsupported(dtype, head_dim) is None
        and (edges is None or (edges.bias is edges.multiplier is edges.types is None and _is_of(edges, dtype)))
    )


def _is_of(edges: BoundEdges, dtype: torch.dtype) -> bool:
    return edges.padded_features is not None and edges.padded_features.dtype is dtype


def attend_jointly(
    call: LayerCall, inputs: Sequence[Tensor], parameters: Sequence[Tensor], edge_weight: Tensor | None
) -> Tensor | tuple[Tensor, ...]:
    """The layer's result: [N, H C], or [N, H, C] and the root [N, columns] (`LayerCall.adds_root`).

    Needs a call for which `takes_layer` is true, and parameters from `joint_parameters`.

    Args:
        inputs: x [N, F]; or those of the targets, and of the sources.
        parameters: weights of the parts, then as many biases or none.
        edge_weight: [H C, r], of key and value for the features of `call.edges`.
    """
    plan, edges = call.plan, call.edges
    features = edges.padded_features if edges is not None and edges.padded_features.requires_grad else None
    given = (features, edge_weight, *inputs, *parameters)
    if torch.is_grad_enabled():
        for each in given:
            if each is not None and each.requires_grad:
                plan.require_backward()
                return _apply_layer(call, *given)
    return _forward(call, None, *given)


def _forward(
    call: LayerCall, ctx: Any, features: Tensor | None, edge_weight: Tensor | None, *given: Tensor
) -> Tensor | tuple[Tensor, ...]:
    """The result; with `ctx` also what the backward pass reads."""
    plan, parts, memory, dtype, scale, dropout, bound, adds_root = call
    parameters = given[len(parts) :]
    joined = memory.join(parameters, parts, dtype)
    inputs, columns = [], []
    for x, part, (weight, bias) in zip(given, parts, joined, strict=False):
        if x.dtype is not dtype:
            x = x.to(dtype)
        inputs.append(x)
        columns += part.split(functional.linear(x, weight, bias))
    *roots, query, key, value = columns
    if bound is not None:
        weight = edge_weight.to(dtype).view(*query.shape[1:], -1)
        bound = replace(bound, key_weight=weight, value_weight=weight)
    attention = plan.call(query, key, value, scale, dtype, bound, dropout)
    if ctx is not None:
        attention = attention._replace(lse=query.new_empty(query.shape[:2], dtype=torch.float32))
    output = REGISTRY[plan.backend].attend(plan.data, attention)
    if ctx is not None:
        ctx.call, ctx.dtypes = call, (parameters[0].dtype, None if edge_weight is None else edge_weight.dtype)
        ctx.attention = without_tensors(attention)
        terms = () if attention.edges is None else attention.edges.tensors()
        # The weights themselves, too, so that autograd detects changes.
        ctx.num_weights = sum([len(part.sizes) for part in parts])
        joint_weights = [weight for weight, _ in joined]
        saved = (output, attention.lse, query, key, value, *terms)
        ctx.save_for_backward(*parameters[: ctx.num_weights], *inputs, *joint_weights, *saved)
    if not adds_root:
        return output, *roots
    (root,) = roots
    return torch.add(output.view(root.shape), root)


def _backward(
    call: LayerCall,
    attention: Call,
    dtypes: tuple[torch.dtype, torch.dtype | None],
    needed: Sequence[bool],
    grad_output: Tensor,
    grad_root: Tensor | None,
    *saved: Tensor | None,
) -> tuple[Tensor | None, ...]:
    """Gradients of the tensor arguments of `_forward`."""
    plan, parts = call.plan, call.parts
    count = len(parts)
    inputs, weights, saved = saved[:count], saved[count : 2 * count], saved[2 * count :]
    of_features, of_edges, *of_rest = needed
    joints, columns = [], []
    for x, part in zip(inputs, parts, strict=True):
        joint = x.new_empty((x.shape[0], part.pitch))
        joints.append(joint)
        columns += part.split(joint)
    wanted = OF_ROWS
    if of_features or of_edges:
        wanted = names_of((True, True, True, of_features, of_edges, of_edges))
    output, lse, *tensors = saved
    attention = with_tensors(attention, tensors, lse)
    backend = REGISTRY[plan.backend]
    found = backend.attend_backward(
        plan.data, attention, output, grad_output.view(output.shape), wanted, tuple(columns[-3:])
    )
    of_roots = () if grad_root is None else (grad_root,)
    for memory, gradient in zip(columns, (*of_roots, *found[:3]), strict=True):
        if gradient is not memory:
            memory.copy_(gradient.view(memory.shape))
    dtype, edge_dtype = dtypes
    return (
        found.padded_features,
        torch.add(found.key_weight, found.value_weight).flatten(0, 1).to(edge_dtype) if of_edges else None,
        *[torch.mm(*each) if of_x else None for *each, of_x in zip(joints, weights, of_rest, strict=False)],
        *parameter_gradients(list(zip(joints, inputs, parts, strict=True)), dtype, of_rest[count:]),
    )


class _Layer(torch.autograd.Function):
    """(call, features, edge_weight, *inputs, *parameters) -> the result of `_forward`."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, *given: Tensor | None) -> Tensor | tuple[Tensor, ...]:
        return _forward(call, ctx, *given)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor, grad_root: Tensor | None = None) -> tuple[Tensor | None, ...]:
        call, saved = ctx.call, ctx.saved_tensors[ctx.num_weights :]
        run = _LayerGradients.apply if torch.is_grad_enabled() else _backward
        if call.adds_root:
            grad_root = grad_output
        return None, *run(call, ctx.attention, ctx.dtypes, ctx.needs_input_grad[1:], grad_output, grad_root, *saved)


class _LayerGradients(torch.autograd.Function):
    """`_backward` whose derivative raises."""

    @staticmethod
    def forward(ctx: Any, call: LayerCall, *given: Any) -> tuple[Tensor | None, ...]:
        ctx.name = call.plan.backend
        return _backward(call, *given)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> NoReturn:
        refuse_double_backward(ctx.name)


# Function.apply of torch's C++ base class, as in kernels/autograd.py. `joint_parameters` is None under torch.func.
_apply_layer = super(torch.autograd.Function, _Layer).apply
