"""Assignment of rows to parts: contiguous ranges of rows, or METIS."""

from collections.abc import Callable, Iterable

import numpy as np

from parallel.errors import PartitionError

METHODS = ("metis", "contiguous")
WINDOW_ROWS = 16  # contiguous parts begin at a row window
# Time of a row outside attention, in edges (kernels/NOTES.md). Without it one rank gets up to 1.8 times the mean number
# of rows.
EDGES_PER_ROW = 8
METIS_BYTES_PER_EDGE = 60  # of the symmetric graph, METIS's own copies included
METIS_SEED = 0

Edges = Iterable[tuple[np.ndarray, np.ndarray]]  # (row, column) of each edge, in chunks


def assign_contiguous(degrees: np.ndarray, num_parts: int) -> np.ndarray:
    """Parts of equal weight in the given order of the rows.

    Args:
        degrees: [N] number of edges of each row.

    Returns:
        [N] int32, ascending. Parts may be empty if there are fewer row windows than parts.
    """
    total = np.cumsum(degrees + EDGES_PER_ROW)
    targets = (total[-1] if total.size else 0) / num_parts * np.arange(1, num_parts)
    cuts = np.rint(np.searchsorted(total, targets) / WINDOW_ROWS).astype(np.int64) * WINDOW_ROWS
    return np.searchsorted(cuts, np.arange(degrees.size), side="right").astype(np.int32)


def assign_by_metis(
    edges: Callable[[], Edges], degrees: np.ndarray, num_parts: int, require_memory: Callable[[str, int], None]
) -> np.ndarray:
    """Parts with few edges between them (METIS), balanced by edges and rows.

    Args:
        edges: the graph, which may be directed; METIS gets its undirected form.
        degrees: [N] edges of each row.
        require_memory: called with a purpose and the needed bytes; raises a MemoryError.

    Returns:
        [N] int32; the same for the same graph on every run.

    Raises:
        PartitionError: METIS is not installed.
    """
    try:
        import pymetis
    except ImportError as error:
        raise PartitionError(
            "method: got 'metis', and pymetis is not installed: pip install pymetis (on aarch64 that needs a C++ "
            "compiler), or take method 'contiguous'"
        ) from error
    num_nodes, num_edges = degrees.size, int(degrees.sum())
    if num_parts == 1 or num_nodes <= num_parts:
        return np.minimum(np.arange(num_nodes, dtype=np.int32), num_parts - 1)
    require_memory("METIS (method 'contiguous' needs less)", 2 * num_edges * METIS_BYTES_PER_EDGE)
    indptr, indices = _symmetric(edges(), num_nodes)
    weights = (degrees + EDGES_PER_ROW).astype(np.int64)
    integer = pymetis.zero_copy_dtype()
    most = np.iinfo(integer).max
    if indices.size > most:
        raise PartitionError(
            f"method: got 'metis' for {indices.size} edges in both directions, and this pymetis counts to {most}: "
            "take method 'contiguous'"
        )
    weights //= 1 + int(weights.sum()) // (most // 2)
    graph = pymetis.CSRAdjacency(indptr.astype(integer), indices.astype(integer))
    weights = np.maximum(weights, 1).astype(integer)
    _, parts = pymetis.part_graph(num_parts, graph, vweights=weights, options=pymetis.Options(seed=METIS_SEED))
    return np.asarray(parts, dtype=np.int32)


def _symmetric(edges: Edges, num_nodes: int) -> tuple[np.ndarray, np.ndarray]:
    """CSR arrays of the undirected graph without self-loops."""
    found = [np.empty(0, np.int64)]
    for row, col in edges:
        row, col = (ends[row != col].astype(np.int64) for ends in (row, col))
        found += [row * num_nodes + col, col * num_nodes + row]
    row, col = np.divmod(sorted_unique(np.concatenate(found)), max(num_nodes, 1))
    return np.concatenate([[0], np.cumsum(np.bincount(row, minlength=num_nodes))]), col


def sorted_unique(values: np.ndarray) -> np.ndarray:
    """As `np.unique` of integers, which hashes them since NumPy 2.3: a hundred times slower on millions. Sorts `values`
    in place."""
    values.sort()
    return values[np.concatenate([[True], values[1:] != values[:-1]])] if values.size else values
