"""Gathers by edge, sums over the edges of a row or column, and the softmax made of them: without atomics, so bitwise
reproducible, and differentiable twice, which torch.segment_reduce is not."""

from typing import Any, NamedTuple

import torch


class Segments(NamedTuple):
    """The edges grouped by row or by column.

    Attributes:
        of_edge: [nnz] int64, the row or column of each edge.
        indptr: [num + 1] int64, segment offsets; None if no sum is needed.
        order: [nnz], the edge at each position of the segments; None if that is the order of the edges.
    """

    of_edge: torch.Tensor
    indptr: torch.Tensor | None
    order: torch.Tensor | None


def softmax(score: torch.Tensor, rows: Segments) -> torch.Tensor:
    """Softmax over the edges of each row; `score`: [nnz] or [nnz, H]. A row with only -inf scores gets zeros."""
    maximum = torch.segment_reduce(score.detach(), "max", offsets=rows.indptr, unsafe=True)
    maximum = torch.where(maximum == -torch.inf, 0.0, maximum)
    weight = torch.exp(score - maximum.index_select(0, rows.of_edge))
    total = SegmentSum.apply(weight, rows)
    return weight / Gather.apply(torch.where(total == 0, 1.0, total), rows)


class Gather(torch.autograd.Function):
    """[nnz, ..]: for each edge its row of `values` [num, ..]."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, segments: Segments) -> torch.Tensor:
        ctx.segments = segments
        return values.index_select(0, segments.of_edge)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return SegmentSum.apply(grad, ctx.segments), None


class SegmentSum(torch.autograd.Function):
    """[num, ..]: the sums of `values` [nnz, ..] over the edges of each row or column."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, segments: Segments) -> torch.Tensor:
        ctx.segments = segments
        if segments.order is not None:
            values = values.index_select(0, segments.order)
        return torch.segment_reduce(values.contiguous(), "sum", offsets=segments.indptr, unsafe=True)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return Gather.apply(grad, ctx.segments), None
