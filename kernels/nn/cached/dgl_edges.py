"""The edges of a DGLGraph or of a `dgl.sparse.SparseMatrix` as an edge_index, kept with the graph.

`plan_edge_index` caches plans per edge_index tensor. One tensor per graph thus makes every layer, device and type find
the plan that an earlier call built.

The tensor, 8 or 16 bytes an edge, is an attribute of DGL's graph index, or of the matrix. DGL never changes an index:
add_edges, remove_nodes and the like put a new one into the graph. So a changed graph has no tensor yet, copies that
share the index (`local_var`) share the tensor, and edges and plans go with the graph. `graph.to()`, `graph[etype]` and
`dgl.batch` make a new index.
"""

from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ...graph.csr import SPARSE_LAYOUTS, is_dgl_graph
from ...runtime.streams import Made
from .tensor_memo import TensorMemo

ATTRIBUTE = "_fused3s_edges"  # dict[torch.device, DGLEdges]
_has_factors = TensorMemo("adj")


class DGLEdges:
    """The edges of one graph on one device.

    Attributes:
        edge_index: [2, E], keys, then queries: the sources and destinations of a DGLGraph, in the order of its edge
            ids; the columns and rows of a SparseMatrix.
        shape: (queries, keys).
    """

    def __init__(self, edge_index: Tensor, shape: tuple[int, int]) -> None:
        self.edge_index, self.shape = edge_index, shape
        self._made = Made.on(edge_index.device)

    @cached_property
    def has_empty_rows(self) -> bool:
        """Whether a query has no key. Waits for a GPU at the first call."""
        return bool((torch.bincount(self.edge_index[1], minlength=self.shape[0]) == 0).any())

    def used_by_current_stream(self) -> "DGLEdges":
        self._made.used_by_current_stream((self.edge_index,))
        return self


@torch.compiler.disable  # looks the edges up by their graph
def edges_of_dgl(graph: Any, device: torch.device) -> DGLEdges:
    """The edges of a DGLGraph, destinations as queries, or of a dgl.sparse.SparseMatrix, rows as queries; on `device`.

    Raises:
        TypeError: it is neither.
        ValueError: the graph has several edge types.
    """
    if is_dgl_graph(graph):
        owner, read = graph._graph, _edges_of_graph
    elif is_sparse_matrix(graph):
        owner, read = graph, _edges_of_matrix
    else:
        raise TypeError(
            f"graph: got {type(graph).__name__}; a DGLGraph, a dgl.sparse.SparseMatrix or a plan is needed "
            "(fused3s.plan_attention takes any graph)"
        )
    found = owner.__dict__.setdefault(ATTRIBUTE, {})
    if device not in found:
        with torch.inference_mode(False), torch.no_grad():  # nothing is cached for tensors of inference mode
            edge_index, shape = read(graph)
            found[device] = DGLEdges(edge_index.to(device), shape)
    return found[device].used_by_current_stream()


def _edges_of_graph(graph: Any) -> tuple[Tensor, tuple[int, int]]:
    if len(graph.canonical_etypes) != 1:
        raise ValueError(
            f"graph: got a DGLGraph with {len(graph.canonical_etypes)} edge types; take one of them, graph[etype], or "
            "all as one, dgl.to_homogeneous(graph)"
        )
    *ends, ids = graph.edges("all", order=None)  # any order: graphs without COO, as formats("csc"), have no other
    edge_index = torch.empty((2, len(ids)), dtype=ids.dtype, device=ids.device)
    edge_index[:, ids.long()] = torch.stack(ends)
    return edge_index, (graph.num_dst_nodes(), graph.num_src_nodes())


def _edges_of_matrix(matrix: Any) -> tuple[Tensor, tuple[int, int]]:
    row, col = matrix.coo()
    return torch.stack((col, row)), tuple(matrix.shape)


def is_sparse_matrix(graph: Any) -> bool:
    """Whether this is a dgl.sparse.SparseMatrix. Does not import dgl.sparse."""
    return type(graph).__name__ == "SparseMatrix"


def factors_of(adj: Any) -> Tensor | None:
    """The values of a SparseMatrix or a torch.sparse tensor, if some are not 1 or they are trained; else None.

    Waits for a GPU where the values are new.

    Raises:
        ValueError: a gradient would be lost.
    """
    if isinstance(adj, Tensor) and adj.layout in SPARSE_LAYOUTS:
        is_coalesced = adj.layout != torch.sparse_coo or adj.is_coalesced()
        if adj.requires_grad and not is_coalesced:
            raise ValueError("adj: its values need a gradient, and it is not coalesced; pass adj.coalesce()")
        owner, values = adj, adj.values() if is_coalesced else adj._values()
    elif is_sparse_matrix(adj):
        owner = values = adj.val
    else:
        return None
    if values.requires_grad or _has_factors.get(owner, "", lambda: bool((values != 1).any()), lambda _: ()):
        return values
    return None


def edges_of(adj: Any, shape: tuple[int, int], device: torch.device) -> tuple[Tensor, tuple[int, int]]:
    """The argument `adj` of `fused3s.edge_attention` as `plan_edge_index` takes it, and its shape. `shape` and `device`
    are those of the queries and keys.

    Raises:
        TypeError, ValueError: it is no such argument.
    """
    if isinstance(adj, Tensor) and adj.layout in SPARSE_LAYOUTS:
        return adj, tuple(adj.shape[:2])
    if isinstance(adj, (tuple, list)) and len(adj) == 2:
        row, col = adj
        return torch.stack((col, row)), shape
    if isinstance(adj, Tensor):
        raise TypeError(
            f"adj: got a dense tensor {tuple(adj.shape)}; queries come first in indices of dgl.sparse, but second in "
            "an edge_index of PyG. Pass a pair with queries first: (indices[0], indices[1]) or (edge_index[1], "
            "edge_index[0])"
        )
    found = edges_of_dgl(adj, device)
    return found.edge_index, found.shape
