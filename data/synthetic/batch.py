"""Synthetic batches of small graphs: molecules, superpixels, syntax trees and protein neighbourhoods.

Each generator makes all graphs of a batch at once, with the spec's mean nodes and edges per graph. `size_cv` is the
coefficient of variation of the graphs' sizes.
"""

from typing import TYPE_CHECKING, Any

import numpy as np

from data.canonical import distinct, to_csr
from data.graph import CsrGraph
from data.synthetic.graph import apportion

if TYPE_CHECKING:
    from data.registry import Dataset

# Molecules: probability that an atom binds to the second to last atom instead of the last, and that it binds to any
# earlier one, as the start of a side chain does.
BRANCHING, FAR = 0.2, 0.03
# Superpixels: width of a picture over its height, and standard deviation of a node's place in the order.
ASPECT, DISORDER = 1.3, 4.0
# Dense neighbourhoods: share of the edges between nodes at a distance of at most REACH in the node order; log-normal
# shape of the popularity of nodes among the other edges.
NEAR, REACH, SIGMA = 0.7, 25, 1.0


def molecules(spec: "Dataset", batch_size: int, seed: int, xp: Any = np, *, size_cv: float) -> CsrGraph:
    """Sparse trees with a few six-rings, in both directions."""
    rng = np.random.default_rng(seed)
    sizes = _sizes(spec, batch_size, size_cv, rng)
    num_bonds = round(spec.nnz * batch_size / spec.num_graphs / 2)
    local = _local(sizes)

    atoms = np.flatnonzero(local > 0)
    step = np.minimum(1 + (rng.random(atoms.size) < BRANCHING), local[atoms])
    far = np.flatnonzero(rng.random(atoms.size) < FAR)
    step[far] = 1 + (rng.random(far.size) * local[atoms[far]]).astype(np.int64)
    # A bond to the fifth atom before closes a ring of six if the chain did not branch.
    closable = np.setdiff1d(np.flatnonzero(local >= 5), atoms[step == 5])
    closing = rng.choice(closable, min(num_bonds - atoms.size, closable.size), replace=False)
    row, col = np.concatenate([atoms, closing]), np.concatenate([atoms - step, closing - 5])
    return _both_directions(row, col, sizes, "random trees with six-rings")


def superpixels(spec: "Dataset", batch_size: int, seed: int, xp: Any = np, *, size_cv: float = 0.05) -> CsrGraph:
    """Planar neighbourhoods: triangulated grids, with nodes numbered line by line in nearly raster order."""
    rng = np.random.default_rng(seed)
    sizes = _sizes(spec, batch_size, size_cv, rng)
    num_edges = round(spec.nnz * batch_size / spec.num_graphs / 2)
    widths = np.maximum(np.rint(np.sqrt(sizes * ASPECT)), 2).astype(np.int64)
    size, width, local = np.repeat(sizes, sizes), np.repeat(widths, sizes), _local(sizes)
    node, column = np.arange(size.size), local % width
    # Edges to the right, down, and one diagonal of every cell, from its upper left or its upper right corner.
    slash = rng.random(size.size) < 0.5
    right = node[(column + 1 < width) & (local + 1 < size)]
    below = node[local + width < size]
    falling = node[(column + 1 < width) & (local + width + 1 < size) & ~slash]
    rising = node[(column > 0) & (local + width - 1 < size) & np.roll(slash, 1)]
    u = np.concatenate([right, below, falling, rising])
    v = u + np.concatenate([np.ones_like(right), width[below], width[falling] + 1, width[rising] - 1])
    missing = num_edges - u.size
    if missing > 0:  # irregular regions have more neighbours: the next but one in a line
        skip = rng.choice(node[(column + 2 < width) & (local + 2 < size)], missing, replace=False)
        u, v = np.concatenate([u, skip]), np.concatenate([v, skip + 2])
    else:
        keep = rng.choice(u.size, num_edges, replace=False)
        u, v = u[keep], v[keep]
    place = np.empty_like(node)
    graph = np.repeat(np.arange(batch_size), sizes)
    place[np.lexsort((local + DISORDER * rng.standard_normal(size.size), graph))] = node
    return _both_directions(place[u], place[v], sizes, "triangulated grids")


def syntax_trees(
    spec: "Dataset", batch_size: int, seed: int, xp: Any = np, *, descent: float, size_cv: float = 0.8
) -> CsrGraph:
    """Random trees in preorder. A parent attends to its children only.

    Args:
        descent: probability that a node is a child of the one before it; otherwise the walk climbs, each further level
            with probability 1 - descent.
    """
    rng = np.random.default_rng(seed)
    sizes = _sizes(spec, batch_size, size_cv, rng)
    root = _local(sizes) == 0
    # The depth of a node is a random walk with steps of at most +1. Each root restarts it below all earlier values.
    steps = 2 - rng.geometric(descent, root.size)
    steps[root] = -(10**6)
    walk = np.cumsum(steps)
    depth = np.where(root, 0, np.maximum(walk - np.minimum.accumulate(walk), 1))
    # The parent of a node is the last earlier node one level up in the same graph.
    level = np.repeat(np.arange(batch_size), sizes) * (int(depth.max()) + 1) + depth
    in_order = np.sort(level * root.size + np.arange(root.size))
    child = np.flatnonzero(~root)
    parent = in_order[np.searchsorted(in_order, (level[child] - 1) * root.size + child) - 1] % root.size
    return to_csr(parent, child, root.size, "random syntax trees", graph_sizes=sizes)


def dense(spec: "Dataset", batch_size: int, seed: int, xp: Any = np, *, size_cv: float = 0.2) -> CsrGraph:
    """Most edges join nodes that are close in the node order, the rest lead to hubs of the graph."""
    rng = np.random.default_rng(seed)
    sizes = _sizes(spec, batch_size, size_cv, rng)
    num_nodes, last = int(sizes.sum()), np.cumsum(sizes) - 1
    wanted = round(spec.nnz * batch_size / spec.num_graphs / 2)
    edges = apportion(wanted, sizes.astype(float) ** 2)  # proportional to the pairs of nodes of a graph

    left = last[np.repeat(np.arange(batch_size), sizes)] - np.arange(num_nodes)  # nodes after this one
    pairs = np.minimum(left, REACH)
    chance = np.minimum(NEAR * edges / np.add.reduceat(pairs, last + 1 - sizes), 1)
    u, offset = np.nonzero(
        (rng.random((num_nodes, REACH)) < np.repeat(chance, sizes)[:, None]) & (np.arange(REACH) < pairs[:, None])
    )
    keys = u * num_nodes + u + 1 + offset

    weight = np.cumsum(np.exp(SIGMA * rng.standard_normal(num_nodes)))
    low = np.concatenate([[0.0], weight[last[:-1]]])
    span = weight[last] - low
    while (missing := wanted - keys.size) > 0:
        # Draw twice the missing number, since some edges exist already; drop the surplus at random.
        graph = np.repeat(np.arange(batch_size), apportion(2 * missing, edges.astype(float)))
        u = last[graph] - (rng.random(graph.size) * sizes[graph]).astype(np.int64)
        v = np.searchsorted(weight, low[graph] + rng.random(graph.size) * span[graph], side="right")
        v = np.minimum(v, last[graph])
        fresh = distinct(np, (np.minimum(u, v) * num_nodes + np.maximum(u, v))[u != v])
        fresh = fresh[keys[np.minimum(np.searchsorted(keys, fresh), keys.size - 1)] != fresh]
        keys = np.sort(np.concatenate([keys, rng.permutation(fresh)[:missing]]))
    return _both_directions(keys // num_nodes, keys % num_nodes, sizes, "dense neighbourhoods")


def _sizes(spec: "Dataset", batch_size: int, cv: float, rng: np.random.Generator) -> np.ndarray:
    """[batch_size] int64 nodes of each graph, at least 2, gamma distributed around the spec's mean."""
    total = round(spec.num_nodes * batch_size / spec.num_graphs)
    return 2 + apportion(total - 2 * batch_size, rng.gamma(1 / cv**2, size=batch_size))


def _local(sizes: np.ndarray) -> np.ndarray:
    """[N] int64, index of each node in its graph."""
    return np.arange(sizes.sum()) - np.repeat(np.cumsum(sizes) - sizes, sizes)


def _both_directions(row: np.ndarray, col: np.ndarray, sizes: np.ndarray, origin: str) -> CsrGraph:
    row, col = np.concatenate([row, col]), np.concatenate([col, row])
    return to_csr(row, col, int(sizes.sum()), origin, graph_sizes=sizes)
