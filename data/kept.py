"""Arrays that are expensive to make and kept in a file: a cache that a run never depends on.

A file that cannot be written (a full or read-only disk), cannot be opened, is damaged, or holds something else costs a
warning and the time to make the arrays again. Files are never deleted or overwritten; the checksums of the .npz format
cover every byte. Two processes may make the same file: one of the two stays, whole.
"""

import hashlib
import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

import numpy as np

from data.atomic import replacing
from data.graph import PARTS, CsrGraph
from data.npz import Npz

logger = logging.getLogger(__name__)

Arrays = Mapping[str, np.ndarray]


def kept_path(folder: Path, stem: str, recipe: str) -> Path:
    """Place of the arrays that `recipe` describes: all inputs that determine them."""
    return folder / f"{stem}-{hashlib.sha256(recipe.encode()).hexdigest()[:12]}.npz"


def fingerprint(files: Iterable[Path]) -> str:
    """Names, sizes and times of the files that something is made of, for its recipe.

    Raises:
        OSError: a file is missing.
    """
    about = ((path.name, path.stat()) for path in sorted(files))
    return " ".join(f"{name}:{stat.st_size}:{stat.st_mtime_ns}" for name, stat in about)


def read_kept(path: Path, recipe: str, check: Callable[[Arrays], None]) -> Arrays | None:
    """The kept arrays; None, after a warning unless there is no such file, if they have to be made.

    Args:
        path: from `kept_path`.
        recipe: what the file must have been made of; "" if its name alone tells.
        check: raises a ValueError, KeyError or IndexError if the arrays do not fit together.

    Raises:
        MemoryError: the arrays would not fit.
    """
    try:
        if not path.exists():
            return None
        with path.open("rb"):
            archive = Npz(path)
        found = str(archive.read("recipe")[0]) if "recipe" in archive else "of an older version"
        if recipe and found != recipe:
            raise ValueError(f"{path}: made of other inputs: {found!r} instead of {recipe!r}")
        arrays = dict(zip(archive, archive.read(*archive), strict=True))
        check(arrays)
    except OSError as error:
        logger.warning("%s: cannot be opened (%s), and is made again for this run", path, error.strerror or error)
    except (ValueError, KeyError, IndexError, TypeError) as error:
        reason = str(error).removeprefix(f"{path}: ").removesuffix("; fetch or write it again")
        text = "%s: cannot be used (%s), and is made again for this run; delete the file to have it kept anew"
        logger.warning(text, path, reason)
    else:
        return arrays
    return None


def keep(path: Path, arrays: Arrays, *, compressed: bool = False) -> None:
    """Write arrays to `path`, whole or, with a warning, not at all. An existing file stays."""
    try:
        if not path.exists():
            with replacing(path) as unfinished:
                (np.savez_compressed if compressed else np.savez)(unfinished, **arrays)
    except OSError as error:
        logger.warning("%s: not kept (%s): the next run makes it again", path, error.strerror or error)


def kept_graph(path: Path, recipe: str, make: Callable[[], CsrGraph]) -> CsrGraph:
    """The kept graph, else a new one, which is kept. Its edge data and collection are not.

    Raises:
        MemoryError: the kept graph would not fit.
    """
    arrays = read_kept(path, recipe, _check_graph)
    if arrays is not None:
        return _graph_of(arrays)
    graph = make()
    arrays = {"recipe": np.array(recipe), "indptr": graph.indptr, "col": graph.col}
    arrays |= {"sha256": np.array(graph.sha256), "origin": np.array(graph.origin)}
    arrays |= {f"ndata.{name}": values for name, values in graph.ndata.items()}
    arrays |= {f"split.{part}": ids for part, ids in (graph.splits or {}).items()}
    if graph.graph_sizes is not None:
        arrays["graph_sizes"] = graph.graph_sizes
    keep(path, arrays)
    return graph


def _check_graph(arrays: Arrays) -> None:
    """The file's checksums cover its bytes, so that the order and the hash of the edges are not checked again."""
    indptr, col = arrays["indptr"], arrays["col"]
    if (
        indptr.dtype.kind != "i"
        or indptr.dtype != col.dtype
        or indptr[0] != 0
        or indptr[-1] != col.size
        or np.any(indptr[1:] < indptr[:-1])
    ):
        raise ValueError(f"indptr must rise from 0 to the {col.size} entries of col")
    if col.size and (col.min() < 0 or col.max() >= indptr.size - 1):
        raise ValueError(f"col must be within 0 .. {indptr.size - 2}")
    if any(len(arrays[name]) != indptr.size - 1 for name in arrays if name.startswith("ndata.")):
        raise ValueError(f"each node array must have {indptr.size - 1} rows")
    for text in ("sha256", "origin"):
        if arrays[text].dtype.kind != "U":
            raise ValueError(f"{text} must be text")


def _graph_of(arrays: Arrays) -> CsrGraph:
    return CsrGraph(
        arrays["indptr"],
        arrays["col"],
        str(arrays["sha256"]),
        str(arrays["origin"]),
        graph_sizes=arrays.get("graph_sizes"),
        ndata={name.removeprefix("ndata."): arrays[name] for name in arrays if name.startswith("ndata.")},
        splits={part: arrays[f"split.{part}"] for part in PARTS} if "split.train" in arrays else None,
    )
