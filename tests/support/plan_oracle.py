"""Plans of `fused3s` made window by window: what the tests compare the planning kernels with, and plan with on the CPU.

The rules are those that kernels/fused/planning/schedule.py and gpu_row_items.py describe and cuda/plan_*.cu computes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pandas as pd
import pytest
import torch

from bench.baselines.bsb import BSB
from fused3s.backends.base import InputSpec
from fused3s.fused import backend as fused3s
from fused3s.fused.choice import GraphSize
from fused3s.fused.data import Fused3SData
from fused3s.fused.edges import forward as fused3s_edges
from fused3s.fused.plan_state import Fused3SPlan
from fused3s.fused.planning import plan as fused3s_planning
from fused3s.fused.planning.gpu_row_items import SORT_SEGMENT as ITEM_SORT_SEGMENT
from fused3s.fused.planning.schedule import ITEM_WORDS, TILE_KEYS, TILE_WORDS, ScheduleForm
from fused3s.fused.shapes import TILE
from fused3s.fused.tiles import backward as fused3s_backward
from fused3s.fused.tuning import MANY_BLOCKS
from fused3s.graph.csr import CSRPattern, csr_from_edges
from fused3s.graph.edge_list import EdgeList
from fused3s.graph.edges import canonical_csr, rows_of_edges
from fused3s.runtime.device import GPULimits

KBLOCK, KWARP = -2, -1  # kBlock and kWarp of struct WorkItem in cuda/tiles/forward.cu
# int32 words of struct KVTile
KEYS, BITMAP = slice(0, 16), slice(16, 24)
# int32 words of struct WorkItem: the first KV tile, what to do, the second KV tile
FIRST, SECOND = slice(0, 24), slice(32, 56)
BEGIN, COUNT, WINDOW, NUM_KEYS, SPLIT, SPLITS = 24, 25, 26, 27, 28, slice(29, 31)
SORT_SEGMENT = 32  # sorted windows: long enough for blocks of equals, short enough to keep neighbours together


@dataclass(frozen=True)
class SplitHeuristic:
    """Sizes, in KV tiles, that decide who takes a window.

    Attributes:
        warp_tiles: most KV tiles of a window that one warp takes alone.
        split_tiles: most KV tiles of a block.
        sort_segment: neighbouring windows of one warp that are sorted by size among themselves; None: all are sorted,
            and dealt to the blocks in turn.
    """

    warp_tiles: int
    split_tiles: int
    sort_segment: int | None

    @classmethod
    def of(cls, tiles: torch.Tensor, warps: int, resident_warps: int, num_heads: int = 1) -> "SplitHeuristic":
        """The rule fitted to the measurements in kernels/NOTES.md.

        One warp takes windows up to a third larger than the seven-eighths quantile, unless that is much beside its
        share of all tiles: the limit is higher where all windows run at once and lower where they run in waves. A graph
        that cannot fill the GPU shares even small windows. A split gets half more than a block's share of one head: the
        blocks of a head run together, and a longer split would be their last.

        Args:
            tiles: [num_row_windows] KV tiles of each window.
            warps: warps of a block.
            resident_warps: warps that the GPU runs at once.
            num_heads: heads, each with its own blocks.
        """
        if not len(tiles):
            return cls(warp_tiles=1, split_tiles=1, sort_segment=SORT_SEGMENT)
        total, most = torch.stack([tiles.sum(), tiles.max()]).tolist()
        head_share = total / resident_warps
        share = num_heads * head_share
        warp_tiles = 3
        if share >= 2:
            quantile = int(tiles.kthvalue(-(-len(tiles) * 7 // 8)).values)
            waves = num_heads * len(tiles) / resident_warps
            part = 1.4 if waves <= 1 else 0.9 if waves <= 1.4 else 0.7
            warp_tiles = max(2, min(round(1.3 * quantile), int(max(7, min(part * share, 22)))))
        at_once = most <= warp_tiles * warps and num_heads * int((tiles <= warp_tiles).sum()) <= resident_warps
        return cls(
            warp_tiles=warp_tiles,
            split_tiles=int(max(32, min(1.5 * head_share * warps, 256))),
            sort_segment=None if at_once and share < 8 else SORT_SEGMENT,
        )


@dataclass(frozen=True, eq=False)
class Schedule:
    """Work items of all blocks.

    Attributes:
        work_items: [num_blocks, warps, 56] int32 struct WorkItem: the first KV tile of a warp and their number, the
            window, the keys of the last tile; KWARP, KBLOCK or the split, with the first split of the window and their
            number; and copies of the first two KV tiles. Window -1: the warp has nothing to do.
        num_splits: splits of all windows.
        windows: number of windows that one warp, one block, and several blocks take.
        heuristic: the sizes that the windows were shared out by.
    """

    work_items: torch.Tensor
    num_splits: int
    windows: tuple[int, int, int]
    heuristic: SplitHeuristic

    @property
    def windows_and_rule(self) -> tuple[int, ...]:
        """As `GPUPlan.windows` has them."""
        rule = self.heuristic
        return *self.windows, rule.warp_tiles, rule.split_tiles, rule.sort_segment or 0


def make_schedule(kv_tiles: torch.Tensor, tile_offset: torch.Tensor, warps: int, rule: SplitHeuristic) -> Schedule:
    """Schedule for blocks of `warps` warps.

    Args:
        kv_tiles: [num_tiles + 2, 24] int32 from `make_kv_tiles`.
        tile_offset: [num_row_windows + 1] int32, first KV tile of each window (`BSB.tcb_row_offset`).
    """
    begin, count = tile_offset.tolist(), [*tile_offset.diff().tolist(), 0]  # of window -1, too, which stands for none
    alone = [window for window, tiles in enumerate(count[:-1]) if tiles <= rule.warp_tiles]
    blocks, num_splits, num_split_windows = [], 0, 0
    for window, tiles in enumerate(count):
        if tiles <= rule.warp_tiles:
            continue
        bounds = _evenly(0, tiles, -(-tiles // rule.split_tiles))
        splits = len(bounds) - 1
        for index, (first, end) in enumerate(pairwise(bounds)):
            split = (num_splits + index, num_splits, splits) if splits > 1 else (KBLOCK, 0, 0)
            blocks.append((begin[window] + first, end - first, window, *split))
        num_splits += splits if splits > 1 else 0
        num_split_windows += splits > 1

    def leads(block: tuple[int, ...]) -> bool:
        return block[1] > rule.warp_tiles * warps

    many = len(blocks) > MANY_BLOCKS  # sorted by powers of two alone
    blocks.sort(key=lambda block: 64 * leads(block) + block[1].bit_length() if many else block[1], reverse=True)
    items = {True: [], False: []}
    for block in blocks:
        start, size, *rest = block
        bounds = [start - (-size * warp // warps) for warp in range(warps + 1)]
        items[leads(block)] += [(first, end - first, *rest) for first, end in pairwise(bounds)]
    of_warps = [(begin[window], count[window], window, KWARP, 0, 0) for window in _in_blocks(alone, count, warps, rule)]
    table = torch.tensor(items[True] + of_warps + items[False], dtype=torch.int64).view(-1, 6).to(kv_tiles.device)
    work_items = _work_items(kv_tiles, table).view(-1, warps, ITEM_WORDS)
    by_block = len(count) - 1 - len(alone) - num_split_windows
    return Schedule(work_items, num_splits, (len(alone), by_block, num_split_windows), rule)


def _evenly(first: int, size: int, parts: int) -> list[int]:
    return [first + size * part // parts for part in range(parts + 1)]


def _in_blocks(windows: list[int], count: list[int], warps: int, rule: SplitHeuristic) -> list[int]:
    """The windows that one warp takes, for whole blocks: largest first in each segment, -1 for warps without one."""
    segment = rule.sort_segment or max(1, len(windows))
    parts = (windows[start : start + segment] for start in range(0, len(windows), segment))
    by_size = [window for part in parts for window in sorted(part, key=lambda window: -count[window])]
    by_size += [-1] * (-len(by_size) % warps)
    if rule.sort_segment is not None:
        return by_size
    num_blocks = len(by_size) // warps  # dealt to the blocks in turn, there and back
    rounds = [by_size[start : start + num_blocks] for start in range(0, len(by_size), num_blocks or 1)]
    for each in rounds[:-1:2]:  # only the last blocks have fewer
        each.reverse()
    return [window for block in zip(*rounds, strict=True) for window in block]


def _work_items(kv_tiles: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """[num_warps, 56] struct WorkItem of [num_warps, 6]: first tile, tiles, window, split, first split, splits."""
    begin, count, window, *split = items.T
    first, second, last = kv_tiles[torch.stack([begin, begin + 1, begin + count - 1])]
    num_keys = (last[:, KEYS] >= 0).sum(1)
    words = torch.stack([begin, count, window, num_keys, *split, torch.zeros_like(begin)], 1).int()
    return torch.cat([first, words, second], 1)


def make_kv_tiles(columns: torch.Tensor, bitmap: torch.Tensor) -> torch.Tensor:
    """[num_tiles + 2, 24] int32 struct KVTile: 16 keys, -1 past the last, and the bitmap; the last two have no keys.

    Args:
        columns: [16 num_tiles] int32, `BSB.col_sparse_to_dense`.
        bitmap: [num_tiles, 16, 2] uint8, `BSB.bitmap`.
    """
    num_tiles = bitmap.shape[0]
    tiles = torch.full((num_tiles + 2, TILE_WORDS), -1, dtype=torch.int32, device=bitmap.device)
    slot = torch.arange(TILE_KEYS, dtype=torch.int16, device=bitmap.device)
    occupied = (bitmap.view(torch.int16) >> slot & 1 == 1).any(1)  # no row has a slot that pads
    tiles[:num_tiles, KEYS] = torch.where(occupied, columns.view(-1, TILE_KEYS), -1)
    # A word has row g of the bitmap in its lower half and row g + 8 in its upper half.
    row_pairs = bitmap.view(-1, 2, 8, 2).transpose(1, 2).reshape(-1, 32)
    tiles[:num_tiles, BITMAP] = row_pairs.view(torch.int32)
    return tiles


def make_tile_slots(kv_tiles: torch.Tensor, tile_offset: torch.Tensor) -> dict[str, torch.Tensor]:
    """Where the edges are in the arrays of `make_kv_tiles`; those of a KV tile are consecutive slots.

    Returns:
        tile_slots: [num_tiles + 3] int32, first slot of each KV tile; nnz behind the last.
        slot_edges: [nnz] int32, the edge of each slot, in CSR order.
        slot_places: [nnz] uint8, 16 * row + key in the KV tile.
    """
    bit = torch.arange(32, dtype=torch.int32, device=kv_tiles.device)
    tile, g, half_and_key = torch.nonzero(kv_tiles[:-2, BITMAP, None] >> bit & 1, as_tuple=True)
    row = g + 8 * (half_and_key // 16)
    window = torch.arange(len(tile_offset) - 1, device=bit.device).repeat_interleave(tile_offset.diff())
    slot_edges = torch.empty_like(row, dtype=torch.int32)
    # A stable sort of the slots by row is CSR order: KV tiles ascend in a row, and keys in a KV tile.
    by_row = torch.sort(16 * window[tile] + row, stable=True).indices
    slot_edges[by_row] = torch.arange(len(row), dtype=torch.int32, device=bit.device)
    per_tile = torch.bincount(tile, minlength=kv_tiles.shape[0])
    tile_slots = torch.nn.functional.pad(per_tile.cumsum(0), (1, 0)).int()
    places = (16 * row + half_and_key % 16).byte()
    return {"tile_slots": tile_slots, "slot_edges": slot_edges, "slot_places": places}


def make_row_items(
    indptr: torch.Tensor, row_ids: torch.Tensor | None, part_edges: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Items of a CSR pattern: the parts of rows with more than `part_edges` edges, then whole rows, by segments.

    Args:
        indptr: [num_rows + 1] int64.
        row_ids: [num_rows] int32, row of query and output of each row; None for rows in their own order.

    Returns:
        items: [num_items, 4] int32 struct Item: row, first edge, number of edges, part (-1: the whole row).
        parts: [num_parts, 2] int32: first part of the row, and the number of its parts.
    """
    rows = range(len(indptr) - 1) if row_ids is None else row_ids.tolist()
    shared, parts, whole = [], [], []
    for row, (first, end) in zip(rows, pairwise(indptr.tolist()), strict=False):  # row_ids may be longer
        if end - first <= part_edges:
            whole.append((row, first, end - first, -1))
            continue
        bounds, number = _evenly(first, end - first, -(-(end - first) // part_edges)), len(parts)
        shared += [(row, a, b - a, number + index) for index, (a, b) in enumerate(pairwise(bounds))]
        parts += [(number, len(bounds) - 1)] * (len(bounds) - 1)
    segments = (whole[start : start + ITEM_SORT_SEGMENT] for start in range(0, len(whole), ITEM_SORT_SEGMENT))
    alone = [item for segment in segments for item in sorted(segment, key=lambda item: -item[2])]
    tables = ((shared + alone, 4), (parts, 2))
    return tuple(torch.tensor(table, dtype=torch.int32).view(-1, n).to(indptr.device) for table, n in tables)


def transpose_csr(
    indptr: torch.Tensor, indices: torch.Tensor, num_cols: int, row_ids: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """A^T of a pattern in the order of `canonical_csr`.

    Args:
        indptr: [num_rows + 1] int64; indices: [nnz] int32.
        row_ids: [num_rows] int32, row of A of each row of the pattern; None for rows in their own order.

    Returns:
        indptr: [num_cols + 1] int64.
        rows: [nnz] int32, row of A of each edge; in each column the rows ascend, then once more those of the edges
            that repeat one, and so on.
        edges: [nnz] int32, place of each edge in the CSR of A.
    """
    row = rows_of_edges(indptr, len(indices)).cpu().numpy()
    row = row if row_ids is None else row_ids.cpu().numpy()[row].astype(np.int64)
    edges = pd.DataFrame({"row": row, "col": indices.cpu().numpy()})
    order = np.lexsort((edges["row"], edges.groupby(["row", "col"]).cumcount(), edges["col"]))
    offsets = np.concatenate([[0], np.bincount(edges["col"], minlength=num_cols).cumsum()]).astype(np.int64)
    arrays = (offsets, row[order].astype(np.int32), order.astype(np.int32))
    return tuple(torch.from_numpy(array).to(indptr.device) for array in arrays)


def tiles_of_csr(indptr: torch.Tensor, indices: torch.Tensor, num_cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(KV tiles [num_tiles + 2, 24] int32, first KV tile of each window [num_windows + 1] int32)."""
    bsb = BSB.from_csr(indptr, indices, num_cols, TILE)
    return make_kv_tiles(bsb.col_sparse_to_dense, bsb.bitmap), bsb.tcb_row_offset


def schedule_of_form(form: ScheduleForm, kv_tiles: torch.Tensor, tile_offset: torch.Tensor) -> Schedule:
    """The schedule under the fitted rule."""
    heuristic = SplitHeuristic.of(tile_offset.diff(), form.warps, form.resident_warps, form.num_groups)
    return make_schedule(kv_tiles, tile_offset, form.warps, heuristic)


def with_schedule(data: Fused3SData, schedule: Schedule) -> Fused3SData:
    """The plan with another schedule of the forward pass."""
    return replace(
        data, work_items=schedule.work_items, num_splits=schedule.num_splits, windows=schedule.windows_and_rule
    )


def with_pass_schedules(data: Fused3SData, by_row: Schedule, by_column: Schedule) -> Fused3SData:
    """The plan with other schedules of the backward pass over KV tiles."""
    return replace(
        data,
        row_work_items=by_row.work_items,
        row_splits=by_row.num_splits,
        column_work_items=by_column.work_items,
        column_splits=by_column.num_splits,
    )


def row_item_arrays(indptr: torch.Tensor, row_ids: torch.Tensor | None, part_edges: int) -> dict[str, torch.Tensor]:
    return dict(zip(("row_items", "row_parts"), make_row_items(indptr, row_ids, part_edges), strict=True))


def transposed_arrays(transposed: tuple[torch.Tensor, ...], part_edges: int) -> dict[str, torch.Tensor]:
    names = ("column_offsets", "column_rows", "column_edges", "column_items", "column_parts")
    return dict(zip(names, (*transposed, *make_row_items(transposed[0], None, part_edges)), strict=True))


def data_by_edge(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    shape: tuple[int, int],
    row_ids: torch.Tensor | None,
    part_edges: int,
) -> Fused3SData:
    """What both passes edge by edge read of a canonical CSR, in items of at most `part_edges` edges."""
    arrays = row_item_arrays(indptr, row_ids, part_edges)
    arrays |= transposed_arrays(transpose_csr(indptr, indices, shape[1], row_ids), part_edges)
    return Fused3SData(GraphSize(*shape, len(indices)), indices=indices, **arrays)


def expected_plan(
    graph: CSRPattern | EdgeList,
    device: torch.device,
    inputs: InputSpec,
    forward: Callable[[int], ScheduleForm],
    perm: torch.Tensor | None = None,
    calls: object = None,
) -> Fused3SPlan:
    """In place of `fused3s_planning.plan_graph`, on any device; it raises for damaged graphs, and numbers no edges."""
    offsets, indices = canonical_csr(csr_from_edges(graph) if isinstance(graph, EdgeList) else graph, device)
    (num_rows, num_cols), num_edges = graph.shape, indices.numel()
    size = GraphSize(num_rows, num_cols, num_edges)
    tiles = tiles_of_csr(offsets, indices, num_cols)
    form = fused3s_planning.form_of(size, device, inputs, forward)
    if form is None:
        size = size._replace(num_tiles=len(tiles[0]) - 2)
        form = fused3s_planning.form_of(size, device, inputs, forward)
    rows = row_ids = None
    if perm is not None:
        rows = perm.to(device)
        row_ids = torch.nn.functional.pad(rows, (0, -num_rows % TILE[0]), value=num_rows)
    data = Fused3SData(size, row_ids)
    if form.schedules:
        kv_tiles, tile_offset = tiles
        data = replace(data, kv_tiles=kv_tiles, tile_offset=tile_offset)
        data = with_schedule(data, schedule_of_form(form.schedules[0], *tiles))
        if inputs.edge_data:
            data = replace(data, **make_tile_slots(*tiles))
    transposed = transpose_csr(offsets, indices, num_cols, rows) if inputs.backward else None
    if len(form.schedules) == 3:
        column_tiles = tiles_of_csr(*transposed[:2], num_rows)
        by_row, by_column = form.schedules[1:]
        schedules = schedule_of_form(by_row, *tiles), schedule_of_form(by_column, *column_tiles)
        data = with_pass_schedules(data, *schedules)
        data = replace(data, column_tiles=column_tiles[0], column_tile_offset=column_tiles[1])
        if form.column_slots:
            slots = make_tile_slots(*column_tiles)
            slots["slot_edges"] = transposed[2][slots["slot_edges"]]
            data = replace(data, **{f"column_{name}": each for name, each in slots.items()})
    if form.part_edges:
        data = replace(data, indices=indices, **row_item_arrays(offsets, rows, form.part_edges))
        if inputs.backward:
            data = replace(data, **transposed_arrays(transposed, form.part_edges))
    return Fused3SPlan(data)


def plan_on_cpu(patch: pytest.MonkeyPatch, limits: GPULimits) -> None:
    """Make `fused3s` plan by this module, for a GPU with such limits."""
    patch.setattr(fused3s, "plan_graph", expected_plan)
    for module in (fused3s, fused3s_backward, fused3s_edges, fused3s_planning):
        patch.setattr(module, "gpu_limits", lambda device: limits)
