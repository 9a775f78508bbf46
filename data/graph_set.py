"""Batches of a collection of small graphs, cut from arrays: no loop over graphs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from data.csr_batches import CsrBatches
from data.graph import CsrTensors, LoadedGraph
from data.packed import rows_of

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
        import torch

        self.meta, self.labels, self.splits, self.metric = loaded.meta, loaded.labels, loaded.splits, loaded.metric
        self._arrays, self._has_features = CsrBatches(loaded, 1, torch.device("cpu")), "feat" in loaded.node_data
        self.sizes, self.edge_counts = self._arrays.sizes, self._arrays.edge_counts

    def __len__(self) -> int:
        return self.sizes.size

    def batch(self, ids: "Sequence[int] | np.ndarray | torch.Tensor") -> GraphBatch:
        """The graphs `ids` [B] as one batch, in this order.

        Raises:
            ValueError: there is no id, or one outside 0 .. G - 1.
        """
        import torch

        ids = self._checked(ids)
        found, labels = self._arrays.picked(ids), self.labels
        if labels is not None:
            labels = labels[torch.from_numpy(ids if self.meta.task == "graph" else rows_of(ids, self.sizes))]
        return GraphBatch(
            row_pointers=found.indptr.to(found.col.dtype),
            columns=found.col,
            graph_sizes=torch.from_numpy(self.sizes[ids]),
            node_data={"feat": _expanded(found.features)} if self._has_features else {},
            edge_data={} if found.edge_features is None else {"feat": _expanded(found.edge_features)},
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


def _expanded(values: "torch.Tensor") -> "torch.Tensor":
    return values if values.is_floating_point() else values.long()
