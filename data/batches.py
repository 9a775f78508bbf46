"""Batches of graphs of a collection as CSR tensors on a device: slices where the graphs follow one another, else a
gather; and gathers of one size, which a CUDA graph can capture."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from data.graph import LoadedGraph, dgl_graph
from data.packed import compact, rows_of

if TYPE_CHECKING:
    import dgl
    import torch

    Ids = Sequence[int] | np.ndarray | torch.Tensor

ROW_MULTIPLE = 64  # the rows of a padded batch are a multiple of it
PADDING_ROWS = 64  # most rows of a graph of padding: a mean over thousands of rows would take longer than the model
SPREAD = 4.0  # standard deviations above the mean size that a padded batch of random graphs has room for
KEPT_SHARE = 0.5  # most of a GPU's free memory that a collection may take


@dataclass(frozen=True, eq=False, kw_only=True)
class GraphBatch:
    """B graphs as one block-diagonal matrix.

    Attributes:
        indptr: [n + 1] int64; col: [nnz] int32 or int64, ascending in each row. A row is a query (see `data`).
        features: [n, F] float32, or [n, C] codes of any integer type; [n, 0] without features.
        edge_features: [nnz, F] float32 or [nnz, C] codes; None without them.
        graph_starts: [B] int64, first node of each graph.
        random_walk: [n, k] float32, random-walk encoding; None without it.
        row_weights: [n] float32 of a padded batch of r real rows: 1 / r for these, 0 for padding; None: all are real.
        node_ids: [n] int64 of a padded batch: each row's node of the collection of N nodes, N for padding; else None.
        ids, labels: of `GraphSet.batch`, on the CPU, else None. [B] int64, the graphs' numbers in the collection; of a
            graph task [B, T] float32, of a node task [n] int64, None if the collection has no labels.
    """

    indptr: "torch.Tensor"
    col: "torch.Tensor"
    features: "torch.Tensor"
    edge_features: "torch.Tensor | None"
    graph_starts: "torch.Tensor"
    random_walk: "torch.Tensor | None" = None
    row_weights: "torch.Tensor | None" = None
    node_ids: "torch.Tensor | None" = None
    ids: "torch.Tensor | None" = None
    labels: "torch.Tensor | None" = None

    @cached_property
    def graph(self) -> "dgl.DGLGraph":
        """The DGLGraph of a batch without padding, made on first use; codes become int64."""
        sizes = self.graph_starts.diff(append=self.graph_starts.new_tensor([len(self.features)]))
        features = {"feat": _expanded(self.features)} if self.features.shape[1] else {}
        of_edges = {} if self.edge_features is None else {"feat": _expanded(self.edge_features)}
        return dgl_graph(self.indptr.to(self.col.dtype), self.col, sizes, features, of_edges)


@dataclass(frozen=True)
class BatchSize:
    """Sizes to which batches are padded.

    Attributes:
        graphs: of the collection; all_graphs: with those that the rows of padding form.
        rows: nodes.
    """

    graphs: int
    rows: int
    edges: int

    @property
    def all_graphs(self) -> int:
        return self.graphs + -(-self.rows // PADDING_ROWS)


class GraphSet:
    """A collection, packed: `GraphSet(data.load(name, batch_size=None))`.

    The arrays are kept on a GPU if they fit into half of its free memory: a batch is then a few small kernels. Else
    they stay in host memory, and a batch is copied from there without waiting for the copy. Codes take the smallest
    type that holds them: all of ogbg-molhiv takes 45 MB.

    Args:
        device: of the batches; None for the CPU.

    Raises:
        TypeError: the first argument is no LoadedGraph.

    Attributes:
        meta, labels: of the loaded graph.
        sizes: [G] int64, nodes of each graph; edge_counts: [G] int64.
        kept_on: where the arrays are.
    """

    def __init__(self, loaded: LoadedGraph, device: "torch.device | None" = None) -> None:
        if not isinstance(loaded, LoadedGraph):
            raise TypeError(f"loaded: got {type(loaded).__name__}; the LoadedGraph that data.load returns is needed")
        import torch

        indptr, col = loaded.row_pointers, loaded.columns
        self.meta, self.labels, self.device = loaded.meta, loaded.labels, device or torch.device("cpu")
        self.sizes = loaded.graph_sizes.numpy()
        self._first_node = np.append(0, self.sizes.cumsum())
        self._first_edge = indptr.numpy()[self._first_node].astype(np.int64)
        self.edge_counts = np.diff(self._first_edge)
        features = loaded.node_data.get("feat", torch.empty(len(indptr) - 1, 0))
        arrays = {"indptr": indptr, "col": col, "features": compact(features)}
        arrays["starts"] = torch.from_numpy(self._first_node)
        table = np.stack([self._first_node[:-1], self.sizes, self._first_edge[:-1], self.edge_counts])
        arrays["table"] = torch.from_numpy(np.pad(table, ((0, 0), (0, 1))))  # the last column is no graph
        if "feat" in loaded.edge_data:
            arrays["edge_features"] = compact(loaded.edge_data["feat"])
        if "random_walk" in loaded.node_data:
            arrays["random_walk"] = loaded.node_data["random_walk"]
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            if sum(array.nbytes for array in arrays.values()) <= KEPT_SHARE * free:
                arrays = {key: array.to(self.device) for key, array in arrays.items()}
                arrays["indptr"] = arrays["indptr"].long()
        self._arrays, self.kept_on = arrays, arrays["col"].device

    def __len__(self) -> int:
        return self.sizes.size

    def batch(self, ids: "Ids") -> GraphBatch:
        """The graphs `ids` [B] as one batch, in this order, with their labels.

        Raises:
            ValueError: there is no id, or one outside 0 .. G - 1.
        """
        import torch

        ids, labels = self._checked(ids), self.labels
        if labels is not None:
            labels = labels[torch.from_numpy(ids if self.meta.task == "graph" else rows_of(ids, self.sizes))]
        return replace(self.picked(ids), ids=torch.from_numpy(ids), labels=labels)

    def batches(
        self, ids: "Ids | None" = None, batch_size: int = 1024, *, seed: int | Sequence[int] | None = None
    ) -> Iterator[GraphBatch]:
        """Batches of `batch_size` graphs, the last one possibly smaller.

        Args:
            ids: graphs to take, such as splits["train"]; None for all.
            batch_size: 1 or more.
            seed: shuffles `ids` first, the same way for the same seed (`[seed, epoch]` for one order an epoch); None
                keeps their order.

        Raises:
            ValueError: an id is outside 0 .. G - 1, there is none, batch_size is below 1, or the seed is none.
        """
        if isinstance(batch_size, bool) or not isinstance(batch_size, int) or batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size!r}; an integer of 1 or more is needed")
        ids = self._checked(np.arange(len(self)) if ids is None else ids)
        if seed is not None:
            try:
                ids = np.random.default_rng(seed).permutation(ids)
            except (TypeError, ValueError) as error:
                raise ValueError(f"seed: got {seed!r}; integers of 0 or more are needed, one or several") from error
        return (self.batch(ids[first : first + batch_size]) for first in range(0, ids.size, batch_size))

    def num_rows(self, ids: np.ndarray) -> int:
        """Rows of the output for the graphs `ids` [B]: graphs of a graph task, nodes of a node task."""
        return len(ids) if self.meta.task == "graph" else int(self.sizes[ids].sum())

    def slice(self, graphs: range) -> GraphBatch:
        """Graphs that follow one another, queued on the current stream of the device."""
        first, last = graphs.start, graphs.stop
        node, last_node = self._first_node[[first, last]].tolist()
        edge, last_edge = self._first_edge[[first, last]].tolist()
        return GraphBatch(
            indptr=self._part("indptr", slice(node, last_node + 1)).long() - edge,
            col=self._part("col", slice(edge, last_edge)) - node,
            features=self._part("features", slice(node, last_node)),
            edge_features=self._part("edge_features", slice(edge, last_edge)),
            graph_starts=self._part("starts", slice(first, last)) - node,
            random_walk=self._part("random_walk", slice(node, last_node)),
        )

    def picked(self, ids: np.ndarray) -> GraphBatch:
        """The graphs `ids` [B] in this order, queued on the current stream of the device.

        Args:
            ids: integers of 0 .. G - 1, one or more.
        """
        import torch

        sizes, counts = self.sizes[ids], self.edge_counts[ids]
        # One copy brings all that the device needs to know; the host keeps the sums, so that nothing waits for them.
        table = torch.from_numpy(np.stack([self._first_node[ids], sizes, self._first_edge[ids], counts]))
        first_node, sizes_there, first_edge, counts_there = to_device(table, self.kept_on)
        starts = sizes_there.cumsum(0) - sizes_there
        nodes = _rows_of(first_node, sizes_there, starts, int(sizes.sum()))
        edges = _rows_of(first_edge, counts_there, counts_there.cumsum(0) - counts_there, int(counts.sum()))
        indptr, col = self._arrays["indptr"], self._arrays["col"]
        degrees = (indptr[nodes + 1] - indptr[nodes]).long()
        moved = torch.repeat_interleave(starts - first_node, counts_there, output_size=len(edges))
        return GraphBatch(
            indptr=self._to(torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])),
            col=self._to(col[edges] + moved.to(col.dtype)),
            features=self._part("features", nodes),
            edge_features=self._part("edge_features", edges),
            graph_starts=self._to(starts),
            random_walk=self._part("random_walk", nodes),
        )

    def padded(self, ids: "torch.Tensor", size: BatchSize) -> GraphBatch:
        """As `picked`, with shapes that depend on `size` alone: nothing waits, and a CUDA graph can capture it.

        Rows behind those of the graphs are zeros without edges; they form graphs of PADDING_ROWS rows at most, or of
        none, so that there are `size.all_graphs`. Entries of `col` behind the last edge are -1, with any edge features.

        Args:
            ids: [size.graphs] int64 on `kept_on`: graphs of the collection that `size` has room for; G stands
                for no graph.
        """
        import torch

        arrays, table = self._arrays, self._arrays["table"][:, ids]
        (first_node, first_edge), sizes = table[::2], table[1::2]  # of nodes, of edges
        ends = sizes.cumsum(1)
        (row_starts, edge_starts), (row_ends, edge_ends) = ends - sizes, ends
        moved_node, moved_edge = first_node - row_starts, first_edge - edge_starts
        nodes, graph, has_node = _gathered_rows(moved_node, row_ends, size.rows + 1)
        edges, of_edge, has_edge = _gathered_rows(moved_edge, edge_ends, size.edges)
        col, of_edges = (
            array if array is None or len(array) else array.new_zeros((1, *array.shape[1:]))
            for array in (arrays["col"], arrays.get("edge_features"))
        )
        walks = arrays.get("random_walk")
        has_row = has_node[:-1, None]
        further = PADDING_ROWS * torch.arange(size.all_graphs - size.graphs, device=ids.device)
        return GraphBatch(
            indptr=(arrays["indptr"][nodes].long() - moved_edge[graph]).where(has_node, edge_ends[-1]),
            col=(col[edges] - moved_node[of_edge].to(col.dtype)).where(has_edge, -1),
            features=arrays["features"][nodes[:-1]].where(has_row, 0),
            edge_features=None if of_edges is None else of_edges[edges],
            graph_starts=torch.cat([row_starts, (row_ends[-1] + further).clamp_(max=size.rows)]),
            random_walk=None if walks is None else walks[nodes[:-1]].where(has_row, 0),
            row_weights=has_node[:-1] / row_ends[-1].clamp(min=1),
            node_ids=nodes[:-1].where(has_node[:-1], int(self._first_node[-1])),
        )

    def largest_size(self, batches: Sequence[np.ndarray]) -> BatchSize:
        """Room for each of these batches, whose elements are ids of graphs."""
        rows, edges = (max(int(counts[ids].sum()) for ids in batches) for counts in (self.sizes, self.edge_counts))
        return rounded_size(max(map(len, batches)), rows, edges)

    def likely_size(self, ids: np.ndarray, batch_size: int) -> BatchSize:
        """Room for nearly all batches of `batch_size` graphs that are drawn from `ids` at random, and for each graph
        alone: SPREAD standard deviations above the mean, or what the largest graphs need, whichever is less."""
        graphs = min(batch_size, len(ids))
        found = []
        for counts in (self.sizes[ids], self.edge_counts[ids]):
            likely = math.ceil(graphs * counts.mean() + SPREAD * math.sqrt(graphs) * counts.std())
            most = int(np.partition(counts, len(counts) - graphs)[len(counts) - graphs :].sum())
            found.append(min(most, max(likely, int(counts.max()))))
        return rounded_size(graphs, *found)

    def fits(self, ids: np.ndarray, size: BatchSize) -> bool:
        """Whether a batch of `size` has room for these graphs."""
        sums = len(ids), self.sizes[ids].sum(), self.edge_counts[ids].sum()
        return all(used <= room for used, room in zip(sums, (size.graphs, size.rows, size.edges), strict=True))

    def _checked(self, ids: "Ids") -> np.ndarray:
        try:
            ids = np.asarray(ids)
        except ValueError as error:
            raise ValueError(f"ids: integers in one row are needed ({error})") from error
        if ids.ndim != 1 or not ids.size or ids.dtype.kind not in "iu":
            raise ValueError(
                f"ids: got shape {ids.shape}, dtype {ids.dtype}; one integer or more is needed, in one row"
            )
        outside = ids[(ids < 0) | (ids >= len(self))]
        if outside.size:
            raise ValueError(f"ids: got {outside[0]}; the set has the graphs 0 .. {len(self) - 1}")
        return ids.astype(np.int64, copy=False)

    def _part(self, key: str, rows: "slice | torch.Tensor") -> "torch.Tensor | None":
        return self._to(self._arrays[key][rows]) if key in self._arrays else None

    def _to(self, array: "torch.Tensor") -> "torch.Tensor":
        return to_device(array, self.device)


def to_device(array: "torch.Tensor", device: "torch.device") -> "torch.Tensor":
    """The array on a device; the host does not wait for the copy."""
    if device.type == "cuda" and not array.is_cuda:
        array = array.pin_memory()  # other memory is copied while the host waits
    return array.to(device, non_blocking=True)


def rounded_size(graphs: int, rows: int, edges: int) -> BatchSize:
    """Room for these numbers."""
    return BatchSize(graphs, max(1, -(-rows // ROW_MULTIPLE)) * ROW_MULTIPLE, max(1, edges))


def _expanded(values: "torch.Tensor") -> "torch.Tensor":
    return values if values.is_floating_point() else values.long()


def _gathered_rows(
    moved: "torch.Tensor", ends: "torch.Tensor", total: int
) -> "tuple[torch.Tensor, torch.Tensor, torch.Tensor]":
    """For [total] rows: the row of the collection that each takes, its graph, and whether it has one, or is padding.

    Args:
        moved: [B] row of the collection minus row of the batch; ends: [B] last row of the batch, plus one.
    """
    import torch

    row = torch.arange(total, device=ends.device)
    graph = torch.searchsorted(ends, row, right=True).clamp_(max=len(ends) - 1)
    is_used = row < ends[-1]
    return (row + moved[graph]).where(is_used, 0), graph, is_used


def _rows_of(first: "torch.Tensor", counts: "torch.Tensor", starts: "torch.Tensor", total: int) -> "torch.Tensor":
    """[total] rows of graphs that begin at row `first` and have `counts` rows, graph after graph; those before a graph
    in the result are `starts`."""
    import torch

    moved = torch.repeat_interleave(first - starts, counts, output_size=total)
    return torch.arange(total, device=first.device) + moved
