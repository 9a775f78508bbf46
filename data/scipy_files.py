"""Graphs as sparse matrices in the .npz files of SciPy."""

import numpy as np

from data.graph import RawGraph
from data.graph_checks import check_size, check_square, checked_graph
from data.npz import Npz

# Arrays of scipy.sparse.save_npz in each of its formats.
SCIPY_ARRAYS = {
    "csr": ("data", "indices", "indptr"),
    "csc": ("data", "indices", "indptr"),
    "bsr": ("data", "indices", "indptr"),
    "coo": ("data", "row", "col"),
    "dia": ("data", "offsets"),
}


def read_scipy_matrix(archive: Npz) -> RawGraph:
    """The graph of a square matrix that `scipy.sparse.save_npz` wrote.

    SciPy itself is not asked: its conversions trust the arrays, and may end the process on wrong ones.

    Raises:
        ValueError: it is not square, or its arrays do not fit together.
        MemoryError: the graph would not fit.
    """
    path = archive.path
    try:
        (kind,) = archive.read("format")
        kind = kind.item().decode() if isinstance(kind.item(), bytes) else str(kind.item())
        rows, columns = map(int, archive.read("shape")[0])
        names = SCIPY_ARRAYS[kind]
        entries = archive["data"].size if kind != "dia" else archive["offsets"].size * rows
    except (KeyError, ValueError, TypeError) as error:
        raise ValueError(f"{path}: not a sparse matrix as SciPy writes it ({error})") from error
    check_square(path, rows, columns)
    check_size(path, "the matrix's number of rows", rows, entries)
    for name in names:
        kinds, allowed = ("biufc", "numbers") if name == "data" else ("iu", "integers")
        if archive[name].dtype.kind not in kinds:
            raise ValueError(f"{path}: {name} has dtype {archive[name].dtype}; {allowed} are needed")
    data, *ids = archive.read(*names)
    try:
        row, col = _EXPAND[kind](rows, data, *(array.astype(np.int64) for array in ids))
    except (ValueError, IndexError) as error:
        raise ValueError(f"{path}: not a sparse matrix as SciPy writes it ({error})") from error
    return checked_graph(path, row, col, rows)


def _from_coo(rows: int, data: np.ndarray, row: np.ndarray, col: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _require(data.ndim == row.ndim == col.ndim == 1, "data, row and col must have one dimension")
    sizes = data.size, row.size, col.size
    _require(len(set(sizes)) == 1, f"data, row and col have {sizes} entries")
    return row, col


def _from_csr(rows: int, data: np.ndarray, indices: np.ndarray, indptr: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _require(data.ndim == 1 and data.size == indices.size, f"data has shape {data.shape}, indices {indices.shape}")
    return _rows_of_offsets(rows, indices, indptr), indices[: indptr[-1]]


def _from_csc(rows: int, data: np.ndarray, indices: np.ndarray, indptr: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    col, row = _from_csr(rows, data, indices, indptr)
    return row, col


def _from_bsr(rows: int, data: np.ndarray, indices: np.ndarray, indptr: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _require(data.ndim == 3 and len(data) == indices.size, f"data has shape {data.shape}, indices {indices.shape}")
    _, height, width = data.shape
    _require(height > 0 and width > 0 and rows % height == rows % width == 0, f"blocks of {height} x {width}")
    block_row = _rows_of_offsets(rows // height, indices, indptr)
    # [blocks, height, width]: every entry of a block is stored.
    row = block_row[:, None, None] * height + np.arange(height)[:, None] + np.zeros(width, np.int64)
    col = indices[: indptr[-1], None, None] * width + np.zeros((height, 1), np.int64) + np.arange(width)
    return row.ravel(), col.ravel()


def _from_dia(rows: int, data: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    _require(offsets.ndim == 1 and data.ndim == 2 and len(data) == offsets.size, f"data has shape {data.shape}")
    _require(np.unique(offsets).size == offsets.size, "an offset twice")
    col = np.arange(min(data.shape[1], rows))
    row = col - offsets[:, None]
    stored = (row >= 0) & (row < rows) & (data[:, : col.size] != 0)  # zeros fill the diagonals up
    return row[stored], np.broadcast_to(col, row.shape)[stored]


def _rows_of_offsets(rows: int, indices: np.ndarray, indptr: np.ndarray) -> np.ndarray:
    """The row of each of the first indptr[-1] entries."""
    _require(indices.ndim == 1 and indptr.shape == (rows + 1,), f"indptr has shape {indptr.shape} for {rows} rows")
    rising = indptr[0] == 0 and indptr[-1] <= indices.size and not (indptr[1:] < indptr[:-1]).any()
    _require(rising, f"indptr must rise from 0 to no more than the {indices.size} entries of indices")
    return np.repeat(np.arange(rows), np.diff(indptr))


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(what)


_EXPAND = {"coo": _from_coo, "csr": _from_csr, "csc": _from_csc, "bsr": _from_bsr, "dia": _from_dia}
