"""Batches of graphs of a collection as CSR tensors on a device, without a DGLGraph: slices where the graphs follow one
another, else a gather."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from data.graph import LoadedGraph
from data.packed import compact

if TYPE_CHECKING:
    import torch

PADDING_ROWS = 64
KEPT_SHARE = 0.5  # of a GPU's free memory that a collection may take to be kept there


@dataclass(frozen=True, eq=False, kw_only=True)
class BatchArrays:
    """B graphs as one block-diagonal matrix.

    Attributes:
        indptr: [n + 1] int64; col: [nnz] int32 or int64, ascending in each row. A row is a query (see `data`).
        features: [n, F] float32, or [n, C] codes of any integer type.
        edge_features: [nnz, F] float32 or [nnz, C] codes; None without them.
        graph_starts: [B] int64, first node of each graph.
    """

    indptr: "torch.Tensor"
    col: "torch.Tensor"
    features: "torch.Tensor"
    edge_features: "torch.Tensor | None"
    graph_starts: "torch.Tensor"


@dataclass(frozen=True, eq=False, kw_only=True)
class CsrBatch(BatchArrays):
    """The graphs `first` .. `last` - 1 of a collection.

    Attributes:
        first_row, last_row: their rows among the outputs of all graphs: nodes of a node task, graphs of a graph task.
    """

    first: int
    last: int
    first_row: int
    last_row: int


def padded(batch: CsrBatch, num_rows: int, num_graphs: int) -> CsrBatch:
    """The batch with `num_rows` rows, of which those behind its own are zeros without edges, and with a number of
    graphs that depends on `num_rows` and `num_graphs` alone.

    The further graphs have PADDING_ROWS rows at most: torch's mean of one graph with thousands of rows would take
    longer than the model.

    Raises:
        ValueError: the batch has more rows or graphs.
    """
    import torch
    from torch.nn.functional import pad

    rows, graphs = len(batch.features), len(batch.graph_starts)
    if rows > num_rows or graphs > num_graphs:
        raise ValueError(
            f"num_rows, num_graphs: got {num_rows} and {num_graphs}; the batch has {rows} rows of {graphs} graphs"
        )
    further = torch.arange(num_graphs + -(-num_rows // PADDING_ROWS) - graphs, device=batch.graph_starts.device)
    starts = (rows + PADDING_ROWS * further).clamp_(max=num_rows)
    return replace(
        batch,
        indptr=pad(batch.indptr, (0, num_rows - rows), value=len(batch.col)),
        features=pad(batch.features, (0, 0, 0, num_rows - rows)),
        graph_starts=torch.cat([batch.graph_starts, starts]),
    )


class CsrBatches:
    """All graphs of `data.load`, in their order, in batches. Iterate it as often as needed.

    The arrays are kept on a GPU if they fit into half of its free memory: a batch is then a few small kernels. Else
    they stay in host memory, or in the files that they are mapped from, and a batch is copied from there without
    waiting for the copy. Codes take the smallest type that holds them: all of ogbg-molhiv takes 45 MB.

    Attributes:
        num_graphs, num_rows: graphs, and rows of the output, of all batches.
        sizes: [G] int64, nodes of each graph; edge_counts: [G] int64.
        kept_on: where the arrays are.
    """

    def __init__(self, loaded: LoadedGraph, batch_size: int, device: "torch.device") -> None:
        import torch

        if batch_size < 1:
            raise ValueError(f"batch_size: got {batch_size}; 1 or more is allowed")
        graph = loaded.graph
        indptr, col, _ = graph.adj_tensors("csc")
        self.sizes = graph.batch_num_nodes().numpy().astype(np.int64)
        self.num_graphs, self.batch_size, self.device = self.sizes.size, batch_size, device
        self._first_node = np.append(0, self.sizes.cumsum())
        self._first_edge = indptr.numpy()[self._first_node].astype(np.int64)
        self.edge_counts = np.diff(self._first_edge)
        self._rows_are_graphs = loaded.meta.task == "graph"
        self.num_rows = self.num_graphs if self._rows_are_graphs else int(self._first_node[-1])
        arrays = {"indptr": indptr, "col": col, "features": compact(graph.ndata["feat"])}
        arrays["starts"] = torch.from_numpy(self._first_node)
        if "feat" in graph.edata:
            arrays["edge_features"] = compact(graph.edata["feat"])
        if device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(device)
            if sum(array.nbytes for array in arrays.values()) <= KEPT_SHARE * free:
                arrays = {key: array.to(device) for key, array in arrays.items()}
                arrays["indptr"] = arrays["indptr"].long()  # once: on the host an array mapped from a file stays there
        self._arrays, self.kept_on = arrays, arrays["col"].device

    def __len__(self) -> int:
        return -(-self.num_graphs // self.batch_size)

    def __iter__(self) -> Iterator[CsrBatch]:
        for first in range(0, self.num_graphs, self.batch_size):
            yield self.batch(first, min(first + self.batch_size, self.num_graphs))

    def batch(self, first: int, last: int) -> CsrBatch:
        """The graphs `first` .. `last` - 1, queued on the current stream of the device.

        Raises:
            ValueError: they are not within 0 .. G.
        """
        if not 0 <= first <= last <= self.num_graphs:
            raise ValueError(f"graphs {first} to {last}: 0 to {self.num_graphs} are allowed, in this order")
        node, last_node = (int(self._first_node[graph]) for graph in (first, last))
        edge, last_edge = (int(self._first_edge[graph]) for graph in (first, last))
        first_row, last_row = (first, last) if self._rows_are_graphs else (node, last_node)
        return CsrBatch(
            first=first,
            last=last,
            first_row=first_row,
            last_row=last_row,
            indptr=self._part("indptr", node, last_node + 1).long() - edge,
            col=self._part("col", edge, last_edge) - node,
            features=self._part("features", node, last_node),
            edge_features=self._part("edge_features", edge, last_edge) if "edge_features" in self._arrays else None,
            graph_starts=self._part("starts", first, last) - node,
        )

    def picked(self, ids: np.ndarray) -> BatchArrays:
        """The graphs `ids` [B] in this order, queued on the current stream of the device.

        Args:
            ids: integers of 0 .. G - 1, one or more.
        """
        import torch

        sizes, counts = self.sizes[ids], self.edge_counts[ids]
        # One copy brings all that the device needs to know; the host keeps the sums, so that nothing waits for them.
        table = torch.from_numpy(np.stack([self._first_node[ids], sizes, self._first_edge[ids], counts]))
        first_node, sizes_there, first_edge, counts_there = self._to(table, self.kept_on)
        starts = sizes_there.cumsum(0) - sizes_there
        nodes = _rows_of(first_node, sizes_there, starts, int(sizes.sum()))
        edges = _rows_of(first_edge, counts_there, counts_there.cumsum(0) - counts_there, int(counts.sum()))
        indptr, col = self._arrays["indptr"], self._arrays["col"]
        degrees = (indptr[nodes + 1] - indptr[nodes]).long()
        moved = torch.repeat_interleave(starts - first_node, counts_there, output_size=len(edges))
        edge_features = self._arrays["edge_features"][edges] if "edge_features" in self._arrays else None
        return BatchArrays(
            indptr=self._to(torch.cat([degrees.new_zeros(1), degrees.cumsum(0)])),
            col=self._to(col[edges] + moved.to(col.dtype)),
            features=self._to(self._arrays["features"][nodes]),
            edge_features=None if edge_features is None else self._to(edge_features),
            graph_starts=self._to(starts),
        )

    def _part(self, key: str, first: int, last: int) -> "torch.Tensor":
        return self._to(self._arrays[key][first:last])

    def _to(self, array: "torch.Tensor", device: "torch.device | None" = None) -> "torch.Tensor":
        device = device or self.device
        if device.type == "cuda" and not array.is_cuda:
            array = array.pin_memory()  # other memory is copied while the host waits
        return array.to(device, non_blocking=True)


def _rows_of(first: "torch.Tensor", counts: "torch.Tensor", starts: "torch.Tensor", total: int) -> "torch.Tensor":
    """[total] rows of graphs that begin at row `first` and have `counts` rows, graph after graph; those before a graph
    in the result are `starts`."""
    import torch

    moved = torch.repeat_interleave(first - starts, counts, output_size=total)
    return torch.arange(total, device=first.device) + moved
