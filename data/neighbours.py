"""Samples of the neighbourhoods of nodes, as in GraphSAGE (Hamilton et al. 2017): a large graph in batches.

In NumPy: the draws of PyG and DGL depend on the number of CPU threads, and a resumed run could not repeat them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Sample:
    """Some nodes of a graph with some of its edges.

    Attributes:
        nodes: [n] int64, their numbers in the graph: the seeds, then the new nodes of each hop. None occurs twice.
        indptr: [n + 1] int64, col: [nnz] int32: the edges as CSR, whose columns are places in `nodes`, in any order. A
            row is a query (see `data`). Nodes of the last hop have no edges of their own.
        num_seeds: number of seeds.
    """

    nodes: np.ndarray
    indptr: np.ndarray
    col: np.ndarray
    num_seeds: int


class NeighbourSampler:
    """Samples of one graph.

    Args:
        indptr: [N + 1], col: [nnz], CSR of the graph.
        fan_out: for each hop the most edges of a node.
    """

    def __init__(self, indptr: np.ndarray, col: np.ndarray, fan_out: Sequence[int]) -> None:
        num_nodes, most = indptr.size - 1, int(np.diff(indptr).max(initial=1))
        self._indptr, self._col = indptr, col
        self._fan_out = [min(one, most) for one in fan_out]  # all edges of a node take no draws
        row = np.repeat(np.arange(num_nodes, dtype=col.dtype), np.diff(indptr))
        loops = np.flatnonzero(row == col)
        self._loop = np.full(num_nodes, -1)  # edge from a node to itself
        self._loop[col[loops]] = loops

    def sample(self, seeds: np.ndarray, rng: np.random.Generator) -> Sample:
        """The seeds [B], and hop by hop their neighbours: of each new node all edges where these are at most as many as
        the hop's fan-out, else as many at random without repetition, its self-loop among them."""
        place = np.full(len(self._loop), -1, np.int32)  # index of each node in the sample
        new, size = seeds.astype(np.int64), len(seeds)
        nodes, sources, counts = [new], [], []
        place[new] = np.arange(size)
        for fan_out in self._fan_out:
            edges, count = self._edges(new, fan_out, rng)
            source = self._col[edges].astype(np.int64)
            unseen = source[place[source] < 0]
            order = np.arange(len(unseen), dtype=np.int32)
            place[unseen] = order  # the last of several writes to one place wins
            new = unseen[place[unseen] == order]
            place[new] = np.arange(size, size + len(new))
            size += len(new)
            for found, one in ((nodes, new), (sources, source), (counts, count)):
                found.append(one)
        degrees = np.concatenate([[0], *counts, np.zeros(len(new), np.int64)])
        return Sample(np.concatenate(nodes), degrees.cumsum(), place[np.concatenate(sources)], len(seeds))

    def _edges(self, nodes: np.ndarray, fan_out: int, rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
        """Edges of the graph, node by node, and their number for each of the nodes."""
        first = self._indptr[nodes].astype(np.int64)
        degrees = self._indptr[nodes + 1] - first
        counts = np.minimum(degrees, fan_out)
        start = counts.cumsum() - counts
        edges = np.arange(counts.sum()) + np.repeat(first - start, counts)
        many = degrees > fan_out
        picks = first[many, None] + _distinct(degrees[many], fan_out, rng)
        loop = self._loop[nodes[many]]
        missing = (loop >= 0) & (picks != loop[:, None]).all(1)
        picks[missing, 0] = loop[missing]
        edges[start[many, None] + np.arange(fan_out)] = picks
        return edges, counts


def _distinct(sizes: np.ndarray, count: int, rng: np.random.Generator) -> np.ndarray:
    """[n, count] int64: for each size `count` different numbers below it, every set as likely (Floyd's algorithm)."""
    draws, found = rng.random((count, len(sizes))), np.empty((count, len(sizes)), np.int64)
    for nth in range(count):
        last = sizes - count + nth
        pick = (draws[nth] * (last + 1)).astype(np.int64)
        found[nth] = np.where((found[:nth] == pick).any(0), last, pick)
    return found.T
