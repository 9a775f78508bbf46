"""Laplacian positional encoding (Dwivedi and Bresson 2020, section 2.1): the eigenvectors of the smallest non-trivial
eigenvalues of the symmetric normalised Laplacian L = I - D^-1/2 A D^-1/2.

A is the undirected, unweighted graph: an edge where the given graph has one in either direction, without self-loops
or multiple edges. The encoding is computed for each connected component separately. A component has exactly one
trivial eigenvector, so "non-trivial" is well defined on a disconnected graph, and the encoding of a batch is the
concatenation of the encodings of its graphs. A component of n nodes has n - 1 non-trivial eigenvectors; further columns
are 0.

The sign of an eigenvector is arbitrary: here its largest entry is positive (of several, the first in node order).
Eigenvectors of a repeated eigenvalue are one choice within their space. The same graph always gives the same encoding,
and another node order gives the permuted encoding unless the graph is symmetric in that eigenvector.
"""

import numpy as np
import scipy.sparse as sp
from scipy.sparse.csgraph import connected_components
from scipy.sparse.linalg import ArpackNoConvergence, eigsh

_DENSE_NODES = 256  # up to this size a dense factorisation is faster than a Lanczos iteration


def laplacian_encoding(
    source: np.ndarray, destination: np.ndarray, num_nodes: int, k: int, *, dense_nodes: int = _DENSE_NODES
) -> np.ndarray:
    """Eigenvectors of the k smallest non-trivial eigenvalues, smallest first.

    Args:
        source, destination: [E] integers, the ends of the edges.
        num_nodes: N.
        k: columns of the encoding, at least 1.
        dense_nodes: larger components are solved iteratively.

    Returns:
        [N, k] float64. Each column has unit norm on each component, or is 0 there.
    """
    operator = _normalised_adjacency(source, destination, num_nodes)
    _, component = connected_components(operator, directed=False)
    sizes = np.bincount(component, minlength=1)
    # Order nodes by component and components by size: components of equal size are solved in one call.
    order = np.lexsort((component, sizes[component]))
    operator = operator[order][:, order]
    encoding = np.zeros((num_nodes, k))
    for size, count in zip(*np.unique(sizes[sizes > 1], return_counts=True), strict=True):
        begin = int(np.searchsorted(sizes[component][order], size))
        columns = min(k, size - 1)
        if size <= max(dense_nodes, 2 * k):  # Lanczos finds few of many eigenvectors, not most of them
            matrices = _diagonal_blocks(operator, begin, size, count)
            vectors = np.linalg.eigh(matrices)[1][:, :, -2 : -2 - columns : -1]
        else:
            ends = [(begin + i * size, begin + (i + 1) * size) for i in range(count)]
            vectors = np.stack([_largest(operator[a:b, a:b], columns) for a, b in ends])
        rows = order[begin : begin + size * count]
        encoding[rows, :columns] = _fix_signs(vectors).reshape(-1, columns)
    return encoding


def _normalised_adjacency(source: np.ndarray, destination: np.ndarray, num_nodes: int) -> sp.csr_array:
    """D^-1/2 A D^-1/2 = I - L, whose largest eigenvalues are the smallest of L."""
    proper = source != destination
    ends = np.concatenate([source[proper], destination[proper]]), np.concatenate([destination[proper], source[proper]])
    adjacency = sp.coo_array((np.ones(len(ends[0])), ends), shape=(num_nodes, num_nodes)).tocsr()
    adjacency.data[:] = 1.0  # multiple edges were summed
    degree = np.maximum(adjacency.sum(axis=1), 1.0)
    scale = sp.diags_array(1.0 / np.sqrt(degree))
    return (scale @ adjacency @ scale).tocsr()


def _diagonal_blocks(operator: sp.csr_array, begin: int, size: int, count: int) -> np.ndarray:
    """The `count` diagonal blocks of `size` from row `begin` on, as dense matrices [count, size, size]."""
    end = begin + size * count
    block = operator[begin:end, begin:end].tocoo()
    matrices = np.zeros((count, size, size))
    matrices[block.row // size, block.row % size, block.col % size] = block.data
    return matrices


def _largest(operator: sp.csr_array, k: int) -> np.ndarray:
    """Eigenvectors [n, k] of the k largest eigenvalues of D^-1/2 A D^-1/2 after the trivial 1."""
    size = operator.shape[0]
    # A fixed start vector for reproducible results, with a component along every eigenvector.
    start = np.random.default_rng(0).standard_normal(size)
    try:
        values, vectors = eigsh(operator, k + 1, which="LA", v0=start, ncv=min(size, max(4 * k, 64)), maxiter=200)
    except ArpackNoConvergence:
        # Long, thin graphs have clustered eigenvalues. Shift-invert near 1 separates them, and on such graphs the
        # factorisation stays sparse. (On dense graphs the plain iteration converges.)
        values, vectors = eigsh(operator.tocsc(), k + 1, sigma=1.01, which="LM", v0=start)
    return vectors[:, np.argsort(-values, kind="stable")[1:]]


def _fix_signs(vectors: np.ndarray) -> np.ndarray:
    """Make the largest entry of each column positive; vectors: [count, n, k]."""
    # Entries that are equal up to rounding tie; the first one decides.
    magnitude = np.abs(vectors)
    first = np.argmax(magnitude > 0.999 * magnitude.max(axis=1, keepdims=True), axis=1, keepdims=True)
    return vectors * np.sign(np.take_along_axis(vectors, first, axis=1))
