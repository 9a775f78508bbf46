"""Reader of edge lists in text: SNAP's whitespace-separated files, and csv."""

import gzip
import logging
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from data.graph import MAX_NODES
from data.memory import fits, require_memory

logger = logging.getLogger(__name__)

SHORTEST_LINE = 4  # bytes: two digits, a separator and the end of the line
LARGEST_GZIP_RATIO = 1032  # of deflate
BYTES_PER_LINE = 96  # peak: the pairs, their sorted copy, and the ranks


def read_snap_edges(path: Path) -> np.ndarray:
    """The edges of a `.txt` or `.txt.gz` file as SNAP publishes it: [E, 2] int64, with the ids of the file.

    Raises:
        ValueError: the file is damaged, holds no edge, or negative ids.
        MemoryError: the edges would not fit.
    """
    return read_pairs(path, separator=r"\s+", comment="#", header=None)


def read_csv_edges(path: Path) -> np.ndarray:
    """The edges in the first two columns of a `.csv` file, as `read_snap_edges`; a first line without numbers is a
    header."""
    with path.open(encoding="utf-8-sig", errors="replace") as lines:
        first = next((line for line in lines if line.strip()), "")
    has_header = not any(_is_number(field) for field in first.split(",")[:2])
    return read_pairs(path, separator=",", comment=None, header=0 if has_header else None)


def ranked(path: Path, pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """(row, col, num_nodes) of edges with any ids: an id becomes its rank among all ids of the file.

    Raises:
        ValueError: there are more than MAX_NODES ids.
    """
    ids, rank = np.unique(pairs, return_inverse=True)
    if ids.size > MAX_NODES:
        raise ValueError(f"{path}: {ids.size} different node ids; 1 to {MAX_NODES} are allowed")
    if ids[-1] != ids.size - 1:
        logger.info("%s: node ids have gaps; a node is now the rank of its id (0 to %d)", path, ids.size - 1)
    row, col = np.ascontiguousarray(rank.reshape(pairs.shape).T, dtype=np.int64)
    return row, col, ids.size


def read_pairs(path: Path, separator: str, comment: str | None, header: int | None, skip: int = 0) -> np.ndarray:
    """[E, 2] int64: the first two columns of a text file.

    Args:
        separator, comment, header: see `pandas.read_csv`.
        skip: lines before the first one.

    Raises:
        ValueError: the file is damaged, or holds negative numbers or none.
        MemoryError: the numbers would not fit.
    """
    import pandas as pd

    columns = {
        "usecols": [0, 1],
        "dtype": np.int64,
        "engine": "c",
        "encoding_errors": "replace",  # in a header; ids are digits
        "skiprows": skip,
    }
    try:
        _require_memory(path)
        with np.errstate(invalid="ignore"):  # an empty field is an error below
            table = pd.read_csv(path, sep=separator, comment=comment, header=header, **columns)
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise ValueError(f"{path}: damaged or truncated gzip ({error}); fetch it again") from error
    except pd.errors.EmptyDataError as error:
        raise ValueError(f"{path}: holds no edge") from error
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {_first_bad_line(path, separator, header, comment, skip) or error}") from error
    if table.empty:
        raise ValueError(f"{path}: holds no edge")
    pairs = table.to_numpy()
    if pairs.min() < 0:
        raise ValueError(f"{path}: holds the node id {pairs.min()}; ids of 0 and above are allowed")
    return pairs


def _require_memory(path: Path) -> None:
    """Raise a MemoryError if the lines would not fit; they are counted only where there may be too many."""
    packed = LARGEST_GZIP_RATIO if path.name.lower().endswith(".gz") else 1
    if fits(path.stat().st_size * packed // SHORTEST_LINE * BYTES_PER_LINE):
        return
    lines = sum(block.count(b"\n") for block in _blocks(path))
    require_memory(f"{path}: an edge list of {lines:,} lines", lines * BYTES_PER_LINE)


def _blocks(path: Path) -> Iterator[bytes]:
    with gzip.open(path) if path.name.lower().endswith(".gz") else path.open("rb") as file:
        while block := file.read(1 << 24):
            yield block


def _first_bad_line(path: Path, separator: str, header: int | None, comment: str | None, skip: int) -> str | None:
    """The first malformed line, found by a second pass, since the message of the fast reader does not name it."""
    opened = gzip.open if path.name.lower().endswith(".gz") else open
    with opened(path, "rt", encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            text = line.split(comment)[0] if comment else line
            skipped = not text.strip() or number <= skip or (header == 0 and number == 1)
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
