"""`csr_of_tiles` and `make_tile_slots` of formats/schedule.py by CUDA kernels."""

import struct
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..fragments import WARP_SIZE
from ..runtime.jit import get_kernel
from ..runtime.launch import launch_kernel
from .gpu_csr import grid_of
from .schedule import TileSlots

WARPS = 8  # as in cuda/plan_edges.cu
SCALARS = struct.Struct("<2i")  # behind the pointers of struct Params


@dataclass(frozen=True)
class PlanEdgesSpec:
    """One instance of cuda/plan_edges.cu."""

    name: str

    source: ClassVar[str] = "plan_edges.cu"


COUNT_EDGES, WRITE_CSR, WRITE_SLOTS = (
    PlanEdgesSpec(f"plan_edges<Edges::{edges}>") for edges in ("kCount", "kCsr", "kSlots")
)


def gpu_csr_of_tiles(
    kv_tiles: torch.Tensor, tile_offset: torch.Tensor, num_edges: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """`csr_of_tiles` by kernels on torch's current stream, for at least one row.

    Args:
        kv_tiles: [num_tiles + 2, 24] int32, on a GPU.
        tile_offset: [num_row_windows + 1] int32, on the same GPU.
        num_edges: edges of the matrix.
    """
    num_windows, device = len(tile_offset) - 1, kv_tiles.device
    counts = torch.empty(16 * num_windows + 1, dtype=torch.int64, device=device)
    _launch(COUNT_EDGES, counts, kv_tiles, tile_offset, num_rows=16 * num_windows)
    offsets = counts.cumsum(0)
    indices = torch.empty(num_edges, dtype=torch.int32, device=device)
    _launch(WRITE_CSR, offsets, kv_tiles, tile_offset, indices, num_rows=16 * num_windows)
    return offsets, indices


def queue_tile_slots(
    slots: TileSlots, kv_tiles: torch.Tensor, tile_offset: torch.Tensor, offsets: torch.Tensor
) -> None:
    """Fill the slots of KV tiles that were made from a CSR, on torch's current stream.

    Args:
        slots: for as many KV tiles and edges as there can be.
        kv_tiles, tile_offset: as above, with at least one row.
        offsets: [num_rows + 1] int64 of the CSR.
    """
    arrays = (slots.tile_slots, slots.slot_edges, slots.slot_places)
    _launch(WRITE_SLOTS, offsets, kv_tiles, tile_offset, None, *arrays, num_rows=len(offsets) - 1)


def _launch(
    spec: PlanEdgesSpec,
    offsets: torch.Tensor,
    kv_tiles: torch.Tensor,
    tile_offset: torch.Tensor,
    *others: torch.Tensor | None,
    num_rows: int,
) -> None:
    num_windows = len(tile_offset) - 1
    tensors = (offsets, kv_tiles, tile_offset, *others, *(None,) * (4 - len(others)))
    scalars = SCALARS.pack(num_windows, num_rows)
    grid = grid_of(num_windows, WARPS)
    launch_kernel(get_kernel(spec, offsets.device.index), grid, WARPS * WARP_SIZE, tensors, scalars)
