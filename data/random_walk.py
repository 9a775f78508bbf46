"""Random-walk encoding (Dwivedi et al. 2022; RWSE of GraphGPS): for each node the probabilities of returning to it
after 1 .. k steps, the diagonals of (D^-1 A)^1 .. (D^-1 A)^k. A row of A is a query: a step goes from query to key."""

import numpy as np

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
    first_node = np.cumsum(graph_sizes, dtype=np.int64) - graph_sizes
    # Together are graphs of similar sizes, up to twice the smallest: all get the size of the largest.
    order = np.argsort(graph_sizes, kind="stable")
    block = (graph_sizes[order].cumsum() - 1) // BLOCK_NODES
    is_last = (np.diff(block) > 0) | (np.diff(np.frexp(graph_sizes[order])[1]) > 0)
    found = np.empty((len(indptr) - 1, k), np.float32)
    for graphs in np.split(order, np.flatnonzero(is_last) + 1):
        local = np.arange(graph_sizes[graphs[-1]])
        nodes = first_node[graphs, None] + local
        is_node = local < graph_sizes[graphs, None]
        found[nodes[is_node]] = _returns(_walk(indptr, col, nodes, is_node), k)[is_node]
    return found


def _walk(indptr: np.ndarray, col: np.ndarray, nodes: np.ndarray, is_node: np.ndarray) -> np.ndarray:
    """D^-1 A of graphs [B, n], as [B, n, n] with zeros for rows that are no nodes."""
    ends, degrees = np.zeros((2, *nodes.shape), np.int64)
    ends[is_node], degrees[is_node] = indptr[nodes[is_node] + 1], np.diff(indptr)[nodes[is_node]]
    flat_degrees = degrees.ravel()
    row = np.repeat(np.arange(nodes.size), flat_degrees)
    edge = np.arange(row.size) + np.repeat(ends.ravel() - flat_degrees.cumsum(), flat_degrees)
    graph, local = np.divmod(row, nodes.shape[1])
    walk = np.zeros((*nodes.shape, nodes.shape[1]))
    walk[graph, local, col[edge] - nodes[graph, 0]] = 1 / flat_degrees[row]
    return walk


def _returns(walk: np.ndarray, k: int) -> np.ndarray:
    """[B, n, k] diagonals of the powers of walk [B, n, n]; the diagonal of a product needs no matrix product."""
    power, diagonals = walk, [np.einsum("bii->bi", walk)]
    while len(diagonals) < k:
        diagonals.append(np.einsum("bij,bji->bi", power, power))
        following = power @ walk
        diagonals.append(np.einsum("bij,bji->bi", power, following))
        power = following
    return np.stack(diagonals[:k], axis=-1)
