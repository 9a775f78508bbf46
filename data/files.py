"""Reader of a user's graph file. No format can run code: pickled arrays are refused.

In every format the first column or row index is the query and the second the key (see `data`). Every stored entry is an
edge, whatever its value.

    .npz         `src_li`, `dst_li` [E], `num_nodes`, as the Fused3S authors publish; optional `feat` (float
                 [N, F]), `label` (integer [N], -1 for unknown) and `edge_feat` (float [E, F], or codes from 0 [E, C]);
                 optional `train_ids`, `valid_ids`, `test_ids`: the nodes of each part of a split
    .npz         a square matrix as `scipy.sparse.save_npz` writes it, in any of SciPy's formats
    .npz         many small undirected graphs, one after the other: `node_counts`, `edge_counts` [B], `u`, `v` (node ids
                 local to their graph, each edge once); `batch_size` of them form the batch. Optional `feat` (float, a
                 row for each node), `graph_label` (float [B, T], NaN for a missing one; a model gets T outputs) and the
                 three parts of a split. With `feat` it may be larger than memory: see `data.mapped_collections`
    .mtx         a square Matrix Market file in coordinate format
    .txt .txt.gz an edge list as SNAP publishes: two whitespace-separated integers a line, # comments
    .csv         an edge list in its first two columns, with or without a header line (without numbers)

Node ids of edge lists are kept if they are 0 .. N-1 without a gap; otherwise each id is replaced by its rank among all
ids of the file. An edge list cannot hold a node without edges: use one of the other formats.

Sizes are compared with each other and with the available memory before any array is read: an .npz states the shape of
each array, an .mtx the number of its entries. `num_nodes` alone decides the memory of a graph, so that a wrong one is
an error here.
"""

import logging
from collections.abc import Callable
from pathlib import Path

from data.edge_text import ranked, read_csv_edges, read_snap_edges
from data.errors import DatasetMissingError
from data.graph import CsrGraph, RawGraph
from data.graph_arrays import COLLECTION, GRAPH, WITH_COLLECTION, WITH_GRAPH, read_collection, read_one_graph
from data.graph_checks import checked_graph
from data.matrix_market import read_matrix_market
from data.npz import Npz
from data.scipy_files import read_scipy_matrix
from data.selection import Selection, refusal

logger = logging.getLogger(__name__)


def read_graph(path: str | Path, selection: Selection, mapped: Path | None = None) -> RawGraph | CsrGraph:
    """Read a graph file. Its suffix, and the arrays of an .npz, determine the format.

    Args:
        path: the file.
        selection: graphs to take from a collection of small graphs; files have no splits.
        mapped: folder for what is kept of a collection that does not fit into memory; None refuses one.

    Raises:
        DatasetMissingError: the file does not exist.
        ValueError: the file is empty, damaged, cannot be opened, is of an unknown format, or holds ids or sizes out of
            range.
        MemoryError: the graph would not fit.
        OSError: what is kept of a collection cannot be written.
    """
    path = Path(path)
    reader = next((reader for ending, reader in _READERS.items() if path.name.lower().endswith(ending)), None)
    if reader is None:
        raise ValueError(f"{path}: unknown format; allowed endings are {', '.join(_READERS)}")
    _check_readable(path)
    raw = reader(path, selection, mapped)
    why = f"{path} holds {'one graph' if raw.graph_sizes is None else 'no splits'}"
    if wrong := refusal(selection, {"order": raw.graph_sizes is not None}, why):
        raise ValueError(wrong)
    return raw


def _check_readable(path: Path) -> None:
    """Find now what the readers of the formats would call damage."""
    try:
        if not path.exists():
            raise DatasetMissingError(f"{path}: no such file; correct the path, or put the graph there")
        if not path.is_file():
            raise ValueError(f"{path}: not a file")
        with path.open("rb") as file:
            empty = not file.read(1)
    except DatasetMissingError:
        raise
    except OSError as error:
        raise ValueError(
            f"{path}: cannot be opened ({error.strerror}); the file may be fine: check its permissions and its disk"
        ) from error
    if empty:
        raise ValueError(f"{path}: the file is empty (0 bytes)")


def _read_npz(path: Path, selection: Selection, mapped: Path | None) -> RawGraph | CsrGraph:
    archive = Npz(path)
    if "format" in archive:
        return read_scipy_matrix(archive)
    for needed, optional in ((GRAPH, WITH_GRAPH), (COLLECTION, WITH_COLLECTION)):
        if all(name in archive for name in needed):
            if unread := sorted(set(archive) - {*needed, *optional}):
                text = "%s: the arrays %s are not read; those that are read besides %s: %s"
                logger.warning(text, path, ", ".join(unread), ", ".join(needed), ", ".join(optional))
            return read_one_graph(archive) if needed is GRAPH else read_collection(archive, selection, mapped)
    raise ValueError(
        f"{path}: holds the arrays {sorted(archive)}; allowed are src_li, dst_li, num_nodes, or those of "
        "scipy.sparse.save_npz, or node_counts, edge_counts, u, v"
    )


def _read_mtx(path: Path, selection: Selection, mapped: Path | None) -> RawGraph:
    return read_matrix_market(path)


def _read_txt(path: Path, selection: Selection, mapped: Path | None) -> RawGraph:
    return checked_graph(path, *ranked(path, read_snap_edges(path)))


def _read_csv(path: Path, selection: Selection, mapped: Path | None) -> RawGraph:
    return checked_graph(path, *ranked(path, read_csv_edges(path)))


_READERS: dict[str, Callable[[Path, Selection, Path | None], RawGraph | CsrGraph]] = {
    ".npz": _read_npz,
    ".mtx": _read_mtx,
    ".txt": _read_txt,
    ".txt.gz": _read_txt,
    ".csv": _read_csv,
}
