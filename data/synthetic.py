"""Seeded stand-ins for graphs that cannot be had: nodes, edges and the spread of degrees, and nothing else.

Communities, node order and the link between features and structure are not modelled; block statistics and accuracy
of a stand-in say nothing about the original.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np

from data.graph import RawGraph

if TYPE_CHECKING:
    from data.registry import Dataset


class Generator(Protocol):
    """Makes a stand-in for an entry of the registry."""

    def generate(self, entry: "Dataset", batch_size: int, rng: np.random.Generator) -> RawGraph: ...


@dataclass(frozen=True)
class Degrees:
    """Degrees `minimum + x`, x log-normal with shape `sigma`, the largest node at about `maximum`.

    A hub's final degree is smaller, as it is drawn more than once with the same partner.
    """

    minimum: int
    sigma: float
    maximum: int

    def draw(self, num_nodes: int, total: int, rng: np.random.Generator) -> np.ndarray:
        """[num_nodes] int64 degrees that sum to `total` exactly."""
        spare = total - self.minimum * num_nodes
        weights = np.exp(self.sigma * rng.standard_normal(num_nodes))
        weights *= spare / weights.sum()
        np.minimum(weights, self.maximum - self.minimum, out=weights)
        weights[weights.argmax()] = self.maximum - self.minimum
        return self.minimum + _apportion(spare, weights)


@dataclass(frozen=True)
class LogNormalGraph:
    """A single graph whose edges join random nodes of given degrees (a configuration model).

    Attributes:
        rows: degrees of the rows of A, and of its columns too if A is symmetric.
        columns: degrees of the columns where A is not symmetric.
        self_loops: how many nodes get a self loop; no other self loops arise.
    """

    rows: Degrees
    columns: Degrees | None = None
    self_loops: int = 0

    def generate(self, entry: "Dataset", batch_size: int, rng: np.random.Generator) -> RawGraph:
        """A graph with the entry's nodes and, exactly, its nnz; symmetric if the entry is."""
        num_nodes, nodes = entry.num_nodes, np.arange(entry.num_nodes)
        off_diagonal = entry.nnz - self.self_loops
        stubs = rng.permutation(np.repeat(nodes, self.rows.draw(num_nodes, off_diagonal, rng)))
        if self.columns is None:
            row, col = _join(stubs[::2], stubs[1::2], num_nodes, rng, undirected=True)
            row, col = np.concatenate([row, col]), np.concatenate([col, row])
        else:
            partners = np.repeat(nodes, self.columns.draw(num_nodes, off_diagonal, rng))
            row, col = _join(stubs, partners, num_nodes, rng, undirected=False)
        loops = rng.choice(num_nodes, self.self_loops, replace=False)
        return RawGraph(
            row=np.concatenate([row, loops]),
            col=np.concatenate([col, loops]),
            num_nodes=num_nodes,
            origin="configuration model with log-normal degrees (data/synthetic.py)",
        )


@dataclass(frozen=True)
class MoleculeBatch:
    """A batch of small sparse trees with a few six-rings, mean sizes as in the entry.

    Attributes:
        shape: of the gamma distribution of graph sizes (coefficient of variation 1 / sqrt(shape)).
        branching: chance that an atom hangs on the last atom but one and not on the last.
    """

    shape: float = 4.0
    branching: float = 0.2

    def generate(self, entry: "Dataset", batch_size: int, rng: np.random.Generator) -> RawGraph:
        """`batch_size` graphs with the entry's mean nodes and nnz per graph, in both directions."""
        num_nodes = round(entry.num_nodes * batch_size / entry.num_graphs)
        num_bonds = round(entry.nnz * batch_size / entry.num_graphs / 2)
        sizes = 2 + _apportion(num_nodes - 2 * batch_size, rng.gamma(self.shape, size=batch_size))
        local = np.arange(num_nodes) - np.repeat(np.cumsum(sizes) - sizes, sizes)

        atoms = np.flatnonzero(local > 0)
        step = np.minimum(1 + (rng.random(atoms.size) < self.branching), local[atoms])
        # A bond to the fifth atom before closes a ring of six where the chain did not branch.
        closable = np.flatnonzero(local >= 5)
        closing = rng.choice(closable, min(num_bonds - atoms.size, closable.size), replace=False)
        row, col = np.concatenate([atoms, closing]), np.concatenate([atoms - step, closing - 5])
        return RawGraph(
            row=np.concatenate([row, col]),
            col=np.concatenate([col, row]),
            num_nodes=num_nodes,
            origin="random trees with six-rings (data/synthetic.py)",
            graph_sizes=sizes,
        )


def random_features(
    num_nodes: int, dim: int, cardinalities: tuple[int, ...] | None, rng: np.random.Generator
) -> np.ndarray:
    """Float32 [N, dim] from N(0, 1); with cardinalities int64 [N, C], column c uniform in 0 .. cardinalities[c] - 1."""
    if cardinalities is None:
        return rng.standard_normal((num_nodes, dim), dtype=np.float32)
    return rng.integers(0, cardinalities, size=(num_nodes, len(cardinalities)))


def _apportion(total: int, weights: np.ndarray) -> np.ndarray:
    """Non-negative integers in proportion to `weights` that sum to `total`."""
    ends = np.cumsum(weights)
    return np.diff(np.rint(ends * (total / ends[-1])).astype(np.int64), prepend=0)


def _join(
    heads: np.ndarray, tails: np.ndarray, num_nodes: int, rng: np.random.Generator, *, undirected: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Pair heads[e] with tails[e]; pairs that are self loops or repeated are drawn anew until all differ."""
    count = heads.size
    keys = np.empty(0, np.int64)
    row, col = heads, tails
    while True:
        if undirected:
            row, col = np.minimum(row, col), np.maximum(row, col)
        keys = np.union1d(keys, (row * num_nodes + col)[row != col])
        if keys.size == count:
            return keys // num_nodes, keys % num_nodes
        # Drawing ends of edges keeps the chance of a node in proportion to its degree.
        row, col = rng.choice(heads, count - keys.size), rng.choice(tails, count - keys.size)
