"""Batches of a collection of small graphs, cut from arrays: no loop over graphs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data.graph import CsrTensors, LoadedGraph
from data.packed import compact, rows_of

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, eq=False, kw_only=True)
class GraphBatch(CsrTensors):
    """Some graphs of a set as one block-diagonal matrix on the CPU, as `data.load` returns it.

    Attributes:
        labels: of a graph task float32 [B, T], of a node task int64 [n]; None if the set has none.
        ids: [B] int64, the graphs' numbers in the set.
    """

    labels: "torch.Tensor | None"
    ids: "torch.Tensor"


class GraphSet:
    """A collection, packed: `GraphSet(data.load(name, batch_size=None))`.

    Codes are kept as uint8 or int32 where they fit: all of ogbg-molhiv takes 45 MB, edge features included. Batches
    have int64.

    Raises:
        TypeError: the argument is no LoadedGraph.

    Attributes:
        meta, labels, splits, metric: of the loaded graph.
        sizes: [G] int64, nodes of each graph.
        edge_counts: [G] int64, edges of each graph.
    """

    def __init__(self, loaded: LoadedGraph) -> None:
        if not isinstance(loaded, LoadedGraph):
            raise TypeError(f"loaded: got {type(loaded).__name__}; the LoadedGraph that data.load returns is needed")
        self.meta, self.labels, self.splits, self.metric = loaded.meta, loaded.labels, loaded.splits, loaded.metric
        indptr, self._col = loaded.row_pointers.numpy(), loaded.columns.numpy()
        self.sizes, self._degrees = loaded.graph_sizes.numpy(), np.diff(indptr)
        self._first = np.cumsum(self.sizes) - self.sizes  # first node of each graph
        self.edge_counts = np.diff(indptr[np.append(self._first, self.sizes.sum())].astype(np.int64))
        self._node_data, self._edge_data = (
            {"feat": compact(values["feat"]).numpy()} if "feat" in values else {}
            for values in (loaded.node_data, loaded.edge_data)
        )

    def __len__(self) -> int:
        return self.sizes.size

    def batch(self, ids: "Sequence[int] | np.ndarray | torch.Tensor") -> GraphBatch:
        """The graphs `ids` [B] as one batch, in this order.

        Raises:
            ValueError: there is no id, or one outside 0 .. G - 1.
        """
        import torch

        ids = self._checked(ids)
        nodes, edges = rows_of(ids, self.sizes), rows_of(ids, self.edge_counts)
        sizes, edge_counts = self.sizes[ids], self.edge_counts[ids]
        indptr = np.zeros(nodes.size + 1, self._col.dtype)
        np.cumsum(self._degrees[nodes], out=indptr[1:])
        moved = (np.cumsum(sizes) - sizes - self._first[ids]).astype(self._col.dtype)
        col = self._col[edges] + np.repeat(moved, edge_counts)
        labels = self.labels
        if labels is not None:
            labels = labels[torch.from_numpy(ids if self.meta.task == "graph" else nodes)]
        return GraphBatch(
            row_pointers=torch.from_numpy(indptr),
            columns=torch.from_numpy(col),
            graph_sizes=torch.from_numpy(sizes),
            node_data={key: _picked(values, nodes) for key, values in self._node_data.items()},
            edge_data={key: _picked(values, edges) for key, values in self._edge_data.items()},
            labels=labels,
            ids=torch.from_numpy(ids),
        )

    def batches(
        self,
        ids: "Sequence[int] | np.ndarray | torch.Tensor | None" = None,
        batch_size: int = 1024,
        *,
        seed: int | Sequence[int] | None = None,
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

    def _checked(self, ids: "Sequence[int] | np.ndarray | torch.Tensor") -> np.ndarray:
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


def _picked(values: np.ndarray, rows: np.ndarray) -> "torch.Tensor":
    import torch

    picked = values[rows]
    return torch.from_numpy(picked if picked.dtype.kind == "f" else picked.astype(np.int64))
