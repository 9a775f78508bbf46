"""Edge data in the order of the slots of KV tiles, in which the forward kernel over KV tiles reads it in whole lines.

The result is kept with the tensor that it was made of: bound edge data serves many calls.
"""

import torch

from ..runtime.launch import stream_handle
from ..runtime.semaphores import is_capturing

KEPT = "_in_slot_order"  # attribute of a tensor: (slot_edges, stream, version of the tensor, result)


def in_slot_order(values: torch.Tensor, slot_edges: torch.Tensor) -> torch.Tensor:
    """Rows of `values` [nnz, ..], which is in CSR order, by slot.

    A result is used on the stream that made it alone. A tensor that was changed in place gets a new one in the same
    memory, which a captured graph may read.
    """
    if values.is_inference() or not values.is_cuda:
        return values.index_select(0, slot_edges)
    stream, version = stream_handle(values.device.index), values._version
    kept = getattr(values, KEPT, None)
    if kept is None or kept[0] is not slot_edges or kept[1] != stream:
        result = values.index_select(0, slot_edges)
    elif kept[2] == version:
        return kept[3]
    else:
        result = torch.index_select(values, 0, slot_edges, out=kept[3])
    if not is_capturing(values.device):  # else only a replay writes the result
        setattr(values, KEPT, (slot_edges, stream, version, result))
    return result
