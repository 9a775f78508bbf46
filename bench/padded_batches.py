"""Batches of a collection at one size, so that one CUDA graph runs for each of them."""

from collections.abc import Iterator

import numpy as np
from torch import Tensor

from bench.batches import Forward
from data.csr_batches import CsrBatch, CsrBatches, padded
from kernels.plan_room import refill_
from models import Execution, GraphInputs

WINDOW_ROWS = 16
SPARE_ROOM = 1.25  # KV tiles and blocks are not known before a batch is planned


class PaddedBatches:
    """The batches of a collection with as many rows and graphs as the largest of them has.

    Attributes:
        room: of a plan for all of them, over that of the first batch.
    """

    def __init__(self, batches: CsrBatches) -> None:
        self._batches = batches
        starts = np.arange(0, batches.num_graphs, batches.batch_size)
        rows, edges = (np.add.reduceat(counts, starts) for counts in (batches.sizes, batches.edge_counts))
        self.room = SPARE_ROOM * max(1.0, edges.max() / max(edges[0], 1))
        self.num_rows = -(-int(rows.max()) // WINDOW_ROWS) * WINDOW_ROWS
        self.num_graphs = min(batches.batch_size, batches.num_graphs)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[CsrBatch]:
        return (padded(batch, self.num_rows, self.num_graphs) for batch in self._batches)


class ReplayedForward:
    """Forward passes of padded batches: their inputs are copied to those of a CUDA graph, which is replayed.

    Args:
        execution: a captured pass over a padded batch with a plan of `with_room`.
        eager: runs a batch that does not fit.

    Attributes:
        num_eager: passes of such batches.
    """

    def __init__(self, execution: Execution, eager: Forward) -> None:
        self._execution, self._eager, self.num_eager = execution, eager, 0

    def __call__(self, inputs: GraphInputs) -> Tensor:
        """Logits of all rows, which the next call overwrites."""
        fixed = self._execution.inputs
        if not refill_(fixed.attention, inputs.attention):
            self.num_eager += 1
            return self._eager(inputs)
        of_floats = fixed.aligned_features is not None
        target, source = (each.aligned_features if of_floats else each.features for each in (fixed, inputs))
        target.copy_(source)
        fixed.graph_starts.copy_(inputs.graph_starts)
        return self._execution.run()
