"""Reader of a user's graph file. No format can run code: pickled arrays are refused.

In every format the first column or row index is the query and the second the key (see `data`). Every stored entry is an
edge, whatever its value.

    .npz         `src_li`, `dst_li` [E], `num_nodes`, as the Fused3S authors publish; optional `feat` (float
                 [N, F]), `label` (integer [N], -1 for unknown) and `edge_feat` (float [E, F], or codes from 0 [E, C]);
                 optional `train_ids`, `valid_ids`, `test_ids`: the nodes of each part of a split
    .npz         a square matrix as `scipy.sparse.save_npz` writes it, in any of SciPy's formats
    .npz         many small undirected graphs, one after the other: `node_counts`, `edge_counts` [B], `u`, `v` (node ids
                 local to their graph, each edge once); `batch_size` of them form the batch. Optional `feat` (float, a
                 row for each node), `graph_label` (float [B, T], NaN for a missing one) and the three parts of a split
    .mtx         a square Matrix Market file in coordinate format
    .txt .txt.gz an edge list as SNAP publishes: two whitespace-separated integers a line, # comments
    .csv         an edge list in its first two columns, with or without a header line (without numbers)

Node ids of edge lists are kept if they are 0 .. N-1 without a gap; otherwise each id is replaced by its rank among all
ids of the file. An edge list cannot hold a node without edges: use one of the other formats.
"""

import gzip
import logging
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from data.errors import DatasetMissingError
from data.graph import MAX_NODES, PARTS, RawGraph
from data.packed import rows_of
from data.selection import Selection, refusal, renumbered

if TYPE_CHECKING:
    import scipy.sparse

logger = logging.getLogger(__name__)

_AUTHORS = {"src_li", "dst_li", "num_nodes"}
_COLLECTION = {"node_counts", "edge_counts", "u", "v"}
_SPLIT = {f"{part}_ids" for part in PARTS}
_DAMAGED = (OSError, EOFError, ValueError, KeyError, NotImplementedError, zipfile.BadZipFile, zlib.error)


def read_graph(path: str | Path, selection: Selection) -> RawGraph:
    """Read a graph file. Its suffix, and the arrays of an .npz, determine the format.

    Args:
        path: the file.
        selection: graphs to take from a collection of small graphs; files have no splits.

    Raises:
        DatasetMissingError: the file does not exist.
        ValueError: the file is empty, damaged, of an unknown format, or holds ids out of range.
    """
    path = Path(path)
    reader = next((reader for ending, reader in _READERS.items() if path.name.lower().endswith(ending)), None)
    if reader is None:
        raise ValueError(f"{path}: unknown format; allowed endings are {', '.join(_READERS)}")
    if not path.exists():
        raise DatasetMissingError(f"{path}: no such file; correct the path, or put the graph there")
    if not path.is_file():
        raise ValueError(f"{path}: not a file")
    if path.stat().st_size == 0:
        raise ValueError(f"{path}: the file is empty (0 bytes)")
    raw = reader(path, selection)
    why = f"{path} holds {'one graph' if raw.graph_sizes is None else 'no splits'}"
    if wrong := refusal(selection, {"order": raw.graph_sizes is not None}, why):
        raise ValueError(wrong)
    return raw


def _read_npz(path: Path, selection: Selection) -> RawGraph:
    if not zipfile.is_zipfile(path):
        raise ValueError(f"{path}: not an .npz archive, or truncated; fetch or write it again")
    with zipfile.ZipFile(path) as archive:
        keys = {name.removesuffix(".npy") for name in archive.namelist()}
    if "format" in keys:
        return _from_scipy_npz(path)
    if keys >= _AUTHORS:
        return _from_authors_arrays(
            path, _load_arrays(path, keys & (_AUTHORS | _SPLIT | {"feat", "label", "edge_feat"}))
        )
    if keys >= _COLLECTION:
        return _from_collection(
            path, _load_arrays(path, keys & (_COLLECTION | _SPLIT | {"feat", "graph_label"})), selection
        )
    raise ValueError(
        f"{path}: holds the arrays {sorted(keys)}; allowed are src_li, dst_li, num_nodes, or those of "
        "scipy.sparse.save_npz, or node_counts, edge_counts, u, v"
    )


def _load_arrays(path: Path, keys: set[str]) -> dict[str, np.ndarray]:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {key: archive[key] for key in keys}
    except MemoryError as error:
        raise MemoryError(f"{path}: {error}") from error
    except _DAMAGED as error:
        raise ValueError(f"{path}: damaged, or holds pickled objects, which are refused ({error})") from error
    if other := sorted(key for key, array in arrays.items() if not isinstance(array, np.ndarray)):
        raise ValueError(f"{path}: damaged: {', '.join(other)} should be in NumPy's format and is not")
    return arrays


def _from_authors_arrays(path: Path, arrays: dict[str, np.ndarray]) -> RawGraph:
    num_nodes = arrays["num_nodes"]
    if num_nodes.size != 1 or num_nodes.dtype.kind not in "iu":
        raise ValueError(
            f"{path}: num_nodes has shape {num_nodes.shape}, dtype {num_nodes.dtype}; one integer is needed"
        )
    num_nodes = int(num_nodes.item())
    row, col = (_integers(path, key, arrays[key]) for key in ("src_li", "dst_li"))
    if row.size != col.size:
        raise ValueError(f"{path}: src_li has {row.size} entries and dst_li {col.size}; they must agree")
    ndata = {}
    if "feat" in arrays:
        ndata["feat"] = _features(path, "feat", arrays["feat"], num_nodes)
    if "label" in arrays:
        label = _integers(path, "label", arrays["label"])
        if label.size != num_nodes:
            raise ValueError(f"{path}: label has {label.size} entries; one for each of {num_nodes} nodes is needed")
        if label.min(initial=0) < -1:
            raise ValueError(f"{path}: label holds {label.min()}; classes from 0, and -1 for unknown, are allowed")
        ndata["label"] = label
    edata = {}
    if "edge_feat" in arrays:
        edata["feat"] = _features(path, "edge_feat", arrays["edge_feat"], row.size, codes=True)
    raw = _checked(path, row, col, num_nodes, ndata, edata)
    return replace(raw, splits=_split(path, arrays, num_nodes))


def _split(path: Path, arrays: dict[str, np.ndarray], count: int) -> dict[str, np.ndarray] | None:
    """The ids of each part, in ascending order; None without them."""
    if not arrays.keys() & _SPLIT:
        return None
    if missing := sorted(_SPLIT - arrays.keys()):
        raise ValueError(
            f"{path}: a split needs train_ids, valid_ids and test_ids (which may be empty); {missing[0]} is missing"
        )
    parts = {part: np.sort(_integers(path, f"{part}_ids", arrays[f"{part}_ids"])) for part in PARTS}
    together = np.sort(np.concatenate(list(parts.values())))
    outside = together[(together < 0) | (together >= count)]
    if outside.size:
        raise ValueError(f"{path}: train_ids, valid_ids or test_ids hold {outside[0]}; allowed are 0 to {count - 1}")
    repeated = together[1:][together[1:] == together[:-1]]
    if repeated.size:
        raise ValueError(
            f"{path}: train_ids, valid_ids and test_ids hold {repeated[0]} twice; each id may be in one part"
        )
    return parts


def _features(path: Path, key: str, values: np.ndarray, rows: int, codes: bool = False) -> np.ndarray:
    """Floats as float32 [rows, F]; where `codes` are allowed, integers as int64 [rows, C]."""
    if (
        values.ndim != 2
        or values.shape[0] != rows
        or values.shape[1] == 0
        or values.dtype.kind not in "f" + "iu" * codes
    ):
        raise ValueError(
            f"{path}: {key} has shape {values.shape}, dtype {values.dtype}; floats{' or integers' * codes} of shape "
            f"[{rows}, F] are needed"
        )
    if values.dtype.kind != "f":
        if values.min(initial=0) < 0:
            raise ValueError(f"{path}: {key} holds {values.min()}; codes from 0 are allowed")
        return values.astype(np.int64)
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    if not np.isfinite(values).all():
        raise ValueError(f"{path}: {key} holds NaN, or numbers beyond float32; finite ones are needed")
    return values


def _from_scipy_npz(path: Path) -> RawGraph:
    import scipy.sparse

    try:
        matrix = scipy.sparse.load_npz(path)  # refuses pickles by default
        if hasattr(matrix, "check_format"):
            matrix.check_format(full_check=True)  # compressed formats: SciPy's conversions trust indptr
        matrix = matrix.tocoo()
    except _DAMAGED as error:
        raise ValueError(f"{path}: not a sparse matrix that SciPy can read ({error})") from error
    return _from_matrix(path, matrix)


def _read_mtx(path: Path, selection: Selection) -> RawGraph:
    import scipy.io

    try:
        matrix = scipy.io.mmread(path)
    except (*_DAMAGED, OverflowError, TypeError) as error:
        raise ValueError(f"{path}: not a Matrix Market file that SciPy can read ({error})") from error
    if isinstance(matrix, np.ndarray):
        raise ValueError(f"{path}: holds a dense array; the coordinate format is needed")
    return _from_matrix(path, matrix)


def _from_matrix(path: Path, matrix: "scipy.sparse.coo_matrix") -> RawGraph:
    rows, columns = matrix.shape
    if rows != columns:
        raise ValueError(f"{path}: the matrix is {rows} x {columns}; a graph needs a square one")
    return _checked(path, matrix.row.astype(np.int64), matrix.col.astype(np.int64), rows)


def _from_collection(path: Path, arrays: dict[str, np.ndarray], selection: Selection) -> RawGraph:
    sizes, edges, u, v = (_integers(path, key, arrays[key]) for key in ("node_counts", "edge_counts", "u", "v"))
    if sizes.size != edges.size:
        raise ValueError(f"{path}: node_counts has {sizes.size} entries and edge_counts {edges.size}; they must agree")
    if sizes.min(initial=1) < 1 or edges.min(initial=0) < 0:
        raise ValueError(f"{path}: node_counts must be at least 1 and edge_counts at least 0 in every graph")
    if not edges.sum() == u.size == v.size:
        raise ValueError(
            f"{path}: edge_counts sum to {edges.sum()}, u has {u.size} entries and v {v.size}; they must agree"
        )
    count = sizes.size
    picked = selection.pick(count, str(path))
    ndata, labels = {}, None
    if "feat" in arrays:
        ndata["feat"] = _features(path, "feat", arrays["feat"], int(sizes.sum()))[rows_of(picked, sizes)]
    if "graph_label" in arrays:
        labels = arrays["graph_label"]
        if labels.ndim != 2 or labels.shape[0] != sizes.size or labels.shape[1] == 0 or labels.dtype.kind not in "fiu":
            raise ValueError(
                f"{path}: graph_label has shape {labels.shape}, dtype {labels.dtype}; numbers of shape "
                f"[{sizes.size}, tasks] are needed"
            )
        labels = labels[picked].astype(np.float32)
    splits = _split(path, arrays, sizes.size)
    splits = splits and renumbered(splits, picked, sizes.size)
    at = rows_of(picked, edges)  # the edges of the picked graphs, one graph after the other
    sizes, edges = sizes[picked], edges[picked]
    u, v = u[at], v[at]
    limit = np.repeat(sizes, edges)
    outside = np.flatnonzero((np.minimum(u, v) < 0) | (np.maximum(u, v) >= limit))
    if outside.size:
        bad = outside[0]
        raise ValueError(
            f"{path}: edge {at[bad]} joins {u[bad]} and {v[bad]} in a graph of {limit[bad]} nodes (ids from 0)"
        )
    first = np.repeat(np.cumsum(sizes) - sizes, edges)
    u, v = u + first, v + first
    row, col = np.concatenate([u, v]), np.concatenate([v, u])  # a self loop twice, and once when canonical
    return RawGraph(
        row,
        col,
        int(sizes.sum()),
        selection.described(str(path)),
        graph_sizes=sizes,
        ndata=ndata,
        graph_labels=labels,
        splits=splits,
        graph_ids=picked,
        collection_size=count,
    )


def _read_txt(path: Path, selection: Selection) -> RawGraph:
    return _ranked(path, read_snap_edges(path))


def read_snap_edges(path: Path) -> np.ndarray:
    """The edges of a `.txt` or `.txt.gz` file as SNAP publishes it: [E, 2] int64, with the ids of the file.

    Raises:
        ValueError: the file is damaged, holds no edge, or negative ids.
    """
    return _read_pairs(path, separator=r"\s+", comment="#", header=None)


def _read_csv(path: Path, selection: Selection) -> RawGraph:
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        first = next((line for line in lines if line.strip()), "")
    has_header = not any(_is_number(field) for field in first.split(",")[:2])
    return _ranked(path, _read_pairs(path, separator=",", comment=None, header=0 if has_header else None))


def _read_pairs(path: Path, separator: str, comment: str | None, header: int | None) -> np.ndarray:
    import pandas as pd

    try:
        table = pd.read_csv(
            path, sep=separator, comment=comment, header=header, usecols=[0, 1], dtype=np.int64, engine="c"
        )
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged or truncated gzip ({error}); fetch it again") from error
    except pd.errors.EmptyDataError as error:
        raise ValueError(f"{path}: holds no edge") from error
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {_first_bad_line(path, separator, header, comment) or error}") from error
    if table.empty:
        raise ValueError(f"{path}: holds no edge")
    pairs = table.to_numpy()
    if pairs.min() < 0:
        raise ValueError(f"{path}: holds the node id {pairs.min()}; ids of 0 and above are allowed")
    return pairs


def _ranked(path: Path, pairs: np.ndarray) -> RawGraph:
    ids, rank = np.unique(pairs, return_inverse=True)
    if ids[-1] != ids.size - 1:
        logger.info("%s: node ids have gaps; a node is now the rank of its id (0 to %d)", path, ids.size - 1)
    row, col = np.ascontiguousarray(rank.reshape(pairs.shape).T, dtype=np.int64)
    return _checked(path, row, col, ids.size)


def _first_bad_line(path: Path, separator: str, header: int | None, comment: str | None) -> str | None:
    """The first malformed line, found by a second pass, since the message of the fast reader does not name it."""
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            text = line.split(comment)[0] if comment else line
            skipped = not text.strip() or (header == 0 and number == 1)
            if not skipped and not _starts_with_two_integers(text.split("," if separator == "," else None)):
                return f"line {number} is {line.strip()[:60]!r}; two integer node ids below 2^63 are needed"
    return None


def _is_number(field: str) -> bool:
    try:
        float(field.strip().strip('"'))
    except ValueError:
        return False
    return True


def _starts_with_two_integers(fields: list[str]) -> bool:
    try:
        return all(-(2**63) <= int(field) < 2**63 for field in fields[:2]) and len(fields) >= 2
    except ValueError:
        return False


def _integers(path: Path, key: str, values: np.ndarray) -> np.ndarray:
    if values.ndim != 1 or values.dtype.kind not in "iu":
        raise ValueError(f"{path}: {key} has shape {values.shape}, dtype {values.dtype}; 1-D integers are needed")
    return values.astype(np.int64)


def _checked(
    path: Path,
    row: np.ndarray,
    col: np.ndarray,
    num_nodes: int,
    ndata: dict[str, np.ndarray] | None = None,
    edata: dict[str, np.ndarray] | None = None,
) -> RawGraph:
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"{path}: {num_nodes} nodes; 1 to {MAX_NODES} are allowed")
    for end, ids in (("row (first column, src_li)", row), ("column (second column, dst_li)", col)):
        outside = np.flatnonzero((ids < 0) | (ids >= num_nodes))
        if outside.size:
            at = outside[0]
            raise ValueError(f"{path}: edge {at} has the {end} {ids[at]}; allowed are 0 to {num_nodes - 1}")
    return RawGraph(row, col, num_nodes, str(path), ndata=ndata or {}, edata=edata or {})


_READERS: dict[str, Callable[[Path, Selection], RawGraph]] = {
    ".npz": _read_npz,
    ".mtx": _read_mtx,
    ".txt": _read_txt,
    ".txt.gz": _read_txt,
    ".csv": _read_csv,
}
