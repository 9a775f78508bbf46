"""Edge lists of graphs: the edges in the caller's order, repeated ones included."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class EdgeList:
    """The pattern of a sparse binary matrix A as a list of its edges, in any order; each entry is an edge of its own.

    Attributes:
        edge_index: [2, E] int32 or int64 on any device. Row 0: keys, columns of A (sources of PyG and DGL); row 1:
            queries, rows of A (targets).
        shape: (num_rows, num_cols) of A.
    """

    edge_index: torch.Tensor
    shape: tuple[int, int]

    @property
    def num_edges(self) -> int:
        """E."""
        return self.edge_index.shape[1]
