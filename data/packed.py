"""Collections of small graphs as arrays: one graph after the other, node ids local to each graph."""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from data.canonical import check_rows, checked_graph
from data.graph import CsrGraph
from data.selection import PART_OF, renumbered

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
    picked: np.ndarray,
    sizes: np.ndarray,
    edge_counts: np.ndarray,
    ends: np.ndarray,
    origin: str,
    *,
    ndata: Mapping[str, np.ndarray],
    edata: Mapping[str, np.ndarray] | None = None,
    graph_labels: np.ndarray | None = None,
    splits: Mapping[str, np.ndarray] | None = None,
    both_directions: bool = True,
    **contents: Any,
) -> CsrGraph:
    """The block-diagonal graph of the picked graphs of a collection, of which only their rows are read.

    Args:
        picked: [B] int64, numbers of the graphs.
        sizes, edge_counts: [G] int64, nodes and listed edges of each graph of the collection.
        ends: [E, 2] integers, query and key of each edge, local to its graph.
        ndata, edata: arrays with a row for each node and for each listed edge.
        graph_labels: [G, T], or None.
        splits: ids of the graphs of each part. Where nodes have labels, the result's splits are of nodes.
        both_directions: whether A gets both directions of each listed edge.
        contents: further fields of `CsrGraph`.

    Raises:
        ValueError: an edge has an end that its graph does not have, or an array has another number of rows.
        MemoryError: the graph would not fit.
    """
    check_rows(origin, "edges", int(edge_counts.sum()), {"u, v (edge_counts have the number)": ends, **(edata or {})})
    check_rows(origin, "nodes", int(sizes.sum()), ndata)
    first = np.array_equal(picked, np.arange(picked.size))  # a slice of the arrays, which is no copy of them
    nodes, edges = (
        slice(int(counts[: picked.size].sum())) if first else rows_of(picked, counts) for counts in (sizes, edge_counts)
    )
    parts = splits and renumbered(splits, picked, sizes.size)
    sizes, edge_counts, ends = sizes[picked], edge_counts[picked], ends[edges].astype(np.int64, copy=False)
    limit = np.repeat(sizes, edge_counts)
    bad = np.flatnonzero(((ends < 0) | (ends >= limit[:, None])).any(1))
    if bad.size:
        raise ValueError(f"{origin}: edge {ends[bad[0]].tolist()} in a graph of {limit[bad[0]]} nodes (ids from 0)")
    if parts and "label" in ndata:
        parts = {part: np.sort(rows_of(ids, sizes)) for part, ids in parts.items()}
    row, col = ends.T + np.repeat(np.cumsum(sizes) - sizes, edge_counts)
    return checked_graph(
        origin,
        row,
        col,
        int(sizes.sum()),
        both_directions=both_directions,
        ndata={name: values[nodes] for name, values in ndata.items()},
        edata={name: values[edges] for name, values in (edata or {}).items()},
        graph_sizes=sizes,
        graph_labels=None if graph_labels is None else graph_labels[picked].astype(np.float32, copy=False),
        splits=parts,
        graph_ids=picked,
        **contents,
    )


def compact(values: "torch.Tensor") -> "torch.Tensor":
    """Codes as uint8 or int32 where they fit; anything else unchanged."""
    import torch

    if values.is_floating_point() or not values.numel() or values.min() < 0:
        return values
    largest = int(values.max())
    return values.to(torch.uint8 if largest <= 255 else torch.int32) if largest < 2**31 else values
