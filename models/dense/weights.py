"""Shapes of the dense block's kernels, and weights in their layout (cuda/dense_block.cu, cuda/dense_tiles.cuh)."""

import math
from dataclasses import dataclass
from functools import cache, cached_property
from typing import NamedTuple

import torch

CAPABILITY, ARCH = (9, 0), "sm_90a"  # wgmma
BLOCK_ROWS = 64  # rows of a consumer warpgroup in a round
BLOCK_SHARED_BYTES = 227 * 1024  # on compute capability 9.0
BARRIER_BYTES = 512  # upper bound for every instance
WARPGROUP_WARPS = 4
VECTORS = 8  # d floats each, in shared memory


class Shape(NamedTuple):
    """Tile sizes and block shape of an instance.

    Attributes:
        slice: output columns of a tall tile, k of a wide tile; a divisor of d.
        consumers: consumer warpgroups, 64 rows each at a time.
        stages: most stages of the ring for streamed tiles.
        shared_h1: whether h1 goes to the up projection through shared memory instead of registers.
        cluster: blocks per cluster; they share every copy of a tile (multicast).
    """

    slice: int
    consumers: int
    stages: int
    shared_h1: bool
    cluster: int


SHAPES = {
    64: Shape(64, 3, 0, False, 1),
    80: Shape(80, 2, 0, False, 1),
    96: Shape(96, 2, 0, False, 1),
    128: Shape(64, 2, 5, False, 1),
    160: Shape(80, 2, 5, True, 2),
    192: Shape(64, 2, 6, True, 2),
    256: Shape(64, 2, 4, True, 2),
}
DIMS = tuple(SHAPES)
WIDTHS = ", ".join(map(str, DIMS))  # for messages


@dataclass(frozen=True)
class DenseLayout:
    """Tiles of a kernel with three consecutive GEMM stages (first, hidden units, last): which are resident in shared
    memory, and which are streamed through a ring.

    Attributes:
        dim: d, one of `DIMS`.
        shape: of the blocks.
        first: inputs of the first product, in units of d.
        last: outputs of the last product, in units of d.
        warp_sums: d floats each, of every consumer warp.
    """

    dim: int
    shape: Shape
    first: int
    last: int
    warp_sums: int = 0

    @property
    def tile_bytes(self) -> int:
        return 2 * self.dim * self.shape.slice

    @property
    def tiles(self) -> int:
        return (self.first + 4 + self.last) * self.dim // self.shape.slice

    @property
    def panel_k(self) -> int:
        """k extent of a panel of a tile: the length of a swizzled row."""
        return math.gcd(self.dim, self.shape.slice, 64)

    @cached_property
    def stages(self) -> int:
        """Stages of the ring: at most those of the shape, such that a round uses each stage equally often."""
        return max(stages for stages in range(self.shape.stages + 1) if self._resident_beside(stages) >= 0)

    @cached_property
    def resident(self) -> int:
        """Resident tiles: all, or as many as fit such that a round uses each ring stage equally often."""
        return self._resident_beside(self.stages)

    def _resident_beside(self, stages: int) -> int:
        """Resident tiles with a ring of `stages`; negative if the streamed tiles would exceed all tiles."""
        if stages == 0:
            return self.tiles
        shape = self.shape
        h1 = shape.consumers * BLOCK_ROWS * self.dim * 2 if shape.shared_h1 else 0
        floats = (VECTORS + shape.consumers * WARPGROUP_WARPS * self.warp_sums) * self.dim
        places = (BLOCK_SHARED_BYTES - h1 - 4 * floats - BARRIER_BYTES) // self.tile_bytes
        laps = -(-max(0, self.tiles - (places - stages)) // stages)
        return self.tiles - laps * stages


@cache
def forward_layout(dim: int, has_next: bool) -> DenseLayout:
    """Of cuda/dense_block.cu; `has_next`: whether the projection of a next block is one of the products."""
    return DenseLayout(dim, SHAPES[dim], 1, 3 if has_next else 0)


@cache
def backward_layout(dim: int, has_next: bool) -> DenseLayout:
    """Of cuda/dense_block_backward.cu."""
    # Three consumers have too few registers. Consumers of one ring wait for each other, so it holds half a round.
    shape = SHAPES[dim]._replace(consumers=2, stages=8 if dim == 128 else 0)
    return DenseLayout(dim, shape, 3 if has_next else 0, 1, warp_sums=8)


def block_threads(consumers: int) -> int:
    return 128 * (consumers + 1)


def num_blocks(num_rows: int, sms: int, cluster: int = 1) -> int:
    """Blocks of a launch: whole clusters, at most one block per SM and one per tile of rows."""
    return min(sms // cluster, -(-num_rows // (BLOCK_ROWS * cluster))) * cluster


def pack_tiles(
    layout: DenseLayout, first: torch.Tensor, tall: torch.Tensor, wide: torch.Tensor, last: torch.Tensor | None
) -> torch.Tensor:
    """[tiles, d * slice]: swizzled tiles, in the order of use, of matrices in the layout of torch.nn.Linear.

    Args:
        first: [d, d * layout.first].
        tall, wide: [2d, d], [d, 2d], to and from the hidden units.
        last: [d * layout.last, d]; None if layout.last is 0.
    """
    tiles = tiles_of(layout, first, tall, wide, last)
    return torch.stack([swizzle_tile(tile, layout.panel_k) for tile in tiles])


def tiles_of(
    layout: DenseLayout, first: torch.Tensor, tall: torch.Tensor, wide: torch.Tensor, last: torch.Tensor | None
) -> list[torch.Tensor]:
    """Wide tiles [d, slice] and tall tiles [slice, d] of the matrices in the order of use, dimensions permuted.

    The d inputs and outputs of the block are permuted in groups of the whole row, hidden units and the outputs of the
    last product in groups of their slice, which is a tile's.
    """
    dim, size = layout.dim, layout.shape.slice
    of_first = permute_dims(first, dim, dim).split(size, 1) if layout.first else ()
    up, down = permute_dims(tall, size, dim).split(size), permute_dims(wide, dim, size).split(size, 1)
    hidden = [tile for pair in zip(up, down, strict=True) for tile in pair]
    if not layout.shape.shared_h1:  # two slices are in flight: up i + 1 is issued before down i
        hidden = [up[0], *(tile for pair in zip(up[1:], down[:-1], strict=True) for tile in pair), down[-1]]
    of_last = () if last is None else permute_dims(last, size, dim).split(size)
    return [*of_first, *hidden, *of_last]


def permute_dims(weight: torch.Tensor, row_block: int, column_block: int) -> torch.Tensor:
    """Rows and columns permuted to the order of the kernel's wgmma columns, block by block."""
    rows, columns = (
        (torch.arange(0, size, block)[:, None] + dimension_of_column(block)).flatten().to(weight.device)
        for size, block in zip(weight.shape, (row_block, column_block), strict=True)
    )
    return weight[rows][:, columns]


def dimension_of_column(size: int) -> torch.Tensor:
    """[size] int64: wgmma column 32s + 8w + 2t + b holds dimension 32s + 8t + 2w + b.

    In 16 columns left at the end, w < 2, it holds 32s + 4t + 2w + b.
    """
    groups = torch.arange(size).split(32)
    return torch.cat([group.view(4, -1, 2).transpose(0, 1).flatten() for group in groups])


def swizzle_tile(tile: torch.Tensor, panel_k: int) -> torch.Tensor:
    """[rows, k] -> [rows * k]: panels of `panel_k` k with wgmma's swizzle for rows of this length.

    A row has c = panel_k / 8 chunks of 16 bytes; chunk i of row n lies at i ^ (n // (8 / c) % c).
    """
    chunks = panel_k // 8
    rows = torch.arange(tile.shape[0], device=tile.device)[:, None]
    order = torch.arange(chunks, device=tile.device) ^ rows // (8 // chunks) % chunks
    return tile.unflatten(1, (-1, chunks, 8)).transpose(0, 1)[:, rows, order].flatten()
