"""Batches of consecutive graphs of a collection as CSR tensors on a device: slices, no gather and no DGLGraph."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data.graph import LoadedGraph
from data.packed import compact

if TYPE_CHECKING:
    import torch

KEPT_SHARE = 0.5  # of a GPU's free memory that a collection may take to be kept there


@dataclass(frozen=True, eq=False)
class CsrBatch:
    """The graphs `first` .. `last` - 1 of a collection as one block-diagonal matrix.

    Attributes:
        first_row, last_row: their rows among the outputs of all graphs: nodes of a node task, graphs of a graph task.
        indptr: [n + 1] int64; col: [nnz] int32 or int64, ascending in each row. A row is a query (see `data`).
        features: [n, F] float32, or [n, C] codes of any integer type.
        edge_features: [nnz, F] float32 or [nnz, C] codes; None without them.
        graph_starts: [last - first] int64, first node of each graph.
    """

    first: int
    last: int
    first_row: int
    last_row: int
    indptr: "torch.Tensor"
    col: "torch.Tensor"
    features: "torch.Tensor"
    edge_features: "torch.Tensor | None"
    graph_starts: "torch.Tensor"


class CsrBatches:
    """All graphs of `data.load`, in their order, in batches. Iterate it as often as needed.

    The arrays are kept on a GPU if they fit into half of its free memory: a batch is then a few small kernels. Else
    they stay in host memory, or in the files that they are mapped from, and a batch is copied from there without
    waiting for the copy. Codes take the smallest type that holds them: all of ogbg-molhiv takes 45 MB.

    Attributes:
        num_graphs, num_rows: graphs, and rows of the output, of all batches.
        sizes: [G] int64, nodes of each graph.
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
        rows = (first, last) if self._rows_are_graphs else (node, last_node)
        return CsrBatch(
            *(first, last, *rows),
            indptr=self._part("indptr", node, last_node + 1).long() - edge,
            col=self._part("col", edge, last_edge) - node,
            features=self._part("features", node, last_node),
            edge_features=self._part("edge_features", edge, last_edge) if "edge_features" in self._arrays else None,
            graph_starts=self._part("starts", first, last) - node,
        )

    def _part(self, key: str, first: int, last: int) -> "torch.Tensor":
        part = self._arrays[key][first:last]
        if self.device.type == "cuda" and not part.is_cuda:
            part = part.pin_memory()  # other memory is copied while the host waits
        return part.to(self.device, non_blocking=True)
