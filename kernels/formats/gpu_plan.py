"""KV tiles and schedule of a CSR pattern by CUDA kernels; the same bits as `formats/bsb.py` and `formats/schedule.py`.

    plan_tiles<kWrite = false>   KV tiles of each row window
    plan_schedule                first KV tile of each window, heuristic, order of the blocks
    plan_tiles<kWrite = true>    the KV tiles
    plan_items                   the work items

The host waits twice for the numbers of `enum PlanNumber`: before it allocates the KV tiles and the work items, whose
sizes only the GPU knows, and at the end.
"""

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

import torch

from ..fragments import WARP_SIZE
from ..runtime.jit import cpp_name, get_kernel
from ..runtime.launch import launch_kernel
from .schedule import ITEM_WORDS, MANY_BLOCKS, TILE_KEYS, TILE_WORDS, Schedule, SplitHeuristic

WINDOW_ROWS = 16
MAX_ROWS = 1 << 30
MAX_COLS = 1 << 28  # a sort key holds a column and a row of the window in 32 bits
MAX_TILES = 2**31 - 1
LEAST_SPLIT_TILES = 32  # of SplitHeuristic.of for a graph with rows
# As in cuda/plan_tiles.cu and cuda/plan_schedule.cu:
TILE_WARPS = 8
SCHEDULE_THREADS = 1024
ITEM_WARPS = 8
BLOCK_WORDS = 5  # of struct ScheduleScratch for each shared block


class PlanNumber(IntEnum):
    """As in cuda/plan_data.cuh."""

    DAMAGE = 0
    NUM_TILES = 1
    IS_DISTINCT = 2
    DUPLICATES = 3
    NUM_BLOCKS = 4
    NUM_SPLITS = 5
    WARP_WINDOWS = 6
    SPLIT_WINDOWS = 7
    WARP_TILES = 8
    SPLIT_TILES = 9
    SEGMENT = 10
    BLOCK_WARPS = 11
    LEADING_BLOCKS = 12
    SHARED_BLOCKS = 13


@dataclass(frozen=True)
class PlanTilesSpec:
    """One instance of `plan_tiles`.

    Attributes:
        wide_indices: whether indices are int64.
        writes: whether it writes the KV tiles, or counts them.
    """

    wide_indices: bool
    writes: bool

    source: ClassVar[str] = "plan_tiles.cu"

    @property
    def name(self) -> str:
        return cpp_name("plan_tiles", self.wide_indices, self.writes)


@dataclass(frozen=True)
class PlanScheduleSpec:
    """`plan_schedule`, which sorts `sort_keys` numbers at a time."""

    sort_keys: int

    source: ClassVar[str] = "plan_schedule.cu"

    @property
    def name(self) -> str:
        return cpp_name("plan_schedule", self.sort_keys)


@dataclass(frozen=True)
class PlanItemsSpec:
    """`plan_items`."""

    source: ClassVar[str] = "plan_schedule.cu"
    name: ClassVar[str] = "plan_items"


COUNT_TILES = {wide: PlanTilesSpec(wide, writes=False) for wide in (False, True)}
WRITE_TILES = {wide: PlanTilesSpec(wide, writes=True) for wide in (False, True)}
PLAN_SCHEDULE = PlanScheduleSpec(sort_keys=4096)  # at least MANY_BLOCKS
PLAN_ITEMS = PlanItemsSpec()
# Scalars behind the pointers of struct Params, ScheduleParams and ItemParams. A plan packs new ones for every graph:
# `pack_scalars` would take as long as the launches.
TILE_SCALARS = struct.Struct("<q2i")
SCHEDULE_SCALARS = struct.Struct("<q9i4x")
ITEM_SCALARS = struct.Struct("<2i")


@dataclass(frozen=True)
class BlockShape:
    """Warps of a block, and warps that the GPU runs at once."""

    warps: int
    resident_warps: int


@dataclass(frozen=True)
class ScheduleInputs:
    """What a schedule depends on besides the graph.

    Attributes:
        num_groups: head groups, each with its own blocks.
        small_tiles: below so many KV tiles, of all head groups together, a graph is small.
        small, large: blocks of a small and of another graph.
    """

    num_groups: int
    small_tiles: int
    small: BlockShape
    large: BlockShape


@dataclass(frozen=True, eq=False)
class GPUPlan:
    """What `make_gpu_plan` returns. The arrays are complete on the device.

    Attributes:
        kv_tiles: [num_tiles + 2, 24] int32, as `make_kv_tiles` returns it.
        tile_offset: [num_row_windows + 1] int32, as `BSB.tcb_row_offset`.
        nnz: number of distinct edges.
        is_distinct: whether the columns of each row ascend strictly, as `edges.is_distinct` says.
        schedule: as `make_schedule` returns it.
    """

    kv_tiles: torch.Tensor
    tile_offset: torch.Tensor
    nnz: int
    is_distinct: bool
    schedule: Schedule

    @property
    def num_tiles(self) -> int:
        return self.kv_tiles.shape[0] - 2


def grid_of(count: int, per_block: int) -> tuple[int]:
    """Grid of at least `count` / `per_block` blocks, at most a sixteenth more.

    Rounded, so that the graphs of a data set share launch configurations, which take longer to make than to use.
    """
    blocks = -(-count // per_block)
    step = 1 << max(0, blocks.bit_length() - 5)
    return (-(-blocks // step) * step,)


def make_gpu_plan(
    indptr: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int], inputs: ScheduleInputs
) -> GPUPlan | None:
    """KV tiles and schedule of a CSR pattern, by kernels on torch's current stream.

    Args:
        indptr: [num_rows + 1] int32 or int64, on a GPU.
        indices: [nnz] int32 or int64, on the same GPU; columns may be unsorted and repeated.
        shape: (num_rows, num_cols).

    Returns:
        The plan; None where the CSR is damaged, or beyond what the kernels take (no row, no column, over 2^30 rows,
        2^28 columns or 2^31 KV tiles): `BSB.from_csr` names what is wrong, or builds it.
    """
    num_rows, num_cols = shape
    num_edges = indices.numel()
    num_windows = -(-num_rows // WINDOW_ROWS)
    most_tiles = num_edges // TILE_KEYS + num_windows
    if not _is_csr(indptr, indices, num_rows) or most_tiles > MAX_TILES:
        return None
    if not (0 < num_rows <= MAX_ROWS and 0 < num_cols <= MAX_COLS):
        return None
    indptr, indices = indptr.long().contiguous(), indices.contiguous()
    device, wide = indptr.device, indices.dtype == torch.int64

    grid = grid_of(num_windows, TILE_WARPS)
    scalars = TILE_SCALARS.pack(num_edges, num_rows, num_cols)
    tile_offset = torch.empty(num_windows + 1, dtype=torch.int32, device=device)
    count = get_kernel(COUNT_TILES[wide], device.index)
    launch_kernel(count, grid, TILE_WARPS * WARP_SIZE, (tile_offset, indptr, indices, None, None), scalars)
    order = _order(tile_offset, most_tiles, inputs, has_offsets=False)

    numbers = order.read()
    if numbers[PlanNumber.DAMAGE]:
        return None
    kv_tiles = torch.empty((numbers[PlanNumber.NUM_TILES] + 2, TILE_WORDS), dtype=torch.int32, device=device)
    write = get_kernel(WRITE_TILES[wide], device.index)
    tensors = (tile_offset, indptr, indices, kv_tiles, order.numbers)
    launch_kernel(write, grid, TILE_WARPS * WARP_SIZE, tensors, scalars)
    work_items = _work_items(kv_tiles, tile_offset, order, numbers)
    numbers = order.read()
    if numbers[PlanNumber.DAMAGE]:  # found by the kernel that writes the KV tiles
        return None
    return GPUPlan(
        kv_tiles,
        tile_offset,
        num_edges - numbers[PlanNumber.DUPLICATES],
        bool(numbers[PlanNumber.IS_DISTINCT]),
        _schedule(work_items, num_windows, numbers),
    )


def make_gpu_schedule(kv_tiles: torch.Tensor, tile_offset: torch.Tensor, inputs: ScheduleInputs) -> Schedule:
    """Another schedule for the KV tiles of a plan with rows. Its array is complete on the device.

    Args:
        kv_tiles: [num_tiles + 2, 24] int32, on a GPU.
        tile_offset: [num_row_windows + 1] int32, on the same GPU.
    """
    order = _order(tile_offset, kv_tiles.shape[0] - 2, inputs, has_offsets=True)
    work_items = _work_items(kv_tiles, tile_offset, order, order.read())
    return _schedule(work_items, len(tile_offset) - 1, order.read())


@dataclass(frozen=True, eq=False)
class _Order:
    """What plan_schedule leaves for plan_items.

    Attributes:
        numbers: [14] int64, by PlanNumber.
        scratch: int32, struct ScheduleScratch.
        most_blocks: bound of the blocks: a window has at most one, but for those of several splits.
        num_windows: row windows.
    """

    numbers: torch.Tensor
    scratch: torch.Tensor
    most_blocks: int
    num_windows: int

    def read(self) -> list[int]:
        """The numbers; waits for all kernels."""
        return self.numbers.tolist()


def _is_csr(indptr: torch.Tensor, indices: torch.Tensor, num_rows: int) -> bool:
    """Whether shapes and types are those of a CSR pattern."""
    one_dimensional = indptr.dim() == indices.dim() == 1 and indptr.numel() == num_rows + 1
    return one_dimensional and {indptr.dtype, indices.dtype} <= {torch.int32, torch.int64}


def _order(tile_offset: torch.Tensor, most_tiles: int, inputs: ScheduleInputs, *, has_offsets: bool) -> _Order:
    """Queue plan_schedule. `has_offsets`: whether `tile_offset` is one, or the number of KV tiles of each window."""
    num_windows, device = len(tile_offset) - 1, tile_offset.device
    most_blocks = num_windows + most_tiles // LEAST_SPLIT_TILES
    scratch = torch.empty(BLOCK_WORDS * most_blocks + 2 * num_windows, dtype=torch.int32, device=device)
    numbers = torch.empty(len(PlanNumber), dtype=torch.int64, device=device)
    shapes = (inputs.small.warps, inputs.small.resident_warps, inputs.large.warps, inputs.large.resident_warps)
    scalars = SCHEDULE_SCALARS.pack(
        inputs.small_tiles, most_blocks, num_windows, inputs.num_groups, MANY_BLOCKS, has_offsets, *shapes
    )
    kernel = get_kernel(PLAN_SCHEDULE, device.index)
    launch_kernel(kernel, (1,), SCHEDULE_THREADS, (tile_offset, numbers, scratch), scalars)
    return _Order(numbers, scratch, most_blocks, num_windows)


def _work_items(kv_tiles: torch.Tensor, tile_offset: torch.Tensor, order: _Order, numbers: list[int]) -> torch.Tensor:
    """Queue plan_items. [items, 56] int32."""
    num_items = numbers[PlanNumber.NUM_BLOCKS] * numbers[PlanNumber.BLOCK_WARPS]
    work_items = torch.empty((num_items, ITEM_WORDS), dtype=torch.int32, device=kv_tiles.device)
    launch_kernel(
        get_kernel(PLAN_ITEMS, kv_tiles.device.index),
        grid_of(num_items, ITEM_WARPS),
        ITEM_WARPS * WARP_SIZE,
        (work_items, kv_tiles, tile_offset, order.numbers, order.scratch),
        ITEM_SCALARS.pack(order.most_blocks, order.num_windows),
    )
    return work_items


def _schedule(work_items: torch.Tensor, num_windows: int, numbers: list[int]) -> Schedule:
    num_blocks, warps = numbers[PlanNumber.NUM_BLOCKS], numbers[PlanNumber.BLOCK_WARPS]
    by_warp, split = numbers[PlanNumber.WARP_WINDOWS], numbers[PlanNumber.SPLIT_WINDOWS]
    heuristic = SplitHeuristic(
        warp_tiles=numbers[PlanNumber.WARP_TILES],
        split_tiles=numbers[PlanNumber.SPLIT_TILES],
        sort_segment=numbers[PlanNumber.SEGMENT] or None,
    )
    return Schedule(
        work_items.view(num_blocks, warps, ITEM_WORDS),
        numbers[PlanNumber.NUM_SPLITS],
        (by_warp, num_windows - by_warp - split, split),
        heuristic,
    )
