"""Errors for derivatives that a backend lacks, where autograd would silently return wrong ones."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch

from ..backends.base import Call
from .side_by_side import is_transformed


def refuse_double_backward(name: str) -> NoReturn:
    raise NotImplementedError(
        f"backend {name} has no second derivatives, and a gradient of its gradient is asked for (create_graph=True): "
        "use backend='scatter', or 'reference'"
    )


def refuse_vmap(name: str) -> NoReturn:
    raise NotImplementedError(
        f"backend {name} cannot be batched by vmap: put the batch into the heads, [N, H, d], or into the graph as "
        "diagonal blocks"
    )


def refuse_transforms(name: str) -> None:
    """Raise a NotImplementedError if forward mode or a torch.func transform is active."""
    if is_transformed():
        raise NotImplementedError(
            f"backend {name} has neither forward-mode derivatives nor transforms of torch.func (grad, vmap, jvp): use "
            "torch.autograd.grad, or backend='reference'"
        )


def once_differentiable(name: str, call: Call) -> Call:
    """The call with tensors whose second derivatives raise, for backends with first derivatives only.

    Raises:
        NotImplementedError: forward mode or a torch.func transform is active.
    """
    refuse_transforms(name)
    given = [*call[:3], *(() if call.edges is None else call.edges.tensors())]
    watched = [place for place, each in enumerate(given) if each is not None and each.requires_grad]
    if not watched or not torch.is_grad_enabled():
        return call
    for place, once in zip(watched, _Once.apply(name, *[given[place] for place in watched]), strict=True):
        given[place] = once
    query, key, value, *terms = given
    edges = None if call.edges is None else call.edges.with_tensors(terms)
    return call._replace(query=query, key=key, value=value, edges=edges)


class _Once(torch.autograd.Function):
    """(name, *tensors) -> the tensors; the derivative of their gradients raises."""

    @staticmethod
    def forward(ctx: Any, name: str, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.name = name
        ctx.save_for_backward(*tensors)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():
            count = len(gradients)

            def views(*tensors: torch.Tensor) -> list[torch.Tensor]:
                return [each.view_as(each) for each in tensors[:count]]

            gradients = OnceDifferentiable.apply(ctx.name, views, *gradients, *ctx.saved_tensors)
        return None, *gradients


class OnceDifferentiable(torch.autograd.Function):
    """(name, compute, *tensors) -> compute(*tensors), whose derivative raises; all tensors are inputs of that node."""

    @staticmethod
    def forward(name: str, compute: Callable[..., Any], *tensors: torch.Tensor | None) -> tuple[Any, ...]:
        return tuple(compute(*tensors))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0]

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> NoReturn:
        refuse_double_backward(ctx.name)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_double_backward(ctx.name)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], name: str, *inputs: Any) -> NoReturn:
        refuse_vmap(name)
