"""KV tiles and schedules of a CSR pattern by CUDA kernels; the same bits as `formats/bsb.py` and `formats/schedule.py`.

    plan_tiles<kWrite = false>   KV tiles of each row window
    plan_schedule                first KV tile of each window, heuristic, order of the blocks; of all schedules
    plan_reverse                 whether the pattern is symmetric, and the reverse of each edge; where asked for
    plan_parts, plan_whole_rows  items of the rows (formats/gpu_row_items.py); where asked for
    plan_tiles<kWrite = true>    the KV tiles
    plan_items                   the work items of a schedule

The host waits once, in `QueuedPlan.sizes`: only the GPU knows the sizes of the KV tiles and of the work items. What it
queues after that is complete after `gpu_schedule.wait_for`.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch

from ..fragments import WARP_SIZE
from ..runtime.jit import cpp_name, get_kernel
from ..runtime.launch import launch_kernel
from .gpu_reverse import MOST_EDGES, is_symmetric, queue_reverse
from .gpu_row_items import QueuedRowItems, queue_row_items
from .gpu_schedule import PlanNumber, QueuedSchedules, ScheduleInputs, grid_of, queue_schedules
from .row_items import RowItems
from .schedule import TILE_KEYS, TILE_WORDS, Schedule

WINDOW_ROWS = 16
MAX_ROWS = 1 << 30
MAX_COLS = 1 << 28  # a sort key holds a column and a row of the window in 32 bits
MAX_TILES = 2**31 - 1
TILE_WARPS, WARP_EDGES = 8, 512  # as in cuda/plan_tiles.cu: warps of a block, most edges of a window of one warp
TILE_SCALARS = struct.Struct("<q3i4x")  # behind the pointers of struct Params


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


COUNT_TILES = {wide: PlanTilesSpec(wide, writes=False) for wide in (False, True)}
WRITE_TILES = {wide: PlanTilesSpec(wide, writes=True) for wide in (False, True)}


@dataclass(frozen=True)
class PlanSizes:
    """What the host learns of a plan.

    Attributes:
        num_tiles: KV tiles.
        is_distinct: whether the columns of each row ascend strictly, as `edges.is_distinct` says.
        is_symmetric: whether the pattern is distinct and equal to its transpose; False where that was not asked for.
        schedules: of each schedule the numbers by PlanNumber.
        row_items: parts of rows, and rows without parts, of a distinct pattern; () where not asked for.
    """

    num_tiles: int
    is_distinct: bool
    is_symmetric: bool
    schedules: Sequence[Sequence[int]]
    row_items: Sequence[int]


@dataclass(frozen=True, eq=False)
class QueuedPlan:
    """A plan whose sizes are being computed, see `queue_plan`.

    Attributes:
        indptr: [num_rows + 1] int64; indices: [nnz] int32 or int64; contiguous, on the GPU.
        shape: (num_rows, num_cols).
        schedules: of the pattern.
        reverse: [nnz] int32, place of the reverse of each edge, if the pattern is symmetric; None if not asked for.
        row_items: None if not asked for.
        numbers: [schedules, 16] int64, by PlanNumber, and those of the row items in a row behind.
        looks_for_symmetry: whether plan_reverse was queued.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    shape: tuple[int, int]
    schedules: QueuedSchedules
    reverse: torch.Tensor | None
    row_items: QueuedRowItems | None
    numbers: torch.Tensor
    looks_for_symmetry: bool

    @property
    def tile_offset(self) -> torch.Tensor:
        """[num_row_windows + 1] int32, as `BSB.tcb_row_offset`."""
        return self.schedules.tile_offset

    def sizes(self) -> PlanSizes | None:
        """Wait for the sizes; None where the CSR is damaged."""
        numbers = self.numbers.tolist()
        first = numbers[0]
        if first[PlanNumber.DAMAGE]:
            return None
        row_items = numbers.pop()[:2] if self.row_items else ()
        return PlanSizes(
            first[PlanNumber.NUM_TILES],
            bool(first[PlanNumber.IS_DISTINCT]),
            self.looks_for_symmetry and is_symmetric(first),
            numbers,
            row_items,
        )

    def write_tiles(self, sizes: PlanSizes) -> torch.Tensor:
        """[num_tiles + 2, 24] int32, as `make_kv_tiles` returns it; queued."""
        kv_tiles = torch.empty((sizes.num_tiles + 2, TILE_WORDS), dtype=torch.int32, device=self.indptr.device)
        arrays = (self.tile_offset, self.indptr, self.indices, kv_tiles, self.schedules.numbers[0])
        _launch_tiles(WRITE_TILES, arrays, self.shape)
        return kv_tiles

    def schedule(self, which: int, sizes: PlanSizes, kv_tiles: torch.Tensor) -> Schedule:
        """As `make_schedule` returns it; queued."""
        return self.schedules.schedule(which, sizes.schedules[which], kv_tiles)

    def rows(self, sizes: PlanSizes) -> RowItems:
        """As `make_row_items` returns it; queued. For distinct patterns."""
        return self.row_items.items(*sizes.row_items)

    def num_distinct(self, sizes: PlanSizes) -> int:
        """Distinct edges. Waits for `write_tiles` where the pattern is not distinct."""
        repeated = 0 if sizes.is_distinct else int(self.schedules.numbers[0][PlanNumber.DUPLICATES])
        return self.indices.numel() - repeated


def queue_plan(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    shape: tuple[int, int],
    inputs: Sequence[ScheduleInputs],
    *,
    looks_for_symmetry: bool = False,
    wants_reverse: bool = False,
    part_edges: int = 0,
    row_ids: torch.Tensor | None = None,
) -> QueuedPlan | None:
    """Queue the kernels that find the sizes of a plan, on torch's current stream.

    Args:
        indptr: [num_rows + 1] int32 or int64, on a GPU.
        indices: [nnz] int32 or int64, on the same GPU; columns may be unsorted and repeated.
        shape: (num_rows, num_cols).
        inputs: of each schedule, up to MOST_SCHEDULES.
        looks_for_symmetry: find out whether A is symmetric.
        wants_reverse: with it, the place of the reverse of each edge.
        part_edges: most edges of a row item; 0 for no row items.
        row_ids: [num_rows] int32, of the row items.

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
    tiles = torch.empty(num_windows, dtype=torch.int32, device=indptr.device)
    _launch_tiles(COUNT_TILES, (tiles, indptr, indices, None, None), shape)

    count = len(inputs) + (1 if part_edges else 0)
    numbers = torch.empty((count, len(PlanNumber)), dtype=torch.int64, device=indptr.device)
    schedules = queue_schedules(tiles, num_windows, most_tiles, inputs, numbers, has_offsets=False)
    first, last = schedules.numbers[0], schedules.numbers[-1]
    looks_for_symmetry = looks_for_symmetry and num_rows == num_cols and num_edges <= MOST_EDGES
    reverse = row_items = None
    if looks_for_symmetry:
        if wants_reverse:
            reverse = torch.empty(num_edges, dtype=torch.int32, device=indptr.device)
        queue_reverse(indptr, indices, first, reverse)
    if part_edges:
        row_items = queue_row_items(indptr, num_edges, row_ids, part_edges, last, first)
    return QueuedPlan(indptr, indices, shape, schedules, reverse, row_items, numbers, looks_for_symmetry)


@dataclass(frozen=True, eq=False)
class GPUPlan:
    """What `make_gpu_plan` returns. The arrays are queued.

    Attributes:
        kv_tiles: [num_tiles + 2, 24] int32, as `make_kv_tiles` returns it.
        tile_offset: [num_row_windows + 1] int32, as `BSB.tcb_row_offset`.
        schedule: as `make_schedule` returns it.
    """

    kv_tiles: torch.Tensor
    tile_offset: torch.Tensor
    schedule: Schedule


def make_gpu_plan(
    indptr: torch.Tensor, indices: torch.Tensor, shape: tuple[int, int], inputs: ScheduleInputs
) -> GPUPlan | None:
    """KV tiles and one schedule of a CSR pattern; arguments as for `queue_plan`, and None where it has none."""
    queued = queue_plan(indptr, indices, shape, (inputs,))
    sizes = queued and queued.sizes()
    if sizes is None:
        return None
    kv_tiles = queued.write_tiles(sizes)
    return GPUPlan(kv_tiles, queued.tile_offset, queued.schedule(0, sizes, kv_tiles))


def _is_csr(indptr: torch.Tensor, indices: torch.Tensor, num_rows: int) -> bool:
    """Whether shapes and types are those of a CSR pattern."""
    one_dimensional = indptr.dim() == indices.dim() == 1 and indptr.numel() == num_rows + 1
    return one_dimensional and {indptr.dtype, indices.dtype} <= {torch.int32, torch.int64}


def _launch_tiles(
    specs: dict[bool, PlanTilesSpec], arrays: tuple[torch.Tensor | None, ...], shape: tuple[int, int]
) -> None:
    """`arrays`: the pointers of struct Params."""
    _, indptr, indices, *_ = arrays
    num_edges, num_windows = indices.numel(), -(-shape[0] // WINDOW_ROWS)
    block_windows = TILE_WARPS if num_edges <= WARP_EDGES * num_windows else 1
    launch_kernel(
        get_kernel(specs[indices.dtype == torch.int64], indptr.device.index),
        grid_of(num_windows, block_windows),
        TILE_WARPS * WARP_SIZE,
        arrays,
        TILE_SCALARS.pack(num_edges, *shape, block_windows),
    )
