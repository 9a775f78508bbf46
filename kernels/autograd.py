"""Gradients of the backends with a backward pass of their own: `attend` and `attend_backward` as one autograd function.

Reverse mode, once: double backward, forward mode and vmap raise an error. Backends made of torch calls need none of
this (`Backend.autograd`).
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch

from .backends.base import Backend, Gradients, Memory
from .dropout import Dropout
from .edge_data import EdgeTerms
from .once_differentiable import refuse_double_backward
from .side_by_side import is_transformed, lie_side_by_side, new_side_by_side
from .torch_private import autograd_active, functorch_active

DIFFERENTIABLE = Gradients._fields
FLOAT_TERMS = DIFFERENTIABLE[3:]  # fields of EdgeTerms, after query, key and value
NUM_TERMS = len(FLOAT_TERMS) + 2  # and types, seed

Terms = tuple[torch.Tensor | None, ...]
NO_TERMS: Terms = (None,) * NUM_TERMS


def is_differentiated(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, edges: EdgeTerms | None = None
) -> bool:
    """Whether autograd records a tensor of the call, or forward mode or a transform of torch.func runs."""
    if torch.is_grad_enabled():
        if query.requires_grad or key.requires_grad or value.requires_grad:
            return True
        if edges is not None and any(term is not None and term.requires_grad for term in _float_terms(edges)):
            return True
    return is_transformed()


def attend_with_gradients(
    backend: Backend,
    data: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    out_dtype: torch.dtype,
    lse: torch.Tensor,
    edges: EdgeTerms | None = None,
) -> torch.Tensor:
    """`backend.attend` with gradients by `backend.attend_backward`.

    Args:
        data: of a plan with `inputs.backward`.
        lse: [num_rows, H] float32, filled; it has no gradient.
        query, key, value, scale, out_dtype, edges: as in `Backend.attend`.
    """
    call = Call(backend, data, scale, out_dtype, lse, edges)
    terms = () if edges is None else split_terms(edges)[0]
    function = _TransformedAttention if functorch_active() else _Attention
    return function.apply(call, query, key, value, *terms)


def split_terms(edges: EdgeTerms | None) -> tuple[Terms, float | None, float]:
    """The tensors of the terms (FLOAT_TERMS, types, the dropout's seed), the clamp, and the dropout's rate or 0."""
    if edges is None:
        return NO_TERMS, None, 0.0
    seed = None if edges.dropout is None else edges.dropout.seed
    return (*_float_terms(edges), edges.types, seed), edges.clamp, _rate(edges)


def join_terms(terms: Terms, clamp: float | None, rate: float) -> EdgeTerms | None:
    """The inverse of `split_terms`."""
    if clamp is None and not [term for term in terms if term is not None]:
        return None
    *floats, types, seed = terms
    dropout = None if seed is None else Dropout(rate, seed)
    return EdgeTerms(**dict(zip(FLOAT_TERMS, floats, strict=True)), types=types, clamp=clamp, dropout=dropout)


def attend(
    backend: Backend,
    data: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    out_dtype: torch.dtype,
    lse: torch.Tensor | None,
    terms: Terms,
    clamp: float | None,
    rate: float,
) -> torch.Tensor:
    """`backend.attend` of split terms."""
    edges = join_terms(terms, clamp, rate)
    # Only backends with `takes_edges` know the last argument.
    return backend.attend(data, query, key, value, scale, out_dtype, lse, *(() if edges is None else (edges,)))


def gradients(
    backend: Backend,
    data: Any,
    scale: float,
    clamp: float | None,
    rate: float,
    wanted: tuple[bool, ...],
    into: Memory | None,
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    *terms: torch.Tensor | None,
) -> Gradients:
    """`backend.attend_backward` of split terms."""
    names, edges = _names(wanted), join_terms(terms, clamp, rate)
    if backend.autograd:
        return _differentiate_again(backend, data, grad_output, query, key, value, output.dtype, scale, edges, names)
    tensors = (grad_output, query, key, value, output, lse)
    return backend.attend_backward(data, *tensors, scale, edges, names, into)


def _differentiate_again(
    backend: Backend,
    data: Any,
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out_dtype: torch.dtype,
    scale: float,
    edges: EdgeTerms | None,
    names: frozenset[str],
) -> Gradients:
    """Gradients by autograd through a second forward pass, where an operator hid the first from autograd."""
    with autograd_active():
        given = {"query": query, "key": key, "value": value}
        if edges is not None:
            given |= dict(zip(FLOAT_TERMS, _float_terms(edges), strict=True))
        leaves = {name: given[name].detach().requires_grad_() for name in names}
        if edges is not None:
            edges = replace(edges, **{name: leaf for name, leaf in leaves.items() if name in FLOAT_TERMS})
        tensors = (leaves.get(name, given[name]) for name in DIFFERENTIABLE[:3])
        lse = query.new_empty(query.shape[:2], dtype=torch.float32) if backend.writes_lse else None
        output = _attend(Call(backend, data, scale, out_dtype, lse, edges), *tensors)
        found = torch.autograd.grad(output, list(leaves.values()), grad_output)
    return Gradients(**dict(zip(leaves, found, strict=True)))


@lru_cache
def _names(wanted: tuple[bool, ...]) -> frozenset[str]:
    return frozenset(name for name, is_wanted in zip(DIFFERENTIABLE, wanted, strict=True) if is_wanted)


class Call(NamedTuple):
    """What autograd does not differentiate; the tensors of `edges` are passed to it beside."""

    backend: Backend
    data: Any
    scale: float
    out_dtype: torch.dtype
    lse: torch.Tensor
    edges: EdgeTerms | None


class _Attention(torch.autograd.Function):
    """(call, query, key, value, *terms) -> output; no terms without edge data.

    `forward` takes ctx: with `setup_context` torch binds the arguments to the signature of `forward` in Python at every
    call, which takes longer than a launch.
    """

    @staticmethod
    def forward(
        ctx: Any, call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *terms: torch.Tensor | None
    ) -> torch.Tensor:
        output = _attend(call, query, key, value)
        _save(ctx, call, query, key, value, terms, output)
        return output

    @staticmethod
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1 : 1 + len(DIFFERENTIABLE)]
        query, key, value, output, lse, *terms = ctx.saved_tensors
        wanted = (*needed, *(False,) * (len(DIFFERENTIABLE) - len(needed)))
        is_joint = all(wanted[:3]) and lie_side_by_side(query, key, value)
        into = new_side_by_side(query) if is_joint else None
        watched = torch.is_grad_enabled() or functorch_active()
        run = _Gradients.apply if watched else gradients
        tensors = (grad_output, query, key, value, output, lse, *(terms or NO_TERMS))
        found = run(*ctx.call, wanted, into, *tensors)
        return (None, *found, None, None) if terms else (None, *found[:3])

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        raise NotImplementedError(
            f"backend {ctx.call[0].name} has no forward-mode derivative: use reverse mode, or backend='reference'"
        )


class _TransformedAttention(_Attention):
    """`_Attention` in the form that the transforms of torch.func ask for."""

    @staticmethod
    def forward(
        call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *terms: torch.Tensor | None
    ) -> torch.Tensor:
        edges = join_terms(terms, call.edges.clamp, _rate(call.edges)) if terms else None  # unwrapped by the transform
        return _attend(call._replace(edges=edges), query, key, value)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        call, query, key, value, *terms = inputs
        _save(ctx, call, query, key, value, terms, output)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], call: Call, *inputs: Any) -> NoReturn:
        _refuse_vmap(call.backend.name)


def _attend(call: Call, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    backend, data, scale, out_dtype, lse, edges = call
    # Only backends with `takes_edges` know the last argument.
    return backend.attend(data, query, key, value, scale, out_dtype, lse, *(() if edges is None else (edges,)))


def _save(
    ctx: Any,
    call: Call,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    terms: Sequence[torch.Tensor | None],
    output: torch.Tensor,
) -> None:
    edges = call.edges
    ctx.call = (call.backend, call.data, call.scale, None if edges is None else edges.clamp, _rate(edges))
    ctx.save_for_backward(query, key, value, output, call.lse, *terms)


class _Gradients(torch.autograd.Function):
    """`gradients` with an error in place of its derivative: without one, double backward would be silently wrong."""

    @staticmethod
    def forward(*inputs: Any) -> tuple[torch.Tensor | None, ...]:
        return gradients(*inputs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        ctx.name = inputs[0].name

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> NoReturn:
        refuse_double_backward(ctx.name)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> NoReturn:
        refuse_double_backward(ctx.name)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], backend: Backend, *inputs: Any) -> NoReturn:
        _refuse_vmap(backend.name)


def _refuse_vmap(name: str) -> NoReturn:
    raise NotImplementedError(
        f"backend {name} cannot be batched by vmap: put the batch into the heads, [N, H, d], or into the graph as "
        "diagonal blocks"
    )


def _rate(edges: EdgeTerms | None) -> float:
    return 0.0 if edges is None or edges.dropout is None else edges.dropout.rate


def _float_terms(edges: EdgeTerms) -> Terms:
    return tuple(getattr(edges, name) for name in FLOAT_TERMS)
