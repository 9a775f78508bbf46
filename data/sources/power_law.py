"""Graphs whose in- and out-degrees follow a power law, of any size. They are exact by definition: no file is read.

Both ends of an edge are floor(N u^2) with u uniform in [0, 1) (NumPy's PCG64, seed 0): the expected degree of the
r-th largest node falls as 1 / sqrt(r). Node numbers are then permuted at random. Repeated edges are dropped, and of the
others as many as asked for are kept, at even distances in the order of queries.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.canonical import to_csr
from data.graph import CsrGraph
from data.selection import Selection
from data.sources.base import OfficialSource

BATCH = 1 << 24  # edges that are drawn at once


@dataclass(frozen=True)
class PowerLaw(OfficialSource):
    """A square graph of `num_edges` different edges."""

    num_nodes: int
    num_edges: int

    def __post_init__(self) -> None:
        if not 0 < self.num_edges <= self.num_nodes**2 // 4:
            raise ValueError(f"num_edges: got {self.num_edges}; 1 to a quarter of {self.num_nodes} ** 2 are allowed")

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        rng, nodes = np.random.default_rng(0), self.num_nodes
        place, edges = rng.permutation(nodes), np.empty(0, np.int64)
        while edges.size < self.num_edges:
            drawn = [_merged(rng, place) for _ in range(-(-(self.num_edges - edges.size) // BATCH))]
            edges = np.concatenate([edges, *drawn])
            edges.sort()  # np.unique hashes, which takes six times as long
            edges = edges[np.diff(edges, prepend=-1) > 0]
        edges = edges[np.arange(self.num_edges) * edges.size // self.num_edges]
        rule = f"power law of degrees, {nodes:,} nodes, {self.num_edges:,} edges"
        return to_csr(*np.divmod(edges, nodes), nodes, rule)


def _merged(rng: np.random.Generator, place: np.ndarray) -> np.ndarray:
    """[BATCH] int64: N query + key."""
    query, key = (place[(len(place) * rng.random(BATCH) ** 2).astype(np.int64)] for _ in range(2))
    return query * len(place) + key
