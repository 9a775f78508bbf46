"""Construction of the BSB arrays, the same code for the CPU (NumPy) and the GPU (CuPy).

The steps are integer sorts, prefix sums and scatters to distinct places, so both devices give the same bits on every
run. They follow the paper's section on the format. No step runs serially over a row window: the published code does,
and is slow on hub windows.
"""

from dataclasses import dataclass
from typing import Any

# Bounds the scratch memory of a pass: about 50 bytes an edge and 128 bytes a TCB. With several passes, the parts and
# the joined columns exist at the same time: at most 5/3 of the result for 16 x 8 blocks.
EDGES_PER_PASS = 1 << 25


@dataclass(frozen=True)
class BSBArrays:
    """BSB arrays in NumPy or CuPy; see `bench.baselines.bsb.BSB` for shapes and meaning."""

    tcb_row_offset: Any
    col_sparse_to_dense: Any
    bitmap: Any
    row_window_order: Any


def build_bsb_arrays(xp: Any, indptr: Any, indices: Any, num_cols: int, tile: tuple[int, int]) -> BSBArrays:
    """Build the BSB arrays of a checked CSR pattern.

    Args:
        xp: `numpy` or `cupy`, the module of both arrays.
        indptr: [num_rows + 1] integer.
        indices: [nnz] integer, in any order within a row; each entry is an edge, repeated ones too.
        num_cols: number of columns.
        tile: (r, c), rows and columns of a TCB.

    Raises:
        ValueError: more than 2^31 - 1 TCBs, which tcb_row_offset (int32) cannot count.
    """
    r, c = tile
    num_rows = indptr.size - 1
    num_windows = -(-num_rows // r)
    window_edge = indptr[xp.minimum(xp.arange(num_windows + 1, dtype=xp.int64) * r, num_rows)].astype(xp.int64)

    tcbs_per_window, columns, bitmaps = [], [], []
    first = 0
    while first < num_windows:
        limit = int(window_edge[first]) + EDGES_PER_PASS
        last = int(xp.searchsorted(window_edge, xp.asarray([limit]), side="right")[0]) - 1
        last = min(max(last, first + 1), num_windows)  # a window is never split, however long
        rows = slice(first * r, min(last * r, num_rows) + 1)
        arrays = _compact_windows(xp, indptr[rows], indices, last - first, num_cols, tile)
        for parts, array in zip((tcbs_per_window, columns, bitmaps), arrays, strict=True):
            parts.append(array)
        first = last

    counts = _joined(xp, tcbs_per_window, xp.int64)
    offset = xp.concatenate([xp.zeros(1, dtype=xp.int64), xp.cumsum(counts)])
    if int(offset[-1]) >= 2**31:
        raise ValueError(
            f"graph: {int(offset[-1])} tensor core blocks of {r}x{c}; at most {2**31 - 1} fit the format "
            "(split the rows into several graphs)"
        )
    return BSBArrays(
        tcb_row_offset=offset.astype(xp.int32),
        col_sparse_to_dense=_joined(xp, columns, xp.int32),
        bitmap=_joined(xp, bitmaps, xp.uint8).reshape(-1, r, c // 8),
        row_window_order=sort_row_windows(xp, counts),
    )


def sort_row_windows(xp: Any, tcbs_per_window: Any) -> Any:
    """[num_row_windows] int32: windows by decreasing TCB count, stable (paper, row-window reordering)."""
    return xp.argsort(-tcbs_per_window, kind="stable").astype(xp.int32)


def _joined(xp: Any, parts: list[Any], dtype: Any) -> Any:
    """Concatenate arrays of type `dtype`. Empties `parts` on the way, which frees its arrays."""
    if len(parts) == 1:
        return parts.pop()
    joined = xp.empty(sum(part.size for part in parts), dtype)
    end = joined.size
    while parts:
        start = end - parts[-1].size
        joined[start:end] = parts.pop()
        end = start
    return joined


def _compact_windows(
    xp: Any, indptr: Any, indices: Any, num_windows: int, num_cols: int, tile: tuple[int, int]
) -> tuple[Any, Any, Any]:
    """TCBs per window, slot columns and bitmaps of consecutive row windows."""
    r, c = tile
    first_edge, last_edge = int(indptr[0]), int(indptr[-1])
    num_edges = last_edge - first_edge

    # Row of each edge: the number of rows that start at or before it.
    row_starts = (indptr[1:-1] - first_edge).astype(xp.int64)
    row = xp.cumsum(xp.bincount(row_starts, minlength=num_edges + 1)[:num_edges])

    # One sort orders the edges by window, column and row; equal neighbours are copies of one edge. No overflow:
    # dimensions are below 2^31, so keys stay below 2^63.
    column = indices[first_edge:last_edge].astype(xp.int64)
    key = ((row // r) * num_cols + column) * r + row % r
    key.sort()
    local_row = key % r
    column_key = key // r

    # Distinct (window, column) pairs are the compacted columns; with repeated edges, (window, copy, column) triples.
    starts_column = _starts_run(xp, column_key)
    first_copy = _starts_run(xp, key)
    if not bool(first_copy.all()):
        copy = xp.arange(key.size) - xp.flatnonzero(first_copy)[xp.cumsum(first_copy) - 1]
        by_copy = xp.argsort(column_key // num_cols * (int(copy.max()) + 1) + copy, kind="stable")
        local_row, column_key, copy = local_row[by_copy], column_key[by_copy], copy[by_copy]
        starts_column = _starts_run(xp, column_key) | _starts_run(xp, copy)
    column_of_edge = xp.cumsum(starts_column) - 1
    column_key = column_key[starts_column]
    window, column = column_key // max(num_cols, 1), column_key % max(num_cols, 1)

    columns_per_window = xp.bincount(window, minlength=num_windows)
    tcbs_per_window = -(-columns_per_window // c)
    first_column = xp.cumsum(columns_per_window) - columns_per_window
    first_slot = (xp.cumsum(tcbs_per_window) - tcbs_per_window) * c
    slot = first_slot[window] + xp.arange(column.size) - first_column[window]

    # Padding slots repeat the window's last column: a kernel may gather them without a test, from a cached line.
    num_tcbs = int(tcbs_per_window.sum())
    is_column = xp.zeros(num_tcbs * c, dtype=xp.bool_)
    is_column[slot] = True
    slot_column = column[xp.cumsum(is_column) - 1].astype(xp.int32)

    mask = xp.zeros(num_tcbs * r * c, dtype=xp.bool_)  # [num_tcbs, r, c]
    slot_of_edge = slot[column_of_edge]
    mask[(slot_of_edge // c * r + local_row) * c + slot_of_edge % c] = True
    return tcbs_per_window, slot_column, xp.packbits(mask, bitorder="little")


def _starts_run(xp: Any, sorted_keys: Any) -> Any:
    """[n] bool: whether an element differs from its predecessor; True for the first."""
    flags = xp.ones(sorted_keys.size, dtype=xp.bool_)
    flags[1:] = sorted_keys[1:] != sorted_keys[:-1]
    return flags
