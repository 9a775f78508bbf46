"""Work of the lane groups of cuda/fused3s_edges.cu, made once a graph by two CUDA kernels (cuda/plan_rows.cu).

    item     [4] int32: row, first edge, number of edges, part (-1: the whole row); what one lane group takes
    part     [2] int32: first part of the row, and the number of its parts; an item of a row that several lane groups
             share, which combine their results in the order of the parts

Rows of up to `part_edges` edges are one item. Items of a warp run as many rounds as the longest of them, so rows are
sorted by length within segments of neighbouring rows, which find common keys in the cache; parts come first, and items
without work last.
"""

from collections.abc import Sequence

from ..runtime.jit import KernelInstance, get_kernel
from ..runtime.launch import Launch
from ..runtime.params import elements
from .gpu_csr import SCAN_BLOCKS, SCAN_CHUNK, blocks_of

SORT_SEGMENT = 256  # sorted rows
PARTS_THREADS = 1024  # as in cuda/plan_rows.cu
PLAN_PARTS, PLAN_WHOLE_ROWS = (KernelInstance("plan_rows.cu", name) for name in ("plan_parts", "plan_whole_rows"))


def most_items_of(num_edges: int, num_rows: int, part_edges: int) -> int:
    """Most items: one for each row, and another for each `part_edges` edges."""
    return num_rows + num_edges // part_edges


def most_parts_of(num_edges: int, part_edges: int) -> int:
    """Most parts: a row with more than `part_edges` edges has at most two for as many of them."""
    return 2 * (num_edges // part_edges)


def row_launches(
    items: Sequence[int],
    parts: Sequence[int],
    offsets: Sequence[int],
    whole_rows: Sequence[int],
    num_rows: Sequence[int],
    most_items: Sequence[int],
    part_edges: int,
    row_ids: int,
    numbers: int,
    device_index: int | None,
) -> list[Launch]:
    """The kernels that fill the items of a matrix, and of its transpose where the sequences have two elements.

    Args:
        items: addresses [most_items, 4] int32; by `most_items_of`.
        parts: addresses [most parts, 2] int32; by `most_parts_of`.
        offsets: addresses [num_rows + 1] int64; at least one row.
        whole_rows: addresses [num_rows] int32, scratch.
        part_edges: most edges of an item.
        row_ids: address [num_rows] int32, row of query and output of each row of the matrix; 0 for rows in their own
            order.
        numbers: address `GPUCSR.numbers`; parts, and rows without parts, are written.
    """
    count, none = len(items), (0,) * (2 - len(items))
    kernels = [get_kernel(instance, device_index) for instance in (PLAN_PARTS, PLAN_WHOLE_ROWS)]
    params = kernels[0].params
    arrays = elements(items=items, parts=parts, offsets=offsets, whole_rows=whole_rows)
    pointers = params.pack_pointers({**arrays, "row_ids": row_ids, "numbers": numbers})
    sizes = elements(num_rows=(*num_rows, *none), most_items=(*most_items, *none))
    scalars = params.pack_scalars(part_edges=part_edges, **sizes)
    grid_of_parts = (min(SCAN_BLOCKS, blocks_of(max(num_rows), SCAN_CHUNK)), count, 1)
    grid_of_rows = (blocks_of(max(most_items), SORT_SEGMENT), count, 1)
    grids = (grid_of_parts, PARTS_THREADS), (grid_of_rows, SORT_SEGMENT)
    return [(kernel, *grid, pointers, scalars) for kernel, grid in zip(kernels, grids, strict=True)]
