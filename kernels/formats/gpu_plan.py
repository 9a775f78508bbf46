"""A plan by CUDA kernels, from an edge list or a CSR: CSR, row items, KV tiles, schedules, slots of edge data.

    plan_count, plan_offsets, plan_place, plan_sort    CSR of A, and of its transpose where asked for (gpu_csr.py)
    plan_tiles<kWrite = false>                         KV tiles of each row window, of both
    plan_schedule                                      first KV tile of each window, heuristic, order of the blocks
    plan_tiles<kWrite = true>                          the KV tiles
    plan_items                                         the work items of all schedules
    plan_edges                                         slots of the edges in the KV tiles
    plan_parts, plan_whole_rows                        items of the rows

The used part of the arrays has the bits of `formats/schedule.py` and `formats/row_items.py`. The host does not wait:
the arrays have room for the most that there can be, and items behind the last have no work. So a plan can be filled
again with another graph, and the filling captured in a CUDA graph.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch

from ..fragments import WARP_SIZE
from ..runtime.jit import cpp_name, get_kernel
from ..runtime.launch import launch_kernel, next_waits
from .gpu_csr import GPUCSR, SORT_WARPS, WARP_EDGES, EdgeSource, PlanNumber, grid_of, new_numbers, queue_csr
from .gpu_edges import queue_tile_slots
from .gpu_row_items import most_items_of, most_parts_of, queue_row_items
from .gpu_schedule import (
    SCHEDULE_NUMBERS,
    BlockShape,
    ScheduleNumber,
    most_blocks_of,
    most_shared_blocks,
    most_splits_of,
    most_tiles_of,
    windows_of,
)
from .row_items import RowItems
from .schedule import ITEM_WORDS, MANY_BLOCKS, TILE_WORDS, Schedule, SplitHeuristic, TileSlots

# As in cuda/plan_schedule.cu and cuda/plan_data.cuh:
MOST_SCHEDULES = 3
SCHEDULE_THREADS = 1024
ITEM_WARPS = 8
BLOCK_WORDS = 5  # of struct ScheduleScratch for each shared block
WINDOW_WORDS = 3  # and for each window
TILE_SCALARS = struct.Struct("<6i")  # behind the pointers of struct Params
SCHEDULE_SCALARS = struct.Struct("<5i")
INPUT_SCALARS = struct.Struct("<6i")


@dataclass(frozen=True)
class PlanTilesSpec:
    """One instance of `plan_tiles`; `writes`: whether it writes the KV tiles, or counts them."""

    writes: bool

    source: ClassVar[str] = "plan_tiles.cu"

    @property
    def name(self) -> str:
        return cpp_name("plan_tiles", self.writes)


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


COUNT_TILES, WRITE_TILES = PlanTilesSpec(writes=False), PlanTilesSpec(writes=True)
PLAN_SCHEDULE = PlanScheduleSpec(sort_keys=4096)  # at least MANY_BLOCKS
PLAN_ITEMS = PlanItemsSpec()


@dataclass(frozen=True)
class ScheduleForm:
    """A schedule that a plan has.

    Attributes:
        of_transpose: whether it is one of A^T.
        num_groups: head groups, each with its own blocks.
        shape: of the blocks.
    """

    of_transpose: bool
    num_groups: int
    shape: BlockShape


@dataclass(frozen=True)
class PlanForm:
    """What a plan consists of; hashable.

    Attributes:
        shape: (num_rows, num_cols) of A, at least 1.
        most_edges: edges that there is room for.
        transposes: whether it has A^T.
        schedules: of A in front of those of A^T; () for a plan without KV tiles.
        part_edges: most edges of a row item; 0 for a plan without row items.
        edge_data: whether it has the number of each edge in the source, and slots where it has KV tiles.
    """

    shape: tuple[int, int]
    most_edges: int
    transposes: bool
    schedules: tuple[ScheduleForm, ...]
    part_edges: int
    edge_data: bool

    @cached_property
    def tile_sides(self) -> int:
        """Patterns with KV tiles: none, A, or A and A^T."""
        return 0 if not self.schedules else 1 + any(each.of_transpose for each in self.schedules)

    def rows_of(self, side: int) -> int:
        """Rows of A, or of A^T."""
        return self.shape[side]


class GPUPlan:
    """Memory of a plan, and how it is filled.

    Attributes:
        form: what it consists of.
        csr: CSR of A and A^T.
        kv_tiles, tile_offset: of A, and of A^T where it has KV tiles.
        schedules: as in `form`, with bounds in place of numbers that the host does not know.
        row_items: of A, and of A^T.
        slots: None without edge data or without KV tiles.
    """

    def __init__(self, form: PlanForm, device: torch.device) -> None:
        self.form, self.device = form, device
        edges, sides = form.most_edges, form.tile_sides
        tiles = [most_tiles_of(edges, form.rows_of(side)) for side in range(sides)]
        blocks = [most_blocks_of(edges, form.rows_of(each.of_transpose), each.shape.warps) for each in form.schedules]
        item_sides = (1 + form.transposes) if form.part_edges else 0
        items = [most_items_of(edges, form.rows_of(side), form.part_edges) for side in range(item_sides)]
        parts = most_parts_of(edges, form.part_edges) if item_sides else 0
        has_slots = form.edge_data and sides > 0
        # Rows of a multiple of 16 bytes come first: the kernels read them whole.
        arrays = _int32_arrays(
            device,
            *((count + 2, TILE_WORDS) for count in tiles),
            *((count, each.shape.warps, ITEM_WORDS) for count, each in zip(blocks, form.schedules, strict=True)),
            *((count, 4) for count in items),
            *((parts, 2) for _ in range(item_sides)),
            *((edges,) for _ in range(1 + form.edge_data + 2 * form.transposes)),
            *((windows_of(form.rows_of(side)) + 1,) for side in range(sides)),
            *(((tiles[0] + 3,), (edges,)) if has_slots else ()),
        )

        def take(count: int) -> list[torch.Tensor]:
            return [next(arrays) for _ in range(count)]

        self.kv_tiles, work_items = take(sides), take(len(form.schedules))
        self.row_items = [
            RowItems(*each, form.part_edges) for each in zip(take(item_sides), take(item_sides), strict=True)
        ]
        indices, *edge_ids = take(1 + form.edge_data)
        transposed = take(2) if form.transposes else (None, None)
        self.tile_offset = take(sides)
        slot_places = torch.empty(edges, dtype=torch.uint8, device=device) if has_slots else None
        self.slots = TileSlots(*take(2), slot_places) if has_slots else None
        self.schedules = [
            Schedule(each, most_splits_of(edges, form.rows_of(of.of_transpose), of.shape), None, None)
            for each, of in zip(work_items, form.schedules, strict=True)
        ]
        rows, cols = form.shape
        offsets = torch.empty(rows + 1 + (cols + 1 if form.transposes else 0), dtype=torch.int64, device=device)
        self.offsets = offsets.split_with_sizes((rows + 1, cols + 1)) if form.transposes else (offsets,)
        edge_ids = edge_ids[0] if edge_ids else None
        self.csr = GPUCSR(new_numbers(form.shape, device), offsets, indices, edge_ids, *transposed)

    def fill(self, source: EdgeSource, row_ids: torch.Tensor | None = None) -> None:
        """Queue the kernels on torch's current stream.

        Args:
            source: up to `form.most_edges` edges; they are read, and need not be kept.
            row_ids: [num_rows] int32, as for `queue_csr` and `queue_row_items`.
        """
        queue_csr(self.csr, source, self.form.shape, row_ids)
        if self.form.schedules:
            self._queue_tiles()
        if self.row_items:
            queue_row_items(self.row_items, self.offsets[: len(self.row_items)], row_ids, self.csr.numbers)
        if self.slots:
            queue_tile_slots(self.slots, self.kv_tiles[0], self.tile_offset[0], self.offsets[0])
        if self.device.type == "cuda":
            next_waits(self.device.index)  # the attention kernels read a plan before griddepcontrol.wait

    def _queue_tiles(self) -> None:
        form, csr, index = self.form, self.csr, self.device.index
        sides, edges = form.tile_sides, form.most_edges
        rows = [form.rows_of(side) for side in range(sides)]
        windows = [windows_of(each) for each in rows]
        per_block = [SORT_WARPS if edges <= WARP_EDGES * each else 1 for each in windows]
        counts = torch.empty(sum(windows), dtype=torch.int32, device=self.device).split_with_sizes(windows)
        none, zeros = (None,) * (2 - sides), (0,) * (2 - sides)
        indices = (csr.indices, csr.column_indices)[:sides]
        columns = [form.rows_of(1 - side) for side in range(sides)]
        scalars = TILE_SCALARS.pack(*rows, *zeros, *columns, *zeros, *per_block, *zeros)
        grid = (max(grid_of(each, of_block)[0] for each, of_block in zip(windows, per_block, strict=True)), sides)
        csr_arrays = (*self.offsets[:sides], *none, *indices, *none, *self.kv_tiles, *none)

        def launch_tiles(spec: PlanTilesSpec, tiles: Sequence[torch.Tensor]) -> None:
            launch_kernel(get_kernel(spec, index), grid, SORT_WARPS * WARP_SIZE, (*tiles, *none, *csr_arrays), scalars)

        launch_tiles(COUNT_TILES, counts)
        schedule_arrays, schedule_scalars, most_items = self._schedule_params(counts, windows)
        count = len(form.schedules)
        launch = (SCHEDULE_THREADS, schedule_arrays, schedule_scalars)
        launch_kernel(get_kernel(PLAN_SCHEDULE, index), (count,), *launch)
        launch_tiles(WRITE_TILES, self.tile_offset)
        grid_of_items = (*grid_of(max(most_items), ITEM_WARPS), count)
        launch_kernel(get_kernel(PLAN_ITEMS, index), grid_of_items, ITEM_WARPS * WARP_SIZE, *launch[1:])

    def _schedule_params(
        self, counts: Sequence[torch.Tensor], windows: list[int]
    ) -> tuple[tuple[torch.Tensor | None, ...], bytes, list[int]]:
        form, count = self.form, len(self.schedules)
        none, zeros = (None,) * (2 - len(windows)), (0,) * (2 - len(windows))
        most_blocks = max(most_shared_blocks(form.most_edges, form.rows_of(side)) for side in range(len(windows)))
        words = (BLOCK_WORDS * most_blocks + WINDOW_WORDS * max(windows) + 4) // 4 * 4
        scratch = torch.empty((count, words), dtype=torch.int32, device=self.device)
        tensors = (
            *(*counts, *none, *self.tile_offset, *none, *self.kv_tiles, *none),
            *(*(each.work_items for each in self.schedules), *(None,) * (MOST_SCHEDULES - count)),
            *(self.csr.numbers, scratch),
        )
        scalars = SCHEDULE_SCALARS.pack(most_blocks, max(windows), *windows, *zeros, MANY_BLOCKS)
        most_items, seen = [], set()
        for schedule, each in zip(self.schedules, form.schedules, strict=True):
            most_items.append(schedule.num_blocks * schedule.warps)
            shape = (each.num_groups, each.shape.warps, each.shape.resident_warps, most_items[-1])
            scalars += INPUT_SCALARS.pack(each.of_transpose, each.of_transpose not in seen, *shape)
            seen.add(each.of_transpose)
        scalars += bytes(INPUT_SCALARS.size * (MOST_SCHEDULES - count))
        return tensors, scalars + bytes(-len(scalars) % 8), most_items


@dataclass(frozen=True)
class PlanSizes:
    """What the GPU found out, from `GPUCSR.numbers`.

    Attributes:
        bad_offset: PlanNumber.BAD_OFFSET; bad_edge: PlanNumber.BAD_EDGE.
        schedules: of each schedule its numbers, by ScheduleNumber.
        row_items: of A and A^T the parts, and the rows without parts.
    """

    bad_offset: int
    bad_edge: int
    schedules: list[list[int]]
    row_items: list[list[int]]

    @classmethod
    def of(cls, numbers: list[int], form: PlanForm) -> "PlanSizes":
        """From the first PlanNumber.COUNTS numbers."""

        def each(first: int, size: int, count: int) -> list[list[int]]:
            return [numbers[first + size * i : first + size * (i + 1)] for i in range(count)]

        return cls(
            numbers[PlanNumber.BAD_OFFSET],
            numbers[PlanNumber.BAD_EDGE],
            each(PlanNumber.SCHEDULES, SCHEDULE_NUMBERS, len(form.schedules)),
            each(PlanNumber.ROW_ITEMS, 2, 2),
        )

    def num_tiles(self, of_transpose: bool, form: PlanForm) -> int:
        """KV tiles of A, or of A^T."""
        which = next(i for i, each in enumerate(form.schedules) if each.of_transpose == of_transpose)
        return self.schedules[which][ScheduleNumber.NUM_TILES]

    def exact_schedule(self, which: int, schedule: Schedule, num_windows: int) -> Schedule:
        """The used part of a schedule, and its numbers."""
        numbers = self.schedules[which]
        by_warp, split = numbers[ScheduleNumber.WARP_WINDOWS], numbers[ScheduleNumber.SPLIT_WINDOWS]
        heuristic = SplitHeuristic(
            warp_tiles=numbers[ScheduleNumber.WARP_TILES],
            split_tiles=numbers[ScheduleNumber.SPLIT_TILES],
            sort_segment=numbers[ScheduleNumber.SEGMENT] or None,
        )
        windows = (by_warp, num_windows - by_warp - split, split)
        work_items = schedule.work_items[: numbers[ScheduleNumber.NUM_BLOCKS]]
        return Schedule(work_items, numbers[ScheduleNumber.NUM_SPLITS], windows, heuristic)

    def exact_items(self, side: int, work: RowItems) -> RowItems:
        """The used part of the items."""
        num_parts, num_whole = self.row_items[side]
        return RowItems(work.items[: num_parts + num_whole], work.parts[:num_parts], work.part_edges)


def _int32_arrays(device: torch.device, *shapes: tuple[int, ...]) -> "Sequence[torch.Tensor]":
    """Arrays of one allocation."""
    sizes = []
    for shape in shapes:
        size = 1
        for extent in shape:
            size *= extent
        sizes.append(size)
    parts = torch.empty(sum(sizes), dtype=torch.int32, device=device).split_with_sizes(sizes)
    return iter([part.view(shape) if len(shape) > 1 else part for part, shape in zip(parts, shapes, strict=True)])
