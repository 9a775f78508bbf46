"""`make_schedule` of formats/schedule.py by the kernels of cuda/plan_schedule.cu, with the same bits.

The kernels make several schedules of one graph at once. Only the GPU knows their sizes: the host reads them
(`QueuedSchedules.read`) before it allocates the work items.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import ClassVar

import torch

from ..fragments import WARP_SIZE
from ..runtime.jit import cpp_name, get_kernel
from ..runtime.launch import launch_kernel
from .schedule import ITEM_WORDS, MANY_BLOCKS, Schedule, SplitHeuristic, make_schedule

LEAST_SPLIT_TILES = 32  # of SplitHeuristic.of for a graph with rows
# As in cuda/plan_schedule.cu and cuda/plan_data.cuh:
MOST_SCHEDULES = 3
SCHEDULE_THREADS = 1024
ITEM_WARPS = 8
BLOCK_WORDS = 5  # of struct ScheduleScratch for each shared block
WINDOW_WORDS = 3  # and for each window


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
    IS_SYMMETRIC = 14
    SURPLUS = 15


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


PLAN_SCHEDULE = PlanScheduleSpec(sort_keys=4096)  # at least MANY_BLOCKS
PLAN_ITEMS = PlanItemsSpec()
# Scalars behind the pointers of struct ScheduleParams and ItemParams, and struct ScheduleInputs. A plan packs new ones
# for every graph: `pack_scalars` would take as long as the launches.
SCHEDULE_SCALARS = struct.Struct("<4i")
INPUT_SCALARS = struct.Struct("<q5i4x")
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

    @classmethod
    def of_one_shape(cls, num_groups: int, shape: BlockShape) -> "ScheduleInputs":
        """Blocks of one shape for graphs of any size."""
        return cls(num_groups, 0, shape, shape)

    def is_small(self, num_tiles: int) -> bool:
        return self.num_groups * num_tiles < self.small_tiles

    def schedule_by_torch(self, kv_tiles: torch.Tensor, tile_offset: torch.Tensor) -> Schedule:
        """`make_schedule` for these inputs, on any device."""
        shape = self.small if self.is_small(kv_tiles.shape[0] - 2) else self.large
        heuristic = SplitHeuristic.of(tile_offset.diff(), shape.warps, shape.resident_warps, self.num_groups)
        return make_schedule(kv_tiles, tile_offset, shape.warps, heuristic)


@dataclass(frozen=True, eq=False)
class QueuedSchedules:
    """What plan_schedule leaves for plan_items.

    Attributes:
        numbers: of each schedule [16] int64, by PlanNumber.
        scratch: of each schedule [words] int32, struct ScheduleScratch.
        tile_offset: [num_row_windows + 1] int32, first KV tile of each window.
        most_blocks: bound of the blocks: a window has at most one, but for those of several splits.
    """

    numbers: tuple[torch.Tensor, ...]
    scratch: tuple[torch.Tensor, ...]
    tile_offset: torch.Tensor
    most_blocks: int

    def schedule(self, which: int, numbers: Sequence[int], kv_tiles: torch.Tensor) -> Schedule:
        """Queue the work items of a schedule, whose `numbers` have been read."""
        num_blocks, warps = numbers[PlanNumber.NUM_BLOCKS], numbers[PlanNumber.BLOCK_WARPS]
        num_items, num_windows = num_blocks * warps, len(self.tile_offset) - 1
        work_items = torch.empty((num_blocks, warps, ITEM_WORDS), dtype=torch.int32, device=kv_tiles.device)
        launch_kernel(
            get_kernel(PLAN_ITEMS, kv_tiles.device.index),
            grid_of(num_items, ITEM_WARPS),
            ITEM_WARPS * WARP_SIZE,
            (work_items, kv_tiles, self.tile_offset, self.numbers[which], self.scratch[which]),
            ITEM_SCALARS.pack(self.most_blocks, num_windows),
        )
        by_warp, split = numbers[PlanNumber.WARP_WINDOWS], numbers[PlanNumber.SPLIT_WINDOWS]
        heuristic = SplitHeuristic(
            warp_tiles=numbers[PlanNumber.WARP_TILES],
            split_tiles=numbers[PlanNumber.SPLIT_TILES],
            sort_segment=numbers[PlanNumber.SEGMENT] or None,
        )
        windows = (by_warp, num_windows - by_warp - split, split)
        return Schedule(work_items, numbers[PlanNumber.NUM_SPLITS], windows, heuristic)


def queue_schedules(
    tiles: torch.Tensor,
    num_windows: int,
    most_tiles: int,
    inputs: Sequence[ScheduleInputs],
    numbers: torch.Tensor,
    *,
    has_offsets: bool,
) -> QueuedSchedules:
    """Queue plan_schedule.

    Args:
        tiles: [num_windows] int32, KV tiles of each window; `has_offsets`: [num_windows + 1], first KV tile of each.
        most_tiles: at least the KV tiles of all windows.
        inputs: of each schedule, up to MOST_SCHEDULES.
        numbers: [at least as many, 16] int64; those of the schedules are written.
    """
    device, count = tiles.device, len(inputs)
    most_blocks = num_windows + most_tiles // LEAST_SPLIT_TILES
    words = (BLOCK_WORDS * most_blocks + WINDOW_WORDS * num_windows + 4) // 4 * 4
    scratch = torch.empty((count, words), dtype=torch.int32, device=device)
    tile_offset = torch.empty(num_windows + 1, dtype=torch.int32, device=device)
    scalars = SCHEDULE_SCALARS.pack(most_blocks, num_windows, MANY_BLOCKS, has_offsets)
    for each in inputs:
        shapes = (each.small.warps, each.small.resident_warps, each.large.warps, each.large.resident_warps)
        scalars += INPUT_SCALARS.pack(each.small_tiles, each.num_groups, *shapes)
    scalars += bytes(INPUT_SCALARS.size * (MOST_SCHEDULES - count))
    kernel = get_kernel(PLAN_SCHEDULE, device.index)
    launch_kernel(kernel, (count,), SCHEDULE_THREADS, (tiles, tile_offset, numbers, scratch), scalars)
    return QueuedSchedules(numbers.unbind(), scratch.unbind(), tile_offset, most_blocks)


def make_schedules(kv_tiles: torch.Tensor, tile_offset: torch.Tensor, *inputs: ScheduleInputs) -> tuple[Schedule, ...]:
    """`make_gpu_schedules` on a GPU, by torch elsewhere."""
    if kv_tiles.is_cuda and len(tile_offset) > 1:
        return make_gpu_schedules(kv_tiles, tile_offset, *inputs)
    return tuple(each.schedule_by_torch(kv_tiles, tile_offset) for each in inputs)


def make_gpu_schedules(
    kv_tiles: torch.Tensor, tile_offset: torch.Tensor, *inputs: ScheduleInputs
) -> tuple[Schedule, ...]:
    """Schedules for the KV tiles of a plan with rows. Reads their sizes once; the work items are queued.

    Args:
        kv_tiles: [num_tiles + 2, 24] int32, on a GPU.
        tile_offset: [num_row_windows + 1] int32, on the same GPU.
    """
    numbers = torch.empty((len(inputs), len(PlanNumber)), dtype=torch.int64, device=kv_tiles.device)
    sizes = (len(tile_offset) - 1, kv_tiles.shape[0] - 2)
    queued = queue_schedules(tile_offset, *sizes, inputs, numbers, has_offsets=True)
    return tuple(queued.schedule(which, read, kv_tiles) for which, read in enumerate(numbers.tolist()))


def grid_of(count: int, per_block: int) -> tuple[int]:
    """Grid of at least `count` / `per_block` blocks, at most a sixteenth more.

    Rounded, so that the graphs of a data set share launch configurations, which take longer to make than to use.
    """
    blocks = -(-count // per_block)
    step = 1 << max(0, blocks.bit_length() - 5)
    return (-(-blocks // step) * step,)


def wait_for(device: torch.device) -> None:
    """Wait for torch's current stream: the attention kernels read a plan before griddepcontrol.wait, so that its arrays
    must be complete, not only queued."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
