"""Items of the lane groups of cuda/edges/forward.cu, built once per graph by two kernels (cuda/plan/plan_rows.cu).

    item     [4] int32: row, first edge, number of edges, part (-1: the whole row); the work of one lane group
    part     [2] int32: first part of the row, number of parts of the row; an item of a row that several lane groups
             share. They combine their results in the order of the parts.

Rows of up to `part_edges` edges are one item. All items of a warp run as many rounds as the longest one, so rows are
sorted by length, but only within segments of neighbouring rows, which share keys in the cache. Parts come first, items
without work last.
"""

from collections.abc import Sequence

from ...runtime.jit import KernelInstance, get_kernel
from ...runtime.launch import Launch
from ...runtime.params import elements
from .gpu_csr import SCAN_BLOCKS, SCAN_CHUNK, blocks_of

SORT_SEGMENT = 256  # rows per sorted segment
PARTS_THREADS = 1024  # as in cuda/plan/plan_rows.cu
PLAN_PARTS, PLAN_WHOLE_ROWS = (KernelInstance("plan/plan_rows.cu", name) for name in ("plan_parts", "plan_whole_rows"))


def most_items_of(num_edges: int, num_rows: int, part_edges: int) -> int:
    """Upper bound of the items: one per row, and one more per `part_edges` edges."""
    return num_rows + num_edges // part_edges


def most_parts_of(num_edges: int, part_edges: int) -> int:
    """Upper bound of the parts: a split row has at most two per `part_edges` edges."""
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
    """The launches that fill the items of a matrix, and of its transpose if the sequences have two elements.

    Args:
        items: addresses [most_items, 4] int32; by `most_items_of`.
        parts: addresses [most parts, 2] int32; by `most_parts_of`.
        offsets: addresses [num_rows + 1] int64; at least one row.
        whole_rows: addresses [num_rows] int32, scratch.
        part_edges: most edges of an item.
        row_ids: address [num_rows] int32, row of query and output of each row of the matrix; 0 for natural order.
        numbers: address of `GPUCSR.numbers`; the numbers of parts and of whole rows are written.
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
