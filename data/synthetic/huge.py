"""Synthetic graphs of a thousand million edges, made in chunks of rows with bounded memory.

Modelled: nodes, edges, and

    degrees   log-normal over the rows (ROW_SIGMA), independent of the row's place in the node order
    columns   with probability LOCAL_SHARE uniform within REACH nodes of the row (node ids wrap around), else uniform
              over all nodes; neither self loops nor repeated edges

Not modelled: popular columns (all have the same expected number of edges), symmetry, communities, triangles, and rows
of a window that share columns. The three constants are assumptions.

A random number is a hash of the edge's position in the CSR arrays, and degrees are computed on the CPU: NumPy and CuPy
give the same graph, in chunks of any size.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from data.graph import CsrGraph
from data.synthetic.graph import apportion
from data.synthetic.random import random_bits_at

if TYPE_CHECKING:
    from data.registry import Dataset

ROW_SIGMA, LOCAL_SHARE, REACH = 1.0, 0.25, 4096
CHUNK_EDGES = {"numpy": 1 << 20, "cupy": 1 << 24}  # in the caches of a CPU; enough for a whole GPU
HOST_BYTES_PER_ITEM = 10  # of each edge and node: the CSR arrays, six float64 numbers of each degree, a chunk
CHUNK_BYTES = 96 * max(CHUNK_EDGES.values())  # at most ten int64 arrays at a time, and some bool ones
MAX_ROUNDS = 1000  # of redrawing repeated edges: sparse graphs need three or four
SHARE_BITS = 16  # bits of a random number that decide whether the edge is local


def huge(spec: "Dataset", batch_size: int, seed: int, xp: Any = np) -> CsrGraph:
    """A graph with exactly the spec's nodes and edges; REACH and each row have less than half of the nodes."""
    num_nodes = spec.num_nodes
    weights = np.random.default_rng(seed).standard_normal(num_nodes)
    weights *= ROW_SIGMA
    degrees = apportion(spec.nnz, np.exp(weights, out=weights))
    indptr = np.zeros(num_nodes + 1, np.int32 if spec.nnz < 2**31 else np.int64)
    np.cumsum(degrees, out=indptr[1:])
    del degrees, weights
    col = np.empty(spec.nnz, indptr.dtype)
    first = 0
    while first < num_nodes:
        limit = indptr.dtype.type(min(int(indptr[first]) + CHUNK_EDGES[xp.__name__], spec.nnz))
        last = max(int(np.searchsorted(indptr, limit, side="right")) - 1, first + 1)
        chunk = _columns(xp, indptr[first : last + 1], first, num_nodes, seed).astype(col.dtype)
        col[indptr[first] : indptr[last]] = chunk if xp is np else xp.asnumpy(chunk)
        first = last
    origin = (
        f"log-normal degrees (sigma {ROW_SIGMA:g}), {LOCAL_SHARE:.0%} of the edges within {REACH} "
        "nodes, the others uniform; nodes and edges only"
    )
    return CsrGraph(indptr, col, origin)


def _columns(xp: Any, indptr: np.ndarray, first_row: int, num_nodes: int, seed: int) -> Any:
    """[edges] int64: the columns of consecutive rows, ascending in each row.

    Args:
        indptr: [rows + 1], offsets in the whole graph.
        first_row: number of the first row.
    """
    begin, end = int(indptr[0]), int(indptr[-1])
    position = xp.arange(begin, end, dtype=xp.int64)
    # Row of each edge, counted from the first one: the number of later rows that start at or before it.
    starts = xp.asarray(indptr[1:-1].astype(np.int64) - begin)
    row = xp.cumsum(xp.bincount(starts, minlength=end - begin + 1)[: end - begin])

    def drawn(row: Any, position: Any, stream: int) -> Any:
        """row * N + column of edges, which sorts by row and then column."""
        return row * num_nodes + _draw(xp, row + first_row, position, num_nodes, seed, stream)

    keys = drawn(row, position, 0)
    keys.sort()
    # Repeated edges are drawn again, in the few rows that have some. Every row keeps its number of edges, so sorted
    # keys stay aligned with `row` and `position`.
    affected = xp.zeros(indptr.size - 1, dtype=bool)
    affected[row[1:][keys[1:] == keys[:-1]]] = True
    redrawn = xp.flatnonzero(affected[row])
    part, part_row, part_position = keys[redrawn], row[redrawn], position[redrawn]
    for attempt in range(1, MAX_ROUNDS):
        repeated = xp.flatnonzero(part[1:] == part[:-1])
        if not repeated.size:
            break
        part[repeated] = drawn(part_row[repeated], part_position[repeated], attempt)
        part.sort()
    else:
        raise ValueError(f"repeated edges are left after {MAX_ROUNDS} rounds; fewer edges per row are needed")
    keys[redrawn] = part
    row *= num_nodes
    keys -= row
    return keys


def _draw(xp: Any, row: Any, position: Any, num_nodes: int, seed: int, stream: int) -> Any:
    """[edges] int64: a column for each edge, never its own row."""
    bits = random_bits_at(xp, seed, stream, position)
    is_local = (bits & ((1 << SHARE_BITS) - 1)) < round(LOCAL_SHARE * (1 << SHARE_BITS))
    bits >>= SHARE_BITS
    # Steps forward from the row; 1 to N - 1 are the other nodes, the last `reach` of them lie before the row.
    step = bits % (2 * REACH) + 1
    step += (step > REACH) * (num_nodes - 2 * REACH - 1)
    step = xp.where(is_local, step, bits % (num_nodes - 1) + 1)
    step += row
    step -= num_nodes * (step >= num_nodes)
    return step
