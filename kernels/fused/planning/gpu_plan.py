"""A plan by CUDA kernels, from an edge list or a CSR: CSR, row items, KV tiles, schedules, slots of edge data.

    plan_count, plan_offsets, plan_place, plan_sort    CSR of A, and of its transpose if wanted (gpu_csr.py)
    plan_tiles<kWrite = false>                         KV tiles of each row window, of both
    plan_schedule                                      first KV tile of each window, heuristic, order of the blocks
    plan_tiles<kWrite = true>                          the KV tiles
    plan_items                                         the work items of all schedules
    plan_edges                                         slots of the edges in the KV tiles
    plan_parts, plan_whole_rows                        items of the rows

The host does not wait: arrays have upper-bound sizes, and items after the last one have no work. A plan can therefore
be refilled with another graph, also inside a CUDA graph.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from ...runtime.device import WARP_SIZE
from ...runtime.jit import KernelInstance, compile_ahead, get_kernel
from ...runtime.launch import Launch, address_of, launch_all, next_waits
from ...runtime.params import elements
from ...runtime.semaphores import is_capturing
from ..choice import GraphSize
from ..data import Fused3SData
from ..tuning import MANY_BLOCKS
from .gpu_csr import (
    GPUCSR,
    SCAN_BLOCKS,
    SCAN_CHUNK,
    SORT_WARPS,
    WARP_EDGES,
    EdgeSource,
    PlanNumber,
    allocate,
    blocks_of,
    csr_instances,
    num_keys,
)
from .gpu_row_items import (
    PARTS_THREADS,
    PLAN_PARTS,
    PLAN_WHOLE_ROWS,
    SORT_SEGMENT,
    most_items_of,
    most_parts_of,
)
from .schedule import (
    ITEM_WORDS,
    SCHEDULE_NUMBERS,
    TILE_WORDS,
    ScheduleForm,
    ScheduleNumber,
    most_blocks_of,
    most_shared_blocks,
    most_splits_of,
    most_tiles_of,
    windows_of,
)

# As in cuda/plan/plan_schedule.cu and cuda/plan/plan_data.cuh:
MOST_SCHEDULES = 3
SCHEDULE_THREADS = 1024
ITEM_WARPS = 8
BLOCK_WORDS = 5  # int32 words of struct ScheduleScratch per shared block
WINDOW_WORDS = 3  # and per window
SCHEDULE_INPUTS = ("side", "is_first", "num_groups", "warps", "resident_warps", "most_items")


COUNT_TILES, WRITE_TILES = (KernelInstance("plan/plan_tiles.cu", "plan_tiles", (writes,)) for writes in (False, True))
PLAN_SCHEDULE = KernelInstance("plan/plan_schedule.cu", "plan_schedule", (4096,))  # keys sorted at a time
PLAN_ITEMS = KernelInstance("plan/plan_schedule.cu", "plan_items")
PLAN_EDGES = KernelInstance("plan/plan_edges.cu", "plan_edges")
SLOT_WARPS = 8  # as in cuda/plan/plan_edges.cu


@dataclass(frozen=True)
class PlanForm:
    """Which arrays a plan has, and their sizes; hashable.

    Attributes:
        shape: (num_rows, num_cols) of A, at least 1.
        most_edges: capacity in edges.
        transposes: whether it has A^T.
        schedules: those of A, then those of A^T; () for a plan without KV tiles.
        part_edges: most edges of a row item; 0 for a plan without row items.
        edge_data: whether it has the index of each edge in the source, and, with KV tiles, slots.
        column_slots: whether the KV tiles of A^T have slots, too.
    """

    shape: tuple[int, int]
    most_edges: int
    transposes: bool
    schedules: tuple[ScheduleForm, ...]
    part_edges: int
    edge_data: bool
    column_slots: bool = False

    @cached_property
    def tile_sides(self) -> int:
        """Number of patterns with KV tiles: 0, 1 (A) or 2 (A and A^T)."""
        return 0 if not self.schedules else 1 + any(each.of_transpose for each in self.schedules)


# 32-bit words of all arrays of a plan, at most: for each edge, row, column, and besides; with schedules of up to four
# warps a block, and parts of at least 16 edges.
EDGE_WORDS, ROW_WORDS, COLUMN_WORDS, MORE_WORDS = 12, 38, 24, 2048


def most_words(num_edges: int, num_rows: int, num_cols: int) -> int:
    """Upper bound of the memory of a plan, in 32-bit words; linear, since torch.compile computes it with symbols."""
    return EDGE_WORDS * num_edges + ROW_WORDS * num_rows + COLUMN_WORDS * num_cols + MORE_WORDS


def _split_memory(memory: torch.Tensor, wide: int, places: int) -> tuple[torch.Tensor, ...]:
    """[wide] int64, [places] uint8, and the rest [...] int32, which begins at a multiple of 16 bytes."""
    first = (2 * wide + -(-places // 4) + 3) // 4 * 4
    places = memory[2 * wide : first].view(torch.uint8)[:places]
    return memory[: 2 * wide].view(torch.int64), places, memory[first:]


def plan_instances(
    wide: bool | None, is_csr: bool | None, transposes: bool, tiles: bool, row_items: bool, slots: bool
) -> list[KernelInstance]:
    """The kernels that fill a plan, in descending order of compile time, roughly.

    Args:
        wide, is_csr: ids of the source of int64, of a CSR; None if the plan shares a filled CSR.
        transposes, tiles, row_items, slots: whether it has A^T, KV tiles, row items, slots.
    """
    found = [WRITE_TILES, PLAN_SCHEDULE, COUNT_TILES, PLAN_ITEMS] if tiles else []
    found += [] if wide is None else csr_instances(wide, is_csr, transposes)
    found += [PLAN_PARTS, PLAN_WHOLE_ROWS] if row_items else []
    return [*found, PLAN_EDGES] if slots else found


# Key: arguments of `plan_instances`, GPU; at most one entry for each combination. Lives as long as the process.
_begun: set[tuple[bool | int | None, ...]] = set()
# Fields of `Fused3SData` by schedule (KV tiles, work items, number of splits), and by pattern with row items.
_SCHEDULE_FIELDS = (
    ("kv_tiles", "work_items", "num_splits"),
    ("kv_tiles", "row_work_items", "row_splits"),
    ("column_tiles", "column_work_items", "column_splits"),
)
_ITEM_FIELDS = (("row_items", "row_parts"), ("column_items", "column_parts"))
_SLOTS = ("tile_slots", "slot_edges", "slot_places")
_SLOT_FIELDS = (_SLOTS, tuple(f"column_{name}" for name in _SLOTS))


def _sides(form: PlanForm) -> list[bool]:
    """Whether each schedule is one of A^T."""
    return [each.of_transpose for each in form.schedules]


class GPUPlan:
    """Memory of a plan, and the kernels that fill it.

    A tensor view costs the host as much as a launch, so kernels get addresses; only arrays that calls read are tensors.

    Attributes:
        form: its arrays and sizes.
        csr: CSR of A and A^T.
        kv_tiles: per pattern with KV tiles [num_tiles + 2, 24] int32, struct KVTile; the last two have no keys.
        tile_offset: per pattern with KV tiles [num_row_windows + 1] int32, first KV tile of each window.
        work_items: per schedule [num_blocks, warps, 56] int32, struct WorkItem (cuda/tiles/forward_params.cuh).
        num_splits: per schedule, at least the number of splits of all windows.
        row_items, row_parts: per pattern (gpu_row_items.py).
        slots: of A, and of A^T if wanted, with edge data: the edges in KV tile order. [num_tiles + 3] int32: first slot
            of each KV tile, nnz after the last; [nnz] int32: edge of each slot, in CSR order of A; [nnz] uint8:
            16 * row + key in the KV tile.
    """

    def __init__(
        self, form: PlanForm, device: torch.device, csr: GPUCSR | None = None, memory: torch.Tensor | None = None
    ) -> None:
        """
        Args:
            csr: filled CSR of another plan of the same graph, to be shared.
            memory: [most_words(...)] int32 for all arrays; None: it is allocated.
        """
        self.form, self.device, self._has_csr = form, device, csr is not None
        edges, sides, shape, part_edges = form.most_edges, form.tile_sides, form.shape, form.part_edges
        item_sides = (1 + form.transposes) if part_edges else 0
        windows = self._windows = [windows_of(rows) for rows in shape[:sides]]
        tiles = [most_tiles_of(edges, rows) for rows in shape[:sides]]
        blocks = [(most_blocks_of(edges, shape[each.of_transpose], each.warps), each.warps) for each in form.schedules]
        items = self._most_items = [most_items_of(edges, rows, part_edges) for rows in shape[:item_sides]]
        parts = most_parts_of(edges, part_edges) if item_sides else 0
        # Sizes in 32-bit words. Arrays read in 16-byte rows come first, then those read in 8-byte rows.
        sizes = [TILE_WORDS * (count + 2) for count in tiles]
        sizes += [ITEM_WORDS * count * warps for count, warps in blocks]
        sizes += [4 * count for count in items]
        sizes += [2 * parts] * item_sides
        wide, places, slot_sides = None, None, min(sides, form.edge_data + form.column_slots)
        if memory is not None:
            wide = GPUCSR.wide_size(shape, form.transposes)
            wide, places, memory = _split_memory(memory, wide, slot_sides * edges)
        if csr is None:
            sizes += GPUCSR.sizes(edges, form.transposes, form.edge_data)
        sizes += [count + 1 for count in windows]
        for count in tiles[:slot_sides]:
            sizes += (count + 3, edges)
        memory, addresses = allocate(sizes, device, memory)
        take, view = iter(addresses).__next__, iter(memory.split_with_sizes(sizes)).__next__
        self._kv_tiles = [take() for _ in tiles]
        self.kv_tiles = [view().view(-1, TILE_WORDS) for _ in tiles]
        self._work_items = [take() for _ in blocks]
        self.work_items = [view().view(count, warps, ITEM_WORDS) for count, warps in blocks]
        self.num_splits = [most_splits_of(edges, shape[each.of_transpose], each) for each in form.schedules]
        self._items, self._parts = [take() for _ in items], [take() for _ in items]
        self.row_items = [view().view(-1, 4) for _ in items]
        self.row_parts = [view().view(-1, 2) for _ in items]
        self.csr = csr or GPUCSR(device, take, view, shape, edges, form.transposes, form.edge_data, wide)
        self._tile_offset = [take() for _ in windows]
        self.tile_offset = [view() for _ in windows]
        if places is None:
            places = torch.empty(slot_sides * edges, dtype=torch.uint8, device=device)
        first_places = places.split(edges)[:slot_sides] if edges else (places,) * slot_sides
        self._slots = [(take(), take(), address_of(each)) for each in first_places]
        self.slots = [(view(), view(), each) for each in first_places]

    @property
    def numbers(self) -> torch.Tensor:
        """[PlanNumber.COUNTS] int64."""
        return self.csr.numbers

    def kernels(self, source: EdgeSource) -> tuple[bool | None, ...]:
        """The kernels of `fill`: arguments of `plan_instances`."""
        ids = (None, None) if self._has_csr else (source.ids.dtype == torch.int64, source.offsets is not None)
        form = self.form
        return *ids, form.transposes, bool(form.schedules), form.part_edges > 0, bool(self.slots)

    def compile_ahead(self, source: EdgeSource, others: Callable[[], list[KernelInstance]] = list) -> None:
        """Begin to compile the kernels of `fill`, and others beside them; once per process for the same kernels."""
        kernels = self.kernels(source)
        begun = *kernels, self.device.index
        if begun not in _begun and self.device.type == "cuda" and not is_capturing(self.device):
            _begun.add(begun)
            compile_ahead([*plan_instances(*kernels), *others()], self.device.index)

    def fill(self, source: EdgeSource, row_ids: torch.Tensor | None = None) -> None:
        """Queue the kernels on torch's current stream.

        Args:
            source: up to `form.most_edges` edges; only read by the queued kernels.
            row_ids: [num_rows] int32, row of query and output of each row of A; None for natural order.
        """
        self.compile_ahead(source)
        form, csr, index, windows = self.form, self.csr, self.device.index, self._windows
        edges, shape, num_schedules, item_sides = form.most_edges, form.shape, len(form.schedules), len(self._items)
        most_blocks = most_windows = words = 0
        if num_schedules:
            most_blocks = max([most_shared_blocks(edges, rows) for rows in shape[: len(windows)]])
            most_windows = max(windows)
            words = (BLOCK_WORDS * most_blocks + WINDOW_WORDS * most_windows + 4) // 4 * 4
        key_words = () if self._has_csr else (2 * num_keys(source, edges, form.transposes),) * (2 + form.transposes)
        sizes = (words * num_schedules, *key_words, *windows, *shape[:item_sides])
        memory, (schedules, *scratch) = allocate(sizes, self.device)  # may be reused by kernels queued later
        keys, scratch = scratch[: len(key_words)], scratch[len(key_words) :]
        row_ids = address_of(row_ids)
        launches, zeros = [], (0, 0)
        if not self._has_csr:
            launches, zeros = csr.launches(source, keys, row_ids, index), csr.zeros
        if num_schedules:
            counts, scratch = scratch[: len(windows)], scratch[len(windows) :]
            launches += self._tile_launches(counts, schedules, most_blocks, most_windows)
        if item_sides:
            launches += self._row_launches(scratch, row_ids)
        if self._slots:
            launches.append(self._slot_launch())
        launch_all(index, launches, zeros)
        del memory  # only now may the allocator reuse it
        if self.device.type == "cuda":
            next_waits(index)  # the attention kernels read a plan before griddepcontrol.wait

    def arrays(self, size: GraphSize, row_ids: torch.Tensor | None) -> Fused3SData:
        """The arrays that calls read, of upper-bound sizes."""
        form, csr, found = self.form, self.csr, {}
        for (tiles, items, splits), side, which in zip(_SCHEDULE_FIELDS, _sides(form), range(3), strict=False):
            found |= {tiles: self.kv_tiles[side], items: self.work_items[which], splits: self.num_splits[which]}
        if form.schedules:
            found |= zip(("tile_offset", "column_tile_offset"), self.tile_offset, strict=False)
        for names, slots in zip(_SLOT_FIELDS, self.slots, strict=False):
            found |= zip(names, slots, strict=True)
        for (items, parts), *arrays in zip(_ITEM_FIELDS, self.row_items, self.row_parts, strict=False):
            found |= zip((items, parts), arrays, strict=True)
        if form.part_edges:
            found["indices"] = csr.indices
        if form.part_edges and form.transposes:
            found |= {"column_rows": csr.column_indices, "column_edges": csr.column_edges}
            found["column_offsets"] = csr.offsets[1]
        return Fused3SData(size, row_ids, edge_ids=csr.edges, **found)

    def exact(self, arrays: Fused3SData, numbers: list[int]) -> Fused3SData:
        """`arrays` of this plan cut to their exact sizes, given its `numbers` after filling."""
        form, found = self.form, {}
        for (tiles, items, splits), side, which in zip(_SCHEDULE_FIELDS, _sides(form), range(3), strict=False):
            of = numbers[PlanNumber.SCHEDULES + SCHEDULE_NUMBERS * which :]
            found[tiles] = getattr(arrays, tiles)[: of[ScheduleNumber.NUM_TILES] + 2]
            found[items] = getattr(arrays, items)[: of[ScheduleNumber.NUM_BLOCKS]]
            found[splits] = of[ScheduleNumber.NUM_SPLITS]
            if which == 0:
                by_warp, split = of[ScheduleNumber.WARP_WINDOWS], of[ScheduleNumber.SPLIT_WINDOWS]
                rule = of[ScheduleNumber.WARP_TILES : ScheduleNumber.SEGMENT + 1]
                found["windows"] = by_warp, self._windows[side] - by_warp - split, split, *rule
        for tiles, (tile_slots, *_), _ in zip(("kv_tiles", "column_tiles"), _SLOT_FIELDS, self.slots, strict=False):
            found[tile_slots] = getattr(arrays, tile_slots)[: len(found[tiles]) + 1]
        for side, (items, parts) in enumerate(_ITEM_FIELDS[: len(self.row_items)]):
            num_parts, num_whole = numbers[PlanNumber.ROW_ITEMS + 2 * side :][:2]
            found[items] = getattr(arrays, items)[: num_parts + num_whole]
            found[parts] = getattr(arrays, parts)[:num_parts]
        return replace(arrays, **found)

    def count_tiles(self) -> int:
        """Number of KV tiles of A, from its CSR. Waits for the GPU."""
        index, windows = self.device.index, windows_of(self.form.shape[0])
        counts = torch.empty(windows, dtype=torch.int32, device=self.device)
        launch_all(index, [self._tiles_launch(COUNT_TILES, [address_of(counts)], [windows], [0])])
        return int(counts.sum())

    def _tile_launches(self, counts: Sequence[int], scratch: int, most_blocks: int, most_windows: int) -> list[Launch]:
        """Launches for KV tiles and schedules.

        Args:
            counts: addresses [num_windows] int32, scratch.
            scratch: address of struct ScheduleScratch of each schedule.
            most_blocks, most_windows: maxima over all schedules.
        """
        index, windows, tiles, num_schedules = self.device.index, self._windows, self._kv_tiles, len(self.work_items)
        kernels = [get_kernel(instance, index) for instance in (PLAN_SCHEDULE, PLAN_ITEMS)]
        params = kernels[0].params
        arrays = elements(tiles=counts, tile_offset=self._tile_offset, kv_tiles=tiles, work_items=self._work_items)
        pointers = params.pack_pointers(arrays | {"numbers": self.csr.address_of_numbers, "scratch": scratch})
        most_items = max(
            [len(items) * each.warps for items, each in zip(self.work_items, self.form.schedules, strict=True)]
        )
        scalars = params.pack_scalars(
            most_blocks=most_blocks,
            most_windows=most_windows,
            many_blocks=MANY_BLOCKS,
            **elements(num_windows=(*windows, 0)[:2]),
            **self._schedule_inputs(),
        )
        grid_of_items = (blocks_of(most_items, ITEM_WARPS), num_schedules, 1)
        return [
            self._tiles_launch(COUNT_TILES, counts, windows, tiles),
            (kernels[0], (num_schedules, 1, 1), SCHEDULE_THREADS, pointers, scalars),
            self._tiles_launch(WRITE_TILES, self._tile_offset, windows, tiles),
            (kernels[1], grid_of_items, ITEM_WARPS * WARP_SIZE, pointers, scalars),
        ]

    def _tiles_launch(
        self, instance: KernelInstance, counts: Sequence[int], windows: Sequence[int], tiles: Sequence[int]
    ) -> Launch:
        """Launch for the KV tiles of A, and of A^T if the sequences have two elements.

        Args:
            counts: addresses of the number of KV tiles per window (output), or of the first KV tile per window.
            tiles: addresses of the KV tiles (output).
        """
        form, csr, sides = self.form, self.csr, len(windows)
        per_block = [SORT_WARPS if form.most_edges <= WARP_EDGES * each else 1 for each in windows]
        kernel, none = get_kernel(instance, self.device.index), (0,) * (2 - sides)
        indices = (csr.address_of_indices, csr.address_of_column_indices)[:sides]
        pointers = kernel.params.pack_pointers(
            elements(tiles=counts, offsets=csr.address_of_offsets[:sides], indices=indices, kv_tiles=tiles)
        )
        rows, columns = form.shape[:sides], form.shape[::-1][:sides]
        scalars = kernel.scalars(
            **elements(num_rows=(*rows, *none), num_cols=(*columns, *none), block_windows=(*per_block, *none))
        )
        grid = (max(map(blocks_of, windows, per_block)), sides, 1)
        return kernel, grid, SORT_WARPS * WARP_SIZE, pointers, scalars

    def _row_launches(self, whole_rows: Sequence[int], row_ids: int) -> list[Launch]:
        """Launches for the row items.

        Args:
            whole_rows: addresses [num_rows] int32 of each pattern, scratch.
            row_ids: address [num_rows] int32, row of query and output of each row of A; 0 for natural order.
        """
        sides, items = len(self._items), self._most_items
        num_rows, none = self.form.shape[:sides], (0,) * (2 - sides)
        kernels = [get_kernel(instance, self.device.index) for instance in (PLAN_PARTS, PLAN_WHOLE_ROWS)]
        params, offsets = kernels[0].params, self.csr.address_of_offsets[:sides]
        arrays = elements(items=self._items, parts=self._parts, offsets=offsets, whole_rows=whole_rows)
        pointers = params.pack_pointers({**arrays, "row_ids": row_ids, "numbers": self.csr.address_of_numbers})
        sizes = elements(num_rows=(*num_rows, *none), most_items=(*items, *none))
        scalars = params.pack_scalars(part_edges=self.form.part_edges, **sizes)
        grid_of_parts = (min(SCAN_BLOCKS, blocks_of(max(num_rows), SCAN_CHUNK)), sides, 1)
        grid_of_rows = (blocks_of(max(items), SORT_SEGMENT), sides, 1)
        grids = (grid_of_parts, PARTS_THREADS), (grid_of_rows, SORT_SEGMENT)
        return [(kernel, *grid, pointers, scalars) for kernel, grid in zip(kernels, grids, strict=True)]

    def _slot_launch(self) -> Launch:
        """Launch for the slots."""
        kernel, windows, csr = get_kernel(PLAN_EDGES, self.device.index), self._windows, self.csr
        sides = len(self._slots)
        slots = dict(zip(_SLOTS, zip(*self._slots, strict=True), strict=True))
        arrays = elements(
            offsets=csr.address_of_offsets, kv_tiles=self._kv_tiles, tile_offset=self._tile_offset, **slots
        )
        pointers = kernel.params.pack_pointers({**arrays, "column_edges": csr.address_of_column_edges})
        sizes = elements(num_windows=(*windows, 0)[:2], num_rows=self.form.shape)
        scalars = kernel.scalars(most_edges=self.form.most_edges, **sizes)
        grid = blocks_of(max(windows[:sides]), SLOT_WARPS), sides, 1
        return kernel, grid, SLOT_WARPS * WARP_SIZE, pointers, scalars

    def _schedule_inputs(self) -> dict[str, int]:
        """Members of struct Params of plan_schedule.cu: ScheduleInputs of each schedule, zeros for unused ones."""
        members, seen = {}, set()
        for which in range(MOST_SCHEDULES):
            values = (0,) * len(SCHEDULE_INPUTS)
            if which < len(self.work_items):
                each = self.form.schedules[which]
                items = self.work_items[which].shape[0] * each.warps
                values = each.of_transpose, each.of_transpose not in seen, each.num_groups, each.warps
                values += (each.resident_warps, items)
                seen.add(each.of_transpose)
            members |= {f"inputs_{which}_{name}": value for name, value in zip(SCHEDULE_INPUTS, values, strict=True)}
        return members
