"""Graphs as the sources give them (`CsrGraph`) and as `load` returns them (`LoadedGraph`)."""

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

from data.dgl import import_dgl

if TYPE_CHECKING:
    import dgl
    import torch

Task = Literal["node", "graph"]
Source = Literal["official", "file", "synthetic"]
Metric = Literal["accuracy", "balanced_accuracy", "rocauc", "ap", "mae", "rmse", "f1"]
Target = tuple[Metric | None, int]  # of a file's graph labels: their metric, and a model's outputs
PARTS = ("train", "valid", "test")
MAX_NODES = 2**31 - 1  # the kernels keep node ids as int32
HASHED_ROWS, HASHED_IDS = 1 << 16, 1 << 22  # converted to int64 at a time


@dataclass(frozen=True, eq=False)
class CsrGraph:
    """A graph as its source gives it, in canonical form: every edge once, sorted by row and then column.

    Attributes:
        indptr: [N + 1] offset of each row's edges; int32, or int64 from 2^31 edges on. A row is a query.
        col: [nnz] of the same type, the keys.
        origin: URL, path or a description of the generator.
        removed: number of repeated edges that the source lists.
        graph_sizes: [B] int64, nodes of each small graph of a batch; None for a single graph.
        ndata: arrays of N rows, among them "feat" (float32 [N, F] or int64 [N, C]), "label" (int64 [N]) and, of an edge
            list whose ids have gaps, "id" (int64 [N], ascending): the ids of its nodes.
        edata: arrays with a row for each edge: "feat" (float32 [E, F] or int64 [E, C]), or nothing.
        graph_labels: [B, T] float32, NaN where a label is missing; None if the graphs have none.
        target: metric and number of outputs of a file's graph labels; None for those of a registered set.
        splits: int64 ids of the nodes (node task) or graphs (graph task) of each of `PARTS`; None without a split.
        graph_ids: [B] int64, numbers of the graphs in their collection; None if unknown.
        collection_size: graphs of the collection, or of the chosen split, that the batch was taken from; None if
            unknown.
    """

    indptr: np.ndarray
    col: np.ndarray
    origin: str
    removed: int = 0
    graph_sizes: np.ndarray | None = None
    ndata: Mapping[str, np.ndarray] = field(default_factory=dict)
    edata: Mapping[str, np.ndarray] = field(default_factory=dict)
    graph_labels: np.ndarray | None = None
    target: Target | None = None
    splits: Mapping[str, np.ndarray] | None = None
    graph_ids: np.ndarray | None = None
    collection_size: int | None = None

    @property
    def num_nodes(self) -> int:
        return self.indptr.size - 1

    @cached_property
    def row(self) -> np.ndarray:
        """[nnz] row of each edge, computed on first use."""
        return np.repeat(np.arange(self.num_nodes, dtype=self.col.dtype), np.diff(self.indptr))

    @cached_property
    def sha256(self) -> str:
        """First 16 hexadecimal digits of the SHA-256 of N, rows and columns, the same on every machine."""
        digest = hashlib.sha256(str(self.num_nodes).encode())
        for first in range(0, self.num_nodes, HASHED_ROWS):
            offsets = self.indptr[first : first + HASHED_ROWS + 1]
            digest.update(np.repeat(np.arange(first, first + offsets.size - 1, dtype="<i8"), np.diff(offsets)))
        for first in range(0, self.col.size, HASHED_IDS):
            digest.update(self.col[first : first + HASHED_IDS].astype("<i8"))
        return digest.hexdigest()[:16]


@dataclass(frozen=True)
class GraphMeta:
    """Description and origin of a loaded graph.

    Attributes:
        name: registered name, or the caller's label of a file.
        source: "official", "file" or "synthetic" (a surrogate, to be named as such in every result).
        origin: URL, path or a description of the generator.
        task: "node" (an output for each node) or "graph" (one for each graph of the batch).
        num_nodes: N, summed over a batch.
        num_edges: nnz(A), edges without duplicates.
        num_graphs: graphs in the batch; 1 for a single graph.
        collection_size: graphs of the collection, or of the chosen split, that they were taken from; None if unknown.
        feature_kind: "float" (float32 [N, F]) or "categorical" (int64 [N, C]).
        feature_dim: F or C, the columns of the node features.
        feature_cardinalities: number of codes of each categorical column; None for float features.
        features: "original", or "random" if the source has none.
        num_classes: size of a model's output.
        sha256: first 16 hexadecimal digits of the edge list's SHA-256; equal A have equal hashes, from any source.
        edge_features: "original" or "random"; None where none were asked for.
        edge_feature_dim: columns of the edge features; 0 where none were asked for.
        edge_feature_cardinalities: number of codes of each categorical column; None for float features.
        unit: of the targets of regression; "" if unknown or none.
    """

    name: str
    source: Source
    origin: str
    task: Task
    num_nodes: int
    num_edges: int
    num_graphs: int
    feature_kind: Literal["float", "categorical"]
    feature_dim: int
    feature_cardinalities: tuple[int, ...] | None
    features: Literal["original", "random"]
    num_classes: int
    sha256: str
    edge_features: Literal["original", "random"] | None = None
    edge_feature_dim: int = 0
    edge_feature_cardinalities: tuple[int, ...] | None = None
    collection_size: int | None = None
    unit: str = ""


@dataclass(frozen=True, eq=False, kw_only=True)
class LoadedGraph:
    """The matrix A of a graph, or the block-diagonal one of a batch of graphs, as CSR tensors on the CPU; its
    description, labels and split.

    Attributes:
        row_pointers: [N + 1] offset of each row's edges, int32, or int64 from 2^31 edges on. A row is a query.
        columns: [nnz] of the same type, ascending in each row: the keys. Both are None where a graph is not in memory.
        graph_sizes: [G] int64, nodes of each graph; of a single graph [1].
        node_data: "feat" float32 [N, F] or int64 [N, C], "label", "id" (int64 [N], where the source has other ids than
            0 .. N - 1), and what else the source has for each node.
        edge_data: "feat" float32 [nnz, F] or int64 [nnz, C], or nothing.
        labels: of a node task int64 [N], the same tensor as node_data["label"], -1 for unknown ([N, C] of 0 and 1 where
            a node has several); of a graph task float32 [G, T], NaN for a missing one. None without labels.
        splits: for "train", "valid" and "test" the int64 ids of the loaded nodes (node task) or graphs (graph task);
            None if the set has no standard split.
        graph_ids: [G] int64, numbers of the graphs in their collection; None if they are not known.
        metric: the standard one, of `models.metrics`; None if the set has none.
    """

    meta: GraphMeta
    row_pointers: "torch.Tensor | None" = None
    columns: "torch.Tensor | None" = None
    graph_sizes: "torch.Tensor | None" = None
    node_data: "dict[str, torch.Tensor]" = field(default_factory=dict)
    edge_data: "dict[str, torch.Tensor]" = field(default_factory=dict)
    labels: "torch.Tensor | None" = None
    splits: "dict[str, torch.Tensor] | None" = None
    metric: Metric | None = None
    graph_ids: "torch.Tensor | None" = None

    @cached_property
    def graph(self) -> "dgl.DGLGraph":
        """The DGLGraph, made on first use."""
        return dgl_graph(self.row_pointers, self.columns, self.graph_sizes, self.node_data, self.edge_data)


def dgl_graph(
    row_pointers: "torch.Tensor",
    columns: "torch.Tensor",
    graph_sizes: "torch.Tensor",
    node_data: "Mapping[str, torch.Tensor] | None" = None,
    edge_data: "Mapping[str, torch.Tensor] | None" = None,
) -> "dgl.DGLGraph":
    """A DGLGraph that shares the tensors of a `LoadedGraph`. It has DGL's "csc" format only, since a row of A is a
    query, the destination of DGL's edge; DGL derives other formats on demand."""
    no_edge_ids = columns.new_empty(0)  # edges keep their order
    graph = import_dgl().graph(("csc", (row_pointers, columns, no_edge_ids)), num_nodes=len(row_pointers) - 1)
    ends = row_pointers[graph_sizes.cumsum(0)]
    graph.set_batch_num_nodes(graph_sizes.to(graph.idtype))
    graph.set_batch_num_edges(ends.diff(prepend=ends.new_zeros(1)).to(graph.idtype))
    graph.ndata.update(node_data or {})
    graph.edata.update(edge_data or {})
    return graph


def to_tensor(values: np.ndarray | None) -> "torch.Tensor | None":
    """The tensor of these values, which share its memory; those of a mapped file must not be written to."""
    import torch

    if values is None:
        return None
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")
        return torch.from_numpy(values)
