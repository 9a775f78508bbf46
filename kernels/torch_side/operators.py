"""Attention as torch operators, `fused3s::attention` and `fused3s::attention_backward`, for torch.compile and export.

A compiled function calls the operators instead of the backend, without a graph break. Operators take no Python objects:
they get the number of a plan, and run the plan itself, with its state: errors, exact sizes, streams. With dynamic=True,
plans share compiled code.

An exported program (torch.export) holds the number of its plan: it runs in this process while the plan lives.
"""

from collections.abc import Sequence
from itertools import count
from typing import Any, NoReturn
from weakref import WeakValueDictionary

import torch

from ..backends import REGISTRY
from ..backends.base import BackwardCall, Call
from ..runtime.semaphores import fresh_semaphores
from ..terms.dropout import Dropout
from ..terms.edge_data import FLOATS, TENSORS, BoundEdges
from .autograd import gradients_of, names_of
from .once_differentiable import refuse_double_backward

# Tensors of `BoundEdges` that are not None (torch cannot differentiate lists with None); which ones those are; its
# additive slope, and the numbers of its score term; rate of the dropout or 0; expression of the score term or "".
EDGES = "Tensor[] edge_tensors, bool[] is_given, float[] edge_numbers, float dropout, str score"
INPUTS = f"Tensor query, Tensor key, Tensor value, str backend, SymInt plan, float scale, {EDGES}"
LIBRARY = torch.library.Library("fused3s", "FRAGMENT")
LIBRARY.define(f"attention({INPUTS}, ScalarType out_dtype, bool with_lse) -> (Tensor output, Tensor lse)")
LIBRARY.define(
    f"attention_backward({INPUTS}, Tensor output, Tensor lse, Tensor grad_output, Tensor? grad_lse, bool[] wanted)"
    " -> Tensor[]"
)
# AttentionPlans by number, while they live. Numbers are never used twice.
_plans: WeakValueDictionary[int, Any] = WeakValueDictionary()
_numbers = count()


def numbered(plan: Any) -> int:
    """The number by which the operators find a plan in this process."""
    number = next(_numbers)
    _plans[number] = plan
    return number


def _data_of(backend: str, number: int, lse: torch.Tensor | None = None) -> Any:
    """The data of a plan: for a backward pass those that `_attention` noted on the memory of `lse`."""
    if lse is not None and (data := getattr(lse.untyped_storage(), "plan_data", None)) is not None:
        return data
    if number not in _plans:
        raise RuntimeError(
            f"a traced program calls a plan of backend {backend} that is gone: the program holds only its number; keep "
            "the plan while the program runs, and trace it anew in another process"
        )
    return _plans[number].data


def attend_as_operator(backend: str, number: int, call: Call, with_lse: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, log-sum-exp) of `Backend.attend`, with its gradients; the second is [0] unless `with_lse`."""
    edges = BoundEdges() if call.edges is None else call.edges
    is_given = [each is not None for each in edges.tensors()]
    tensors = [each for each in edges.tensors() if each is not None]
    rate = 0.0 if edges.dropout is None else edges.dropout.rate
    numbers = [edges.additive_slope, *edges.score_numbers]
    inputs = call.query, call.key, call.value, backend, number, call.scale  # a slice fails in the Dynamo of torch 2.6
    terms = tensors, is_given, numbers, rate, edges.score or ""
    return torch.ops.fused3s.attention(*inputs, *terms, call.out_dtype, with_lse)


def _places(given: Sequence[Any], is_given: Sequence[bool], other: Any = None) -> list[Any]:
    """`given` at the positions of `is_given`, `other` elsewhere."""
    rest = iter(given)
    return [next(rest) if each else other for each in is_given]


def _call(inputs: Sequence[Any], out_dtype: torch.dtype, lse: torch.Tensor | None) -> Call:
    """The call of `attend_as_operator`; `inputs`: as INPUTS."""
    query, key, value, _, _, scale, edge_tensors, is_given, edge_numbers, dropout, score = inputs
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
    return Call(query, key, value, scale, out_dtype, lse, edges)


def _attention(*inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *inputs, out_dtype, with_lse = inputs
    lse = _new_lse(inputs[0], with_lse)
    backend, call = REGISTRY[inputs[3]], _call(inputs, out_dtype, lse if with_lse else None)
    # Keeps the plan until the backward pass, which refuses one whose memory was filled anew (`PlanRoom.fill`). On the
    # memory, since torch.compile may save another tensor of it. CUDA graphs forget it: their plans live anyway.
    data = lse.untyped_storage().plan_data = _data_of(*inputs[3:5])
    if not backend.writes_lse:
        call, _ = call._replace(lse=None), lse.zero_()
    with fresh_semaphores():
        return backend.attend(data, call).contiguous(), lse


def _attention_backward(*inputs: Any) -> list[torch.Tensor]:
    """The wanted gradients, in the order of the fields of `Gradients`."""
    *inputs, output, lse, grad_output, grad_lse, wanted = inputs
    backend, data = REGISTRY[inputs[3]], _data_of(*inputs[3:5], lse)
    call = _call(inputs, output.dtype, lse)
    given = BackwardCall(call, output, grad_output, names_of(tuple(wanted)), grad_lse=grad_lse)
    with fresh_semaphores():  # no `into`: results of an operator must not share memory
        found = gradients_of(backend, data, given)
    return [gradient.contiguous() for gradient in found if gradient is not None]


def _fake_attention(query: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
    *_, out_dtype, with_lse = others
    return query.new_empty(query.shape, dtype=out_dtype), _new_lse(query, with_lse)


def _fake_attention_backward(*inputs: Any) -> list[torch.Tensor]:
    tensors, wanted = (*inputs[:3], *_places(*inputs[6:8])), inputs[-1]
    return [tensor.new_empty(tensor.shape) for tensor, is_wanted in zip(tensors, wanted, strict=False) if is_wanted]


def _new_lse(query: torch.Tensor, with_lse: bool) -> torch.Tensor:
    return query.new_empty(query.shape[:2] if with_lse else (0,), dtype=torch.float32)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[torch.Tensor, torch.Tensor]) -> None:
    query, key, value, *plan, edge_tensors, is_given, edge_numbers, dropout, score, _, with_lse = inputs
    if not with_lse:
        ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(*output, query, key, value, *edge_tensors)
    ctx.call = plan, is_given, edge_numbers, dropout, score, with_lse


def _differentiate(ctx: Any, grad_output: torch.Tensor | None, grad_lse: torch.Tensor | None) -> tuple[Any, ...]:
    plan, is_given, edge_numbers, dropout, score, with_lse = ctx.call
    if not with_lse and not REGISTRY[plan[0]].autograd:
        raise ValueError("fused3s::attention: called with with_lse=False, but its gradient reads the log-sum-exp")
    output, lse, query, key, value, *edge_tensors = ctx.saved_tensors
    if grad_output is None:
        grad_output = torch.zeros_like(output)
    of_edges = _places(ctx.needs_input_grad[6], is_given, False)[: len(FLOATS)]
    wanted = [*ctx.needs_input_grad[:3], *of_edges]
    inputs = query, key, value, *plan, edge_tensors, is_given, edge_numbers, dropout, score
    found = torch.ops.fused3s.attention_backward(*inputs, output, lse, grad_output, grad_lse, wanted)
    found = [*_places(found, wanted), None, None]  # types and seed have no gradient
    of_edges = [gradient for gradient, given in zip(found[3:], is_given, strict=False) if given]
    return *found[:3], None, None, None, of_edges, *(None,) * 6


def _save_backend(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    ctx.backend = inputs[3]


def _refuse(ctx: Any, *grads: Any) -> NoReturn:
    refuse_double_backward(ctx.backend)


for device in ("CPU", "CUDA"):
    LIBRARY.impl("attention", _attention, device)
    LIBRARY.impl("attention_backward", _attention_backward, device)
torch.library.register_fake("fused3s::attention", _fake_attention, lib=LIBRARY)
torch.library.register_fake("fused3s::attention_backward", _fake_attention_backward, lib=LIBRARY)
torch.library.register_autograd("fused3s::attention", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("fused3s::attention_backward", _refuse, setup_context=_save_backend, lib=LIBRARY)
