"""Reader of a user's graph file. No format can run code: pickled arrays are refused.

In every format the first column or row index is the query and the second the key (see `data`). Every stored entry is an
edge, whatever its value.

    .npz         `src_li`, `dst_li` [E], `num_nodes`, as the Fused3S authors publish; optional `feat` (float
                 [N, F]), `label` (integer [N], -1 for unknown) and `edge_feat` (float [E, F], or codes from 0 [E, C]);
                 optional `train_ids`, `valid_ids`, `test_ids`: the nodes of each part of a split
    .npz         a square matrix as `scipy.sparse.save_npz` writes it, in any of SciPy's formats
    .npz         many small undirected graphs, one after the other: `node_counts`, `edge_counts` [B], `u`, `v` (node ids
                 local to their graph, each edge once); `batch_size` of them form the batch. Optional `feat` (float, a
                 row for each node), the three parts of a split and `graph_label`: a class (integer [B], -1 for
                 unknown), or T numbers (float [B, T], NaN for a missing one), for which a model gets T outputs: if all
                 are 0 or 1 they are answers, which are scored by ROC-AUC, else targets of regression, scored by the
                 mean absolute error. With `feat` it may be larger than memory: see `data.mapped_collections`
    .mtx         a square Matrix Market file in coordinate format
    .txt .txt.gz an edge list as SNAP publishes: two whitespace-separated integers a line, # comments
    .csv         an edge list in its first two columns, with or without a header line (without numbers)

Node ids of edge lists are kept if they are 0 .. N-1 without a gap; otherwise each id is replaced by its rank among all
ids of the file, which are then in `node_data["id"]`. Names are no ids: number them first. An edge list cannot hold a
node without edges: use one of the other formats.
"""

import logging
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DatasetMissingError
from data.features import as_features, check_classes
from data.graph import MAX_NODES, PARTS, CsrGraph, RawGraph, Target
from data.mapped_collections import loading_bytes, mapped_csr
from data.memory import LOADING_BYTES_PER_EDGE, LOADING_BYTES_PER_NODE, fits, require_memory
from data.packed import join_graphs, rows_of
from data.selection import Selection, refusal, renumbered

logger = logging.getLogger(__name__)

SPLIT = tuple(f"{part}_ids" for part in PARTS)
# Names of the arrays: needed and optional ones.
GRAPH, WITH_GRAPH = ("src_li", "dst_li", "num_nodes"), ("feat", "label", "edge_feat", *SPLIT)
COLLECTION, WITH_COLLECTION = ("node_counts", "edge_counts", "u", "v"), ("feat", "graph_label", *SPLIT)
MAX_CLASSES = 1_000_000  # classes of a label, codes of a feature column: each takes a row of the model's weights
# Errors of NumPy, SciPy, pandas and the archives for damaged content.
DAMAGED = (OSError, EOFError, ValueError, LookupError, TypeError, AttributeError, OverflowError)
DAMAGED += (NotImplementedError, zipfile.BadZipFile, zlib.error)

Arrays = Mapping[str, np.ndarray]


def read_graph(path: str | Path, selection: Selection, mapped: Path | None = None) -> RawGraph | CsrGraph:
    """Read a graph file. Its suffix, and the arrays of an .npz, determine the format.

    Args:
        path: the file.
        selection: graphs to take from a collection of small graphs; files have no splits to choose.
        mapped: folder for the CSR arrays of a collection that does not fit into memory; None refuses one.

    Raises:
        DatasetMissingError: the file does not exist.
        ValueError: the file is damaged, of an unknown format, or holds ids or sizes out of range.
        MemoryError: the graph would not fit.
        OSError: the CSR arrays of a collection cannot be written.
    """
    path = Path(path)
    if not path.exists():
        raise DatasetMissingError(f"{path}: no such file; correct the path, or put the graph there")
    name = path.name.lower()
    if name.endswith(".npz"):
        raw = _read_npz(path, selection, mapped)
    elif name.endswith(".mtx"):
        raw = _of_matrix(path, _reading(path, _read_mtx))
    elif name.endswith((".txt", ".txt.gz", ".csv")):
        raw = _ranked(path, read_pairs(path))
    else:
        raise ValueError(f"{path}: unknown format; allowed endings are .npz, .mtx, .txt, .txt.gz, .csv")
    why = f"{path} holds {'one graph' if raw.graph_sizes is None else 'no splits'}"
    if wrong := refusal(selection, {"order": raw.graph_sizes is not None}, why):
        raise ValueError(wrong)
    return raw


def read_pairs(path: Path) -> np.ndarray:
    """[E, 2] int64: the edges of an edge list in text, with the ids of the file.

    Raises:
        ValueError: the file is damaged, or holds no edge or a negative id.
    """
    pairs = _reading(path, _read_columns)
    if not pairs.size:
        raise ValueError(f"{path}: holds no edge")
    if pairs.min() < 0:
        raise ValueError(f"{path}: holds the node id {pairs.min()}; ids of 0 and above are allowed")
    return pairs


def _reading(path: Path, read: Callable[[Path], Any]) -> Any:
    try:
        return read(path)
    except MemoryError as error:
        raise MemoryError(f"{path}: {error}") from error
    except DAMAGED as error:
        raise ValueError(
            f"{path}: cannot be read ({str(error)[:500]}); correct it, or fetch or write it again"
        ) from error


def _read_columns(path: Path) -> np.ndarray:
    import pandas as pd

    options = {"sep": r"\s+", "comment": "#", "header": None}
    if path.name.lower().endswith(".csv"):
        first = pd.read_csv(path, header=None, nrows=1, encoding="utf-8-sig", usecols=[0, 1])
        is_header = pd.to_numeric(first.iloc[0], errors="coerce").isna().all()
        options = {"sep": ",", "header": 0 if is_header else None}
    options |= {"usecols": [0, 1], "engine": "c"}
    try:
        return pd.read_csv(path, dtype=np.int64, **options).to_numpy()
    except ValueError:
        cells = pd.read_csv(path, dtype=str, **options)  # an error of its own, if that is no edge list at all
        wrong = cells[~cells.apply(lambda ids: ids.str.fullmatch(r"\s*[+-]?\d+\s*", na=False)).all(axis=1)]
        if wrong.empty:
            raise
        raise ValueError(
            f"edge {wrong.index[0]} is {', '.join(map(str, wrong.iloc[0]))}; node ids must be integers of 0 and above: "
            "number names first, for example with pandas.factorize, and keep their table"
        ) from None


def _ranked(path: Path, pairs: np.ndarray) -> RawGraph:
    """The graph of edges with any ids: an id becomes its rank among all ids of the file."""
    ids, rank = np.unique(pairs, return_inverse=True)
    if ids[-1] != ids.size - 1:
        logger.info("%s: node ids have gaps; a node is now the rank of its id (0 to %d)", path, ids.size - 1)
    row, col = np.ascontiguousarray(rank.reshape(pairs.shape).T, dtype=np.int64)
    return checked_graph(path, row, col, ids.size, ndata={"id": ids} if ids[-1] != ids.size - 1 else {})


def _read_mtx(path: Path) -> Any:
    import scipy.io

    matrix = scipy.io.mmread(path)
    if isinstance(matrix, np.ndarray):
        raise ValueError("a dense array; the coordinate format is needed")
    return matrix


def _read_scipy(path: Path) -> Any:
    import scipy.sparse

    matrix = scipy.sparse.load_npz(path)
    if matrix.format in ("csr", "csc", "bsr"):
        matrix.check_format(full_check=True)  # conversions trust the arrays
    return matrix.tocoo()


def _of_matrix(path: Path, matrix: Any) -> RawGraph:
    rows, columns = matrix.shape
    if rows != columns:
        raise ValueError(f"{path}: the matrix is {rows} x {columns}; a graph needs a square one")
    return checked_graph(path, matrix.row.astype(np.int64), matrix.col.astype(np.int64), rows)


def _read_npz(path: Path, selection: Selection, mapped: Path | None) -> RawGraph | CsrGraph:
    names = set(_reading(path, _names))
    if "format" in names:
        return _of_matrix(path, _reading(path, _read_scipy))
    for needed, optional in ((GRAPH, WITH_GRAPH), (COLLECTION, WITH_COLLECTION)):
        if names.issuperset(needed):
            if unread := sorted(names - {*needed, *optional}):
                text = "%s: the arrays %s are not read; those that are read besides %s: %s"
                logger.warning(text, path, ", ".join(unread), ", ".join(needed), ", ".join(optional))
            known = names & {*needed, *optional}
            return _one_graph(path, known) if needed is GRAPH else _collection(path, known, selection, mapped)
    raise ValueError(
        f"{path}: holds the arrays {sorted(names)}; allowed are src_li, dst_li, num_nodes, or those of "
        "scipy.sparse.save_npz, or node_counts, edge_counts, u, v"
    )


def _names(path: Path) -> list[str]:
    with np.load(path, allow_pickle=False) as archive:
        if not isinstance(archive, np.lib.npyio.NpzFile):
            raise ValueError("not an .npz archive")
        if len({*archive.files}) < len(archive.files):
            raise ValueError(f"an array is there twice: {', '.join(archive.files)}")
        return archive.files


def _arrays(path: Path, names: Iterable[str]) -> Arrays:
    """The arrays of these names; those of ids and counts as int64."""

    def read(path: Path) -> Arrays:
        with np.load(path, allow_pickle=False) as archive:
            require_memory(str(path), sum(archive.zip.getinfo(f"{name}.npy").file_size for name in names))
            return {name: archive[name] for name in names}

    arrays = dict(_reading(path, read))
    for name in arrays.keys() - {"feat", "edge_feat", "graph_label"}:
        values = arrays[name]
        if values.ndim != (name != "num_nodes") or values.dtype.kind not in "iu":
            wanted = "one integer is" if name == "num_nodes" else "1-D integers are"
            raise ValueError(f"{path}: {name} has shape {values.shape}, dtype {values.dtype}; {wanted} needed")
        arrays[name] = values.astype(np.int64)
    return arrays


def _one_graph(path: Path, names: set[str]) -> RawGraph:
    arrays = _arrays(path, names)
    row, col, num_nodes = arrays["src_li"], arrays["dst_li"], int(arrays["num_nodes"])
    if row.size != col.size:
        raise ValueError(f"{path}: src_li has {row.size} entries and dst_li {col.size}; they must agree")
    ndata, edata = {}, {}
    if "feat" in names:
        ndata["feat"] = as_features(path, "feat", arrays["feat"], num_nodes)
    if "label" in names:
        ndata["label"] = label = arrays["label"]
        if label.size != num_nodes:
            raise ValueError(f"{path}: label has {label.size} entries; one for each of {num_nodes} nodes is needed")
        check_classes(str(path), label, MAX_CLASSES)
    if "edge_feat" in names:
        edata["feat"] = as_features(path, "edge_feat", arrays["edge_feat"], row.size, most_codes=MAX_CLASSES)
    return checked_graph(path, row, col, num_nodes, ndata=ndata, edata=edata, splits=_split(path, arrays, num_nodes))


def _collection(path: Path, names: set[str], selection: Selection, mapped: Path | None) -> RawGraph | CsrGraph:
    arrays = _arrays(path, names - {"u", "v", "feat"})
    sizes, edge_counts, count = arrays["node_counts"], arrays["edge_counts"], arrays["node_counts"].size
    if count == 0 or count != edge_counts.size:
        raise ValueError(
            f"{path}: node_counts has {count} entries and edge_counts {edge_counts.size}; they must agree, and be one "
            "or more"
        )
    if sizes.min() < 1 or edge_counts.min() < 0 or max(sizes.max(), edge_counts.max()) > MAX_NODES:
        raise ValueError(f"{path}: node_counts must be 1 or more, edge_counts 0 or more, each below 2^31")
    labels, target = _graph_labels(path, arrays["graph_label"], count) if "graph_label" in names else (None, None)
    splits = _split(path, arrays, count)
    picked = selection.pick(count, str(path))
    about = {
        "graph_labels": None if labels is None else labels[picked],
        "target": target,
        "splits": splits and renumbered(splits, picked, count),
        "graph_ids": picked,
        "collection_size": count,
    }
    origin = selection.described(str(path))
    needed = loading_bytes(path, int(sizes[picked].sum()), int(edge_counts[picked].sum()))
    if mapped and "feat" in names and not fits(needed):
        if selection.order != "dataset":
            raise MemoryError(
                f"{path}: about {needed / 2**30:.1f} GiB needed; a collection that does not fit into memory is read "
                f"with order='dataset' only, and got {selection.order!r}"
            )
        return mapped_csr(path, origin, sizes, edge_counts, picked.size, mapped, about)
    require_memory(f"{path}: {picked.size:,} graphs", needed)
    ends = _arrays(path, ("u", "v"))
    if not edge_counts.sum() == ends["u"].size == ends["v"].size:
        raise ValueError(
            f"{path}: edge_counts sum to {edge_counts.sum()}, u has {ends['u'].size} entries and v {ends['v'].size}; "
            "they must agree"
        )
    feat = None
    if "feat" in names:
        feat = as_features(path, "feat", _arrays(path, ("feat",))["feat"], int(sizes.sum()))[rows_of(picked, sizes)]
    pairs = np.stack([ends["u"], ends["v"]], 1)[rows_of(picked, edge_counts)]
    return join_graphs(sizes[picked], edge_counts[picked], pairs, feat, None, origin, **about)


def _graph_labels(path: Path, labels: np.ndarray, count: int) -> tuple[np.ndarray, Target]:
    """Labels [B, T] float32, and what a model predicts of them."""
    are_classes = labels.shape == (count,) and labels.dtype.kind in "iu"
    if are_classes:
        labels = labels[:, None]
        if labels.min() < -1 or labels.max() >= MAX_CLASSES:
            raise ValueError(
                f"{path}: graph_label holds {labels.min()} to {labels.max()}; -1 to {MAX_CLASSES - 1} are allowed"
            )
    if labels.ndim != 2 or len(labels) != count or labels.shape[1] == 0 or labels.dtype.kind not in "fiu":
        raise ValueError(
            f"{path}: graph_label has shape {labels.shape}, dtype {labels.dtype}; numbers of shape [{count}, tasks] "
            f"or classes (integers) of shape [{count}] are needed"
        )
    with np.errstate(over="ignore"):
        labels = labels.astype(np.float32)
    if np.isinf(labels).any():
        raise ValueError(f"{path}: graph_label holds infinity, or numbers beyond float32; NaN stands for a missing one")
    if are_classes:
        return labels, ("accuracy", int(labels.max()) + 1)
    are_answers = (np.isnan(labels) | (labels == 0) | (labels == 1)).all()
    return labels, ("rocauc" if are_answers else "mae", labels.shape[1])


def _split(path: Path, arrays: Arrays, count: int) -> dict[str, np.ndarray] | None:
    """The ids of each part, in ascending order; None without them."""
    given = [name for name in SPLIT if name in arrays]
    if not given:
        return None
    if missing := sorted(set(SPLIT) - set(given)):
        raise ValueError(
            f"{path}: a split needs train_ids, valid_ids and test_ids (which may be empty); {missing[0]} is missing"
        )
    together = np.sort(np.concatenate([arrays[name] for name in SPLIT]))
    outside = together[(together < 0) | (together >= count)]
    if outside.size:
        raise ValueError(f"{path}: train_ids, valid_ids or test_ids hold {outside[0]}; allowed are 0 to {count - 1}")
    repeated = together[1:][together[1:] == together[:-1]]
    if repeated.size:
        raise ValueError(
            f"{path}: train_ids, valid_ids and test_ids hold {repeated[0]} twice; each id may be in one part"
        )
    return {part: np.sort(arrays[name]) for part, name in zip(PARTS, SPLIT, strict=True)}


def checked_graph(place: Path, row: np.ndarray, col: np.ndarray, num_nodes: int, **contents: Any) -> RawGraph:
    """The graph of edges [E] int64, after a check of its ids and size.

    Args:
        place: the file or folder, for messages, and the origin unless `contents` has one.
        contents: further fields of `RawGraph`.

    Raises:
        ValueError: an edge has an end outside 0 .. num_nodes - 1, or there are too many nodes or none.
        MemoryError: the graph would not fit.
    """
    if not 1 <= num_nodes <= MAX_NODES:
        raise ValueError(f"{place}: num_nodes is {num_nodes}; 1 to {MAX_NODES} are allowed")
    for end, ids in (("row (first column, src_li)", row), ("column (second column, dst_li)", col)):
        outside = np.flatnonzero((ids < 0) | (ids >= num_nodes))
        if outside.size:
            at = outside[0]
            raise ValueError(f"{place}: edge {at} has the {end} {ids[at]}; allowed are 0 to {num_nodes - 1}")
    needed = num_nodes * LOADING_BYTES_PER_NODE + row.size * LOADING_BYTES_PER_EDGE
    require_memory(f"{place}: num_nodes is {num_nodes:,}, with {row.size:,} edges", needed)
    return RawGraph(row, col, num_nodes, contents.pop("origin", str(place)), **contents)
