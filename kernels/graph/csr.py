"""CSR patterns of all accepted kinds of graphs. Rows are queries, columns are keys.

For a DGLGraph the rows are the destination nodes: node v attends to node u for every edge u -> v (its in-edges).
"""

import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .edge_list import EdgeList, check_ids, edges_from_torch

MAX_DIM = 2**31 - 1  # row and column ids are stored as int32
SPARSE_LAYOUTS = (torch.sparse_csr, torch.sparse_csc, torch.sparse_coo)


@dataclass(frozen=True, eq=False)
class CSRPattern:
    """The pattern of a sparse matrix A: row i has edges to the columns indices[indptr[i]:indptr[i+1]].

    Attributes:
        indptr: [num_rows + 1], an integer array of NumPy, CuPy or torch (any device).
        indices: [nnz], the same kind of array; columns may be unsorted and repeated: each entry is an edge.
        shape: (num_rows, num_cols).
        edge_ids: [nnz], the same kind of array: the caller's edge index of each entry; None means stored order.
    """

    indptr: Any
    indices: Any
    shape: tuple[int, int]
    edge_ids: Any | None = None


def csr_from_scipy(matrix: Any, edge_ids: bool = False) -> CSRPattern:
    """Pattern of a SciPy sparse matrix or array: every stored entry is an edge, whatever its value.

    Args:
        edge_ids: number the entries as `matrix.tocoo()` does.

    Raises:
        TypeError: it has not two dimensions.
    """
    if len(matrix.shape) != 2:
        raise TypeError(f"graph: got a SciPy array of shape {matrix.shape}; 2-D, queries by keys, is needed")
    if not edge_ids or matrix.format == "csr":
        csr = matrix.tocsr()
        if csr.nnz == matrix.nnz:  # `tocsr` merges repeated entries of a COO matrix
            return CSRPattern(csr.indptr, csr.indices, tuple(csr.shape))
    coo = matrix.tocoo()
    by_row = np.argsort(coo.row, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(coo.row, minlength=coo.shape[0]))])
    return CSRPattern(indptr, coo.col[by_row], tuple(coo.shape), by_row if edge_ids else None)


def csr_from_torch(matrix: torch.Tensor, edge_ids: bool = False) -> CSRPattern:
    """Pattern of a 2-D torch.sparse CSR, CSC or COO tensor: every stored entry is an edge, whatever its value.

    Args:
        edge_ids: number the entries in stored order.
    """
    if matrix.dim() != 2 or matrix.layout not in SPARSE_LAYOUTS or matrix.dense_dim():
        raise TypeError(
            f"graph: got a torch tensor of layout {matrix.layout} with {matrix.dim()} dimensions; 2-D torch.sparse "
            "CSR, CSC and COO tensors are allowed (tensor.to_sparse_csr()), and in plan_attention, with shape=, an "
            "edge_index [2, E]"
        )
    if matrix.layout == torch.sparse_csr:
        return CSRPattern(matrix.crow_indices(), matrix.col_indices(), tuple(matrix.shape))
    return csr_from_edges(edges_from_torch(matrix), edge_ids)


def csr_from_edges(edges: EdgeList, edge_ids: bool = False) -> CSRPattern:
    """Pattern of an edge list on its device, rows and columns ascending. Waits for a GPU, to check the ids.

    Args:
        edge_ids: keep the index of each edge in the list, which then has no padding.

    Raises:
        ValueError: an id is out of range.
    """
    check_ids(edges)
    num_rows, num_cols = edges.shape
    edge_index = edges.edge_index
    if edges.has_padding:
        edge_index = edge_index[:, edge_index[0] != -1]
    col, row = edge_index.long()
    order = torch.sort(row * num_cols + col, stable=True).indices  # below 2^62: both dimensions are below 2^31
    indptr = torch.searchsorted(row[order], torch.arange(num_rows + 1, device=row.device))
    return CSRPattern(indptr, edge_index[0][order], edges.shape, order if edge_ids else None)


def csr_from_dgl(graph: Any, edge_ids: bool = False) -> CSRPattern:
    """In-edges of a homogeneous DGLGraph: rows are destination nodes (queries), columns source nodes (keys).

    Args:
        edge_ids: keep DGL's edge ids; a pattern alone does not need them.
    """
    if len(graph.canonical_etypes) != 1:
        raise ValueError(
            f"graph: got a DGLGraph with {len(graph.canonical_etypes)} edge types; one is needed "
            "(graph[etype], or dgl.to_homogeneous(graph))"
        )
    indptr, indices, ids = graph.adj_tensors("csc")  # one row per destination
    in_stored_order = len(ids) < len(indices)  # DGL leaves the ids empty then
    ids = ids if edge_ids and not in_stored_order else None
    return CSRPattern(indptr, indices, (graph.num_dst_nodes(), graph.num_src_nodes()), ids)


def is_dgl_graph(graph: Any) -> bool:
    """Whether `graph` is a DGLGraph. Does not import DGL: the caller of a DGLGraph has."""
    return isinstance(graph, getattr(sys.modules.get("dgl"), "DGLGraph", ()))


def csr_pattern(graph: Any, edge_ids: bool = False) -> CSRPattern:
    """CSR pattern of a DGLGraph, a SciPy or torch sparse matrix, or an edge list; a pattern is returned as it is.

    Args:
        edge_ids: keep the caller's edge indices if they differ from stored order.

    Raises:
        TypeError: `graph` is none of these.
    """
    if isinstance(graph, CSRPattern):
        return graph
    if isinstance(graph, EdgeList):
        return csr_from_edges(graph, edge_ids)
    if isinstance(graph, torch.Tensor):
        return csr_from_torch(graph, edge_ids)
    package = type(graph).__module__.split(".", maxsplit=1)[0]
    if package == "scipy" and hasattr(graph, "tocsr"):
        return csr_from_scipy(graph, edge_ids)
    if is_dgl_graph(graph):
        return csr_from_dgl(graph, edge_ids)
    raise TypeError(
        f"graph: got {type(graph).__module__}.{type(graph).__qualname__}; allowed are dgl.DGLGraph, a scipy.sparse "
        "matrix, a torch.sparse CSR, CSC or COO tensor, and in plan_attention, with shape=, an edge_index "
        "[2, E] and (indptr, indices)"
    )


def check_csr(indptr: torch.Tensor, indices: torch.Tensor, num_cols: int) -> None:
    """Raise a TypeError or ValueError that names the first thing wrong with a CSR pattern. Waits for a GPU."""
    for each in (indptr, indices):
        if each.dtype not in (torch.int32, torch.int64) and each.numel():
            raise TypeError(f"indptr and indices: got {each.dtype}; torch.int32 and torch.int64 are allowed")
    if indptr.device != indices.device:
        raise ValueError("indptr and indices: one is on the CPU and one on a GPU; put both on one device")
    if indptr.dim() != 1 or not indptr.numel():
        raise ValueError(f"indptr: got shape {tuple(indptr.shape)}; [num_rows + 1] with at least one entry is needed")
    if indices.dim() != 1:
        raise ValueError(f"indices: got shape {tuple(indices.shape)}; [nnz] is needed")
    for what, size in (("num_rows", len(indptr) - 1), ("num_cols", num_cols)):
        if not 0 <= size <= MAX_DIM:
            raise ValueError(f"{what}: got {size}; 0 to {MAX_DIM} is allowed")
    first, last = int(indptr[0]), int(indptr[-1])
    if first != 0:
        raise ValueError(f"indptr: starts with {first}; it must start with 0")
    if last != len(indices):
        raise ValueError(f"indptr: ends with {last}, but indices has {len(indices)} entries; they must agree")
    decreasing = torch.nonzero(indptr[1:] < indptr[:-1])
    if decreasing.numel():
        row = int(decreasing[0])
        raise ValueError(f"indptr: decreases at row {row} ({int(indptr[row])} to {int(indptr[row + 1])})")
    if indices.numel():
        low, high = (int(each) for each in indices.aminmax())
        if low < 0 or high >= num_cols:
            bad = low if low < 0 else high
            position = torch.nonzero(indices == bad)[0].to(indptr.dtype)
            row = int(torch.searchsorted(indptr, position, right=True)) - 1
            raise ValueError(f"indices: row {row} holds column {bad}; allowed are 0 to {num_cols - 1}")


def as_tensor(array: Any) -> torch.Tensor:
    """A torch view of a NumPy, CuPy or torch array on its device; a copy if torch cannot view it (read-only, negative
    strides)."""
    if isinstance(array, torch.Tensor):
        return array
    if hasattr(array, "__cuda_array_interface__"):
        return torch.from_dlpack(array)
    return torch.from_numpy(np.require(array, requirements="CW"))
