"""Synthetic single graphs: a degree-corrected block model whose row windows have the paper's block statistics.

Every window of 16 rows gets a number of tensor core blocks, which gives its columns and edges; the edges are shared
among the rows of the window. There are two kinds of edges. Free edges join nodes of given degrees at random (a
configuration model); hubs make their columns popular in every window. Patches connect a run of `patch_side`
consecutive nodes completely to another run: communities whose rows share columns, so that a block can hold more than 8
nonzeros.

NumPy and CuPy run the same code and give the same graph: degrees are computed on the CPU, random numbers are hashes,
and the rest is integer sorts and gathers.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from data.canonical import distinct, to_csr
from data.graph import CsrGraph
from data.synthetic.random import random_bits, shuffled
from data.synthetic.windows import decile_counts, log_normal_counts

if TYPE_CHECKING:
    from data.registry import Dataset

WINDOW = 16  # rows of a row window
TCB_COLUMNS = 8
MAX_ROUNDS = 12  # rounds of redrawing repeated edges; far below 1 % of the edges are missing after them
# Random streams, one for each purpose and round.
HEADS, TAILS, PATCH_WINDOWS, PATCH_RUNS = 0, 100, 200, 300


@dataclass(frozen=True)
class WindowedGraph:
    """Generator of a single graph with given block statistics.

    Attributes:
        mean_tcbs: mean number of tensor core blocks per row window.
        deciles: bounds of the tenths of these numbers; None: they are log-normal with `cv`, at most `max_tcbs`.
        row_sigma: log-normal shape of the degrees inside a window.
        hub: share of the columns above the mean that one row of a window takes.
        slope: a window's edges grow with its columns to the power 1 + slope.
        patch_share: share of the edges that lie in patches.
        patch_side: nodes on each side of a patch, at most 16.
        column_sigma: log-normal shape of the columns' popularity, if A is not symmetric.
        self_loops: number of nodes with a self loop; the generator makes no others.
    """

    mean_tcbs: float
    deciles: tuple[int, ...] | None = None
    cv: float = 0.0
    max_tcbs: float = np.inf
    row_sigma: float = 0.8
    hub: float = 0.0
    slope: float = 0.0
    patch_share: float = 0.0
    patch_side: int = 2
    column_sigma: float = 0.8
    self_loops: int = 0

    def generate(self, spec: "Dataset", batch_size: int, seed: int, xp: Any = np) -> CsrGraph:
        """A graph with the spec's nodes and its nnz to within 1 %; exactly symmetric if the spec is."""
        num_nodes = spec.num_nodes
        rng = np.random.default_rng(seed)
        row_degrees = self._row_degrees(num_nodes, spec.nnz - self.self_loops, rng)
        if spec.symmetric:
            keys = self._undirected(xp, seed, row_degrees)
        else:
            popularity = np.exp(self.column_sigma * rng.standard_normal(num_nodes))
            keys = self._directed(xp, seed, row_degrees, apportion(row_degrees.sum(), popularity))
        if self.self_loops:
            loops = xp.asarray(rng.choice(num_nodes, self.self_loops, replace=False))
            keys = xp.concatenate([keys, loops * (num_nodes + 1)])
            keys.sort()
        row = keys // num_nodes
        keys -= row * num_nodes  # in place, since these are the largest arrays of the process
        if xp is not np:
            row, keys = xp.asnumpy(row), xp.asnumpy(keys)
        return to_csr(row, keys, num_nodes, "block model fitted to the paper's statistics")

    def _row_degrees(self, num_nodes: int, num_edges: int, rng: np.random.Generator) -> np.ndarray:
        """[N] int64 with the sum `num_edges`."""
        num_windows = -(-num_nodes // WINDOW)
        if self.deciles:
            tcbs = decile_counts(self.deciles, num_windows, self.mean_tcbs)
        else:
            tcbs = log_normal_counts(self.cv, self.max_tcbs, num_windows, self.mean_tcbs)
        # The last block of a window is partly filled.
        columns = rng.permutation(np.maximum(tcbs * TCB_COLUMNS - rng.uniform(0, TCB_COLUMNS, num_windows), 0.5))
        hub = self.hub * np.maximum(columns - columns.mean(), 0)
        shares = np.exp(self.row_sigma * rng.standard_normal((num_windows, WINDOW)))
        shares.ravel()[num_nodes:] = 0
        shares *= ((columns - hub) / shares.sum(1))[:, None]
        shares[:, 0] += hub
        shares *= (columns**self.slope)[:, None]
        return apportion(num_edges, shares.ravel()[:num_nodes])

    def _undirected(self, xp: Any, seed: int, degrees: np.ndarray) -> Any:
        """Sorted keys of both directions of undirected edges."""
        num_nodes, wanted = degrees.size, int(degrees.sum()) // 2
        stubs = xp.asarray(np.repeat(np.arange(num_nodes), degrees))
        keys = distinct(xp, _upper(xp, *self._patches(xp, seed, stubs, stubs, num_nodes), num_nodes))
        free = wanted - keys.size
        ends = shuffled(xp, _evenly(xp, stubs, 2 * free), seed, HEADS)
        heads, tails = ends[:free], ends[free:]
        for attempt in range(1, MAX_ROUNDS):
            keys = distinct(xp, xp.concatenate([keys, _upper(xp, heads, tails, num_nodes)]))
            missing = wanted - keys.size
            if missing <= 0:
                break
            heads = _any_of(xp, stubs, seed, HEADS + attempt, missing)
            tails = _any_of(xp, stubs, seed, TAILS + attempt, missing)
        del stubs, ends, heads, tails
        low = keys // num_nodes
        keys = xp.concatenate([keys, (keys - low * num_nodes) * num_nodes + low])
        keys.sort()
        return keys

    def _directed(self, xp: Any, seed: int, row_degrees: np.ndarray, column_degrees: np.ndarray) -> Any:
        """Sorted keys of edges with separate row and column degrees."""
        num_nodes, wanted = row_degrees.size, int(row_degrees.sum())
        rows, columns = (xp.asarray(np.repeat(np.arange(num_nodes), d)) for d in (row_degrees, column_degrees))
        keys = distinct(xp, _keys(*self._patches(xp, seed, rows, columns, num_nodes), num_nodes))
        free = wanted - keys.size
        heads = _evenly(xp, rows, free)
        tails = shuffled(xp, _evenly(xp, columns, free), seed, TAILS)
        for attempt in range(1, MAX_ROUNDS):
            keys = distinct(xp, xp.concatenate([keys, _keys(heads, tails, num_nodes)]))
            missing = wanted - keys.size
            if missing <= 0:
                break
            heads = _any_of(xp, rows, seed, HEADS + attempt, missing)
            tails = _any_of(xp, columns, seed, TAILS + attempt, missing)
        return keys

    def _patches(self, xp: Any, seed: int, rows: Any, columns: Any, num_nodes: int) -> tuple[Any, Any]:
        """Both ends of the patches' edges. Windows are drawn in proportion to their edges."""
        side = self.patch_side
        edges = rows.size // 2 if rows is columns else rows.size
        count = round(self.patch_share * edges / side**2)
        last_full = num_nodes // WINDOW - 1
        first = [
            xp.minimum(_any_of(xp, stubs, seed, PATCH_WINDOWS + end, count) // WINDOW, last_full) * WINDOW
            + random_bits(xp, seed, PATCH_RUNS + end, count) % (WINDOW - side + 1)
            for end, stubs in enumerate((rows, columns))
        ]
        steps = xp.arange(side)
        row = xp.broadcast_to((first[0][:, None] + steps)[:, :, None], (count, side, side))
        col = xp.broadcast_to((first[1][:, None] + steps)[:, None, :], (count, side, side))
        return row.ravel(), col.ravel()


def apportion(total: int, weights: np.ndarray) -> np.ndarray:
    """Non-negative integers in proportion to `weights` that sum to `total`."""
    ends = np.cumsum(weights)
    return np.diff(np.rint(ends * (total / ends[-1])).astype(np.int64), prepend=0)


def _evenly(xp: Any, ids: Any, count: int) -> Any:
    """`count` evenly spaced ids, an equal share of every node."""
    return ids[xp.arange(count) * ids.size // count] if count < ids.size else ids


def _any_of(xp: Any, ids: Any, seed: int, stream: int, count: int) -> Any:
    return ids[random_bits(xp, seed, stream, count) % ids.size]


def _keys(heads: Any, tails: Any, num_nodes: int) -> Any:
    """row * N + column of each edge, without self loops."""
    return (heads * num_nodes + tails)[heads != tails]


def _upper(xp: Any, heads: Any, tails: Any, num_nodes: int) -> Any:
    """Keys of undirected edges, with the smaller node as the row."""
    return _keys(xp.minimum(heads, tails), xp.maximum(heads, tails), num_nodes)
