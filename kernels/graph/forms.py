"""Converts the graph types that callers pass into the records that plans are built from. Never waits for a GPU."""

import math
from typing import Any

import torch

from ..arguments import check_dense
from .csr import MAX_DIM, SPARSE_LAYOUTS, CSRPattern, csr_pattern
from .edge_list import EdgeList, edges_from_torch, with_memory
from .key_lists import KeyLists

Graph = CSRPattern | EdgeList


def graph_record(graph: Any, shape: tuple[int, int] | None, edge_ids: bool) -> Graph:
    """The record of a graph on its device, without a copy if possible.

    Args:
        graph: an edge_index [2, E], (indptr, indices) or KeyLists, with `shape`; or a type that has a shape.
        edge_ids: keep the caller's edge indices if they differ from stored order.

    Raises:
        TypeError, ValueError: `graph` is no graph, or `shape` is missing, malformed or not the graph's.
    """
    if shape is not None:
        shape = checked_shape(shape)
    graph = with_memory(graph)
    for array in graph if isinstance(graph, tuple) else (graph.indices if isinstance(graph, KeyLists) else graph,):
        if isinstance(array, torch.Tensor) and array.is_meta:
            raise ValueError("graph: on the device meta, without values; a plan reads its ids")
    if isinstance(graph, tuple):
        return _from_arrays(graph, shape)
    if isinstance(graph, torch.Tensor) and graph.layout == torch.strided:
        return _from_edge_index(graph, shape)
    if isinstance(graph, KeyLists):
        return _from_lists(graph, shape)
    if isinstance(graph, (CSRPattern, EdgeList)):
        found = graph
    elif _is_coo_or_csc(graph):
        found = edges_from_torch(graph)
    else:
        found = csr_pattern(graph, edge_ids)
    if shape not in (None, tuple(found.shape)):
        raise ValueError(f"shape: got {shape}, but the graph is {tuple(found.shape)}; leave it out for such a graph")
    return found


def count_edges(graph: Graph) -> int:
    """Number of edges, from the sizes of the arrays."""
    return graph.num_edges if isinstance(graph, EdgeList) else math.prod(graph.indices.shape)


def _is_coo_or_csc(graph: Any) -> bool:
    if not isinstance(graph, torch.Tensor) or graph.layout not in SPARSE_LAYOUTS or graph.layout == torch.sparse_csr:
        return False
    return graph.sparse_dim() == graph.dim() == 2


def _from_edge_index(edge_index: torch.Tensor, shape: tuple[int, int] | None) -> EdgeList:
    check_dense("graph", edge_index)
    if edge_index.dim() != 2 or edge_index.shape[0] != 2 or edge_index.dtype not in (torch.int32, torch.int64):
        raise ValueError(
            f"graph: got a dense {edge_index.dtype} tensor of shape {tuple(edge_index.shape)}; an edge_index is [2, E] "
            "int32 or int64: sources (keys), then targets (queries). For a dense matrix A: A.to_sparse_csr()"
        )
    _require_shape("an edge_index", shape)
    if type(edge_index) is not torch.Tensor:
        edge_index = edge_index.as_subclass(torch.Tensor)
    return EdgeList(edge_index, shape)


def _from_arrays(arrays: tuple[Any, ...], shape: tuple[int, int] | None) -> CSRPattern:
    if len(arrays) != 2 or not all(hasattr(array, "shape") and len(array.shape) == 1 for array in arrays):
        got = ", ".join(str(tuple(getattr(array, "shape", ()))) for array in arrays)
        raise ValueError(
            f"graph: got a tuple of arrays of shapes {got}; (indptr [num_rows + 1], indices [E]) is needed"
        )
    _require_shape("(indptr, indices)", shape)
    indptr, indices = arrays
    if len(indptr) != shape[0] + 1:
        raise ValueError(
            f"graph: got (indptr, indices) with {len(indptr)} entries of indptr for shape {shape}; {shape[0] + 1}, one "
            "more than rows, are needed (sources and targets go into torch.stack([sources, targets]))"
        )
    return CSRPattern(indptr, indices, shape)


def _from_lists(lists: KeyLists, shape: tuple[int, int] | None) -> EdgeList:
    _require_shape("KeyLists", shape)
    if len(lists.indices) != shape[0]:
        raise ValueError(
            f"KeyLists: got shape {tuple(lists.indices.shape)} for a graph of shape {shape}; {shape[0]} rows are needed"
        )
    return lists.edges(shape[1])


def _require_shape(form: str, shape: tuple[int, int] | None) -> None:
    if shape is None:
        raise ValueError(
            f"shape: {form} has no shape of its own; pass shape=(num_rows, num_cols), the rows of q and of k and v"
        )


def checked_shape(shape: Any) -> tuple[int, int]:
    """(num_rows, num_cols); a ValueError unless it is two integers from 0 to MAX_DIM."""
    if isinstance(shape, (tuple, list)) and len(shape) == 2:
        num_rows, num_cols = shape
        if all(type(size) is int and 0 <= size <= MAX_DIM for size in (num_rows, num_cols)):
            return num_rows, num_cols
    raise ValueError(f"shape: got {shape!r}; (num_rows, num_cols) is needed, two integers from 0 to {MAX_DIM}")
