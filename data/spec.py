"""Sizes of a graph, which the registry states and the generators of synthetic graphs take."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from data.graph import CsrGraph, RawGraph


@dataclass(frozen=True, kw_only=True)
class GraphSpec:
    """Name and size of a graph, or of a batch of small graphs.

    Attributes:
        name: registered name.
        num_nodes: nodes; for a collection of small graphs those of its first `num_graphs`.
        nnz: directed edges, nnz(A), of the same graphs.
        symmetric: whether A is symmetric.
        num_graphs: number of graphs that `num_nodes` and `nnz` count; None for a single graph.
    """

    name: str
    num_nodes: int
    nnz: int
    symmetric: bool
    num_graphs: int | None = None


class Generator(Protocol):
    """Makes a synthetic graph of a given size. One seed gives one graph, on NumPy and on CuPy (`xp`)."""

    def generate(self, spec: GraphSpec, batch_size: int, seed: int, xp: Any = np) -> RawGraph | CsrGraph: ...
