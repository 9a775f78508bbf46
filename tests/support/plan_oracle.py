"""Plans of `fused3s` by torch: what the tests compare the planning kernels with, and plan with on the CPU.

The rules are those that kernels/formats/schedule.py and gpu_row_items.py describe and cuda/plan_*.cu computes.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from kernels.backends import fused3s, fused3s_backward, fused3s_edges, fused3s_planning
from kernels.backends.base import InputSpec
from kernels.backends.fused3s_data import Fused3SData
from kernels.backends.fused3s_shapes import TILE
from kernels.backends.kernel_choice import GraphSize
from kernels.formats.bsb import BSB
from kernels.formats.csr import CSRPattern, csr_from_edges
from kernels.formats.edge_list import EdgeList
from kernels.formats.edges import canonical_csr, rows_of_edges
from kernels.formats.gpu_row_items import SORT_SEGMENT as ITEM_SORT_SEGMENT
from kernels.formats.schedule import ITEM_WORDS, MANY_BLOCKS, TILE_KEYS, TILE_WORDS, ScheduleForm
from kernels.runtime.device import GPULimits

KBLOCK, KWARP = -2, -1  # kBlock and kWarp of struct WorkItem in cuda/fused3s.cu
# int32 words of struct KVTile
KEYS, BITMAP = slice(0, 16), slice(16, 24)
TILES_AT_A_TIME = 1 << 22  # copied to KV tiles at a time: about 0.8 GB of scratch memory
DECODED_TILES = 1 << 18  # decoded to edges at a time: about 0.5 GB of scratch memory
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
        num_splits: splits of all windows, or more.
        windows: number of windows that one warp, one block, and several blocks take; None where the host does not know.
        heuristic: the sizes that the windows were shared out by; likewise.
    """

    work_items: torch.Tensor
    num_splits: int
    windows: tuple[int, int, int] | None
    heuristic: SplitHeuristic | None

    @property
    def windows_and_rule(self) -> tuple[int, ...]:
        """As `GPUPlan.windows` has them."""
        rule = self.heuristic
        return *self.windows, rule.warp_tiles, rule.split_tiles, rule.sort_segment or 0

    @property
    def num_blocks(self) -> int:
        return self.work_items.shape[0]

    @property
    def warps(self) -> int:
        """Warps of a block."""
        return self.work_items.shape[1]


def make_schedule(kv_tiles: torch.Tensor, tile_offset: torch.Tensor, warps: int, heuristic: SplitHeuristic) -> Schedule:
    """Schedule for blocks of `warps` warps. Its arrays are complete on the device when it returns.

    Args:
        kv_tiles: [num_tiles + 2, 24] int32 from `make_kv_tiles`.
        tile_offset: [num_row_windows + 1] int32, first KV tile of each window (`BSB.tcb_row_offset`).
    """
    begin = tile_offset.long()
    count = begin.diff(append=begin[-1:])  # with a 0 for window -1, which stands for no window
    by_warp = count[:-1] <= heuristic.warp_tiles
    shared, num_leading, num_splits, num_split_windows = _block_items(
        torch.nonzero(~by_warp)[:, 0], begin, count, heuristic, warps
    )
    alone = _warp_items(torch.nonzero(by_warp)[:, 0], begin, count, heuristic, warps)
    items = torch.cat([shared[:, : num_leading * warps], alone, shared[:, num_leading * warps :]], 1)
    work_items = _work_items(kv_tiles, items).view(-1, warps, ITEM_WORDS)
    # Reading these numbers waits for the arrays, too: the kernel reads them before griddepcontrol.wait.
    num_splits, num_split_windows, num_by_warp = torch.stack([num_splits, num_split_windows, by_warp.sum()]).tolist()
    num_by_block = len(by_warp) - num_by_warp - num_split_windows
    return Schedule(work_items, num_splits, (num_by_warp, num_by_block, num_split_windows), heuristic)


def make_kv_tiles(columns: torch.Tensor, bitmap: torch.Tensor) -> torch.Tensor:
    """[num_tiles + 2, 24] int32 struct KVTile: 16 keys, -1 past the last, and the bitmap; the last two have no keys.

    Args:
        columns: [16 num_tiles] int32, `BSB.col_sparse_to_dense`.
        bitmap: [num_tiles, 16, 2] uint8, `BSB.bitmap`.
    """
    columns, num_tiles = columns.view(-1, TILE_KEYS), bitmap.shape[0]
    tiles = torch.empty((num_tiles + 2, TILE_WORDS), dtype=torch.int32, device=bitmap.device)
    tiles[num_tiles:] = -1
    slot = torch.arange(TILE_KEYS, dtype=torch.int16, device=bitmap.device)
    for first in range(0, num_tiles, TILES_AT_A_TIME):
        part = slice(first, min(first + TILES_AT_A_TIME, num_tiles))
        occupied = bitmap[part].view(torch.int16).squeeze(-1)  # a row's bits of the slots
        for rows in (8, 4, 2, 1):
            occupied = occupied[:, :rows] | occupied[:, rows:]
        tiles[part, KEYS] = torch.where(occupied >> slot & 1 == 1, columns[part], -1)  # no row has a slot that pads
        # A word has row g of the bitmap in its lower half and row g + 8 in its upper half.
        row_pairs = bitmap[part].view(-1, 2, 8, 2).transpose(1, 2).reshape(-1, 32)
        tiles[part, BITMAP] = row_pairs.view(torch.int32)
    return tiles


def csr_of_tiles(kv_tiles: torch.Tensor, tile_offset: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(indptr [16 num_row_windows + 1] int64, indices [nnz] int32) of the matrix in `make_kv_tiles`'s arrays."""
    row, tile, place = _edges_of_tiles(kv_tiles, tile_offset)
    row, by_row = torch.sort(row, stable=True)
    counts = torch.bincount(row, minlength=16 * (len(tile_offset) - 1))
    indices = kv_tiles[tile[by_row], (place[by_row] % 16).long()]
    return torch.nn.functional.pad(counts.cumsum(0), (1, 0)), indices


@dataclass(frozen=True, eq=False)
class TileSlots:
    """Where the edges are in the KV tiles; those of a KV tile are consecutive slots.

    Attributes:
        tile_slots: [num_tiles + 3] int32, first slot of each KV tile; nnz behind the last.
        slot_edges: [nnz] int32, the edge of each slot, in CSR order.
        slot_places: [nnz] uint8, 16 * row + key in the KV tile.
    """

    tile_slots: torch.Tensor
    slot_edges: torch.Tensor
    slot_places: torch.Tensor


def make_tile_slots(kv_tiles: torch.Tensor, tile_offset: torch.Tensor) -> TileSlots:
    """Slots of the arrays of `make_kv_tiles`."""
    row, tile, place = _edges_of_tiles(kv_tiles, tile_offset)
    slot_edges = torch.empty_like(row, dtype=torch.int32)
    # A stable sort of the slots by row is CSR order: KV tiles ascend in a row, and keys in a KV tile.
    slot_edges[torch.sort(row, stable=True).indices] = torch.arange(len(row), dtype=torch.int32, device=row.device)
    per_tile = torch.bincount(tile, minlength=kv_tiles.shape[0])
    return TileSlots(torch.nn.functional.pad(per_tile.cumsum(0), (1, 0)).int(), slot_edges, place)


def _edges_of_tiles(
    kv_tiles: torch.Tensor, tile_offset: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Row [nnz] int64, KV tile [nnz] int64 and place [nnz] uint8 of all edges, KV tile by KV tile."""
    num_tiles, device = kv_tiles.shape[0] - 2, kv_tiles.device
    bit = torch.arange(32, device=device, dtype=torch.int32)
    window = torch.arange(len(tile_offset) - 1, device=device).repeat_interleave(tile_offset.diff())
    none = torch.empty(0, dtype=torch.int64, device=device)
    rows, tiles, places = [none], [none], [none.byte()]
    for first in range(0, num_tiles, DECODED_TILES):
        part = kv_tiles[first : min(first + DECODED_TILES, num_tiles)]
        tile, g, half_and_key = torch.nonzero(part[:, BITMAP, None] >> bit & 1, as_tuple=True)
        row = g + 8 * (half_and_key // 16)
        tiles.append(tile + first)
        rows.append(16 * window[first + tile] + row)
        places.append((16 * row + half_and_key % 16).byte())
    return torch.cat(rows), torch.cat(tiles), torch.cat(places)


def _block_items(
    windows: torch.Tensor, begin: torch.Tensor, count: torch.Tensor, heuristic: SplitHeuristic, warps: int
) -> tuple[torch.Tensor, int, torch.Tensor, torch.Tensor]:
    """Items of the windows that blocks share, as `_work_items` wants them: a block for each split, most tiles first
    (by powers of two among many blocks); the number of blocks with more than `warp_tiles` a warp; the number of splits,
    and of windows with several.
    """
    total = count[windows]
    splits = (total + (heuristic.split_tiles - 1)) // heuristic.split_tiles
    of_window = torch.stack([windows, begin[windows], total, splits, splits.cumsum(0) - splits])
    window, start, total, num_splits, first = torch.repeat_interleave(of_window, splits, dim=1)
    index = torch.arange(len(window), device=begin.device) - first
    offset = total * index // num_splits
    size = total * (index + 1) // num_splits - offset
    is_split = num_splits > 1
    number = is_split.cumsum(0) - 1
    split = torch.where(is_split, number, KBLOCK)
    leads = size > heuristic.warp_tiles * warps
    order = size if len(size) <= MANY_BLOCKS else leads * 64 + torch.log2(size.double()).floor()
    by_size = torch.argsort(order, descending=True, stable=True)
    blocks = torch.stack([start + offset, size, window, split, (number - index) * is_split, num_splits * is_split])
    start, size, *rest = blocks[:, by_size, None]

    steps = torch.arange(warps + 1, device=begin.device)
    bounds = start + (size * steps + (warps - 1)) // warps
    items = torch.stack([each.expand(-1, warps) for each in (bounds[:, :-1], bounds.diff(dim=1), *rest)])
    return items.flatten(1), int(leads.sum()), is_split.sum(), (splits > 1).sum()


def _warp_items(
    windows: torch.Tensor, begin: torch.Tensor, count: torch.Tensor, heuristic: SplitHeuristic, warps: int
) -> torch.Tensor:
    """Items of the windows that one warp takes, as `_work_items` wants them, for whole blocks."""
    segment = torch.arange(len(windows), device=begin.device) // (heuristic.sort_segment or max(1, len(windows)))
    by_size = torch.argsort(segment * (heuristic.warp_tiles + 1) - count[windows], stable=True)
    window = windows.new_full((-(-len(windows) // warps), warps), -1)
    window.view(-1)[: len(windows)] = windows[by_size]
    if heuristic.sort_segment is None:  # dealt to the blocks in turn, there and back
        rounds = window.view(warps, -1)
        rounds[:-1:2] = rounds[:-1:2].flip(1)  # only the last blocks have fewer
        window = rounds.T
    window = window.flatten()
    none = torch.zeros_like(window)
    return torch.stack([begin[window], count[window], window, none + KWARP, none, none])


def _work_items(kv_tiles: torch.Tensor, items: torch.Tensor) -> torch.Tensor:
    """[num_warps, 56] struct WorkItem.

    Args:
        items: [6, num_warps] int64: first tile, number of tiles, window, split, first split and number of splits.
    """
    begin, count, window, *split = items
    first, second, last = kv_tiles[torch.stack([begin, begin + 1, begin + count - 1])]
    num_keys = (last[:, KEYS] >= 0).sum(1)
    words = torch.stack([begin, count, window, num_keys, *split, torch.zeros_like(begin)], 1).int()
    return torch.cat([first, words, second], 1)


@dataclass(frozen=True, eq=False)
class RowItems:
    """Items of all rows.

    Attributes:
        items: [num_items, 4] int32 struct Item: row, first edge, number of edges, part (-1: the whole row).
        parts: [num_parts, 2] int32: first part of the row, and the number of its parts.
        part_edges: most edges of an item.
    """

    items: torch.Tensor
    parts: torch.Tensor
    part_edges: int


def make_row_items(indptr: torch.Tensor, row_ids: torch.Tensor | None, part_edges: int) -> RowItems:
    """Items of a CSR pattern. The arrays are complete on the device when it returns.

    Args:
        indptr: [num_rows + 1] int64.
        row_ids: [num_rows] int32, row of query and output of each row; None for rows in their own order.
        part_edges: most edges of an item.
    """
    count = indptr.diff()
    rows = torch.arange(len(count), device=indptr.device)
    num_parts = ((count + (part_edges - 1)) // part_edges).clamp(min=1)
    is_long = num_parts > 1

    long_rows = torch.nonzero(is_long)[:, 0]
    parts_of_row = num_parts[long_rows]
    row, parts, first_part = torch.repeat_interleave(
        torch.stack([long_rows, parts_of_row, parts_of_row.cumsum(0) - parts_of_row]), parts_of_row, dim=1
    )
    part = torch.arange(len(row), device=indptr.device)
    index = part - first_part
    begin = count[row] * index // parts
    size = count[row] * (index + 1) // parts - begin
    shared = torch.stack([row, indptr[row] + begin, size, part], 1)

    whole = torch.nonzero(~is_long)[:, 0]
    segment = torch.arange(len(whole), device=indptr.device) // ITEM_SORT_SEGMENT
    whole = whole[torch.argsort(segment * (part_edges + 1) - count[whole], stable=True)]
    alone = torch.stack([rows[whole], indptr[whole], count[whole], torch.full_like(whole, -1)], 1)

    items = torch.cat([shared, alone])
    if row_ids is not None:
        items[:, 0] = row_ids.to(items.device).long()[items[:, 0]]
    parts_array = torch.stack([first_part, parts], 1).int()
    return RowItems(items.int(), parts_array, part_edges)


@dataclass(frozen=True, eq=False)
class TransposedCSR:
    """A^T of a pattern.

    Attributes:
        indptr: [num_cols + 1] int64.
        indices: [nnz] int32, row of A of each edge; in each column the rows ascend, then once more those of the edges
            that repeat one, and so on.
        edge: [nnz] int32, place of each edge in the CSR of A.
    """

    indptr: torch.Tensor
    indices: torch.Tensor
    edge: torch.Tensor


def transpose_csr(
    indptr: torch.Tensor, indices: torch.Tensor, num_cols: int, row_ids: torch.Tensor | None = None
) -> TransposedCSR:
    """The transpose of a CSR pattern in the order of `canonical_csr`. Does not wait for a GPU.

    Args:
        indptr: [num_rows + 1] int64.
        indices: [nnz] int32.
        row_ids: [num_rows] int32, row of A of each row of the pattern; None for rows in their own order.
    """
    rows = rows_of_edges(indptr, len(indices))
    if row_ids is None:  # rows ascend already
        columns, edge = torch.sort(indices, stable=True)
    else:
        rows = row_ids.to(rows.device).long()[rows]
        by_row = torch.sort(rows, stable=True).indices
        columns, order = torch.sort(indices[by_row], stable=True)
        edge = by_row[order]
    rows = rows[edge]
    starts = torch.ones(len(edge), dtype=torch.bool, device=edge.device)
    starts[1:] = (rows.diff() != 0) | (columns.diff() != 0)
    place = torch.arange(len(edge), device=edge.device)
    copy = place - torch.where(starts, place, 0).cummax(0).values  # neighbours repeat an edge
    by_copy = torch.sort(columns.long() * len(edge) + copy, stable=True).indices
    transposed = torch.searchsorted(columns, torch.arange(num_cols + 1, dtype=columns.dtype, device=columns.device))
    return TransposedCSR(transposed, rows[by_copy].int(), edge[by_copy].int())


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


def row_item_arrays(items: RowItems) -> dict[str, torch.Tensor]:
    return {"row_items": items.items, "row_parts": items.parts}


def transposed_arrays(transposed: TransposedCSR, items: RowItems) -> dict[str, torch.Tensor]:
    return {
        "column_offsets": transposed.indptr,
        "column_rows": transposed.indices,
        "column_edges": transposed.edge,
        "column_items": items.items,
        "column_parts": items.parts,
    }


def data_by_edge(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    shape: tuple[int, int],
    row_ids: torch.Tensor | None,
    part_edges: int,
) -> Fused3SData:
    """What both passes edge by edge read of a canonical CSR, in items of at most `part_edges` edges."""
    transposed = transpose_csr(indptr, indices, shape[1], row_ids)
    arrays = row_item_arrays(make_row_items(indptr, row_ids, part_edges))
    arrays |= transposed_arrays(transposed, make_row_items(transposed.indptr, None, part_edges))
    return Fused3SData(*shape, len(indices), indices=indices, **arrays)


def plan_by_torch(
    graph: BSB | CSRPattern | EdgeList,
    device: torch.device,
    inputs: InputSpec,
    forward: Callable[[int], ScheduleForm],
    perm: torch.Tensor | None = None,
) -> Fused3SData:
    """`fused3s_planning.plan_graph` by torch, on any device; it raises for damaged graphs, and numbers no edges."""
    offsets, indices = canonical_csr(csr_from_edges(graph) if isinstance(graph, EdgeList) else graph, device)
    (num_rows, num_cols), num_edges = graph.shape, indices.numel()
    size = GraphSize(num_rows, num_cols, num_edges)
    tiles = tiles_of_csr(offsets, indices, num_cols)
    form = fused3s_planning.form_of(size, device, inputs, forward)
    if form is None:
        size = replace(size, num_tiles=len(tiles[0]) - 2)
        form = fused3s_planning.form_of(size, device, inputs, forward)
    rows = row_ids = None
    if perm is not None:
        rows = perm.to(device)
        row_ids = torch.nn.functional.pad(rows, (0, -num_rows % TILE[0]), value=num_rows)
    data = Fused3SData(num_rows, num_cols, num_edges, size.num_tiles, row_ids)
    if form.schedules:
        kv_tiles, tile_offset = tiles
        data = replace(data, kv_tiles=kv_tiles, tile_offset=tile_offset)
        data = with_schedule(data, schedule_of_form(form.schedules[0], *tiles))
        if inputs.edge_data:
            slots = make_tile_slots(*tiles)
            names = ("tile_slots", "slot_edges", "slot_places")
            data = replace(data, **{name: getattr(slots, name) for name in names})
    transposed = transpose_csr(offsets, indices, num_cols, rows) if inputs.backward else None
    if len(form.schedules) == 3:
        column_tiles = tiles_of_csr(transposed.indptr, transposed.indices, num_rows)
        by_row, by_column = form.schedules[1:]
        schedules = schedule_of_form(by_row, *tiles), schedule_of_form(by_column, *column_tiles)
        data = with_pass_schedules(data, *schedules)
        data = replace(data, column_tiles=column_tiles[0], column_tile_offset=column_tiles[1])
    if form.part_edges:
        data = replace(data, indices=indices, **row_item_arrays(make_row_items(offsets, rows, form.part_edges)))
        if inputs.backward:
            items = make_row_items(transposed.indptr, None, form.part_edges)
            data = replace(data, **transposed_arrays(transposed, items))
    return data


def plan_on_cpu(patch: pytest.MonkeyPatch, limits: GPULimits) -> None:
    """Make `fused3s` plan by torch, for a GPU with such limits."""
    patch.setattr(fused3s, "plan_graph", plan_by_torch)
    for module in (fused3s, fused3s_backward, fused3s_edges, fused3s_planning):
        patch.setattr(module, "gpu_limits", lambda device: limits)
