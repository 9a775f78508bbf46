"""`csr_of_tiles` and `make_tile_slots` of formats/schedule.py by CUDA kernels."""

import struct
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..fragments import WARP_SIZE
from ..runtime.jit import get_kernel
from ..runtime.launch import Launch, address_of, launch_all
from .gpu_csr import WINDOW_ROWS, blocks_of

WARPS = 8  # as in cuda/plan_edges.cu
POINTERS, SCALARS = struct.Struct("<7Q"), struct.Struct("<2i")  # of struct Params


@dataclass(frozen=True, eq=False)
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
    tiles, sizes = (address_of(kv_tiles), address_of(tile_offset)), (num_windows, 16 * num_windows)
    counts = torch.empty(16 * num_windows + 1, dtype=torch.int64, device=device)
    launch_all(device.index, [_launch(COUNT_EDGES, (address_of(counts), *tiles), *sizes, device.index)])
    offsets = counts.cumsum(0)
    indices = torch.empty(num_edges, dtype=torch.int32, device=device)
    addresses = (address_of(offsets), *tiles, address_of(indices))
    launch_all(device.index, [_launch(WRITE_CSR, addresses, *sizes, device.index)])
    return offsets, indices


def slot_launch(
    slots: tuple[int, int, int], kv_tiles: int, tile_offset: int, offsets: int, num_rows: int, device_index: int | None
) -> Launch:
    """The kernel that fills the slots of KV tiles that were made from a CSR; at least one row.

    Args:
        slots: addresses of the arrays of TileSlots, for as many KV tiles and edges as there can be.
        kv_tiles, tile_offset: addresses of the above.
        offsets: address [num_rows + 1] int64 of the CSR.
    """
    addresses = (offsets, kv_tiles, tile_offset, 0, *slots)
    return _launch(WRITE_SLOTS, addresses, -(-num_rows // WINDOW_ROWS), num_rows, device_index)


def _launch(
    spec: PlanEdgesSpec, addresses: tuple[int, ...], num_windows: int, num_rows: int, device_index: int | None
) -> Launch:
    grid = (blocks_of(num_windows, WARPS), 1, 1)
    pointers = POINTERS.pack(*addresses, *(0,) * (7 - len(addresses)))
    return get_kernel(spec, device_index), grid, WARPS * WARP_SIZE, pointers, SCALARS.pack(num_windows, num_rows)
