"""Slots of the edges in the KV tiles, computed by cuda/plan/plan_edges.cu."""

from ...runtime.device import WARP_SIZE
from ...runtime.jit import KernelInstance, get_kernel
from ...runtime.launch import Launch
from .gpu_csr import WINDOW_ROWS, blocks_of

WARPS = 8  # as in cuda/plan/plan_edges.cu
PLAN_EDGES = KernelInstance("plan/plan_edges.cu", "plan_edges")


def slot_launch(
    slots: tuple[int, int, int], kv_tiles: int, tile_offset: int, offsets: int, num_rows: int, device_index: int | None
) -> Launch:
    """The launch that fills the slots of KV tiles made from a CSR with at least one row.

    Args:
        slots: addresses of the arrays of `GPUPlan.slots`, of upper-bound sizes.
        kv_tiles, tile_offset: addresses of those arrays of `GPUPlan`, of A.
        offsets: address [num_rows + 1] int64 of the CSR.
    """
    kernel, num_windows = get_kernel(PLAN_EDGES, device_index), -(-num_rows // WINDOW_ROWS)
    places = dict(zip(("tile_slots", "slot_edges", "slot_places"), slots, strict=True))
    pointers = kernel.params.pack_pointers(
        {"offsets": offsets, "kv_tiles": kv_tiles, "tile_offset": tile_offset, **places}
    )
    grid, scalars = (blocks_of(num_windows, WARPS), 1, 1), kernel.scalars(num_windows=num_windows, num_rows=num_rows)
    return kernel, grid, WARPS * WARP_SIZE, pointers, scalars
