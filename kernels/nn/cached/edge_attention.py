"""Attention of an edge_index as one torch operator, `fused3s::attention_of_edges`, for torch.compile.

An eager layer plans the edge_index and calls the plan; a compiled one calls this operator, which looks up or builds the
plan inside, so that neither the plan nor the sizes of a graph are part of the compiled code. The backward pass looks up
the plan of the forward pass by the same tensor.
"""

from dataclasses import replace
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from ... import AttentionPlan, Dropout
from ...backends import REGISTRY
from ...backends.base import BackwardCall
from ...runtime.semaphores import is_capturing
from ...torch_side.autograd import gradients_of
from ...torch_side.once_differentiable import refuse_double_backward
from .planned_edges import bind_features, plan_edge_index

INPUTS = (  # the fields of `EdgeCall`
    "Tensor query, Tensor key, Tensor value, Tensor? features, Tensor? key_weight, Tensor? value_weight, "
    "Tensor? dropout_seed, float dropout, float scale, Tensor edge_index, str backend, bool cache"
)
WANTED = ("query", "key", "value", "padded_features", "key_weight", "value_weight")  # fields of `Gradients`
LIBRARY = torch.library.Library("fused3s", "FRAGMENT")
# A captured CUDA graph would keep the first plan. A torch without this tag: `_refuse_capture`.
TAGS = tuple(getattr(torch.Tag, name) for name in ("cudagraph_unsafe",) if hasattr(torch.Tag, name))
LIBRARY.define(f"attention_of_edges({INPUTS}, bool with_lse) -> (Tensor output, Tensor lse)", tags=TAGS)
LIBRARY.define(
    f"attention_of_edges_backward({INPUTS}, Tensor grad_output, Tensor output, Tensor lse, bool[] wanted) -> Tensor[]",
    tags=TAGS,
)


class EdgeCall(NamedTuple):
    """The arguments that both operators have; see `attend_edges`."""

    query: Tensor
    key: Tensor
    value: Tensor
    features: Tensor | None
    key_weight: Tensor | None
    value_weight: Tensor | None
    dropout_seed: Tensor | None
    dropout: float
    scale: float
    edge_index: Tensor
    backend: str
    cache: bool

    def plan(self, backward: bool) -> AttentionPlan:
        _refuse_capture(self.query.device)
        return plan_edge_index(
            self.edge_index,
            (self.query.shape[0], self.key.shape[0]),
            backend=self.backend,
            dtype=self.query.dtype,
            head_dim=self.query.shape[2],
            num_heads=self.query.shape[1],
            edge_data=self.features is not None,
            backward=backward,
            cache=self.cache,
        )

    def options(self, plan: AttentionPlan) -> dict[str, Any]:
        """Keywords of the plan's call."""
        options = {"scale": self.scale, "dropout": Dropout(self.dropout, self.dropout_seed) if self.dropout else 0.0}
        if self.features is not None:
            bound = bind_features(plan, self.features, self.query.dtype, cache=self.cache)
            options["edges"] = replace(bound, key_weight=self.key_weight, value_weight=self.value_weight)
        return options


def attend_edges(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    edge_index: Tensor,
    *,
    backend: str,
    cache: bool,
    scale: float,
    features: Tensor | None = None,
    key_weight: Tensor | None = None,
    value_weight: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """softmax(scale * q k^T masked by the edges) v, [num_rows, H, d], with gradients; for torch.compile.

    Args:
        query: [num_rows, H, d]; key, value: [num_cols, H, d].
        edge_index, backend, cache: see `plan_edge_index`.
        features: [E, r], q's type; key_weight, value_weight: [H, d, r], as in `fused3s.terms.edge_data`.
        dropout: rate of the weights; the seed is drawn from torch's generator.
    """
    seed = torch.randint(1 << 62, (1,), dtype=torch.int64, device=query.device) if dropout else None
    given = (query, key, value, features, key_weight, value_weight)
    with_lse = torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in given)
    terms = (features, key_weight, value_weight, seed, dropout, scale)
    output, _ = torch.ops.fused3s.attention_of_edges(query, key, value, *terms, edge_index, backend, cache, with_lse)
    return output


def _refuse_capture(device: torch.device) -> None:
    """Raise if this torch captures the operator in a CUDA graph."""
    if not TAGS and is_capturing(device):
        raise RuntimeError(
            f"torch {torch.__version__}: a CUDA graph of a compiled layer would keep the plan of its first edge_index; "
            "compile without mode='reduce-overhead', or use torch 2.8 or newer"
        )


def _attention_of_edges(*inputs: Any) -> tuple[Tensor, Tensor]:
    *given, with_lse = inputs
    given = EdgeCall(*given)
    with torch.no_grad():
        plan = given.plan(with_lse)
        if with_lse and REGISTRY[plan.backend].writes_lse:
            output, lse = plan(*given[:3], return_lse=True, **given.options(plan))
        else:
            output, lse = plan(*given[:3], **given.options(plan)), _new_lse(given.query, with_lse).zero_()
    return output.contiguous(), lse


def _attention_of_edges_backward(*inputs: Any) -> list[Tensor]:
    """The wanted gradients, in the order of WANTED."""
    *given, grad_output, output, lse, wanted = inputs
    given, names = EdgeCall(*given), {name for name, is_wanted in zip(WANTED, wanted, strict=True) if is_wanted}
    with torch.no_grad():
        plan = given.plan(True)
        call = plan.call(*given[:3], out_dtype=output.dtype, **given.options(plan))._replace(lse=lse)
        backward = BackwardCall(call, output, grad_output, frozenset(names))
        found = gradients_of(REGISTRY[plan.backend], plan.data, backward)._asdict()
        if "padded_features" in names:  # from CSR order to the caller's
            features, order = given.features, plan.edge_order.edge_of_csr
            gradient = found["padded_features"][:, : features.shape[1]].to(features.dtype)
            found["padded_features"] = torch.empty_like(features).index_copy_(0, order.long(), gradient)
    return [found[name].contiguous() for name in WANTED if name in names]


def _new_lse(query: Tensor, with_lse: bool) -> Tensor:
    """Memory for the log-sum-exp; backends that autograd differentiates have none."""
    return query.new_empty(query.shape[:2] if with_lse else (0,), dtype=torch.float32)


def _fake(query: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    return query.new_empty(query.shape), _new_lse(query, others[-1])


def _fake_backward(*inputs: Any) -> list[Tensor]:
    tensors, wanted = inputs[: len(WANTED)], inputs[-1]
    return [each.new_empty(each.shape) for each, is_wanted in zip(tensors, wanted, strict=True) if is_wanted]


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    *tensors, dropout, scale, edge_index, backend, cache, with_lse = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(*tensors, edge_index, *output)
    ctx.call = dropout, scale, backend, cache, with_lse


def _differentiate(ctx: Any, grad_output: Tensor, grad_lse: None) -> tuple[Tensor | None, ...]:
    *tensors, edge_index, output, lse = ctx.saved_tensors
    dropout, scale, backend, cache, with_lse = ctx.call
    if not with_lse:
        raise ValueError("fused3s::attention_of_edges: called with with_lse=False, but its gradient needs it")
    wanted, given = list(ctx.needs_input_grad[: len(WANTED)]), (*tensors, dropout, scale, edge_index, backend, cache)
    found = iter(torch.ops.fused3s.attention_of_edges_backward(*given, grad_output, output, lse, wanted))
    return *(next(found) if is_wanted else None for is_wanted in wanted), *(None,) * 7


def _refuse(ctx: Any, *gradients: Tensor) -> NoReturn:
    refuse_double_backward("of a compiled layer")


for device in ("CPU", "CUDA"):
    LIBRARY.impl("attention_of_edges", _attention_of_edges, device)
    LIBRARY.impl("attention_of_edges_backward", _attention_of_edges_backward, device)
torch.library.register_fake("fused3s::attention_of_edges", _fake, lib=LIBRARY)
torch.library.register_fake("fused3s::attention_of_edges_backward", _fake_backward, lib=LIBRARY)
torch.library.register_autograd("fused3s::attention_of_edges", _differentiate, setup_context=_save, lib=LIBRARY)
torch.library.register_autograd("fused3s::attention_of_edges_backward", _refuse, lib=LIBRARY)
