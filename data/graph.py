"""Graphs as the sources give them (`RawGraph`), in canonical form (`CsrGraph`) and as `load` returns them."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Literal

import numpy as np

if TYPE_CHECKING:
    import dgl
    import torch

Task = Literal["node", "graph"]
Source = Literal["official", "file", "synthetic"]
Metric = Literal["accuracy", "rocauc", "ap", "mae", "f1"]
PARTS = ("train", "valid", "test")
MAX_NODES = 2**31 - 1  # the kernels keep node ids as int32
MAX_CODES = 1_000_000  # classes of a label, codes of a feature column: each takes a row of the model's weights


@dataclass(frozen=True, eq=False)
class RawGraph:
    """A graph as its source holds it: ids are checked, duplicate edges are allowed.

    Attributes:
        row: [E] int64, the query of each edge (a row of A).
        col: [E] int64, its key (a column of A).
        num_nodes: N.
        origin: URL, path or a description of the generator.
        graph_sizes: [B] int64, nodes of each small graph of a batch; None for a single graph.
        ndata: arrays of N rows, among them "feat" (float32 [N, F] or int64 [N, C]) and "label" (int64 [N]).
        edata: arrays of E rows: "feat" (float32 [E, F] or int64 [E, C]), or nothing.
        graph_labels: [B, T] float32, NaN where a label is missing; None if the graphs have none.
        splits: int64 ids of the nodes (node task) or graphs (graph task) of each of `PARTS`; None if there are none.
        graph_ids: [B] int64, numbers of the graphs in their collection; None if they are not known.
        collection_size: graphs of the collection, or of the chosen split, that the batch was taken from; None if it is
            not known.
    """

    row: np.ndarray
    col: np.ndarray
    num_nodes: int
    origin: str
    graph_sizes: np.ndarray | None = None
    ndata: Mapping[str, np.ndarray] = field(default_factory=dict)
    edata: Mapping[str, np.ndarray] = field(default_factory=dict)
    graph_labels: np.ndarray | None = None
    splits: Mapping[str, np.ndarray] | None = None
    graph_ids: np.ndarray | None = None
    collection_size: int | None = None


@dataclass(frozen=True, eq=False)
class CsrGraph:
    """A graph in canonical form: every edge once, sorted by row and then column.

    Attributes:
        indptr: [N + 1] offset of each row's edges; int32, or int64 from 2^31 edges on.
        col: [nnz] of the same type, the columns.
        sha256: see `GraphMeta`.
        origin, graph_sizes, ndata, graph_labels, splits, graph_ids, collection_size: see `RawGraph`.
        edata: arrays of nnz rows; of duplicates the first one's.
        removed: number of duplicates left out.
    """

    indptr: np.ndarray
    col: np.ndarray
    sha256: str
    origin: str
    graph_sizes: np.ndarray | None = None
    ndata: Mapping[str, np.ndarray] = field(default_factory=dict)
    edata: Mapping[str, np.ndarray] = field(default_factory=dict)
    graph_labels: np.ndarray | None = None
    splits: Mapping[str, np.ndarray] | None = None
    graph_ids: np.ndarray | None = None
    collection_size: int | None = None
    removed: int = 0

    @property
    def num_nodes(self) -> int:
        return self.indptr.size - 1

    @cached_property
    def row(self) -> np.ndarray:
        """[nnz] row of each edge, computed on first use."""
        return np.repeat(np.arange(self.num_nodes, dtype=self.col.dtype), np.diff(self.indptr))


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
        feature_dim: F or C, the columns of `ndata["feat"]`.
        feature_cardinalities: number of codes of each categorical column; None for float features.
        features: "original", or "random" if the source has none.
        num_classes: size of a model's output.
        licence: of the data set, as its publisher states it; "" if unknown.
        citation: how to cite it; "" if unknown.
        sha256: first 16 hexadecimal digits of the edge list's SHA-256; equal A have equal hashes, from any source.
        edge_features: "original" or "random"; None where none were asked for.
        edge_feature_dim: columns of `edata["feat"]`; 0 where none were asked for.
        edge_feature_cardinalities: number of codes of each categorical column; None for float features.
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
    licence: str
    citation: str
    sha256: str
    edge_features: Literal["original", "random"] | None = None
    edge_feature_dim: int = 0
    edge_feature_cardinalities: tuple[int, ...] | None = None
    collection_size: int | None = None


@dataclass(frozen=True, eq=False)
class LoadedGraph:
    """A DGLGraph on the CPU (int32 ids; a batch has `batch_num_nodes` set), its description, labels and split.

    Attributes:
        labels: of a node task int64 [N], the same tensor as ndata["label"], -1 for unknown ([N, C] of 0 and 1 where a
            node has several); of a graph task float32 [G, T], NaN for a missing one. None without labels.
        splits: for "train", "valid" and "test" the int64 ids of the loaded nodes (node task) or graphs (graph task);
            None if the set has no standard split.
        graph_ids: [G] int64, numbers of the graphs in their collection; None if they are not known.
        metric: "accuracy", "rocauc" (area under the ROC curve), "ap" (average precision), the last two averaged over
            the tasks, "mae" or "f1"; None if the set has no standard one.
    """

    graph: "dgl.DGLGraph"
    meta: GraphMeta
    labels: "torch.Tensor | None" = None
    splits: "dict[str, torch.Tensor] | None" = None
    metric: Metric | None = None
    graph_ids: "torch.Tensor | None" = None
