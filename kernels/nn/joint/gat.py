"""Projections and attention of GATConv and of GATv2Conv, as one autograd node each."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ... import AttentionPlan
from ...backends import REGISTRY
from ...backends.base import QKV, BackwardCall, Call
from ...terms.edge_data import NOTHING_BOUND, check_edges, scored_edges
from ...torch_side.autograd import with_tensors
from ...torch_side.side_by_side import RowParts
from .one_node import NodeCall, attend
from .projections import Projections

Saved = Sequence[Tensor | None]
OF_ENDS = frozenset(("value", "row_values", "column_values"))
OF_EDGES = OF_ENDS | {"edge_values"}
ALIGNMENT = 16  # columns: rows of 16-bit values then begin at a sector of 32 bytes, and kernels need no copy


def score_of(row: bool, edge: bool) -> str:
    """The score of GATConv, as a `ScoreTerm` names its values: of columns, and, if there are any, of rows and edges."""
    return f"leaky_relu(column0{' + row0' * row}{' + edge0' * edge}, number0)"


@dataclass(eq=False, slots=True)
class GATv2Call(NodeCall):
    """One call of GATv2Conv: the values are the keys.

    Its differentiable arguments are a [1, H, C], the bias of the output or None, and inputs and parameters of the
    projections. Its result is the output [N, H, C]; with a bias [N, H C].

    Attributes:
        projections: to query and key, (H, C) each.
        dtype: type of the GEMMs.
        slope: of the leaky ReLU below 0.
        dropout: of the plan's call.
    """

    plan: AttentionPlan
    projections: Projections
    dtype: torch.dtype
    slope: float
    dropout: float

    def forward(
        self, with_lse: bool, additive: Tensor, bias: Tensor | None, *given: Tensor
    ) -> tuple[Tensor, Call, Saved]:
        (query, key), of_projections = self.projections.forward(given, self.dtype)
        weight = additive[0].to(self.dtype)
        edges = NOTHING_BOUND.changed(order=self.plan.edge_order, additive_weight=weight, additive_slope=self.slope)
        if weight.shape != query.shape[1:] or weight.device != query.device:
            check_edges(edges, query)  # raises
        output, attention, saved = attend(self.plan, query, key, key, 1.0, edges, self.dropout, with_lse)
        return _add_bias(output, bias), attention, (additive, bias, *saved, *of_projections)

    def backward(
        self, data: Any, attention: Call, needed: Sequence[bool], grads: Sequence[Tensor], *saved: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        (additive, bias, output, lse, *tensors), of_projections = self.projections.split_saved(saved)
        attention = with_tensors(attention, tensors, lse)
        of_head = output.shape[1:]
        # Query (or in rows of its own), key, value:
        rows = RowParts(of_head[1], *[of_head[0]] * (4 - len(self.projections.parts)))
        joint = attention.key.new_empty((attention.key.shape[0], rows.pitch))
        *of_query, of_key, of_value = rows.split(joint)
        joints = [joint[:, : -of_head.numel()]]
        if not of_query:
            of_query = [torch.empty_like(output)]
            joints.insert(0, of_query[0].flatten(1))
        wanted = QKV | {"additive_weight"} if needed[0] else QKV
        memory = (of_query[0], of_key, of_value)
        given = BackwardCall(attention, output, _like(grads[0], output), wanted, memory)
        found = REGISTRY[self.plan.backend].attend_backward(data, given)
        for place, gradient in zip(memory, found, strict=False):
            if gradient is not place:
                place.copy_(gradient)
        of_key.add_(of_value)
        of_additive = found.additive_weight.to(additive.dtype)[None] if needed[0] else None
        of_rest = self.projections.gradients(joints, of_projections, needed[2:])
        return of_additive, _bias_gradient(grads[0], bias), *of_rest


@dataclass(eq=False, slots=True)
class GATCall(NodeCall):
    """One call of GATConv.

    A score needs <att, W x> = <W^T att, x> of both ends; the GEMM of the values also computes it for the sources.

        sources [N, F]  ->  value: H heads of C | score of each head as a source (and, in a square graph, as a target)
        targets         ->  score of each head as a target

    Its differentiable arguments are the values of edges [nnz, H, 1] or None; the bias of the output or None; the
    sources, W [H C, F] and att_src; the targets and their W, or None twice where they are the sources; att_dst. Its
    result is the output [N, H, C]; with a bias [N, H C].

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
        bias: Tensor | None,
        source: Tensor,
        weight: Tensor,
        of_source: Tensor,
        target: Tensor | None,
        target_weight: Tensor | None,
        of_target: Tensor,
    ) -> tuple[Tensor, Call, Saved]:
        dtype, (_, num_heads, head_dim), num_rows = self.dtype, of_source.shape, source.shape[0]
        width, wide = num_heads * head_dim, torch.float32 if dtype.itemsize < 4 else dtype
        vectors = torch.cat((of_source, of_target)) if target is None else of_source
        source, joint = source.to(dtype), _joint_weight(weight, vectors).to(dtype)
        rows = functional.linear(source, joint)
        pitch = rows.shape[1]
        value = rows.as_strided((num_rows, num_heads, head_dim), (pitch, head_dim, 1))
        count = vectors.shape[0]
        scores = rows.as_strided((count, num_rows, num_heads, 1), (1, pitch, count, 1), width)
        column, *row = scores.to(wide, copy=True, memory_format=torch.contiguous_format).unbind()
        target_rows = None
        if target is not None:
            target, target_rows = target.to(dtype), _score_rows(target_weight, of_target).to(dtype)
            row = [functional.linear(target, target_rows).to(wide).unsqueeze(-1)]
        # The score reads neither queries nor keys.
        query = value if target is None else rows.new_empty((target.shape[0], num_heads, head_dim))
        values = {"row_values": row[0], "column_values": column, "edge_values": edge_values}
        edges = scored_edges(self.plan.edge_order, self.score, (self.slope,), **values)
        if of_target.shape != of_source.shape:
            check_edges(edges, query)  # raises
        output, attention, saved = attend(self.plan, query, value, value, 1.0, edges, self.dropout, with_lse)
        ends = (bias, source, joint, weight, vectors, target, target_rows, target_weight, of_target)
        watched = (of_source,)  # so that autograd detects changes
        return _add_bias(output, bias), attention, (*ends, *saved, *watched)

    def backward(
        self, data: Any, attention: Call, needed: Sequence[bool], grads: Sequence[Tensor], *saved: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        bias, source, joint, weight, vectors, target, target_rows, target_weight, of_target, output, lse, *rest = saved
        attention = with_tensors(attention, rest[:-1], lse)
        (_, num_heads, head_dim), num_vectors, num_rows = output.shape, vectors.shape[0], source.shape[0]
        width, num_scores = weight.shape[0], num_vectors * num_heads
        # Columns: dV, gradients of scores, scratch for dQ and dK (the kernel always writes them); padded to whole
        # heads.
        joint_heads = 2 * num_heads + -(-num_scores // head_dim)
        pitch = joint_heads * head_dim
        memory = source.new_empty((num_rows, pitch))
        heads = (num_rows, num_heads, head_dim), (pitch, head_dim, 1)
        value, unread = memory.as_strided(*heads), memory.as_strided(*heads, pitch - width)
        wanted = OF_EDGES if needed[0] else OF_ENDS
        into = (unread if target is None else torch.empty_like(output), unread, value)
        given = BackwardCall(attention, output, _like(grads[0], output), wanted, into)
        found = REGISTRY[self.plan.backend].attend_backward(data, given)
        if found.value is not value:
            value.copy_(found.value)
        for i, gradient in enumerate((found.column_values, found.row_values)[:num_vectors]):
            memory.as_strided((num_rows, num_heads, 1), (pitch, num_vectors, 1), width + i).copy_(gradient)
        rows = memory.as_strided((num_rows, width + num_scores), (pitch, 1))
        of_joint = torch.mm(rows.t(), source).to(weight.dtype)
        of_weight = of_joint[:width]
        of_vectors = _vector_gradients(of_joint[width:], weight, vectors, of_weight)
        of_source = torch.mm(rows, joint[: width + num_scores]) if needed[2] else None
        of_target_rows = of_target_weight = None
        if target is not None:
            row = found.row_values.squeeze(-1).to(self.dtype)
            of_target_weight = torch.zeros_like(target_weight)
            of_scores = torch.mm(row.t(), target).to(target_weight.dtype)
            of_vectors += _vector_gradients(of_scores, target_weight, of_target, of_target_weight)
            of_target_rows = torch.mm(row, target_rows) if needed[5] else None
        of_ends = (of_source, of_weight, of_vectors[0], of_target_rows, of_target_weight, of_vectors[1])
        return found.edge_values, _bias_gradient(grads[0], bias), *of_ends


def _joint_weight(weight: Tensor, vectors: Tensor) -> Tensor:
    """[columns, F]: W, then `_score_rows`, then zeros up to ALIGNMENT."""
    parts = [weight, _score_rows(weight, vectors)]
    if missing := -(parts[0].shape[0] + parts[1].shape[0]) % ALIGNMENT:
        parts.append(weight.new_zeros((missing, weight.shape[1])))
    return torch.cat(parts)


def _score_rows(weight: Tensor, vectors: Tensor) -> Tensor:
    """[H n, F]: W^T att of each head, for vectors [n, H, C]."""
    num_heads, head_dim = vectors.shape[1:]
    return torch.bmm(vectors.transpose(0, 1), weight.view(num_heads, head_dim, -1)).view(-1, weight.shape[1])


def _vector_gradients(of_rows: Tensor, weight: Tensor, vectors: Tensor, of_weight: Tensor) -> list[Tensor]:
    """Gradients [1, H, C] of the vectors of `_score_rows`, from the gradient of its result [H n, F]; adds the gradient
    of W to `of_weight`."""
    count, num_heads, head_dim = vectors.shape
    of_rows = of_rows.view(num_heads, count, -1)
    of_weight.view(num_heads, head_dim, -1).baddbmm_(vectors.permute(1, 2, 0), of_rows)
    of_vectors = torch.empty_like(vectors)
    torch.bmm(of_rows, weight.view(num_heads, head_dim, -1).transpose(1, 2), out=of_vectors.transpose(0, 1))
    return [*of_vectors.split(1)]


def _add_bias(output: Tensor, bias: Tensor | None) -> Tensor:
    """Output [N, H, C], or [N, H C] + bias."""
    return output if bias is None else torch.add(output.flatten(1), bias)


def _like(grad: Tensor, output: Tensor) -> Tensor:
    """The gradient of `_add_bias` in the output's shape and type: a bias of float32 widens the sum."""
    return grad.view(output.shape).to(output.dtype)


def _bias_gradient(grad: Tensor, bias: Tensor | None) -> Tensor | None:
    return None if bias is None else grad.sum(0, dtype=bias.dtype)
