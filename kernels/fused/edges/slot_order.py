"""Edge data in the order of the slots of KV tiles, in which the kernels over KV tiles read it in whole lines.

The result is cached on its source tensor, since bound edge data serves many calls.
"""

import torch

from ...runtime.gather_rows import gather_rows
from ...runtime.launch import stream_handle
from ...runtime.semaphores import is_capturing

# Attributes of a tensor, for slots of A and of A^T, one result each as long as it lives: (slot_edges, stream, result,
# version of the tensor).
KEPT = "_in_slot_order", "_in_slot_order_of_columns"


def in_slot_order(
    values: torch.Tensor, slot_edges: torch.Tensor, dim: int = 0, of_columns: bool = False
) -> torch.Tensor:
    """Rows of `values` [nnz, H, ..], which is in CSR order, by slot of A, or of A^T: [slots, H, ..].

    With `dim` = 1 [H, slots, ..]: a warp reads neighbouring slots of one head after the other.

    The first result is cached as long as the tensor lives, since a captured graph may read it. A change of the tensor
    updates it in place. Eager calls on another stream compute the result anew; a capture may use the cached one, since
    captures begin when the GPU is idle. Results computed inside a capture are not cached: they have no contents before
    a replay.
    """
    stream = stream_handle(values.device.index) if values.is_cuda else 0
    captures, name = is_capturing(values.device), KEPT[of_columns]
    kept = getattr(values, name, None)

    def sort() -> torch.Tensor:
        return gather_rows(values, slot_edges) if dim == 0 else values.transpose(0, 1).index_select(1, slot_edges)

    if values.is_inference() or (kept is None and captures):
        return sort()
    version = values._version
    if kept is None:
        result = sort()
    else:
        of_slots, of_stream, result, of_version = kept
        if of_slots is not slot_edges or (of_stream != stream and not captures):
            return sort()
        if of_version == version:
            return result
        if captures:
            return sort()
        result.copy_(sort())
    setattr(values, name, (slot_edges, stream, result, version))
    return result
