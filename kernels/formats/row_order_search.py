"""The search for a row order that makes a kernel gather fewer columns. Needs SciPy, and Numba for "communities".

A kernel gathers a row of K and of V for each distinct column of a 16-row window. Windows of rows with common columns
need fewer, and neighbouring windows with common columns find theirs in the cache.

    communities  grown bottom up: rows into windows, windows into groups, groups into larger ones, and so on,
                 each filled with the member that shares most columns with it so far (`formats.window_filling`)
    auto         communities for at most MAX_EDGES edges, kept if they save MIN_SAVING of the traffic; else none

Communities found by modularity (Louvain, Leiden) and sorted inside by minhash were tried on real graphs: they saved
fewer gathers and took longer, as modularity knows nothing of windows. Reverse Cuthill-McKee saved fewer still.
"""

import time

import numpy as np
import scipy.sparse as sp
import torch

from .csr import MAX_DIM, CSRPattern, array_module, check_csr
from .row_order import RowOrder, check_method
from .window_filling import compiled_fill_windows

WINDOW_ROWS = 16
TILE_COLUMNS = 16
GROUP = 4  # windows to a group (those of the warps of one block), groups to a larger group
# Least share of the moved rows of Q, K, V and O that an order must save. Below it, scattered rows of Q and O cost more.
MIN_SAVING = 0.15
MAX_EDGES = 1 << 24


def find_row_order(pattern: CSRPattern, method: str = "auto") -> RowOrder:
    """Find an order of the rows; the same pattern gives the same order every time.

    Args:
        pattern: on any device (the work is done on the CPU); columns may be unsorted and repeated.
        method: one of METHODS.

    Raises:
        ValueError: `method` is none of METHODS, or the pattern is wrong; the text names what.
        ImportError: the method needs Numba, which is not installed.
    """
    check_method(method)
    may_decline = method == "auto"
    if method == "auto":
        method = "communities" if pattern.indices.shape[0] <= MAX_EDGES else "none"
    if method == "communities":
        compiled_fill_windows()

    start = time.perf_counter()
    csr = _to_scipy(pattern)
    natural = np.arange(csr.shape[0], dtype=np.int32)
    before = np.diff(_merge_rows(csr, natural, WINDOW_ROWS).indptr)  # columns of each window
    perm, after = None, before
    if method != "none":
        perm = _fill(csr, WINDOW_ROWS)
        windows = _merge_rows(csr, perm, WINDOW_ROWS)
        after = np.diff(windows.indptr)
        # K and V are moved for each column, Q and O for each row.
        if may_decline and after.sum() + csr.shape[0] > (1 - MIN_SAVING) * (before.sum() + csr.shape[0]):
            perm, after, method = None, before, "none"
        else:
            perm = _group_windows(windows, perm)  # as they are: what they gather stays the same
    return RowOrder(
        perm=None if perm is None else torch.from_numpy(perm),
        method=method,
        seconds=time.perf_counter() - start,
        columns_before=int(before.sum()),
        columns_after=int(after.sum()),
        tiles_before=int((-(-before // TILE_COLUMNS)).sum()),
        tiles_after=int((-(-after // TILE_COLUMNS)).sum()),
    )


def _group_windows(windows: sp.csr_array, perm: np.ndarray) -> np.ndarray:
    """Windows of perm, each a row of all columns it gathers, filled into groups, groups into larger ones, while more
    than one is to be made."""
    units, unit = windows, WINDOW_ROWS
    while (num_units := perm.size // unit) > GROUP:
        # Only whole units move: the rows left over stay at the end, and the windows before them keep their rows.
        units = units[:num_units]
        order = _fill(units, GROUP)
        moved = perm[: num_units * unit].reshape(num_units, unit)[order].ravel()
        perm = np.concatenate([moved, perm[moved.size :]])
        units, unit = _merge_rows(units, order, GROUP), unit * GROUP
    return perm


def _fill(csr: sp.csr_array, window_rows: int) -> np.ndarray:
    """[num_rows] int32 order of the rows by `fill_windows`."""
    by_column = csr.tocsc()
    columns = np.diff(csr.indptr)
    # Natural order as far as nothing else is known, but rows with nothing to share after the others.
    seeds = np.argsort(-np.minimum(columns, 2), kind="stable").astype(np.int32)
    return compiled_fill_windows()(
        csr.indptr.astype(np.int64),
        csr.indices.astype(np.int32, copy=False),
        by_column.indptr.astype(np.int64),
        by_column.indices.astype(np.int32, copy=False),
        seeds,
        window_rows,
    )


def _merge_rows(csr: sp.csr_array, order: np.ndarray, size: int) -> sp.csr_array:
    """[ceil(num_rows / size), num_cols] pattern: row w has the columns of the rows order[size * w : size * (w + 1)]."""
    num_rows = order.size
    first = np.append(np.arange(0, num_rows, size), num_rows)
    member = sp.csr_array((np.ones(num_rows, np.int8), order, first), shape=(first.size - 1, num_rows))
    merged = member @ csr  # at most `size` in an entry
    merged.data[:] = 1
    return merged


def _to_scipy(pattern: CSRPattern) -> sp.csr_array:
    """The checked pattern on the CPU, of ones, without duplicates."""
    xp, (indptr, indices) = array_module(pattern.indptr, pattern.indices)
    check_csr(xp, indptr, indices, pattern.shape[1])
    if xp is not np:
        indptr, indices = indptr.get(), indices.get()
    offsets = np.int32 if indices.size <= MAX_DIM else np.int64
    arrays = np.ones(indices.size, np.int8), indices.astype(np.int32), indptr.astype(offsets)  # copies: sorted in place
    csr = sp.csr_array(arrays, shape=pattern.shape)
    csr.sum_duplicates()
    csr.data[:] = 1
    return csr
