"""Random-walk encoding (Dwivedi et al. 2022; RWSE of GraphGPS): for each node the probabilities of returning to it
after 1 .. k steps, the diagonals of (D^-1 A)^1 .. (D^-1 A)^k. A row of A is a query: a step goes from query to key."""

import numpy as np

from data.packed import rows_of

MOST_NODES = 4096  # most nodes of a graph: its powers are dense
BLOCK_NODES = 4096  # most nodes of graphs whose powers are computed together


def random_walk_encoding(indptr: np.ndarray, col: np.ndarray, graph_sizes: np.ndarray, k: int) -> np.ndarray:
    """Encoding of the nodes of a batch of graphs, computed in float64.

    Args:
        indptr: [N + 1] integers; col: [nnz] integers, distinct in each row: the block-diagonal A.
        graph_sizes: [G] integers, nodes of each graph.
        k: steps, at least 1.

    Returns:
        [N, k] float32; zeros where a node has no edges.

    Raises:
        ValueError: a graph has more than MOST_NODES nodes.
    """
    if (largest := int(graph_sizes.max())) > MOST_NODES:
        raise ValueError(
            f"random_walk: got {k} with a graph of {largest:,} nodes; graphs of up to {MOST_NODES:,} nodes have this "
            "encoding: leave it out (model.random_walk: 0)"
        )
    degrees = np.diff(indptr)
    row = np.repeat(np.arange(degrees.size), degrees)
    ends = np.append(0, np.cumsum(graph_sizes, dtype=np.int64))
    edge_counts = np.diff(indptr[ends])
    found = np.empty((degrees.size, k), np.float32)
    for size in np.unique(graph_sizes).tolist():
        of_size = np.flatnonzero(graph_sizes == size)
        for graphs in np.array_split(of_size, -(-of_size.size * size // BLOCK_NODES)):
            edges, counts = rows_of(graphs, edge_counts), edge_counts[graphs]
            graph, first = (np.repeat(each, counts) for each in (np.arange(graphs.size), ends[graphs]))
            walk = np.zeros((graphs.size, size, size))
            walk[graph, row[edges] - first, col[edges] - first] = 1 / degrees[row[edges]]
            found[rows_of(graphs, graph_sizes)] = _returns(walk, k).reshape(-1, k)
    return found


def _returns(walk: np.ndarray, k: int) -> np.ndarray:
    """[B, n, k] diagonals of the powers of walk [B, n, n]; the diagonal of a product needs no matrix product."""
    power, diagonals = walk, [np.einsum("bii->bi", walk)]
    while len(diagonals) < k:
        diagonals.append(np.einsum("bij,bji->bi", power, power))
        following = power @ walk
        diagonals.append(np.einsum("bij,bji->bi", power, following))
        power = following
    return np.stack(diagonals[:k], axis=-1)
