"""The search for a row order with fewer gathered columns. Needs SciPy, and Numba for "communities".

A kernel gathers one row of K and one of V per distinct column of a 16-row window. Rows with common columns in one
window reduce the gathers; neighbouring windows with common columns hit the cache.

    communities  bottom up: rows into windows, windows into groups, groups into larger groups, each filled greedily with
                 the member that shares most columns with it (`graph.reorder.window_filling`)
    auto         communities for at most MAX_EDGES edges, kept if they save MIN_SAVING of the traffic; else none

Louvain and Leiden communities, sorted inside by minhash, saved fewer gathers on real graphs and took longer, since
modularity ignores windows. Reverse Cuthill-McKee saved still fewer.
"""

import time

import numpy as np
import scipy.sparse as sp
import torch

from ..csr import MAX_DIM, CSRPattern, as_tensor, check_csr
from .row_order import RowOrder, check_method
from .window_filling import compiled_fill_windows

WINDOW_ROWS = 16
TILE_COLUMNS = 16
GROUP = 4  # windows per group (one per warp of a block), groups per larger group
# Least share of the moved rows of Q, K, V and O that an order must save. Below it, scattered rows of Q and O cost more.
MIN_SAVING = 0.15
MAX_EDGES = 1 << 24


def find_row_order(pattern: CSRPattern, method: str = "auto") -> RowOrder:
    """Find an order of the rows. Deterministic.

    Args:
        pattern: on any device (the search runs on the CPU); columns may be unsorted and repeated.
        method: one of METHODS.

    Raises:
        ValueError: `method` is not one of METHODS, or the pattern is invalid; the text names the entry.
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
    before = np.diff(_merge_rows(csr, natural, WINDOW_ROWS).indptr)  # columns per window
    perm, after = None, before
    if method != "none":
        perm = _fill(csr, WINDOW_ROWS)
        windows = _merge_rows(csr, perm, WINDOW_ROWS)
        after = np.diff(windows.indptr)
        # K and V move once per gathered column, Q and O once per row.
        if may_decline and after.sum() + csr.shape[0] > (1 - MIN_SAVING) * (before.sum() + csr.shape[0]):
            perm, after, method = None, before, "none"
        else:
            perm = _group_windows(windows, perm)  # keeps their rows, so their gathers do not change
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
    """Order the windows of `perm` by greedy grouping, then the groups, until one group is left. `windows`: [windows,
    num_cols], the gathered columns of each."""
    units, unit = windows, WINDOW_ROWS
    while (num_units := perm.size // unit) > GROUP:
        # Only full windows move; the rows of a last, partial one stay at the end.
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
    # Seeds: natural order, with rows that share nothing last.
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
    """[ceil(num_rows / size), num_cols] pattern: row w is the union of the rows order[size * w : size * (w + 1)]."""
    num_rows = order.size
    first = np.append(np.arange(0, num_rows, size), num_rows)
    member = sp.csr_array((np.ones(num_rows, np.int8), order, first), shape=(first.size - 1, num_rows))
    merged = member @ csr  # entries are at most `size`
    merged.data[:] = 1
    return merged


def _to_scipy(pattern: CSRPattern) -> sp.csr_array:
    """The checked pattern as a SciPy CSR array of ones on the CPU, without duplicates."""
    indptr, indices = as_tensor(pattern.indptr), as_tensor(pattern.indices)
    check_csr(indptr, indices, pattern.shape[1])
    indptr, indices = indptr.cpu().numpy(), indices.cpu().numpy()
    offsets = np.int32 if indices.size <= MAX_DIM else np.int64
    arrays = np.ones(indices.size, np.int8), indices.astype(np.int32), indptr.astype(offsets)  # copies: sorted in place
    csr = sp.csr_array(arrays, shape=pattern.shape)
    csr.sum_duplicates()
    csr.data[:] = 1
    return csr
