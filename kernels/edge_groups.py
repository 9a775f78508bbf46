"""Edge data of calls whose shapes are not those of a backend (`kernels.call_shapes`).

grouped queries, bound    biases and values of H heads become those of the rows (i, g) and their edges, with H / G
                          heads; values of one head serve all. Values of columns and weights belong to the KV heads:
                          one value, or as many as there are KV heads.
d_v is not d, called      weights are padded with zeros as keys and values are
a batch, called           data and weights of H heads are repeated for each element
"""

from dataclasses import dataclass, fields, replace

import torch

from .call_shapes import CallShape, padded, to_rows
from .edge_data import BoundEdges, EdgeData, bind, check_edges, edge_permutation
from .formats.edge_order import EdgeOrder
from .score_expression import parse, renamed
from .score_source import count_values
from .score_term import MOST_VALUES

OF_QUERY_HEADS = ("bias", "multiplier", "edge_values", "row_values", "head_values")  # [.., 1 or H, ..]
PER_HEAD = (*OF_QUERY_HEADS, "column_values")
WEIGHTS = {"key_weight": 0, "value_weight": 0, "type_weight": 1, "additive_weight": 0}  # dimension of the heads
WIDTHS = {"key_weight": -2, "value_weight": -2, "type_weight": -1, "additive_weight": -1}  # dimension of the columns


@dataclass(frozen=True, eq=False)
class GroupedEdges(BoundEdges):
    """Edge data of grouped queries, bound to the edges and rows of the planned graph.

    Attributes:
        query_heads: H of its biases and values; None if all have one head.
    """

    query_heads: int | None = None


def bind_groups(
    data: EdgeData,
    order: EdgeOrder,
    backend_order: torch.Tensor | None,
    check_values: bool,
    shape: tuple[int, int],
    size: int,
) -> GroupedEdges:
    """`edge_data.bind` for a plan of groups of `size` query heads.

    Args:
        order: edge order of the planned graph, in which edge e * size + g is edge e of the caller.
        shape: (num_rows, num_cols) of the caller's graph.
    """
    edge = edge_permutation(order, backend_order)
    callers = EdgeOrder(torch.arange(order.num_edges // size, device=edge.device))
    bound = bind(data, callers, None, check_values, shape)  # in the caller's order, with errors in the caller's numbers
    heads = [values.shape[1] for name in OF_QUERY_HEADS if (values := getattr(bound, name)) is not None]
    several = {number for number in heads if number > 1}
    if len(several) > 1 or any(number % size for number in several):
        raise ValueError(
            f"edges: got data of {', '.join(map(str, sorted(several)))} heads; one head is needed, or the query heads "
            f"of a call, a multiple of {size}"
        )
    found = {"order": order, "query_heads": next(iter(several), None)}
    for name in ("bias", "multiplier", "edge_values"):
        if (values := getattr(bound, name)) is not None:
            found[name] = _rows_of_values(values, size).index_select(0, edge)
    if bound.padded_features is not None:
        found["padded_features"] = bound.padded_features.repeat_interleave(size, 0).index_select(0, edge)
    if bound.types is not None:
        found["types"] = bound.types[edge // size]
    if bound.row_values is not None:
        found["row_values"] = _rows_of_values(bound.row_values, size)
    given = {field.name: getattr(bound, field.name) for field in fields(BoundEdges)}
    bound = GroupedEdges(**(given | found))
    values = bound.head_values
    return bound if values is None or values.shape[1] == 1 else _with_head_values_in_rows(bound, shape[0], size)


def _rows_of_values(values: torch.Tensor, size: int) -> torch.Tensor:
    """[N * size, 1 or H / size, ..] from [N, 1 or H, ..], of rows or of edges; nothing indexes an entry twice, so that
    the gradient has the same bits on every run."""
    return values.repeat_interleave(size, 0) if values.shape[1] == 1 else to_rows(values, size)


def _with_head_values_in_rows(bound: BoundEdges, num_rows: int, size: int) -> BoundEdges:
    """The same score term with values of heads as values of rows: the heads of a group are rows."""
    counts = count_values(bound.score)
    if counts["row"] + counts["head"] > MOST_VALUES:
        raise ValueError(
            f"score: got {counts['row']} values of rows and {counts['head']} of heads; with grouped queries, at most "
            f"{MOST_VALUES} together are allowed"
        )
    values = _rows_of_values(bound.head_values, size)  # [size, H / size, n]
    values = values.repeat(num_rows, 1, 1)
    if bound.row_values is not None:
        values = torch.cat([bound.row_values.expand(-1, values.shape[1], -1), values], -1)
    names = {f"head{i}": f"row{counts['row'] + i}" for i in range(counts["head"])}
    return replace(bound, row_values=values, head_values=None, score=renamed(parse(bound.score), names))


def edges_of_call(edges: BoundEdges, k: torch.Tensor, shape: CallShape) -> BoundEdges:
    """The checked edge data of a call with keys `k` [M, d], [M, H_kv, d] or [B, M, H_kv, d], as its backend takes it.

    Raises:
        ValueError, TypeError: data or a weight does not fit the call; the text names it and what is needed.
    """
    of_one = k if shape.batch is None else k[0]
    kv_heads = of_one.shape[1] if of_one.dim() == 3 else 1
    if shape.rows > 1:
        _check_heads(edges, kv_heads, shape.rows)
    found = {}
    if shape.dim != shape.value_dim:
        for name, axis in WIDTHS.items():
            weight = getattr(edges, name)
            if isinstance(weight, torch.Tensor) and weight.dim() >= -axis:
                width = shape.value_dim if name == "value_weight" else shape.dim
                if weight.shape[axis] != width:
                    raise ValueError(f"{name}: got shape {tuple(weight.shape)}; {width} columns of a head are needed")
                found[name] = padded(weight, shape.width, axis)
        edges = replace(edges, **found)
    check_edges(edges, padded(of_one, shape.width))
    if shape.batch in (None, 1):
        return edges
    found = {}
    for name in PER_HEAD:
        if (values := getattr(edges, name)) is not None and values.shape[1] > 1:
            found[name] = values.repeat(1, shape.batch, *(1,) * (values.dim() - 2))
    for name, axis in WEIGHTS.items():
        if (weight := getattr(edges, name)) is not None:
            found[name] = torch.cat([weight] * shape.batch, axis)
    return replace(edges, **found)


def _check_heads(edges: GroupedEdges, kv_heads: int, size: int) -> None:
    """Raise unless the data has one head, or those of a call with groups of `size` query heads."""
    if edges.query_heads not in (None, kv_heads * size):
        raise ValueError(
            f"edges: got data of {edges.query_heads} heads, but q has {kv_heads * size}; data of one head or of "
            f"{kv_heads * size} is needed"
        )
    columns = edges.column_values
    if columns is not None and columns.shape[1] not in (1, kv_heads):
        raise ValueError(
            f"score: got values of columns of {columns.shape[1]} heads, but k has {kv_heads}; those of one head or of "
            f"{kv_heads} are needed"
        )
    for name, axis in WEIGHTS.items():
        weight = getattr(edges, name)
        if isinstance(weight, torch.Tensor) and weight.dim() > axis and weight.shape[axis] != kv_heads:
            raise ValueError(
                f"{name}: got shape {tuple(weight.shape)}; with grouped queries weights belong to the KV heads, and "
                f"there are {kv_heads}; for weights of each query head, repeat k and v, and plan without num_kv_heads"
            )
