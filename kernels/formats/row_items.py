"""Work of the lane groups of `cuda/fused3s_edges.cu`, made once a graph on the graph's device.

    item     a row of A, or a part of a long row, that one lane group takes
    part     an item of a row that several lane groups share; they combine their results in the order of the parts

Rows of up to `part_edges` edges are one item. Items of a warp run as many rounds as the longest of them, so rows are
sorted by length within segments of neighbouring rows, which find common keys in the cache; parts come first.
"""

from dataclasses import dataclass

import torch

SORT_SEGMENT = 256  # sorted rows


@dataclass(frozen=True, eq=False)
class RowItems:
    """Items of all rows.

    Attributes:
        items: [num_items, 4] int32 struct Item: row, first edge, number of edges, part (-1: the whole row).
        parts: [num_parts, 2] int32: first part of the row, and the number of its parts.
        part_edges: most edges of an item.
    """

    items: torch.Tensor
    parts: torch.Tensor
    part_edges: int


def make_row_items(indptr: torch.Tensor, row_ids: torch.Tensor | None, part_edges: int) -> RowItems:
    """Items of a CSR pattern. The arrays are complete on the device when it returns.

    Args:
        indptr: [num_rows + 1] int64.
        row_ids: [num_rows] int32, row of query and output of each row; None for rows in their own order.
        part_edges: most edges of an item.
    """
    count = indptr.diff()
    rows = torch.arange(len(count), device=indptr.device)
    num_parts = ((count + (part_edges - 1)) // part_edges).clamp(min=1)
    is_long = num_parts > 1

    long_rows = torch.nonzero(is_long)[:, 0]
    parts_of_row = num_parts[long_rows]
    row, parts, first_part = torch.repeat_interleave(
        torch.stack([long_rows, parts_of_row, parts_of_row.cumsum(0) - parts_of_row]), parts_of_row, dim=1
    )
    part = torch.arange(len(row), device=indptr.device)
    index = part - first_part
    begin = count[row] * index // parts
    size = count[row] * (index + 1) // parts - begin
    shared = torch.stack([row, indptr[row] + begin, size, part], 1)

    whole = torch.nonzero(~is_long)[:, 0]
    segment = torch.arange(len(whole), device=indptr.device) // SORT_SEGMENT
    whole = whole[torch.argsort(segment * (part_edges + 1) - count[whole], stable=True)]
    alone = torch.stack([rows[whole], indptr[whole], count[whole], torch.full_like(whole, -1)], 1)

    items = torch.cat([shared, alone])
    if row_ids is not None:
        items[:, 0] = row_ids.to(items.device).long()[items[:, 0]]
    parts_array = torch.stack([first_part, parts], 1).int()
    items = items.int()
    if items.is_cuda:  # the kernel reads both before griddepcontrol.wait
        torch.cuda.current_stream(items.device).synchronize()
    return RowItems(items, parts_array, part_edges)
