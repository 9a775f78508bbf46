"""Gradients of the backends with a backward pass of their own: `attend` and `attend_backward` as one autograd function.

First derivatives in reverse mode: double backward, forward mode and vmap raise an error. Backends of plain torch calls
(`Backend.autograd`) need none of this; calls traced by torch.compile get their gradients from `operators`.
"""

from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any, NoReturn

import torch

from ..backends.base import QKV, Backend, BackwardCall, Call, Gradients, Memory
from ..terms.dropout import Dropout
from ..terms.edge_data import FLOATS, TENSORS
from .once_differentiable import OnceDifferentiable, refuse_vmap
from .side_by_side import is_transformed, lie_side_by_side, new_side_by_side
from .torch_private import autograd_active, functorch_active

NUM_INPUTS = 3 + len(FLOATS)  # with gradients: the fields of `Gradients`
NO_TENSORS = dict.fromkeys(TENSORS)


def is_differentiated(call: Call) -> bool:
    """Whether autograd records a tensor of the call, or forward mode or a torch.func transform is active."""
    if torch.is_grad_enabled():
        if call.query.requires_grad or call.key.requires_grad or call.value.requires_grad:
            return True
        edges = call.edges
        if edges is not None and any(each is not None and each.requires_grad for each in edges.tensors()):
            return True
    return is_transformed()


def attend_with_gradients(
    backend: Backend, data: Any, call: Call, returns_lse: bool
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(output, log-sum-exp) of a call that has one, with gradients by `backend.attend_backward`; None in its place
    unless `returns_lse`."""
    terms = () if call.edges is None else call.edges.tensors()
    apply = _TransformedAttention.apply if is_transformed() else _apply_attention
    found = apply(backend, data, call, returns_lse, *call[:3], *terms)
    return found if returns_lse else (found, None)


def gradients_of(backend: Backend, data: Any, given: BackwardCall) -> Gradients:
    """`Backend.attend_backward`, or, for a backend with `autograd`, autograd through a second forward pass."""
    if not backend.autograd:
        return backend.attend_backward(data, given)
    call = given.call
    with autograd_active():
        tensors = [*call[:3], *(() if call.edges is None else call.edges.tensors())]
        places = [place for place, name in enumerate(Gradients._fields) if name in given.wanted]
        for place in places:
            tensors[place] = tensors[place].detach().requires_grad_()
        output = backend.attend(data, with_tensors(call, tensors, None)._replace(out_dtype=given.output.dtype))
        found = torch.autograd.grad(output, [tensors[place] for place in places], given.grad_output)
    return Gradients(**{Gradients._fields[place]: each for place, each in zip(places, found, strict=True)})


def with_tensors(call: Call, tensors: Sequence[torch.Tensor | None], lse: torch.Tensor | None) -> Call:
    """The call with query, key, value and the tensors of edge data replaced by `tensors`, and with `lse`."""
    query, key, value, *terms = tensors
    edges = call.edges.with_tensors(terms) if terms else None
    return Call(query, key, value, call.scale, call.out_dtype, lse, edges)


@lru_cache
def names_of(wanted: tuple[bool, ...]) -> frozenset[str]:
    """Names of the wanted fields of `Gradients`."""
    return frozenset(name for name, is_wanted in zip(Gradients._fields, wanted, strict=False) if is_wanted)


class _Attention(torch.autograd.Function):
    """(backend, data, call, returns_lse, query, key, value, *tensors of edge data) -> output, or (output, lse).

    `forward` takes ctx: with `setup_context` torch would bind the arguments to the signature in Python at every call,
    which takes longer than a launch.
    """

    @staticmethod
    def forward(
        ctx: Any, backend: Backend, data: Any, call: Call, returns_lse: bool, *tensors: torch.Tensor | None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        output = backend.attend(data, call)
        _save(ctx, backend, data, call, tensors, output)
        return (output, call.lse) if returns_lse else output

    @staticmethod
    def backward(
        ctx: Any, grad_output: torch.Tensor | None, grad_lse: torch.Tensor | None = None
    ) -> tuple[torch.Tensor | None, ...]:
        wanted = names_of(ctx.needs_input_grad[4 : 4 + NUM_INPUTS])
        output, lse, *tensors = ctx.saved_tensors
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        backend, data, call = ctx.call
        call = with_tensors(call, tensors, lse)
        is_joint = wanted >= QKV and lie_side_by_side(*call[:3])
        into = new_side_by_side(call.query) if is_joint else None
        if torch.is_grad_enabled() or functorch_active():
            compute = partial(_gradients, backend, data, call, wanted, into)
            found = OnceDifferentiable.apply(backend.name, compute, output, lse, grad_output, grad_lse, *tensors)
        else:
            given = BackwardCall(call, output, grad_output, wanted, into, grad_lse)
            found = backend.attend_backward(data, given)
        return None, None, None, None, *found[: len(tensors)], *(None,) * (len(tensors) - NUM_INPUTS)


# Function.apply of torch's C++ base class. The Python method first searches the arguments for dead torch.func wrappers,
# which takes as long as a launch.
_apply_attention = super(torch.autograd.Function, _Attention).apply


class _TransformedAttention(_Attention):
    """`_Attention` with `setup_context`, as torch.func requires, and with errors for unsupported transforms."""

    @staticmethod
    def forward(
        backend: Backend, data: Any, call: Call, returns_lse: bool, *tensors: torch.Tensor | None
    ) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
        output = backend.attend(data, with_tensors(call, tensors, call.lse))
        return (output, call.lse) if returns_lse else output

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        backend, data, call, returns_lse, *tensors = inputs
        _save(ctx, backend, data, call, tensors, output[0] if returns_lse else output)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(
            f"backend {ctx.call[0].name} has no forward-mode derivative: use reverse mode, or backend='reference'"
        )

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], backend: Backend, *inputs: Any) -> NoReturn:
        refuse_vmap(backend.name)


def _save(
    ctx: Any, backend: Backend, data: Any, call: Call, tensors: Sequence[torch.Tensor | None], output: torch.Tensor
) -> None:
    ctx.call = backend, data, without_tensors(call)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(output, call.lse, *tensors)


def without_tensors(call: Call) -> Call:
    """The call without its tensors; autograd saves them and detects later changes."""
    edges = call.edges
    if edges is not None:
        dropout = None if edges.dropout is None else Dropout(edges.dropout.rate)
        edges = edges.changed(order=None, dropout=dropout, checked_types=None, **NO_TENSORS)
    return Call(None, None, None, call.scale, call.out_dtype, None, edges)


def _gradients(
    backend: Backend,
    data: Any,
    call: Call,
    wanted: frozenset[str],
    into: Memory | None,
    *tensors: torch.Tensor | None,
) -> Gradients:
    """`Backend.attend_backward` of a call. Tensors: output, lse, the gradients of both, then the tensors of the
    call."""
    output, lse, grad_output, grad_lse, *given = tensors
    call = with_tensors(call, given, lse)
    return backend.attend_backward(data, BackwardCall(call, output, grad_output, wanted, into, grad_lse))
