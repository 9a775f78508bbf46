"""Slots of the edges in the KV tiles, by cuda/plan_edges.cu."""

import struct
from dataclasses import dataclass
from typing import ClassVar

from ..fragments import WARP_SIZE
from ..runtime.jit import get_kernel
from ..runtime.launch import Launch
from .gpu_csr import WINDOW_ROWS, blocks_of

WARPS = 8  # as in cuda/plan_edges.cu
POINTERS, SCALARS = struct.Struct("<6Q"), struct.Struct("<2i")  # of struct Params


@dataclass(frozen=True, eq=False)
class PlanEdgesSpec:
    """The kernel of cuda/plan_edges.cu."""

    source: ClassVar[str] = "plan_edges.cu"
    name: ClassVar[str] = "plan_edges"


PLAN_EDGES = PlanEdgesSpec()


def slot_launch(
    slots: tuple[int, int, int], kv_tiles: int, tile_offset: int, offsets: int, num_rows: int, device_index: int | None
) -> Launch:
    """The kernel that fills the slots of KV tiles that were made from a CSR; at least one row.

    Args:
        slots: addresses of the arrays of `GPUPlan.slots`, for as many KV tiles and edges as there can be.
        kv_tiles, tile_offset: addresses of those arrays of `GPUPlan`, of A.
        offsets: address [num_rows + 1] int64 of the CSR.
    """
    num_windows = -(-num_rows // WINDOW_ROWS)
    pointers = POINTERS.pack(offsets, kv_tiles, tile_offset, *slots)
    grid = (blocks_of(num_windows, WARPS), 1, 1)
    scalars = SCALARS.pack(num_windows, num_rows)
    return get_kernel(PLAN_EDGES, device_index), grid, WARPS * WARP_SIZE, pointers, scalars
