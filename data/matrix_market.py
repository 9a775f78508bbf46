"""Graphs as Matrix Market files in coordinate format.

    %%MatrixMarket matrix coordinate FIELD SYMMETRY
    % comments
    ROWS COLUMNS ENTRIES
    ROW COLUMN [VALUE]       one line for each entry, ids from 1

Network Repository begins some files with one percent sign, which SciPy takes, too.
SciPy's reader is not used: some damaged files end the process in it.
"""

from pathlib import Path

import numpy as np

from data.edge_text import read_pairs
from data.graph import RawGraph
from data.graph_checks import check_size, check_square, checked_graph

FIELDS = ("real", "double", "integer", "unsigned-integer", "complex", "pattern")
BANNERS = ("%%matrixmarket", "%matrixmarket")
BOTH_TRIANGLES = ("symmetric", "skew-symmetric", "hermitian")  # whose files hold one of the two
LONGEST_LINE = 2**20  # of the head, which is read line by line
SHORTEST_ENTRY = 4  # bytes: two digits, a separator and the end of the line


def read_matrix_market(path: Path) -> RawGraph:
    """The graph of a square matrix; every stored entry is an edge.

    Raises:
        ValueError: the file is damaged, or the matrix is not square.
        MemoryError: the graph would not fit.
    """
    symmetric, size, lines_before = _read_head(path)
    rows, columns, entries = size
    check_square(path, rows, columns)
    if entries * SHORTEST_ENTRY > path.stat().st_size + 1:  # the last line may have no end
        raise ValueError(
            f"{path}: not a Matrix Market file, or truncated: {entries} entries in {path.stat().st_size} bytes"
        )
    check_size(path, "the matrix's number of rows", rows, entries * (1 + symmetric))
    if entries == 0:
        return checked_graph(path, np.empty(0, np.int64), np.empty(0, np.int64), rows)
    pairs = read_pairs(path, separator=r"\s+", comment="%", header=None, skip=lines_before)
    if len(pairs) != entries:
        raise ValueError(f"{path}: not a Matrix Market file, or truncated: {len(pairs)} of {entries} entries")
    outside = np.flatnonzero(((pairs < 1) | (pairs > rows)).any(1))
    if outside.size:
        raise ValueError(
            f"{path}: not a Matrix Market file: entry {outside[0]} has the ids {pairs[outside[0]].tolist()}; 1 to "
            f"{rows} are allowed"
        )
    row, col = pairs.T - 1
    if symmetric:
        other = row != col
        row, col = np.concatenate([row, col[other]]), np.concatenate([col, row[other]])
    return checked_graph(path, np.ascontiguousarray(row), np.ascontiguousarray(col), rows)


def _read_head(path: Path) -> tuple[bool, tuple[int, int, int], int]:
    """Whether one triangle stands for both, (rows, columns, entries), and the number of lines that say so."""
    with path.open(encoding="latin-1") as file:
        first = file.readline(LONGEST_LINE)
        words = first.lower().split()
        if len(words) != 5 or words[0] not in BANNERS or words[1] != "matrix":
            raise ValueError(f"{path}: not a Matrix Market file: it starts with {first.strip()[:60]!r}")
        _, _, layout, field, symmetry = words
        if layout == "array":
            raise ValueError(f"{path}: holds a dense array; the coordinate format is needed")
        if layout != "coordinate" or field not in FIELDS or symmetry not in ("general", *BOTH_TRIANGLES):
            raise ValueError(f"{path}: not a Matrix Market file: its first line is {first.strip()[:100]!r}")
        number = 1
        while line := file.readline(LONGEST_LINE):
            number += line.endswith("\n")
            if not line.startswith("%") and line.strip():
                break
    numbers = line.split()
    if len(numbers) != 3 or not all(text.isascii() and text.isdigit() and len(text) < 20 for text in numbers):
        raise ValueError(
            f"{path}: not a Matrix Market file: line {number} is {line.strip()[:60]!r}; rows, columns and entries are "
            "needed"
        )
    rows, columns, entries = map(int, numbers)
    return symmetry in BOTH_TRIANGLES, (rows, columns, entries), number
