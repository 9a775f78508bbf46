"""Projections and attention of FusedGATConv and of FusedGATv2Conv, as one autograd node each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from kernels import AttentionPlan, BoundEdges
from kernels.autograd import with_tensors
from kernels.backends import REGISTRY
from kernels.backends.base import Call
from kernels.side_by_side import RowParts
from models.one_node import NodeCall, attend, tensors_of
from models.projections import Projections

Saved = Sequence[Tensor | None]
OF_ROWS = frozenset(("query", "key", "value"))
OF_ENDS = frozenset(("value", "row_values", "column_values"))
OF_EDGES = OF_ENDS | {"edge_values"}
SCORE = "leaky_relu(column0 + row0, number0)"  # as a `ScoreTerm` names its values
SCORE_OF_EDGES = "leaky_relu(column0 + row0 + edge0, number0)"
ALIGNMENT = 8  # columns: rows of 16-bit values are then aligned to 16 bytes, so that kernels need no copy


@dataclass(frozen=True, eq=False, slots=True)
class GATv2Call(NodeCall):
    """One call of FusedGATv2Conv: the values are the keys.

    Its differentiable arguments are a [1, H, C], and inputs and parameters of the projections; its result is the output
    [N, H, C].

    Attributes:
        projections: to query and key, (H, C) each.
        slope: of the leaky ReLU below 0.
        dropout: of the plan's call.
    """

    plan: AttentionPlan
    projections: Projections
    slope: float
    dropout: float

    def forward(self, with_lse: bool, additive: Tensor, *given: Tensor) -> tuple[Tensor, Call, Saved]:
        (query, key), of_projections = self.projections.forward(given)
        dtype = self.projections.dtype
        weight = additive[0].to(dtype)
        edges = BoundEdges(self.plan.edge_order, additive_weight=weight, additive_slope=self.slope)
        attention = self.plan.call(query, key, key, 1.0, dtype, edges, self.dropout)
        output, attention = attend(self.plan, attention, with_lse)
        return output, attention, (additive, output, attention.lse, *tensors_of(attention), *of_projections)

    def backward(
        self, attention: Call, needed: Sequence[bool], grads: Sequence[Tensor], *saved: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        (additive, output, lse, *tensors), of_projections = self.projections.split_saved(saved)
        attention = with_tensors(attention, tensors, lse)
        of_head = output.shape[1:]
        rows = RowParts(*[of_head] * (4 - len(self.projections.parts)))  # query in rows of its own, or here; key, value
        joint = attention.key.new_empty((attention.key.shape[0], rows.pitch))
        *of_query, of_key, of_value = rows.split(joint)
        joints = [joint[:, : -of_head.numel()]]
        if not of_query:
            of_query = [torch.empty_like(output)]
            joints.insert(0, of_query[0].flatten(1))
        wanted = OF_ROWS | {"additive_weight"} if needed[0] else OF_ROWS
        memory = (of_query[0], of_key, of_value)
        found = REGISTRY[self.plan.backend].attend_backward(self.plan.data, attention, output, grads[0], wanted, memory)
        for place, gradient in zip(memory, found, strict=False):
            if gradient is not place:
                place.copy_(gradient)
        of_key.add_(of_value)
        of_additive = found.additive_weight.to(additive.dtype)[None] if needed[0] else None
        return of_additive, *self.projections.gradients(joints, of_projections, needed[1:])


@dataclass(frozen=True, eq=False, slots=True)
class GATCall(NodeCall):
    """One call of FusedGATConv.

    A score needs <att, W x> of both ends, which is <W^T att, x>: the GEMM of the values computes those of the sources.

        sources [N, F]  ->  value: H heads of C | score of each head as a source (and, in a square graph, as a target)
        targets         ->  score of each head as a target

    Its differentiable arguments are the values of edges [nnz, H, 1] or None; the sources, W [H C, F] and att_src; the
    targets and their W, or None twice where they are the sources; att_dst. Its result is the output [N, H, C].

    Attributes:
        dtype: type of the GEMMs.
        score: normalised expression of the score.
        slope: of the leaky ReLU below 0.
        dropout: of the plan's call.
    """

    plan: AttentionPlan
    dtype: torch.dtype
    score: str
    slope: float
    dropout: float

    def forward(
        self,
        with_lse: bool,
        edge_values: Tensor | None,
        source: Tensor,
        weight: Tensor,
        of_source: Tensor,
        target: Tensor | None,
        target_weight: Tensor | None,
        of_target: Tensor,
    ) -> tuple[Tensor, Call, Saved]:
        dtype, (num_heads, head_dim) = self.dtype, of_source.shape[1:]
        width, wide = weight.shape[0], torch.promote_types(dtype, torch.float32)
        attentions = (of_source, of_target) if target is None else (of_source,)
        source, joint = source.to(dtype), _joint_weight(weight, attentions).to(dtype)
        rows = functional.linear(source, joint)
        value = rows[:, :width].unflatten(1, (num_heads, head_dim))
        scores = _scores(rows, width, num_heads, len(attentions))
        column, *row = [scores[..., i : i + 1].to(wide).contiguous() for i in range(len(attentions))]
        target_rows = None
        if target is not None:
            target, target_rows = target.to(dtype), _score_rows(target_weight, (of_target,)).to(dtype)
            row = [functional.linear(target, target_rows).to(wide).unsqueeze(-1)]
        unread = value.new_zeros(head_dim)
        query, key = (unread.expand(len(each), num_heads, -1) for each in (row[0], value))
        edges = BoundEdges(
            self.plan.edge_order,
            row_values=row[0],
            column_values=column,
            edge_values=edge_values,
            score=self.score,
            score_numbers=(self.slope,),
        )
        attention = self.plan.call(query, key, value, 1.0, dtype, edges, self.dropout)
        output, attention = attend(self.plan, attention, with_lse)
        saved = (source, joint, weight, of_source, target, target_rows, target_weight, of_target)
        return output, attention, (*saved, output, attention.lse, *tensors_of(attention))

    def backward(
        self, attention: Call, needed: Sequence[bool], grads: Sequence[Tensor], *saved: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        source, joint, weight, of_source, target, target_rows, target_weight, of_target, output, lse, *tensors = saved
        attentions = (of_source, of_target) if target is None else (of_source,)
        num_heads, head_dim = output.shape[1:]
        width, num_scores = weight.shape[0], len(attentions) * num_heads
        # value | scores | rows that the kernel writes for key and query, which the scores do not read. In whole heads.
        rows = source.new_empty((len(source), 2 * num_heads + -(-num_scores // head_dim), head_dim))
        value, unread = rows[:, :num_heads], rows[:, -num_heads:]
        of_query = unread if target is None else torch.empty_like(output)
        found = REGISTRY[self.plan.backend].attend_backward(
            self.plan.data,
            with_tensors(attention, tensors, lse),
            output,
            grads[0],
            OF_EDGES if needed[0] else OF_ENDS,
            (of_query, unread, value),
        )
        if found.value is not value:
            value.copy_(found.value)
        rows = rows.flatten(1)[:, : width + num_scores]
        scores = _scores(rows, width, num_heads, len(attentions))
        for i, gradient in enumerate((found.column_values, found.row_values)[: len(attentions)]):
            scores[..., i : i + 1].copy_(gradient)
        of_joint = torch.mm(rows.t(), source).to(weight.dtype)
        of_weight, *of_attention = _weight_gradients(of_joint[width:], weight, attentions, of_joint[:width])
        of_source_rows = torch.mm(rows, joint[: width + num_scores]) if needed[1] else None
        of_target_rows = of_target_weight = None
        if target is not None:
            row = found.row_values.squeeze(-1).to(self.dtype)
            of_scores = torch.mm(row.t(), target).to(target_weight.dtype)
            of_target_weight, *of_target = _weight_gradients(of_scores, target_weight, (of_target,))
            of_attention += of_target
            of_target_rows = torch.mm(row, target_rows) if needed[4] else None
        of_source, of_target = of_attention
        return found.edge_values, of_source_rows, of_weight, of_source, of_target_rows, of_target_weight, of_target


def _joint_weight(weight: Tensor, attentions: Sequence[Tensor]) -> Tensor:
    """[columns, F]: W, then `_score_rows`, then zeros up to ALIGNMENT."""
    parts = [weight, _score_rows(weight, attentions)]
    if missing := -(len(parts[0]) + len(parts[1])) % ALIGNMENT:
        parts.append(weight.new_zeros((missing, weight.shape[1])))
    return torch.cat(parts)


def _score_rows(weight: Tensor, attentions: Sequence[Tensor]) -> Tensor:
    """[H n, F]: W^T att of each head, for n vectors [1, H, C]."""
    with torch.autocast(weight.device.type, enabled=False):
        return torch.bmm(_by_head(attentions), _heads(weight, attentions)).flatten(0, 1)


def _weight_gradients(
    of_scores: Tensor, weight: Tensor, attentions: Sequence[Tensor], of_values: Tensor | None = None
) -> list[Tensor]:
    """Gradients of W and of the vectors, given that of `_score_rows`; `of_values`, which is overwritten, is the rest of
    the gradient of W."""
    by_head, of_rows, heads = _by_head(attentions), _heads(of_scores, attentions), _heads(weight, attentions)
    if of_values is None:
        of_values = torch.bmm(by_head.transpose(1, 2), of_rows).flatten(0, 1)
    else:
        _heads(of_values, attentions).baddbmm_(by_head.transpose(1, 2), of_rows)
    of_attention = torch.bmm(of_rows, heads.transpose(1, 2))  # [H, n, C]
    return [of_values, *[of_attention[None, :, i] for i in range(len(attentions))]]


def _by_head(attentions: Sequence[Tensor]) -> Tensor:
    """[H, n, C] of n vectors [1, H, C]."""
    return (attentions[0] if len(attentions) == 1 else torch.cat(attentions)).transpose(0, 1)


def _heads(rows: Tensor, attentions: Sequence[Tensor]) -> Tensor:
    """[H, .., F] of rows [H .., F]."""
    return rows.view(attentions[0].shape[1], -1, rows.shape[1])


def _scores(rows: Tensor, width: int, num_heads: int, count: int) -> Tensor:
    """[N, H, n], n = `count`: the columns from `width` on."""
    return rows[:, width : width + num_heads * count].unflatten(1, (num_heads, count))
