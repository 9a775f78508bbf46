"""`csr_of_tiles` and `make_tile_slots` of formats/schedule.py by CUDA kernels, with the same bits."""

import struct
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..fragments import WARP_SIZE
from ..runtime.jit import cpp_name, get_kernel
from ..runtime.launch import launch_kernel
from .gpu_schedule import grid_of
from .schedule import TileSlots

WARPS = 8  # as in cuda/plan_edges.cu
SCALARS = struct.Struct("<i4x")  # behind the pointers of struct Params


@dataclass(frozen=True)
class PlanEdgesSpec:
    """One instance of cuda/plan_edges.cu: it counts the edges of the rows, or writes them."""

    counts: bool

    source: ClassVar[str] = "plan_edges.cu"

    @property
    def name(self) -> str:
        return cpp_name("plan_edges", self.counts)


COUNT_EDGES, WRITE_EDGES = PlanEdgesSpec(counts=True), PlanEdgesSpec(counts=False)


def gpu_csr_of_tiles(
    kv_tiles: torch.Tensor, tile_offset: torch.Tensor, num_edges: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """`csr_of_tiles` by kernels on torch's current stream, for at least one row.

    Args:
        kv_tiles: [num_tiles + 2, 24] int32, on a GPU.
        tile_offset: [num_row_windows + 1] int32, on the same GPU.
        num_edges: edges of the matrix; None where not known: the call then waits for the GPU.
    """
    counts = torch.empty(16 * (len(tile_offset) - 1) + 1, dtype=torch.int64, device=kv_tiles.device)
    _launch(COUNT_EDGES, counts, kv_tiles, tile_offset)
    indptr = counts.cumsum(0)
    num_edges = int(indptr[-1]) if num_edges is None else num_edges
    indices = torch.empty(num_edges, dtype=torch.int32, device=kv_tiles.device)
    _launch(WRITE_EDGES, indptr, kv_tiles, tile_offset, indices)
    return indptr, indices


def make_gpu_tile_slots(
    kv_tiles: torch.Tensor, tile_offset: torch.Tensor, num_edges: int, indptr: torch.Tensor | None = None
) -> TileSlots:
    """`make_tile_slots` by kernels on torch's current stream, for at least one row. The arrays are queued.

    Args:
        kv_tiles, tile_offset: as above.
        num_edges: edges of the matrix.
        indptr: [16 num_row_windows + 1] int64 of `gpu_csr_of_tiles`; None where it was not made.
    """
    device = kv_tiles.device
    if indptr is None:
        counts = torch.empty(16 * (len(tile_offset) - 1) + 1, dtype=torch.int64, device=device)
        _launch(COUNT_EDGES, counts, kv_tiles, tile_offset)
        indptr = counts.cumsum(0)
    tile_slots = torch.empty(kv_tiles.shape[0] + 1, dtype=torch.int32, device=device)
    slot_edges = torch.empty(num_edges, dtype=torch.int32, device=device)
    slot_places = torch.empty(num_edges, dtype=torch.uint8, device=device)
    _launch(WRITE_EDGES, indptr, kv_tiles, tile_offset, None, tile_slots, slot_edges, slot_places)
    return TileSlots(tile_slots, slot_edges, slot_places)


def _launch(
    spec: PlanEdgesSpec,
    indptr: torch.Tensor,
    kv_tiles: torch.Tensor,
    tile_offset: torch.Tensor,
    indices: torch.Tensor | None = None,
    *slots: torch.Tensor,
) -> None:
    num_windows = len(tile_offset) - 1
    tensors = (indptr, kv_tiles, tile_offset, indices, *(slots or (None, None, None)))
    grid = grid_of(num_windows, WARPS)
    launch_kernel(get_kernel(spec, indptr.device.index), grid, WARPS * WARP_SIZE, tensors, SCALARS.pack(num_windows))
