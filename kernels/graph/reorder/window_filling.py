"""Greedy grouping of rows into windows that share columns, compiled by Numba on first use and cached beside this file.

Each step depends on the rows taken before, so array operations cannot express the loop. Without compilation it is
hundreds of times slower.
"""

from collections.abc import Callable
from functools import cache

import numpy as np

# Columns with more rows left are ignored: they say little about which rows belong together, and the limit bounds the
# work per gathered column.
HUB_ROWS = 1024
# Weight of a shared column: 1 + SCARCITY / (rows left in it), which favours rows that complete a column.
SCARCITY = 2.0


def fill_windows(
    indptr: np.ndarray,
    indices: np.ndarray,
    col_ptr: np.ndarray,
    col_rows: np.ndarray,
    seeds: np.ndarray,
    window_rows: int,
) -> np.ndarray:
    """Fill the windows one by one, each time with the row that shares most columns with the window.

    The rating of row r is sum(1 + SCARCITY / rows left in c) / sqrt(columns of r) over the columns c that r shares with
    the window. Without the root all hubs would cluster; divided by the number of columns, rows of one column would.
    Rows left in c are counted at the window's first use of c, including that row. The best remaining row starts the
    next window, which keeps neighbouring windows similar; if no row shares a column, the next seed does.

    Args:
        indptr, indices: [num_rows + 1] int64, [nnz] int32, the CSR pattern without duplicates.
        col_ptr, col_rows: [num_cols + 1] int64, [nnz] int32, its transpose. `col_rows` is overwritten.
        seeds: [num_rows] int32, a permutation: the order of the rows that start a window if nothing is shared.
        window_rows: rows of a window.

    Returns:
        perm: [num_rows] int32, the row at each position.
    """
    num_rows = indptr.size - 1
    perm = np.empty(num_rows, np.int32)
    score = np.zeros(num_rows, np.float64)
    share = np.empty(num_rows, np.float64)  # 1 / sqrt(columns); 0 once the row is taken
    for r in range(num_rows):
        share[r] = 1.0 / np.sqrt(max(indptr[r + 1] - indptr[r], 1))
    candidates = np.empty(num_rows, np.int32)
    col_end = col_ptr[1:].copy()  # a column's remaining rows end here
    window_of_col = np.full(col_end.size, -1, np.int32)

    next_seed = 0
    row = -1
    num_candidates = 0
    for position in range(num_rows):
        window = position // window_rows
        if position % window_rows == 0:
            for i in range(num_candidates):
                score[candidates[i]] = 0.0
            num_candidates = 0
        if row < 0:
            while share[seeds[next_seed]] == 0.0:
                next_seed += 1
            row = seeds[next_seed]
        perm[position] = row
        share[row] = 0.0

        # Columns new to the window raise the rating of the rows left in them.
        for edge in range(indptr[row], indptr[row + 1]):
            col = indices[edge]
            if window_of_col[col] == window:
                continue
            window_of_col[col] = window
            entry, end = col_ptr[col], col_end[col]
            if end - entry > HUB_ROWS:
                continue
            weight = 1.0 + SCARCITY / (end - entry) if end > entry else 0.0
            while entry < end:
                other = col_rows[entry]
                if share[other] == 0.0:
                    end -= 1
                    col_rows[entry] = col_rows[end]
                    continue
                if score[other] == 0.0:
                    candidates[num_candidates] = other
                    num_candidates += 1
                score[other] += weight
                entry += 1
            col_end[col] = end

        row = -1
        best = 0.0
        i = 0
        while i < num_candidates:
            other = candidates[i]
            rating = score[other] * share[other]
            if rating == 0.0:
                num_candidates -= 1
                candidates[i] = candidates[num_candidates]
                continue
            if rating > best:
                best = rating
                row = other
            i += 1
    return perm


@cache
def compiled_fill_windows() -> Callable[..., np.ndarray]:
    """`fill_windows` compiled by Numba: some seconds the first time, then read from Numba's disk cache.

    Raises:
        ImportError: Numba is not installed.
    """
    try:
        import numba
    except ImportError as error:
        raise ImportError(
            "reorder: the method 'communities' needs the package numba (pip install numba); 'none' and a permutation "
            "do not"
        ) from error
    signature = "int32[::1](int64[::1], int32[::1], int64[::1], int32[::1], int32[::1], int64)"
    return numba.njit(signature, cache=True)(fill_windows)
