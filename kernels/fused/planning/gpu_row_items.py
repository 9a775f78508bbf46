"""Items of the lane groups of cuda/edges/forward.cu, built once per graph by two kernels (cuda/plan/plan_rows.cu).

    item     [4] int32: row, first edge, number of edges, part (-1: the whole row); the work of one lane group
    part     [2] int32: first part of the row, number of parts of the row; an item of a row that several lane groups
             share. They combine their results in the order of the parts.

Rows of up to `part_edges` edges are one item. All items of a warp run as many rounds as the longest one, so rows are
sorted by length, but only within segments of neighbouring rows, which share keys in the cache. Parts come first, items
without work last.
"""

from ...runtime.jit import KernelInstance

SORT_SEGMENT = 256  # rows per sorted segment
PARTS_THREADS = 1024  # as in cuda/plan/plan_rows.cu
PLAN_PARTS, PLAN_WHOLE_ROWS = (KernelInstance("plan/plan_rows.cu", name) for name in ("plan_parts", "plan_whole_rows"))


def most_items_of(num_edges: int, num_rows: int, part_edges: int) -> int:
    """Upper bound of the items: one per row, and one more per `part_edges` edges."""
    return num_rows + num_edges // part_edges


def most_parts_of(num_edges: int, part_edges: int) -> int:
    """Upper bound of the parts: a split row has at most two per `part_edges` edges."""
    return 2 * (num_edges // part_edges)
