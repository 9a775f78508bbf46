"""Edge data of calls whose shapes are not those of a backend (`fused3s.torch_side.call_shapes`).

grouped queries, bound    values of query heads become those of the rows of the planned graph and of their edges;
                          values of one head serve all. Values of columns and weights belong to the KV heads: one
                          value for all, or one for each
d_v is not d, called      weights are padded with zeros as keys and values are
a batch, called           values and weights of H heads are repeated for each element
"""

from dataclasses import dataclass, fields, replace

import torch

from ..graph.edge_order import EdgeOrder
from ..torch_side.call_shapes import CallShape, HeadGroups, padded, to_rows
from .edge_data import BoundEdges, EdgeData, bind, check_edges, score_shape
from .score_expression import parse, renamed
from .score_source import KINDS, count_values
from .score_term import MOST_VALUES

OF_QUERY_HEADS = ("edge_values", "row_values", "head_values")  # [.., 1 or H, n]
# Dimension of the heads.
WEIGHTS = {"key_weight": 0, "value_weight": 0, "type_weight": 1, "key_factor": 1, "additive_weight": 0}
# Dimension of the columns.
WIDTHS = {"key_weight": -2, "value_weight": -2, "type_weight": -1, "key_factor": -1, "additive_weight": -1}


@dataclass(frozen=True, eq=False)
class GroupedEdges(BoundEdges):
    """Edge data of grouped queries, bound to the edges, rows and columns of the planned graph.

    Attributes:
        groups: those of its plan.
        query_heads, kv_heads: how many heads its values have, of queries and of columns; None if all have one.
    """

    groups: HeadGroups | None = None
    query_heads: int | None = None
    kv_heads: int | None = None


def groups_of(edges: BoundEdges) -> HeadGroups | None:
    """The groups of the plan that bound the edges."""
    return edges.groups if isinstance(edges, GroupedEdges) else None


def bind_groups(
    data: EdgeData,
    order: EdgeOrder | None,
    shape: tuple[int, int],
    device: torch.device,
    groups: HeadGroups,
    check_values: bool,
) -> GroupedEdges:
    """`edge_data.bind` for a plan with groups.

    Args:
        order: edge order of the planned graph, in which edge e * size + g is edge e of the caller.
        shape: (num_rows, num_cols) of the caller's graph.
    """
    callers = None if order is None else EdgeOrder(torch.arange(order.num_edges // groups.size, device=device))
    bound = bind(data, callers, shape, device, check_values)  # with errors in the caller's numbers
    given = {field.name: getattr(bound, field.name) for field in fields(BoundEdges)}
    heads = {each.shape[1] for name in OF_QUERY_HEADS if (each := given[name]) is not None and each.shape[1] > 1}
    if len(heads) > 1 or any(number % groups.rows for number in heads):
        raise ValueError(
            f"values of queries and edges: got {', '.join(map(str, sorted(heads)))} heads; one head is needed, or the "
            f"query heads of a call, a multiple of {groups.rows}"
        )
    columns = given["column_values"]
    kv_heads = None if columns is None or columns.shape[1] == 1 else columns.shape[1]
    if kv_heads and kv_heads % groups.lists:
        raise ValueError(
            f"values of columns: got {kv_heads} heads; one head is needed, or the {groups.lists} KV heads of the lists"
        )
    given |= {"groups": groups, "query_heads": next(iter(heads), None), "kv_heads": kv_heads}
    if given["order"] is callers and order is not None:
        edge, given["order"] = order.edge_of_csr, order
        for name in ("edge_values", "padded_features", "types"):
            if given[name] is not None:
                given[name] = _in_rows(given[name], groups.size).index_select(0, edge)
        if bound.checked_types is not None:
            given["checked_types"] = given["types"], bound.checked_types[1]
    for name, per in (("row_values", groups.rows), ("column_values", groups.lists)):
        if given[name] is not None:
            given[name] = _in_rows(given[name], per)
    bound = GroupedEdges(**given)
    values = bound.head_values
    return bound if values is None or values.shape[1] == 1 else _with_head_values_in_rows(bound, shape[0], groups.rows)


def _in_rows(values: torch.Tensor, per: int) -> torch.Tensor:
    """[N * per, ..], with the heads of [N, H, n] as `to_rows` has them; values of one head, or of none, repeated.

    By repeat_interleave and not by index_select, whose backward pass would add by atomics.
    """
    return to_rows(values, per) if values.dim() == 3 and values.shape[1] > 1 else values.repeat_interleave(per, 0)


def _with_head_values_in_rows(bound: GroupedEdges, num_rows: int, per: int) -> GroupedEdges:
    """The same score term with values of heads as values of rows: the heads of a group are rows."""
    counts = count_values(bound.score)
    if counts["row"] + counts["head"] > MOST_VALUES:
        raise ValueError(
            f"score: got {counts['row']} values of rows and {counts['head']} of heads; with grouped queries, at most "
            f"{MOST_VALUES} together are allowed"
        )
    values = _in_rows(bound.head_values, per).repeat(num_rows, 1, 1)
    if bound.row_values is not None:
        values = torch.cat([bound.row_values.expand(-1, values.shape[1], -1), values], -1)
    names = {f"head{i}": f"row{counts['row'] + i}" for i in range(counts["head"])}
    score = renamed(parse(bound.score), names)
    checked = score_shape(score, bound.score_numbers, values, bound.column_values, bound.edge_values, None)
    return replace(bound, row_values=values, head_values=None, score=score, checked_score=checked)


def edges_of_call(edges: BoundEdges, k: torch.Tensor, shape: CallShape) -> BoundEdges:
    """The checked edge data of a call with keys `k` [M, d], [M, H_kv, d] or [B, M, H_kv, d], as its backend takes it.

    Raises:
        ValueError, TypeError: data or a weight does not fit the call; the text names it and what is needed.
    """
    of_one = k if shape.batch is None else k[0]
    if isinstance(edges, GroupedEdges):
        _check_heads(edges, of_one.shape[1])
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
    check_edges(edges, padded(to_rows(of_one, shape.columns), shape.width))
    if shape.batch in (None, 1):
        return edges
    found = {}
    for name in [f"{kind}_values" for kind in KINDS]:
        values = getattr(edges, name)
        if values is not None and values.shape[1] > 1:
            found[name] = values.repeat(1, shape.batch, 1)
    for name, axis in WEIGHTS.items():
        weight = getattr(edges, name)
        if weight is not None:
            found[name] = torch.cat([weight] * shape.batch, axis)
    return replace(edges, **found)


def _check_heads(edges: GroupedEdges, kv_heads: int) -> None:
    """Raise unless values and weights are those of a call with so many KV heads."""
    heads = kv_heads * edges.groups.size
    for got, name, needed in (
        (edges.query_heads, "values of queries and edges", heads),
        (edges.kv_heads, "values of columns", kv_heads),
    ):
        if got not in (None, needed):
            raise ValueError(
                f"{name}: got {got} heads, but the call has {needed}; those of one head or of {needed} are needed"
            )
    for name, axis in WEIGHTS.items():
        weight = getattr(edges, name)
        if weight is not None and edges.groups.lists > 1:
            raise ValueError(f"{name}: got one, but a plan of lists for each KV head takes no weights")
        if isinstance(weight, torch.Tensor) and weight.dim() > axis and weight.shape[axis] != kv_heads:
            raise ValueError(
                f"{name}: got shape {tuple(weight.shape)}; with grouped queries weights belong to the KV heads, and "
                f"there are {kv_heads}; for weights of each query head, repeat k and v, and plan without num_kv_heads"
            )
