"""A layer as one autograd node, for attention backends with a backward pass of their own.

On small graphs a step is CPU-bound: one node replaces a node per operation of the layer, with its checks and reshapes.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ... import AttentionPlan, BoundEdges
from ...backends import REGISTRY
from ...backends.base import Call
from ...torch_side.autograd import without_tensors
from ...torch_side.once_differentiable import OnceDifferentiable

Results = Tensor | tuple[Tensor, ...]


class NodeCall(ABC):
    """One call of a layer. Its attributes are the arguments that autograd does not differentiate.

    Attributes:
        plan: plan of a backend with `has_backward`.
    """

    plan: AttentionPlan

    @abstractmethod
    def forward(self, with_lse: bool, *given: Tensor | None) -> tuple[Results, Call, Sequence[Tensor | None]]:
        """The results, the attention call, and the tensors that `backward` reads.

        Args:
            with_lse: whether a backward pass follows, for which the attention writes its log-sum-exp.
            given: the differentiable arguments.
        """

    @abstractmethod
    def backward(
        self, data: Any, attention: Call, needed: Sequence[bool], grads: Sequence[Tensor | None], *saved: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Gradients of `given`.

        Args:
            data: the plan's data in the forward pass; a `PlanRoom` may have been filled since.
            attention: the attention call without its tensors.
            needed: for each of `given`, whether its gradient is needed.
            grads: gradients of the results.
            saved: from `forward`.
        """


def takes_plan(plan: AttentionPlan, target: Tensor, source: Tensor, dtype: torch.dtype, head_dim: int) -> bool:
    """Whether a node can call this plan for features of targets and sources; otherwise call the plan, which computes it
    or raises."""
    backend = REGISTRY[plan.backend]
    is_planned = dtype is plan.inputs.dtype and head_dim == plan.inputs.head_dim  # `plan_attention` checked these
    return (
        backend.has_backward
        and plan.groups is None
        and plan.shape == (target.shape[0], source.shape[0])
        and plan.device == target.device == source.device
        and (is_planned or backend.unsupported(dtype, head_dim) is None)
    )


def is_recorded(*given: Tensor | None) -> bool:
    """Whether autograd records a call with these tensors."""
    if torch.is_grad_enabled():
        for each in given:
            if each is not None and each.requires_grad:
                return True
    return False


def run_as_node(call: NodeCall, *given: Tensor | None) -> Results:
    """The results of a call; `takes_plan` must be true for its plan."""
    if is_recorded(*given):
        call.plan.require_backward()
        return _apply_node(call, *given)
    return call.forward(False, *given)[0]


def attend(
    plan: AttentionPlan,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    scale: float,
    edges: BoundEdges | None,
    dropout: float,
    with_lse: bool,
) -> tuple[Tensor, Call, Sequence[Tensor | None]]:
    """The output, the attention call, and what its backward pass reads: output, log-sum-exp and the call's
    tensors. Edge data fit the plan."""
    if dropout:
        edges = plan.call(query, key, value, scale, None, edges, dropout).edges
    lse = query.new_empty(query.shape[:2], dtype=torch.float32) if with_lse else None
    attention = Call(query, key, value, scale, query.dtype, lse, edges)
    output = REGISTRY[plan.backend].attend(plan.data, attention)
    return output, attention, (output, lse, query, key, value, *(() if edges is None else edges.tensors()))


class _Node(torch.autograd.Function):
    """(call, *given) -> the results of `NodeCall.forward`."""

    @staticmethod
    def forward(ctx: Any, call: NodeCall, *given: Tensor | None) -> Results:
        results, attention, saved = call.forward(True, *given)
        ctx.call, ctx.data, ctx.attention = call, call.plan.data, without_tensors(attention)
        ctx.save_for_backward(*saved)
        return results

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        arguments = ctx.data, ctx.attention, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            count = len(grads)

            def compute(*tensors: Tensor | None) -> tuple[Tensor | None, ...]:
                return ctx.call.backward(*arguments, tensors[:count], *tensors[count:])

            return None, *OnceDifferentiable.apply(ctx.call.plan.backend, compute, *grads, *ctx.saved_tensors)
        return None, *ctx.call.backward(*arguments, grads, *ctx.saved_tensors)


# Function.apply of torch's C++ base class, as in torch_side/autograd.py. `joint_parameters` is None under torch.func.
_apply_node = super(torch.autograd.Function, _Node).apply
