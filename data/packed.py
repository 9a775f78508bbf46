"""Collections of small graphs as arrays: one graph after the other, node ids local to each graph."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from data.canonical import checked_graph
from data.graph import CsrGraph
from data.selection import PART_OF

if TYPE_CHECKING:
    import torch


def rows_of(picked: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Rows that belong to the picked graphs, graph after graph, in a table where graph g has `counts[g]` rows."""
    first, counts = (np.cumsum(counts) - counts)[picked], counts[picked]
    return np.arange(counts.sum()) + np.repeat(first - (np.cumsum(counts) - counts), counts)


def consecutive(sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Ids of each part where parts of these sizes follow one another, under the keys train, valid and test."""
    ends = dict(zip(sizes, np.cumsum(list(sizes.values())).tolist(), strict=True))
    return {
        part: np.arange(ends.get(split, 0) - sizes.get(split, 0), ends.get(split, 0)) for split, part in PART_OF.items()
    }


def join_graphs(
    sizes: np.ndarray,
    edge_counts: np.ndarray,
    ends: np.ndarray,
    feat: np.ndarray | None,
    edge_feat: np.ndarray | None,
    origin: str,
    *,
    both_directions: bool = True,
    **contents: Any,
) -> CsrGraph:
    """The block-diagonal graph of a collection.

    Args:
        sizes: [B] int64, nodes of each graph.
        edge_counts: [B] int64, listed edges of each graph.
        ends: [E, 2] int64, query and key of each edge, local to its graph.
        feat: [N, C] of all nodes, or None.
        edge_feat: [E, C] of the listed edges, or None.
        both_directions: whether A gets both directions of each listed edge.
        contents: further fields of `CsrGraph`.

    Raises:
        ValueError: an edge has an end that its graph does not have.
    """
    limit = np.repeat(sizes, edge_counts)
    bad = np.flatnonzero(((ends < 0) | (ends >= limit[:, None])).any(1))
    if bad.size:
        raise ValueError(f"{origin}: edge {ends[bad[0]].tolist()} in a graph of {limit[bad[0]]} nodes (ids from 0)")
    row, col = ends.T + np.repeat(np.cumsum(sizes) - sizes, edge_counts)
    found = {"ndata": {} if feat is None else {"feat": feat}, "edata": {} if edge_feat is None else {"feat": edge_feat}}
    found |= {"graph_sizes": sizes, "origin": origin} | contents
    return checked_graph(origin, row, col, int(sizes.sum()), both_directions=both_directions, **found)


def compact(values: "torch.Tensor") -> "torch.Tensor":
    """Codes as uint8 or int32 where they fit; anything else unchanged."""
    import torch

    if values.is_floating_point() or not values.numel() or values.min() < 0:
        return values
    largest = int(values.max())
    return values.to(torch.uint8 if largest <= 255 else torch.int32) if largest < 2**31 else values
