"""Attention as torch operators, `fused3s::attention` and `fused3s::attention_backward`, for torch.compile and export.

A compiled function calls the operators instead of the backend, without a graph break. Operators take no Python objects:
the data of a plan is flattened into tensors, numbers and a string that describes its layout, and rebuilt inside. With
dynamic=True, plans that differ only in sizes share compiled code.

torch.export works; the exported program contains the plan, so it is for one graph. It needs Python, CuPy and
`import kernels`; AOTInductor cannot run the kernels.
"""

from ast import literal_eval
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from itertools import count, islice
from typing import Any, NoReturn, get_type_hints
from weakref import WeakValueDictionary

import torch

from ..backends import REGISTRY
from ..backends.base import Backend, Call
from ..runtime.semaphores import fresh_semaphores
from ..terms.dropout import Dropout
from ..terms.edge_data import FLOATS, TENSORS, BoundEdges
from .autograd import gradients_of, names_of
from .once_differentiable import refuse_double_backward
from .torch_private import mark_static_address

PLAN = "Tensor[] plan_tensors, SymInt[] plan_numbers, str layout"
# Tensors of `BoundEdges` that are not None (torch cannot differentiate lists with None); which ones those are; its
# additive slope, and the numbers of its score term; rate of the dropout or 0; expression of the score term or "".
EDGES = "Tensor[] edge_tensors, bool[] is_given, float[] edge_numbers, float dropout, str score"
INPUTS = f"Tensor query, Tensor key, Tensor value, {PLAN}, float scale, {EDGES}"
LIBRARY = torch.library.Library("fused3s", "FRAGMENT")
LIBRARY.define(f"attention({INPUTS}, ScalarType out_dtype, bool with_lse) -> (Tensor output, Tensor lse)")
LIBRARY.define(
    f"attention_backward({INPUTS}, Tensor output, Tensor lse, Tensor grad_output, Tensor? grad_lse, bool[] wanted)"
    " -> Tensor[]"
)


@dataclass(frozen=True, eq=False)
class Operands:
    """The data of a plan, flattened into arguments of an operator.

    Attributes:
        tensors: all tensors of the data.
        numbers: its integers; for an object of another library its id in this process (`_foreign`).
        layout: the backend and the kind of each field, as Python literals: "t" for the next tensor, "n" for the next
            number, a count for a tuple of that many numbers, a list for a nested dataclass, (value,) for anything else.
    """

    tensors: list[torch.Tensor]
    numbers: list[int]
    layout: str

    @classmethod
    def of(cls, backend: str, record: Any) -> "Operands":
        if REGISTRY[backend].data_type is None:
            number = next(_numbers)
            _foreign[number] = record
            return cls([], [number], repr((backend, None)))
        tensors: list[torch.Tensor] = []
        numbers: list[int] = []
        return cls(tensors, numbers, repr((backend, _take_apart(record, tensors, numbers))))

    @staticmethod
    def join(tensors: list[torch.Tensor], numbers: list[int], layout: str) -> tuple[Backend, Any]:
        """The backend, and the plan data rebuilt from tensors and numbers."""
        name, kinds = _parsed(layout)
        backend = REGISTRY[name]
        if kinds is None:
            return backend, _foreign_object(name, numbers[0])
        return backend, _put_together(backend.data_type, kinds, iter(tensors), iter(numbers))


_foreign: WeakValueDictionary[int, Any] = WeakValueDictionary()  # alive as long as their plans
_numbers = count()
_parsed = lru_cache(literal_eval)  # each call of an operator needs it


def _take_apart(record: Any, tensors: list[torch.Tensor], numbers: list[int]) -> list[Any]:
    """Append the tensors and numbers of a record; returns the kinds of its fields."""
    kinds: list[Any] = []
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            mark_static_address(value)
            tensors.append(value)
            kinds.append("t")
        elif type(value) is int:
            numbers.append(value)
            kinds.append("n")
        elif type(value) is tuple:
            numbers += value
            kinds.append(len(value))
        else:
            kinds.append(_take_apart(value, tensors, numbers) if is_dataclass(value) else (value,))
    return kinds


def _put_together(record_type: type, kinds: list[Any], tensors: Iterator[torch.Tensor], numbers: Iterator[int]) -> Any:
    values = []
    for field, kind in zip(fields(record_type), kinds, strict=True):
        if isinstance(kind, str):
            values.append(next(tensors if kind == "t" else numbers))
        elif isinstance(kind, int):
            values.append(tuple(islice(numbers, kind)))
        elif isinstance(kind, list):
            values.append(_put_together(get_type_hints(record_type)[field.name], kind, tensors, numbers))
        else:
            values.append(kind[0])
    return record_type(*values)


def _foreign_object(backend: str, number: int) -> Any:
    record = _foreign.get(number)
    if record is None:
        raise RuntimeError(
            f"a traced program calls a plan of backend {backend} that is gone: its format belongs to another library, "
            "and the program cannot hold it; keep the plan, or trace a plan of another backend"
        )
    return record


def attend_as_operator(plan: Operands, call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of `Backend.attend`, with its gradients; the second is [0] unless `with_lse`."""
    return torch.ops.fused3s.attention(*_inputs(plan, call), call.out_dtype, with_lse)


def _inputs(plan: Operands, call: Call) -> tuple[Any, ...]:
    """The common first arguments of both operators."""
    edges = BoundEdges() if call.edges is None else call.edges
    is_given = [each is not None for each in edges.tensors()]
    tensors = [each for each in edges.tensors() if each is not None]
    rate = 0.0 if edges.dropout is None else edges.dropout.rate
    numbers = [edges.additive_slope, *edges.score_numbers]
    plan_inputs = plan.tensors, plan.numbers, plan.layout
    tensors_of_call = call.query, call.key, call.value  # a slice of a NamedTuple fails in the Dynamo of torch 2.6
    return *tensors_of_call, *plan_inputs, call.scale, tensors, is_given, numbers, rate, edges.score or ""


def _places(given: Sequence[Any], is_given: Sequence[bool], other: Any = None) -> list[Any]:
    """`given` at the positions of `is_given`, `other` elsewhere."""
    rest = iter(given)
    return [next(rest) if each else other for each in is_given]


def _call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan_tensors: list[torch.Tensor],
    plan_numbers: list[int],
    layout: str,
    scale: float,
    edge_tensors: list[torch.Tensor],
    is_given: list[bool],
    edge_numbers: list[float],
    dropout: float,
    score: str,
    *,
    out_dtype: torch.dtype,
    lse: torch.Tensor | None,
) -> tuple[Backend, Any, Call]:
    """The inverse of `_inputs`."""
    backend, data = Operands.join(plan_tensors, plan_numbers, layout)
    edges = None
    if edge_tensors or score:
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
        edges = template.with_tensors(tensors)
    return backend, data, Call(query, key, value, scale, out_dtype, lse, edges)


def _attention(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *inputs, out_dtype, with_lse = inputs
    lse = _new_lse(inputs[0], with_lse)
    backend, data, call = _call(*inputs, out_dtype=out_dtype, lse=lse if with_lse else None)
    if not backend.writes_lse:
        call, _ = call._replace(lse=None), lse.zero_()
    with fresh_semaphores():
        return backend.attend(data, call).contiguous(), lse


def _attention_backward(*inputs: Any) -> list[torch.Tensor]:
    """The wanted gradients, in the order of the fields of `Gradients`."""
    *inputs, output, lse, grad_output, grad_lse, wanted = inputs
    backend, data, call = _call(*inputs, out_dtype=output.dtype, lse=lse)
    names = names_of(tuple(wanted))
    with fresh_semaphores():  # no `into`: results of an operator must not share memory
        found = gradients_of(backend, data, call, output, grad_output, names, grad_lse=grad_lse)
    return [gradient.contiguous() for gradient in found if gradient is not None]


def _fake_attention(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *_, out_dtype, with_lse = others
    return query.new_empty(query.shape, dtype=out_dtype), _new_lse(query, with_lse)


def _fake_attention_backward(*inputs: Any) -> list[torch.Tensor]:
    tensors, wanted = (*inputs[:3], *_places(*inputs[7:9])), inputs[-1]
    return [tensor.new_empty(tensor.shape) for tensor, is_wanted in zip(tensors, wanted, strict=False) if is_wanted]


def _new_lse(query: torch.Tensor, with_lse: bool) -> torch.Tensor:
    return query.new_empty(query.shape[:2] if with_lse else (0,), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, plan_tensors, *numbers, edge_tensors, is_given, edge_numbers = inputs[:10]
    dropout, score, _, with_lse = inputs[10:]
    if not with_lse:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, query, key, value, *edge_tensors, *plan_tensors)
    ctx.call = len(edge_tensors), numbers, is_given, edge_numbers, dropout, score, with_lse


def _differentiate(ctx: Any, grad_output: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    num_edge_tensors, (numbers, layout, scale), is_given, edge_numbers, dropout, score, with_lse = ctx.call
    if not with_lse and not REGISTRY[_parsed(layout)[0]].autograd:
        raise ValueError("fused3s::attention: called with with_lse=False, but its gradient reads the log-sum-exp")
    output, lse, query, key, value, *rest = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    edge_tensors, plan_tensors = rest[:num_edge_tensors], rest[num_edge_tensors:]
    of_edges = _places(ctx.needs_input_grad[7], is_given, False)[: len(FLOATS)]
    wanted = [*ctx.needs_input_grad[:3], *of_edges]
    of_plan = plan_tensors, numbers, layout, scale
    inputs = query, key, value, *of_plan, edge_tensors, is_given, edge_numbers, dropout, score
    found = torch.ops.fused3s.attention_backward(*inputs, output, lse, grad_output, grad_lse, wanted)
    found = [*_places(found, wanted), None, None]  # of types and the seed
    of_edges = [gradient for gradient, given in zip(found[3:], is_given, strict=False) if given]
    return *found[:3], [None] * len(plan_tensors), None, None, None, of_edges, *(None,) * 6


def _save_layout(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.layout = inputs[5]


def _refuse(ctx: Any, *grads: Any) -> NoReturn:
    refuse_double_backward(_parsed(ctx.layout)[0])


for device in ("CPU", "CUDA"):
    LIBRARY.impl("attention", _attention, device)
    LIBRARY.impl("attention_backward", _attention_backward, device)
torch.library.register_fake("fused3s::attention", _fake_attention, lib=LIBRARY)
torch.library.register_fake("fused3s::attention_backward", _fake_attention_backward, lib=LIBRARY)
torch.library.register_autograd("fused3s::attention", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("fused3s::attention_backward", _refuse, setup_context=_save_layout, lib=LIBRARY)
