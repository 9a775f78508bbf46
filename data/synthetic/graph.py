"""Synthetic single graphs: a degree-corrected block model whose row windows have the paper's block statistics.

Every window of 16 rows gets a number of tensor core blocks, which gives its columns and edges; the edges are shared
among the rows of the window. There are two kinds of edges. Free edges join nodes of given degrees at random (a
configuration model); hubs make their columns popular in every window. Patches connect a run of `patch_side`
consecutive nodes completely to another run: communities whose rows share columns, so that a block can hold more than 8
nonzeros.

NumPy and CuPy run the same code and give the same graph: degrees are computed on the CPU, random numbers are hashes,
and the rest is integer sorts and gathers.
"""

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


def windowed(
    spec: "Dataset",
    batch_size: int,
    seed: int,
    xp: Any = np,
    *,
    mean_tcbs: float,
    deciles: tuple[int, ...] | None = None,
    cv: float = 0.0,
    max_tcbs: float = np.inf,
    row_sigma: float = 0.8,
    hub: float = 0.0,
    slope: float = 0.0,
    patch_share: float = 0.0,
    patch_side: int = 2,
    column_sigma: float = 0.8,
    self_loops: int = 0,
) -> CsrGraph:
    """A graph with the spec's nodes and its nnz to within 1 %; exactly symmetric if the spec is.

    Args:
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
    num_nodes, num_windows = spec.num_nodes, -(-spec.num_nodes // WINDOW)
    rng = np.random.default_rng(seed)
    if deciles:
        tcbs = decile_counts(deciles, num_windows, mean_tcbs)
    else:
        tcbs = log_normal_counts(cv, max_tcbs, num_windows, mean_tcbs)
    # The last block of a window is partly filled.
    columns = rng.permutation(np.maximum(tcbs * TCB_COLUMNS - rng.uniform(0, TCB_COLUMNS, num_windows), 0.5))
    of_hub = hub * np.maximum(columns - columns.mean(), 0)
    shares = np.exp(row_sigma * rng.standard_normal((num_windows, WINDOW)))
    shares.ravel()[num_nodes:] = 0
    shares *= ((columns - of_hub) / shares.sum(1))[:, None]
    shares[:, 0] += of_hub
    shares *= (columns**slope)[:, None]
    degrees = [apportion(spec.nnz - self_loops, shares.ravel()[:num_nodes])]
    if not spec.symmetric:
        degrees.append(apportion(degrees[0].sum(), np.exp(column_sigma * rng.standard_normal(num_nodes))))
    stubs = [xp.asarray(np.repeat(np.arange(num_nodes), of_nodes)) for of_nodes in degrees]
    del tcbs, columns, of_hub, shares, degrees  # memory
    keys = _edges(xp, seed, stubs, num_nodes, patch_share, patch_side)
    if self_loops:
        loops = xp.asarray(rng.choice(num_nodes, self_loops, replace=False))
        keys = xp.concatenate([keys, loops * (num_nodes + 1)])
        keys.sort()
    row = keys // num_nodes
    keys -= row * num_nodes  # in place, since these are the largest arrays of the process
    if xp is not np:
        row, keys = xp.asnumpy(row), xp.asnumpy(keys)
    return to_csr(row, keys, num_nodes, "block model fitted to the paper's statistics")


def _edges(xp: Any, seed: int, stubs: list[Any], num_nodes: int, patch_share: float, patch_side: int) -> Any:
    """Sorted keys, row * N + column, of edges between stubs, which name a node once for each of its edges.

    Args:
        stubs: emptied, to free the memory. Those of rows and those of columns; one array of both for undirected edges,
            of which the result has both directions.
    """
    rows, columns, is_symmetric = stubs[0], stubs[-1], len(stubs) == 1
    keys_of = _upper if is_symmetric else _keys
    wanted = rows.size // 2 if is_symmetric else rows.size
    patches = _patches(xp, seed, rows, columns, num_nodes, round(patch_share * wanted / patch_side**2), patch_side)
    keys = distinct(xp, keys_of(xp, *patches, num_nodes))
    free = wanted - keys.size
    if is_symmetric:
        ends = shuffled(xp, _evenly(xp, rows, 2 * free), seed, HEADS)
        heads, tails = ends[:free], ends[free:]
    else:
        heads, tails = _evenly(xp, rows, free), shuffled(xp, _evenly(xp, columns, free), seed, TAILS)
    for attempt in range(1, MAX_ROUNDS):
        keys = distinct(xp, xp.concatenate([keys, keys_of(xp, heads, tails, num_nodes)]))
        missing = wanted - keys.size
        if missing <= 0:
            break
        heads = _any_of(xp, rows, seed, HEADS + attempt, missing)
        tails = _any_of(xp, columns, seed, TAILS + attempt, missing)
    if is_symmetric:
        del rows, columns, ends, heads, tails
        stubs.clear()
        low = keys // num_nodes
        keys = xp.concatenate([keys, (keys - low * num_nodes) * num_nodes + low])
        keys.sort()
    return keys


def _patches(xp: Any, seed: int, rows: Any, columns: Any, num_nodes: int, count: int, side: int) -> tuple[Any, Any]:
    """Both ends of the edges of `count` patches. Windows are drawn in proportion to their edges."""
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


def _keys(xp: Any, heads: Any, tails: Any, num_nodes: int) -> Any:
    """row * N + column of each edge, without self loops."""
    return (heads * num_nodes + tails)[heads != tails]


def _upper(xp: Any, heads: Any, tails: Any, num_nodes: int) -> Any:
    """Keys of undirected edges, with the smaller node as the row."""
    return _keys(xp, xp.minimum(heads, tails), xp.maximum(heads, tails), num_nodes)
