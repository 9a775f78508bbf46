"""Attention as torch operators, `fused3s::attention` and `fused3s::attention_backward`, for torch.compile and export.

A compiled function calls the operators where an eager one calls the backend, so that there is no graph break. An
operator takes no Python object: the record of a plan is taken apart into its tensors, its numbers and a text that says
how they fit together, and is put together again inside. With dynamic=True, plans that differ in sizes alone share
compiled code.

torch.export works, and the exported program holds the plan: it is a program for one graph. It needs Python, CuPy and
`import kernels` where it runs; AOTInductor cannot run the kernels.
"""

from ast import literal_eval
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from functools import lru_cache
from itertools import count, islice
from typing import Any, NoReturn, get_type_hints
from weakref import WeakValueDictionary

import torch

from .autograd import DIFFERENTIABLE, attend, gradients, split_terms
from .backends import REGISTRY
from .backends.base import Backend
from .edge_data import EdgeTerms
from .once_differentiable import refuse_double_backward
from .runtime.semaphores import fresh_semaphores

PLAN = "Tensor[] plan_tensors, SymInt[] plan_numbers, str layout"
TERMS = (  # as `split_terms` orders them
    "Tensor? bias, Tensor? multiplier, Tensor? features, Tensor? key_weight, Tensor? value_weight, "
    "Tensor? type_weight, Tensor? types, Tensor? dropout_seed, float? clamp, float dropout"
)
LIBRARY = torch.library.Library("fused3s", "FRAGMENT")
LIBRARY.define(
    f"attention(Tensor query, Tensor key, Tensor value, {PLAN}, float scale, ScalarType out_dtype, bool with_lse, "
    f"{TERMS}) -> (Tensor output, Tensor lse)"
)
LIBRARY.define(
    "attention_backward(Tensor grad_output, Tensor query, Tensor key, Tensor value, Tensor output, Tensor lse, "
    f"{PLAN}, float scale, bool[] wanted, {TERMS}) -> Tensor[]"
)


@dataclass(frozen=True, eq=False)
class Operands:
    """The record of a plan as arguments of an operator.

    Attributes:
        tensors: all tensors of the record.
        numbers: its integers; of an object of another library the number under which this process knows it.
        layout: the backend and what each field is, as Python literals: "t" for the next tensor, "n" for the next
            number, a count for a tuple of so many numbers, a list for a record in a field, (value,) for anything else.
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
        """The backend, and the record with these tensors and numbers."""
        name, kinds = _parsed(layout)
        backend = REGISTRY[name]
        if kinds is None:
            return backend, _foreign_object(name, numbers[0])
        return backend, _put_together(backend.data_type, kinds, iter(tensors), iter(numbers))


_foreign: WeakValueDictionary[int, Any] = WeakValueDictionary()  # as long as their plans
_numbers = count()
_parsed = lru_cache(literal_eval)  # each call of an operator needs it


def _take_apart(record: Any, tensors: list[torch.Tensor], numbers: list[int]) -> list[Any]:
    """Append the tensors and numbers of a record; what its fields are."""
    kinds: list[Any] = []
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, torch.Tensor):
            # torch._dynamo.mark_static_address, whose import takes a second: the CUDA graphs of torch.compile read the
            # plan where it is, instead of copying it at every replay.
            value._dynamo_static_input_type = "unguarded"
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


def attend_as_operator(
    plan: Operands,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    out_dtype: torch.dtype,
    with_lse: bool,
    edges: EdgeTerms | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of `Backend.attend`, with its gradients; the second is [0] unless `with_lse`."""
    terms, clamp, dropout = split_terms(edges)
    return torch.ops.fused3s.attention(
        query,
        key,
        value,
        plan.tensors,
        plan.numbers,
        plan.layout,
        scale,
        out_dtype,
        with_lse,
        *terms,
        clamp,
        dropout,
    )


def _attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    plan_tensors: list[torch.Tensor],
    plan_numbers: list[int],
    layout: str,
    scale: float,
    out_dtype: torch.dtype,
    with_lse: bool,
    *terms: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    backend, data = Operands.join(plan_tensors, plan_numbers, layout)
    *terms, clamp, dropout = terms
    lse = _new_lse(query, with_lse)
    filled = lse if with_lse else None
    with fresh_semaphores():
        output = attend(backend, data, query, key, value, scale, out_dtype, filled, terms, clamp, dropout)
    return output.contiguous(), lse


def _attention_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    plan_tensors: list[torch.Tensor],
    plan_numbers: list[int],
    layout: str,
    scale: float,
    wanted: list[bool],
    *terms: Any,
) -> list[torch.Tensor]:
    """The wanted gradients, in the order of DIFFERENTIABLE."""
    backend, data = Operands.join(plan_tensors, plan_numbers, layout)
    *terms, clamp, dropout = terms
    call = (backend, data, scale, clamp, dropout, tuple(wanted), None)  # the results of an operator share no memory
    with fresh_semaphores():
        found = gradients(*call, grad_output, query, key, value, output, lse, *terms)
    return [gradient.contiguous() for gradient in found if gradient is not None]


def _fake_attention(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    out_dtype, with_lse = others[6:8]
    return query.new_empty(query.shape, dtype=out_dtype), _new_lse(query, with_lse)


def _fake_attention_backward(
    grad_output: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor,
    plan_tensors: list[torch.Tensor],
    plan_numbers: list[int],
    layout: str,
    scale: float,
    wanted: list[bool],
    *terms: Any,
) -> list[torch.Tensor]:
    inputs = (query, key, value, *terms)[: len(DIFFERENTIABLE)]
    return [tensor.new_empty(tensor.shape) for tensor, is_wanted in zip(inputs, wanted, strict=True) if is_wanted]


def _new_lse(query: torch.Tensor, with_lse: bool) -> torch.Tensor:
    return query.new_empty(query.shape[:2] if with_lse else (0,), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, plan_tensors, plan_numbers, layout, scale, _, with_lse, *terms, clamp, dropout = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(query, key, value, *output, *terms, *plan_tensors)
    ctx.call = (plan_numbers, layout, scale, with_lse, clamp, dropout)


def _differentiate(ctx: Any, grad_output: torch.Tensor, grad_lse: None) -> tuple[Any, ...]:
    numbers, layout, scale, with_lse, clamp, dropout = ctx.call
    if not with_lse and not REGISTRY[_parsed(layout)[0]].autograd:
        raise ValueError("fused3s::attention: called with with_lse=False, but its gradient reads the log-sum-exp")
    query, key, value, output, lse, *rest = ctx.saved_tensors
    terms, plan_tensors = rest[:8], rest[8:]
    of_terms = ctx.needs_input_grad[9:15]
    wanted = [*ctx.needs_input_grad[:3], *of_terms]
    found = iter(
        torch.ops.fused3s.attention_backward(
            grad_output,
            query,
            key,
            value,
            output,
            lse,
            plan_tensors,
            numbers,
            layout,
            scale,
            wanted,
            *terms,
            clamp,
            dropout,
        )
    )
    of_inputs = [next(found) if is_wanted else None for is_wanted in wanted]
    return (*of_inputs[:3], [None] * len(plan_tensors), *(None,) * 5, *of_inputs[3:], *(None,) * 4)


def _save_layout(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.layout = inputs[8]


def _refuse(ctx: Any, *grads: Any) -> NoReturn:
    refuse_double_backward(_parsed(ctx.layout)[0])


for device in ("CPU", "CUDA"):
    LIBRARY.impl("attention", _attention, device)
    LIBRARY.impl("attention_backward", _attention_backward, device)
torch.library.register_fake("fused3s::attention", _fake_attention, lib=LIBRARY)
torch.library.register_fake("fused3s::attention_backward", _fake_attention_backward, lib=LIBRARY)
torch.library.register_autograd("fused3s::attention", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("fused3s::attention_backward", _refuse, setup_context=_save_layout, lib=LIBRARY)
