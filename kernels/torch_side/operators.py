"""Attention as torch operators, each with another one as its backward pass, for torch.compile and export.

    fused3s::attention            of a plan, which it gets by number
    fused3s::attention_of_edges   of an edge_index (`nn.cached.edge_attention`)
    fused3s::attention_in_memory  of a plan in a tensor (the same module)

A compiled function calls the operators instead of the backend, without a graph break. Operators take no Python objects.
They run the plan itself, with its state: errors, exact sizes, streams. Neither the plan nor the sizes of a graph are
part of the compiled code: with dynamic=True, graphs share it.

An exported program (torch.export) holds the number of its plan: it runs in this process while the plan lives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from ..backends import REGISTRY
from ..backends.base import BackwardCall, Call
from ..runtime.gather_rows import add_to_rows, gather_rows
from ..runtime.semaphores import FreshSemaphores
from ..terms.dropout import Dropout
from ..terms.edge_data import FLOATS, TENSORS, BoundEdges, padded_columns
from .autograd import gradients_of, names_of
from .once_differentiable import refuse_double_backward
from .torch_private import register_shortcut

# Tensors of `BoundEdges` that are not None (torch cannot differentiate lists with None); which ones those are; its
# additive slope, and the numbers of its score term; rate of the dropout or 0; expression of the score term or "".
EDGES = "Tensor[] edge_tensors, bool[] is_given, float[] edge_numbers, float dropout, str score"
LIBRARY = torch.library.Library("fused3s", "FRAGMENT")
OF_EDGES = tuple(TENSORS.index(name) for name in ("padded_features", "edge_values"))  # with an entry for each edge
# AttentionPlans by number, while they live. Numbers are never used twice.
_plans: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


def numbered(plan: Any) -> int:
    """The number by which the operators find a plan in this process."""
    number = next(_numbers)
    _plans[number] = plan
    return number


def _plan_of(backend: str, number: int, *_: Any) -> tuple[Any, None, None]:
    if number not in _plans:
        raise RuntimeError(
            f"a traced program calls a plan of backend {backend} that is gone: the program holds only its number; keep "
            "the plan while the program runs, and trace it anew in another process"
        )
    return _plans[number], None, None


def attend_as_operator(
    operator: "Operator", backend: str, graph: Sequence[Any], call: Call, with_lse: bool
) -> tuple[Tensor, Tensor]:
    """(output, log-sum-exp) of `Backend.attend`, with its gradients; the second is [0] unless `with_lse`.

    Args:
        graph: the operator's own arguments.
        call: edge data are in the order that `operator.plan_of` tells.
    """
    edges = BoundEdges() if call.edges is None else call.edges
    is_given = [each is not None for each in edges.tensors()]
    tensors = [each for each in edges.tensors() if each is not None]
    rate = 0.0 if edges.dropout is None else edges.dropout.rate
    numbers = [edges.additive_slope, *edges.score_numbers]
    inputs = call.query, call.key, call.value, backend, *graph, call.scale  # a slice fails in the Dynamo of torch 2.6
    terms = tensors, is_given, numbers, rate, edges.score or ""
    return getattr(torch.ops.fused3s, operator.name)(*inputs, *terms, call.out_dtype, with_lse)


def _places(given: Sequence[Any], is_given: Sequence[bool], other: Any = None) -> list[Any]:
    """`given` at the positions of `is_given`, `other` elsewhere."""
    rest = iter(given)
    return [next(rest) if each else other for each in is_given]


def _edges_of(
    edge_tensors: Sequence[Tensor], is_given: Sequence[bool], edge_numbers: Sequence[float], dropout: float, score: str
) -> BoundEdges | None:
    """The edges that `attend_as_operator` took apart."""
    if not (edge_tensors or score):
        return None
    tensors = _places(edge_tensors, is_given)
    weights = dict(zip(TENSORS, tensors, strict=False))
    sizes = [weights[name].shape[2] for name in ("key_weight", "value_weight") if weights[name] is not None]
    sizes += [] if weights["key_factor"] is None else [weights["key_factor"].shape[0]]
    template = BoundEdges(
        num_features=next(iter(sizes), 0),
        dropout=Dropout(dropout) if dropout else None,
        score=score or None,
        additive_slope=edge_numbers[0],
        score_numbers=tuple(edge_numbers[1:]),
    )
    return template.with_tensors(tensors)


def _sorted(call: Call, order: Tensor | None, features: Tensor | None) -> list[Tensor | None]:
    """The tensors of OF_EDGES in the plan's order; `features` if they are known. `plan_of` has checked their rows."""
    if order is None:
        return []
    tensors = call.edges.tensors()
    given, values = (tensors[place] for place in OF_EDGES)
    if features is None and given is not None:
        features = gather_rows(given, order, padded_columns(given.shape[1]))
    return [features, None if values is None else gather_rows(values, order)]


def _with_sorted(call: Call, found: Sequence[Tensor | None]) -> Call:
    """The call with the tensors of `_sorted`."""
    if not found:
        return call
    tensors = [*call.edges.tensors()]
    for place, tensor in zip(OF_EDGES, found, strict=True):
        tensors[place] = tensor
    return call._replace(edges=call.edges.with_tensors(tensors))


def _new_lse(query: Tensor, with_lse: bool) -> Tensor:
    return query.new_empty(query.shape[:2] if with_lse else (0,), dtype=torch.float32)


def _refuse(ctx: Any, *grads: Any) -> NoReturn:
    refuse_double_backward(ctx.backend)


def _save_backend(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.backend = inputs[3]


@dataclass(frozen=True)
class Operator:
    """`fused3s::NAME` and `fused3s::NAME_backward`.

    Attributes:
        name: of the forward pass.
        graph: schema of the arguments that tell the graph.
        plan_of: gives the plan; the places [nnz] that its edges have in the tensors of OF_EDGES, None if they are in
            its order; and the features in its order, if they are known. Of the backend, these arguments, the call, and
            whether gradients are wanted.
        tags: of torch.
    """

    name: str
    graph: str
    plan_of: Callable[..., Any]
    tags: tuple[torch.Tag, ...] = ()

    def __post_init__(self) -> None:
        inputs = f"Tensor query, Tensor key, Tensor value, str backend, {self.graph}, float scale, {EDGES}"
        results = "(Tensor output, Tensor lse)"
        LIBRARY.define(f"{self.name}({inputs}, ScalarType out_dtype, bool with_lse) -> {results}", tags=self.tags)
        LIBRARY.define(
            f"{self.name}_backward({inputs}, Tensor output, Tensor lse, Tensor grad_output, Tensor? grad_lse, "
            "bool[] wanted) -> Tensor[]",
            tags=self.tags,
        )
        backward, forward = f"{self.name}_backward", self.name
        for name, run, fake, differentiate, save in (
            (forward, self._attend, self._fake, self._differentiate, self._save),
            (backward, self._attend_backward, self._fake_backward, _refuse, _save_backend),
        ):
            for device in ("CPU", "CUDA"):
                LIBRARY.impl(name, run, device)
            torch.library.register_fake(f"fused3s::{name}", fake, lib=LIBRARY)
            torch.library.register_autograd(f"fused3s::{name}", differentiate, setup_context=save, lib=LIBRARY)
            operator = getattr(torch.ops.fused3s, name).default
            register_shortcut(LIBRARY, operator, run, differentiate, save)

    def _split(self, inputs: Sequence[Any]) -> tuple[Call, tuple[Any, ...]]:
        """The call, and the arguments of `plan_of` before it."""
        query, key, value, *plan, scale, edge_tensors, is_given, edge_numbers, dropout, score = inputs
        edges = _edges_of(edge_tensors, is_given, edge_numbers, dropout, score)
        return Call(query, key, value, scale, query.dtype, None, edges), plan

    def _attend(self, *inputs: Any) -> tuple[Tensor, Tensor]:
        *inputs, out_dtype, with_lse = inputs
        call, plan = self._split(inputs)
        plan, order, features = self.plan_of(*plan, call, with_lse)
        sorted_edges = _sorted(call, order, features)
        lse, backend = _new_lse(call.query, with_lse), REGISTRY[plan.backend]
        # Keeps the plan until the backward pass, which refuses one whose memory was filled anew (`PlanRoom.fill`). On
        # the memory, since torch.compile may save another tensor of it. CUDA graphs forget it: their plans live anyway,
        # and no other tensor of their pool may be kept.
        lse.untyped_storage().planned = plan, order, sorted_edges, (data := plan.data)
        writes_lse = with_lse and backend.writes_lse
        call = _with_sorted(call, sorted_edges)._replace(out_dtype=out_dtype, lse=lse if writes_lse else None)
        if not writes_lse:
            lse.zero_()
        with FreshSemaphores():
            return backend.attend(data, call).contiguous(), lse

    def _attend_backward(self, *inputs: Any) -> list[Tensor]:
        """The wanted gradients, in the order of the fields of `Gradients`."""
        *inputs, output, lse, grad_output, grad_lse, wanted = inputs
        given, plan = self._split(inputs)
        planned = getattr(lse.untyped_storage(), "planned", None)
        if planned is None:
            plan, order, features = self.plan_of(*plan, given, True)
            planned = plan, order, _sorted(given, order, features), plan.data
        plan, order, sorted_edges, data = planned
        call = _with_sorted(given, sorted_edges)._replace(out_dtype=output.dtype, lse=lse)
        backward = BackwardCall(call, output, grad_output, names_of(tuple(wanted)), grad_lse=grad_lse)
        with FreshSemaphores():  # no `into`: results of an operator must not share memory
            found = [*gradients_of(REGISTRY[plan.backend], data, backward)]
        for place in OF_EDGES if order is not None else ():
            if (gradient := found[3 + place]) is not None:
                tensor = given.edges.tensors()[place]
                found[3 + place] = add_to_rows(gradient.to(tensor.dtype), order, tensor.shape)
        return [gradient.contiguous() for gradient in found if gradient is not None]

    def _fake(self, query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
        *_, out_dtype, with_lse = others
        return query.new_empty(query.shape, dtype=out_dtype), _new_lse(query, with_lse)

    def _fake_backward(self, *inputs: Any) -> list[Tensor]:
        *inputs, _, _, _, _, wanted = inputs
        *_, edge_tensors, is_given, _, _, _ = inputs
        tensors = (*inputs[:3], *_places(edge_tensors, is_given))
        return [tensor.new_empty(tensor.shape) for tensor, is_wanted in zip(tensors, wanted, strict=False) if is_wanted]

    def _save(self, ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        *inputs, _, with_lse = inputs
        if not with_lse:
            ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        *head, edge_tensors, is_given, edge_numbers, dropout, score = inputs
        tensors = [each for each in head if isinstance(each, Tensor)]  # q, k, v, and of an edge_index that
        ctx.save_for_backward(*output, *edge_tensors, *tensors)
        rest = [None if isinstance(each, Tensor) else each for each in head]
        ctx.call = rest, len(edge_tensors), (is_given, edge_numbers, dropout, score), with_lse

    def _differentiate(self, ctx: Any, grad_output: Tensor | None, grad_lse: Tensor | None) -> tuple[Any, ...]:
        head, count, (is_given, *terms), with_lse = ctx.call
        if not with_lse and not REGISTRY[head[3]].autograd:
            raise ValueError(
                f"fused3s::{self.name}: called with with_lse=False, but its gradient reads the log-sum-exp"
            )
        output, lse, *saved = ctx.saved_tensors
        edge_tensors, tensors = saved[:count], iter(saved[count:])
        head = [next(tensors) if each is None else each for each in head]
        if grad_output is None:
            grad_output = torch.zeros_like(output)
        of_edges = _places(ctx.needs_input_grad[len(head)], is_given, False)[: len(FLOATS)]
        wanted = [*ctx.needs_input_grad[:3], *of_edges]
        backward = getattr(torch.ops.fused3s, f"{self.name}_backward")
        found = backward(*head, edge_tensors, is_given, *terms, output, lse, grad_output, grad_lse, wanted)
        found = [*_places(found, wanted), None, None]  # types and seed have no gradient
        of_edges = [gradient for gradient, given in zip(found[3:], is_given, strict=False) if given]
        return *found[:3], *(None,) * (len(head) - 3), of_edges, *(None,) * 6


OF_PLAN = Operator("attention", "SymInt plan", _plan_of)
