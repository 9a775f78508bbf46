"""Reader of a user's graph file; docs/datasets.md has the table of formats. No format can run code: pickled arrays are
refused.

The first column or row index is the query and the second the key (see `data`), unless a header says otherwise: one with
the words of ENDS names the columns, and a `target` attends to its `source`; another header is a warning. Spaces, tabs,
commas or semicolons separate the columns of a text, as its first line has them.

Of an .npz of many small graphs `batch_size` form the batch. The type of `graph_label` says what a model gets and how it
is scored: integers [B] are classes, -1 for unknown; integers [B, T] answers to T questions, 1 for yes, 0 for no, -1 for
unknown (ROC-AUC); floats [B, T] targets of regression, NaN for a missing one (mean absolute error).

Node ids of edge lists are kept if they are 0 .. N-1 without a gap; otherwise each id is replaced by its rank among all
ids of the file, which are then in `node_data["id"]`. The nodes of a table beside the edge list are those of the graph;
without one, an edge list cannot hold a node without edges.
"""

import csv
import gzip
import logging
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice, takewhile
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from data.canonical import check_rows, checked_graph
from data.errors import DatasetMissingError, reading
from data.features import as_integers
from data.graph import MAX_NODES, PARTS, CsrGraph, Target
from data.memory import require_memory
from data.packed import join_graphs
from data.selection import Selection, refuse

logger = logging.getLogger(__name__)

SPLIT = tuple(f"{part}_ids" for part in PARTS)
# Names of the arrays: needed and optional ones.
GRAPH, WITH_GRAPH = ("src_li", "dst_li", "num_nodes"), ("feat", "label", "edge_feat", *SPLIT)
COLLECTION, WITH_COLLECTION = ("node_counts", "edge_counts", "u", "v"), ("feat", "edge_feat", "graph_label", *SPLIT)
TEXT = (".txt", ".csv", ".tsv", ".txt.gz", ".csv.gz", ".tsv.gz")
# Columns by name, the query first; also with an ending, if none is named without: source_id, FromNodeId.
ENDS = (("query", "key"), ("target", "source"), ("dst", "src"), ("to", "from"), ("tail", "head"))
ENDING = re.compile(r"[ _-]?(node)?[ _-]?(id|idx|index)?$")
ID = re.compile(r"\s*[+-]?\d{1,18}(\.0*)?\s*")
SPLIT_WORDS = {"train": "train", "valid": "valid", "val": "valid", "validation": "valid", "test": "test"}

Arrays = Mapping[str, np.ndarray]


def read_graph(path: str | Path, selection: Selection) -> CsrGraph:
    """Read a graph file. Its suffix, and the arrays of an .npz, determine the format.

    Args:
        path: the file.
        selection: graphs to take from a collection of small graphs; files have no splits to choose.

    Raises:
        DatasetMissingError: the file does not exist.
        ValueError: the file is damaged, of an unknown format, or holds ids or sizes out of range.
        MemoryError: the graph would not fit.
    """
    path = Path(path)
    if not path.exists():
        raise DatasetMissingError(f"{path}: no such file; correct the path, or put the graph there")
    if not path.is_file():  # a pipe may never end
        raise ValueError(f"{path}: cannot be read: a folder, a pipe or a device; a graph file is needed")
    name = path.name.lower()
    if name.endswith(".npz"):
        raw = _read_npz(path, selection)
    elif name.endswith(".mtx"):
        import scipy.io

        raw = matrix_graph(path, scipy.io.mmread)
    elif _text_ending(path):
        with reading(path):
            _tell_direction(path)
        table = nodes_table(path)
        raw = _with_table(path, table, read_pairs(path)) if table else ranked_graph(path, read_pairs(path))
    else:
        raise ValueError(f"{path}: unknown format; allowed endings are .npz, .mtx, {', '.join(TEXT)}")
    if raw.graph_sizes is None:
        refuse(selection, f"{path} holds one graph")
    refuse(selection, f"{path} holds no splits", ("split",))
    return raw


def nodes_table(path: Path) -> Path | None:
    """The table of the nodes beside an edge list in text, if there is one."""
    if ending := _text_ending(path):
        tables = (path.with_name(path.name[: -len(ending)] + f".nodes{other}") for other in TEXT)
        return next((one for one in tables if one.is_file()), None)
    return None


def read_pairs(path: Path) -> np.ndarray:
    """[E, 2] int64: the edges of an edge list in text, with the ids of the file.

    Raises:
        ValueError: the file is damaged, or holds no edge or a negative id.
    """
    with reading(path):
        pairs = _read_columns(path)
    if not pairs.size:
        raise ValueError(f"{path}: holds no edge")
    if pairs.min() < 0:
        raise ValueError(f"{path}: holds the node id {pairs.min()}; ids of 0 and above are allowed")
    return pairs


def _text_ending(path: Path) -> str | None:
    return next((ending for ending in TEXT if path.name.lower().endswith(ending)), None)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    """Number and text of the lines with content, without comments."""
    with _opened(path) as file:
        for number, line in enumerate(file, 1):
            if content := line.partition("#")[0].strip(" \r\n"):
                yield number, content


def _opened(path: Path) -> TextIO:
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    return opened(path, "rt", encoding="utf-8-sig", errors="replace")


def _form(path: Path) -> tuple[str, list[str], bool]:
    """Separator of the columns, cells of the first line, and whether it is a header: no number in the first two."""
    _, first = next(_lines(path), (0, ""))
    separator = next((one for one in ";,\t" if one in first), r"\s+")
    if separator == "\t" and path.name.lower().endswith((".txt", ".txt.gz")):
        separator = r"\s+"
    cells = [cell.strip().lower() for cell in _cells(first, separator)]
    return separator, cells, not any(map(ID.fullmatch, cells[:2]))


def _cells(line: str, separator: str) -> list[str]:
    return line.split() if separator == r"\s+" else next(csv.reader([line], delimiter=separator))


def _named(cells: list[str]) -> list[int] | None:
    """The columns of the query and the key, if cells of a header name both."""
    for words in (cells, [ENDING.sub("", cell) for cell in cells]):
        if names := next((names for names in ENDS if {*names} <= {*words}), None):
            return [*map(words.index, names)]
    return None


def _tell_direction(path: Path) -> None:
    """Log which end of an edge attends to which, if there is a header, also one in a comment."""
    _, cells, has_header = _form(path)
    if named := _named(cells):
        logger.info("%s: %s attends to %s, as the header names them", path, *(cells[nth] for nth in named))
    elif has_header and cells:
        text = "%s: the header names no direction: the first column, %s, attends to the second. Known names are %s"
        logger.warning(text, path, cells[0], ", ".join("/".join(names) for names in ENDS))
    for comment in _comments(path):
        words = comment.lower().split()
        if not has_header and len(words) == len(cells) and _named(words):
            text = (
                "%s: the first column attends to the second; the comment %r is not read. Without its # it is a header"
            )
            logger.warning(text, path, comment)


def _comments(path: Path) -> Iterator[str]:
    """The comments before the first line with content."""
    with _opened(path) as file:
        for line in takewhile(lambda line: not line.partition("#")[0].strip(), file):
            yield line.partition("#")[2].strip()


def _read_columns(path: Path) -> np.ndarray:
    import pandas as pd

    separator, cells, has_header = _form(path)
    ends = _named(cells) or [0, 1]  # columns of the query and the key
    if unread := [nth for nth in range(len(cells)) if nth not in ends]:
        names = [cells[nth] if has_header else str(nth + 1) for nth in unread]
        logger.warning("%s: not read, as an edge has no value: column %s", path, ", ".join(names))
    options = {"sep": separator, "comment": "#", "header": 0 if has_header else None, "encoding": "utf-8-sig"}
    try:
        pairs = pd.read_csv(path, usecols=ends, engine="c", low_memory=False, **options)
        pairs = pairs if ends[0] < ends[1] else pairs.iloc[:, ::-1]
        if all(dtype == np.int64 for dtype in pairs.dtypes):
            return pairs.to_numpy()
    except pd.errors.EmptyDataError:
        return np.empty((0, 2), np.int64)
    except ValueError:
        _check_lines(path, separator, has_header, ends)
        raise
    _check_lines(path, separator, has_header, ends)
    return pairs.to_numpy().astype(np.int64)  # such as 1.0


def _check_lines(path: Path, separator: str, has_header: bool, ends: list[int]) -> None:
    """Raise a ValueError that names the first line without two ids."""
    for number, line in islice(_lines(path), int(has_header), None):
        ids = [cell for nth, cell in enumerate(_cells(line, separator)) if nth in ends]
        if len(ids) < 2 or not all(ID.fullmatch(cell) for cell in ids):
            raise ValueError(
                f"line {number} is {line[:100]!r}; two node ids are needed, integers of 0 and above: number names "
                "first, for example with pandas.factorize, and keep their table"
            )


def _with_table(path: Path, table: Path, pairs: np.ndarray) -> CsrGraph:
    """The graph of edges and of the nodes in a table, with their features, labels and split."""
    import pandas as pd

    def refuse(wrong: np.ndarray, column: str, allowed: str) -> None:
        if wrong.any():
            row = int(np.argmax(wrong))
            value = nodes[column].iloc[row]
            found = "empty" if pd.isna(value) else repr(str(value))
            raise ValueError(f"{table}, line {nodes.index[row] + 2}: {column} is {found}; {allowed}")

    logger.info("%s: the nodes are those of %s", path, table)
    types = dict.fromkeys(("id", "label", "split"), str)
    options = {"sep": _form(table)[0], "skip_blank_lines": False, "skipinitialspace": True, "encoding": "utf-8-sig"}
    # More cells than the header has are a warning.
    with reading(table), warnings.catch_warnings(action="error", category=pd.errors.ParserWarning):
        nodes = pd.read_csv(table, dtype=types, index_col=False, **options).dropna(how="all")
    if "id" not in nodes or nodes.empty:
        found = f"{len(nodes)} nodes with the columns {', '.join(map(str, nodes))}"
        raise ValueError(
            f"{table}: holds {found}; a header with the column id is needed, label, split and features are optional"
        )
    refuse(~nodes["id"].str.fullmatch(r"\s*\d{1,18}\s*", na=False), "id", "an integer of 0 or above is needed")
    nodes["id"] = nodes["id"].astype(np.int64)
    refuse(nodes["id"].duplicated(), "id", "and so is that of an earlier line")
    ids = np.sort(nodes["id"])
    place = np.searchsorted(ids, pairs).clip(max=ids.size - 1)
    if (lacking := pairs[ids[place] != pairs]).size:
        raise ValueError(f"{path}: an edge has the node id {lacking[0]}, which {table} lacks; add the node there")
    ndata, splits = {"id": ids} if ids[-1] != ids.size - 1 else {}, None
    order = np.argsort(nodes["id"])
    if "label" in nodes:
        label = nodes["label"].fillna("-1").str.strip().str.replace(r"\.0*$", "", regex=True)  # pandas: 1.0 beside gaps
        refuse(~label.str.fullmatch(r"-1|\d{1,6}"), "label", "classes from 0 to 999999, and -1, are allowed")
        ndata["label"] = label.to_numpy(np.int64)[order]
    if "split" in nodes:
        part = nodes["split"].str.strip().map(SPLIT_WORDS)
        refuse(nodes["split"].notna() & part.isna(), "split", f"allowed are {', '.join(SPLIT_WORDS)}, or nothing")
        splits = {one: np.flatnonzero((part == one).to_numpy()[order]) for one in PARTS}
    if names := [name for name in nodes if name not in types]:
        numbers = nodes[names].apply(pd.to_numeric, errors="coerce").to_numpy(np.float32)
        for name, column in zip(names, numbers.T, strict=True):
            refuse(~np.isfinite(column), name, "a feature is a finite number")
        ndata["feat"] = numbers[order]
    return checked_graph(path, *place.T, ids.size, ndata=ndata, splits=splits)


def ranked_graph(path: Path, pairs: np.ndarray, both_directions: bool = False) -> CsrGraph:
    """The graph of edges with any ids: an id becomes its rank among all ids of the file."""
    ids, rank = np.unique(pairs, return_inverse=True)
    if ids[-1] != ids.size - 1:
        logger.info("%s: node ids have gaps; a node is now the rank of its id (0 to %d)", path, ids.size - 1)
    ndata = {"id": ids} if ids[-1] != ids.size - 1 else {}
    return checked_graph(path, *rank.reshape(pairs.shape).T, ids.size, both_directions=both_directions, ndata=ndata)


def matrix_graph(path: Path, load: Callable[[Path], Any]) -> CsrGraph:
    """The graph of a square SciPy matrix; every stored entry is an edge."""
    with reading(path):
        matrix = load(path)
        if isinstance(matrix, np.ndarray):
            raise ValueError("a dense array; the coordinate format is needed")
        rows, columns = matrix.shape
        if rows != columns:
            raise ValueError(f"the matrix is {rows} x {columns}; a graph needs a square one")
        if matrix.format in ("csr", "csc", "bsr"):
            matrix.check_format(full_check=True)  # conversions trust the arrays
        ends = matrix.tocoo().coords
    return checked_graph(path, *ends, rows)


def _read_npz(path: Path, selection: Selection) -> CsrGraph:
    with reading(path), np.load(path, allow_pickle=False) as archive:
        names = {*archive.files}
    if "format" in names:
        import scipy.sparse

        _arrays(path, names & {"row", "col", "coords", "indices", "indptr", "offsets"})  # a conversion cuts floats off
        return matrix_graph(path, scipy.sparse.load_npz)
    for needed, optional in ((GRAPH, WITH_GRAPH), (COLLECTION, WITH_COLLECTION)):
        if names.issuperset(needed):
            if unread := sorted(names - {*needed, *optional}):
                text = "%s: the arrays %s are not read; those that are read besides %s: %s"
                logger.warning(text, path, ", ".join(unread), ", ".join(needed), ", ".join(optional))
            return read_collection(path, selection) if needed is COLLECTION else _one_graph(path, names, selection)
    raise ValueError(
        f"{path}: holds the arrays {sorted(names)}; allowed are src_li, dst_li, num_nodes, or those of "
        "scipy.sparse.save_npz, or node_counts, edge_counts, u, v"
    )


def _arrays(path: Path, names: Iterable[str]) -> Arrays:
    """The arrays of these names; those of ids and counts as int64."""
    with reading(path), np.load(path, allow_pickle=False) as archive:
        require_memory("its arrays", sum(archive.zip.getinfo(f"{name}.npy").file_size for name in names))
        arrays = {name: archive[name] for name in names}
        if wrong := [name for name, values in arrays.items() if not isinstance(values, np.ndarray)]:
            raise ValueError(f"{wrong[0]} is no array")
    for name in arrays.keys() - {"feat", "edge_feat", "graph_label"}:
        values = arrays[name]
        if (values.ndim != (name != "num_nodes") and name != "coords") or values.dtype.kind not in "iu":
            wanted = "one integer is" if name == "num_nodes" else "1-D integers are"
            raise ValueError(f"{path}: {name} has shape {values.shape}, dtype {values.dtype}; {wanted} needed")
        arrays[name] = as_integers(f"{path}: {name}", values)
    return arrays


def _one_graph(path: Path, names: set[str], selection: Selection) -> CsrGraph:
    names = names & {*GRAPH, *WITH_GRAPH} - (set() if selection.edge_features else {"edge_feat"})
    arrays = _arrays(path, names)
    row, col, num_nodes = arrays["src_li"], arrays["dst_li"], int(arrays["num_nodes"])
    ndata = {name: arrays[name] for name in ("feat", "label") if name in names}
    edata = {"feat": arrays["edge_feat"]} if "edge_feat" in names else {}
    return checked_graph(path, row, col, num_nodes, ndata=ndata, edata=edata, splits=_split(path, arrays))


def read_collection(path: Path, selection: Selection) -> CsrGraph:
    """Read an .npz of many small graphs; errors as `read_graph`."""
    with reading(path), np.load(path, allow_pickle=False) as archive:
        names = {*archive.files} & {*COLLECTION, *WITH_COLLECTION}
    rows = names & {"u", "v", "feat", *(("edge_feat",) if selection.edge_features else ())}
    arrays = _arrays(path, names - {"u", "v", "feat", "edge_feat"})
    sizes, edge_counts, count = arrays["node_counts"], arrays["edge_counts"], arrays["node_counts"].size
    if count == 0 or count != edge_counts.size:
        raise ValueError(
            f"{path}: node_counts has {count} entries and edge_counts {edge_counts.size}; they must agree, and be one "
            "or more"
        )
    if sizes.min() < 1 or edge_counts.min() < 0 or max(sizes.max(), edge_counts.max()) > MAX_NODES:
        raise ValueError(f"{path}: node_counts must be 1 or more, edge_counts 0 or more, each below 2^31")
    labels, target = _graph_labels(path, arrays["graph_label"], count) if "graph_label" in names else (None, None)
    splits = _split(path, arrays)
    picked, available = selection.pick(count, str(path), splits)
    arrays |= _arrays(path, rows)
    u, v = arrays["u"], arrays["v"]
    check_rows(path, "edges", u.size, {"v": v})
    return join_graphs(
        picked,
        sizes,
        edge_counts,
        np.stack([u, v], 1),
        selection.described(str(path)),
        ndata={"feat": arrays["feat"]} if "feat" in rows else {},
        edata={"feat": arrays["edge_feat"]} if "edge_feat" in rows else {},
        graph_labels=labels,
        target=target,
        splits=splits,
        collection_size=available,
    )


def _graph_labels(path: Path, labels: np.ndarray, count: int) -> tuple[np.ndarray, Target]:
    """Labels [B, T] float32, and what a model predicts of them."""
    are_integers = labels.dtype.kind in "iu"
    are_classes = labels.shape == (count,) and are_integers
    labels = labels[:, None] if are_classes else labels
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
    known = labels[~np.isnan(labels)]
    if are_integers and np.isin(known, (-1, 0, 1)).all():
        return np.where(labels == -1, np.nan, labels), ("rocauc", labels.shape[1])
    unclear = are_integers or (known.size and np.isin(known, (0, 1)).all())  # but under a registered name
    return labels, (None if unclear else "mae", labels.shape[1])


def _split(path: Path, arrays: Arrays) -> dict[str, np.ndarray] | None:
    """The ids of each part, in ascending order; None without them."""
    missing = [name for name in SPLIT if name not in arrays]
    if len(missing) == len(SPLIT):
        return None
    if missing:
        raise ValueError(
            f"{path}: a split needs train_ids, valid_ids and test_ids (which may be empty); {missing[0]} is missing"
        )
    return {part: np.sort(arrays[name]) for part, name in zip(PARTS, SPLIT, strict=True)}
