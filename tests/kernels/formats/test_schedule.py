"""Schedules: every edge in one work item, every window handled in one of three ways, and the rule that decides."""

from dataclasses import replace

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import EDGE_CASES, load_real_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_oracle import (
    BEGIN,
    BITMAP,
    COUNT,
    FIRST,
    ITEM_WORDS,
    KBLOCK,
    KEYS,
    KWARP,
    NUM_KEYS,
    SECOND,
    SPLIT,
    SPLITS,
    TILE_KEYS,
    TILE_WORDS,
    WINDOW,
    Schedule,
    SplitHeuristic,
    csr_of_tiles,
    make_kv_tiles,
    make_schedule,
    make_tile_slots,
)

from kernels import BSB

TILE = (16, TILE_KEYS)
HEURISTICS = [SplitHeuristic(1, 16, 3), SplitHeuristic(8, 64, 100), SplitHeuristic(2, 2, None), SplitHeuristic(0, 1, 2)]


def offsets(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


def numbered_tiles(num_tiles: int) -> torch.Tensor:
    """KV tiles whose words are all different, but for the keys: tile i has i % 16 + 1."""
    tiles = torch.arange((num_tiles + 2) * TILE_WORDS, dtype=torch.int32).view(-1, TILE_WORDS)
    tiles[:, KEYS].masked_fill_(torch.arange(TILE_KEYS) > torch.arange(num_tiles + 2)[:, None] % TILE_KEYS, -1)
    tiles[num_tiles:] = -1
    return tiles


def schedule_of(counts: list[int], warps: int, heuristic: SplitHeuristic) -> Schedule:
    """Schedule of windows with so many KV tiles, checked."""
    tile_offset = offsets(counts)
    kv_tiles = numbered_tiles(sum(counts))
    schedule = make_schedule(kv_tiles, tile_offset, warps, heuristic)
    check_schedule(schedule, kv_tiles, tile_offset, warps, heuristic)
    return schedule


def check_schedule(
    schedule: Schedule, kv_tiles: torch.Tensor, tile_offset: torch.Tensor, warps: int, heuristic: SplitHeuristic
) -> None:
    """Every KV tile is in one work item, every window is a warp's, a block's or split, and no item is too large."""
    assert schedule.heuristic == heuristic
    assert schedule.warps == warps
    assert schedule.work_items.shape == (schedule.num_blocks, warps, ITEM_WORDS)
    assert schedule.work_items.dtype == torch.int32
    items, tile_offset = schedule.work_items.numpy(), tile_offset.numpy()
    check_items(items.reshape(-1, ITEM_WORDS), kv_tiles.numpy())

    of_warps = np.zeros(len(tile_offset) - 1, int)
    of_blocks = np.zeros_like(of_warps)
    splits: dict[int, dict[int, np.ndarray]] = {}
    for block in items:
        if (block[:, SPLIT] == KWARP).all():
            assert (block[:, COUNT] <= heuristic.warp_tiles).all()
            assert (block[block[:, WINDOW] < 0, COUNT] == 0).all()
            for item in block[block[:, WINDOW] >= 0]:
                window = item[WINDOW]
                of_warps[window] += 1
                assert (item[BEGIN], item[BEGIN] + item[COUNT]) == (tile_offset[window], tile_offset[window + 1])
            continue
        same = [WINDOW, SPLIT, *range(SPLITS.start, SPLITS.stop)]
        assert (block[:, same] == block[0, same]).all(), "warps of one block with several windows or splits"
        assert 0 < block[:, COUNT].sum() <= heuristic.split_tiles
        assert np.ptp(block[:, COUNT]) <= 1, "warps of one block with uneven shares"
        window, split = block[0, WINDOW], block[0, SPLIT]
        if split == KBLOCK:
            of_blocks[window] += 1
            check_tiles_in_order(block, *tile_offset[window : window + 2])
        else:
            assert split not in splits.setdefault(window, {}), "a split that two blocks take"
            splits[window][split] = block
    of_splits = np.zeros_like(of_warps)
    numbers = []
    for window, blocks in splits.items():
        first_split, num_splits = blocks[min(blocks)][0, SPLITS]
        assert num_splits > 1
        assert sorted(blocks) == list(range(first_split, first_split + num_splits))
        in_order = np.concatenate([blocks[split] for split in sorted(blocks)])
        assert (in_order[:, SPLITS] == (first_split, num_splits)).all()
        check_tiles_in_order(in_order, *tile_offset[window : window + 2])
        of_splits[window] += 1
        numbers += blocks
    assert sorted(numbers) == list(range(schedule.num_splits))
    assert (of_warps + of_blocks + of_splits == 1).all()
    assert schedule.windows == (of_warps.sum(), of_blocks.sum(), of_splits.sum())
    begin, count = items[..., BEGIN].ravel(), items[..., COUNT].ravel()
    covered = [tile for first, number in zip(begin, count, strict=True) for tile in range(first, first + number)]
    assert sorted(covered) == list(range(tile_offset[-1]))


def check_tiles_in_order(items: np.ndarray, begin: int, end: int) -> None:
    """The items take the KV tiles `begin` to `end`, one after the other."""
    assert items[0, BEGIN] == begin
    assert (items[1:, BEGIN] == items[:-1, BEGIN] + items[:-1, COUNT]).all()
    assert items[-1, BEGIN] + items[-1, COUNT] == end


def check_items(items: np.ndarray, tiles: np.ndarray) -> None:
    """Each item has copies of its first two KV tiles and the number of keys of its last one."""
    items = items[items[:, COUNT] > 0]
    begin, last = items[:, BEGIN], items[:, BEGIN] + items[:, COUNT] - 1
    np.testing.assert_array_equal(items[:, FIRST], tiles[begin])
    several = last > begin
    np.testing.assert_array_equal(items[several, SECOND], tiles[begin[several] + 1])
    np.testing.assert_array_equal(items[:, NUM_KEYS], (tiles[last, KEYS] >= 0).sum(1))


def edges_of_items(schedule: Schedule, kv_tiles: torch.Tensor) -> list[tuple[int, int]]:
    """(row, column) of every bit that a warp finds in the KV tiles of its work item."""
    edges = []
    for item in schedule.work_items.numpy().reshape(-1, ITEM_WORDS):
        mine = kv_tiles.numpy()[item[BEGIN] : item[BEGIN] + item[COUNT]]
        num_keys = (mine[:, KEYS] >= 0).sum(1)
        assert (num_keys[:-1] == TILE_KEYS).all(), "only the last KV tile of a window has fewer than 16 keys"
        bits = np.unpackbits(np.ascontiguousarray(mine[:, BITMAP]).view(np.uint8), axis=1, bitorder="little")
        tile, word, half, column = np.nonzero(bits.reshape(-1, 8, 2, TILE_KEYS))
        assert (column < num_keys[tile]).all()
        edges += zip(item[WINDOW] * 16 + 8 * half + word, mine[tile, column], strict=True)
    return sorted(edges)


def check_graph(bsb: BSB, warps: int, heuristic: SplitHeuristic) -> None:
    kv_tiles = make_kv_tiles(bsb.col_sparse_to_dense, bsb.bitmap)
    assert kv_tiles.shape == (bsb.num_tcbs + 2, TILE_WORDS)
    assert (kv_tiles[-2:] == -1).all()
    schedule = make_schedule(kv_tiles, bsb.tcb_row_offset, warps, heuristic)
    check_schedule(schedule, kv_tiles, bsb.tcb_row_offset, warps, heuristic)
    indptr, indices = bsb.to_csr()
    rows = np.repeat(np.arange(bsb.shape[0]), indptr.diff().numpy())
    assert edges_of_items(schedule, kv_tiles) == sorted(zip(rows, indices.numpy(), strict=True))


@pytest.mark.parametrize("warps", [2, 4])
@pytest.mark.parametrize("heuristic", HEURISTICS, ids=str)
@pytest.mark.parametrize("name", EDGE_CASES)
def test_work_items_hold_every_edge_of_edge_cases(name, heuristic, warps):
    check_graph(BSB.from_scipy(EDGE_CASES[name](), TILE), warps, heuristic)


@pytest.mark.parametrize("name", ["cora", "pubmed", "soc-epinions1", "ogbg-molhiv"])
def test_work_items_hold_every_edge_of_real_graphs(name, real_graph_dir):
    bsb = BSB.from_scipy(load_real_graph(real_graph_dir, name), TILE)
    check_graph(bsb, 4, SplitHeuristic.of(bsb.tcb_row_offset.diff(), 4, resident_warps=1584))


def check_edges_of_tiles(graph: sp.csr_array) -> None:
    """The CSR arrays of the KV tiles are the graph's, and every edge has the slot that its place in a KV tile gives."""
    bsb = BSB.from_scipy(graph, TILE)
    kv_tiles, tile_offset = make_kv_tiles(bsb.col_sparse_to_dense, bsb.bitmap), bsb.tcb_row_offset
    graph = sp.csr_array(graph != 0)
    graph.sum_duplicates()
    indptr, indices = csr_of_tiles(kv_tiles, tile_offset)
    assert (indptr.dtype, indices.dtype) == (torch.int64, torch.int32)
    assert len(indptr) == 16 * (len(tile_offset) - 1) + 1
    num_rows = graph.shape[0]
    assert indptr[: num_rows + 1].tolist() == graph.indptr.tolist()
    assert (indptr[num_rows:] == graph.nnz).all(), "edges in the padding of the last window"
    assert indices.tolist() == graph.indices.tolist()

    slots = make_tile_slots(kv_tiles, tile_offset)
    assert (slots.tile_slots.dtype, slots.slot_edges.dtype) == (torch.int32, torch.int32)
    assert slots.slot_places.dtype == torch.uint8
    edge_at = {place: edge for edge, place in enumerate(zip(*map(np.ndarray.tolist, graph.nonzero()), strict=True))}
    first, edges, places = (each.tolist() for each in (slots.tile_slots, slots.slot_edges, slots.slot_places))
    assert len(first) == bsb.num_tcbs + 3
    assert first[0] == 0
    assert first[-3:] == [graph.nnz] * 3
    windows = np.repeat(np.arange(len(tile_offset) - 1), np.diff(tile_offset.numpy()))
    keys = kv_tiles[:, KEYS].tolist()
    for tile, window in enumerate(windows.tolist()):
        for slot in range(first[tile], first[tile + 1]):
            row, key = divmod(places[slot], TILE_KEYS)
            assert edge_at[16 * window + row, keys[tile][key]] == edges[slot]
    assert sorted(edges) == list(range(graph.nnz))


@pytest.mark.parametrize("decoded_tiles", [1, 7, 1 << 18])
@pytest.mark.parametrize("name", EDGE_CASES)
def test_edges_of_the_tiles_of_edge_cases(monkeypatch, name, decoded_tiles):
    monkeypatch.setattr("plan_oracle.DECODED_TILES", decoded_tiles)
    check_edges_of_tiles(EDGE_CASES[name]())


@pytest.mark.parametrize("name", ["cora", "ogbg-molhiv"])
def test_edges_of_the_tiles_of_real_graphs(name, real_graph_dir):
    check_edges_of_tiles(load_real_graph(real_graph_dir, name))


@settings(max_examples=50, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 70), st.integers(1, 70)),
    density=st.sampled_from([0.01, 0.1, 0.9]),
    seed=st.integers(0, 2**32 - 1),
)
def test_edges_of_the_tiles_of_any_graph(shape, density, seed):
    check_edges_of_tiles(sp.csr_array((np.random.default_rng(seed).random(shape) < density).astype(np.int8)))


TILE_COUNTS = st.lists(st.one_of(st.integers(0, 6), st.integers(0, 120)), max_size=40)


@settings(max_examples=150, deadline=None)
@given(
    counts=TILE_COUNTS,
    warps=st.sampled_from([1, 2, 4, 8]),
    warp_tiles=st.integers(0, 30),
    split_tiles=st.integers(1, 60),
    sort_segment=st.sampled_from([None, 1, 2, 7, 32]),
    many_blocks=st.sampled_from([0, 4096]),
)
def test_any_windows_under_any_sizes(counts, warps, warp_tiles, split_tiles, sort_segment, many_blocks):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("plan_oracle.MANY_BLOCKS", many_blocks)
        schedule_of(counts, warps, SplitHeuristic(warp_tiles, split_tiles, sort_segment))


@settings(max_examples=100, deadline=None)
@given(
    counts=TILE_COUNTS,
    warps=st.sampled_from([2, 4]),
    resident_warps=st.sampled_from([8, 64, 2112]),
    num_heads=st.sampled_from([1, 8]),
)
def test_any_windows_under_the_fitted_rule(counts, warps, resident_warps, num_heads):
    tiles = torch.tensor(counts, dtype=torch.int32)
    schedule_of(counts, warps, SplitHeuristic.of(tiles, warps, resident_warps, num_heads))


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([], SplitHeuristic(1, 1, 32)),
        ([1, 5, 0], SplitHeuristic(3, 32, None)),  # less than the GPU: even small windows are shared
        ([2, 1] * 10, SplitHeuristic(3, 32, 32)),
        ([4] * 35 + [9] * 5, SplitHeuristic(5, 138, 32)),  # seven eighths have up to 4
        ([8] * 80, SplitHeuristic(10, 256, 32)),
        ([4] * 7 + [20], SplitHeuristic(5, 36, None)),  # few, and all resident at once
        ([4] * 7 + [21], SplitHeuristic(5, 36, 32)),  # but for one, which starts first
        ([9] * 8, SplitHeuristic(12, 54, 32)),
        ([20] * 4 + [1] * 4, SplitHeuristic(14, 63, 32)),  # 1.4 times a warp's share
        ([20] * 4 + [1] * 5, SplitHeuristic(9, 63, 32)),  # 0.9 times: one window is too many to run at once
        ([20] * 4 + [1] * 8, SplitHeuristic(7, 66, 32)),  # 0.7 times: many more are
        ([60] * 80, SplitHeuristic(22, 256, 32)),
    ],
)
def test_fitted_rule_on_a_gpu_of_two_blocks(counts, expected):
    tiles = torch.tensor(counts)
    assert SplitHeuristic.of(tiles, 4, resident_warps=8) == expected
    heads = SplitHeuristic.of(tiles, 4, resident_warps=8 * 8, num_heads=8)
    assert replace(heads, split_tiles=expected.split_tiles) == expected, "heads share the GPU"
    assert heads.split_tiles == SplitHeuristic.of(tiles, 4, resident_warps=8 * 8).split_tiles, "a split is of one head"


def test_heads_that_fill_the_gpu_leave_windows_to_warps():
    tiles = torch.tensor([3, 10, 2])
    one = schedule_of(tiles.tolist(), 4, SplitHeuristic.of(tiles, 4, resident_warps=64))
    many = schedule_of(tiles.tolist(), 4, SplitHeuristic.of(tiles, 4, resident_warps=64, num_heads=64))
    assert one.windows == (2, 1, 0)
    assert many.windows == (3, 0, 0)


def test_example_of_the_module():
    schedule = schedule_of([2, 9, 1, 21], 4, SplitHeuristic(warp_tiles=2, split_tiles=12, sort_segment=32))
    items = schedule.work_items
    assert [[(i[BEGIN], i[BEGIN] + i[COUNT] - 1) for i in block if i[COUNT]] for block in items.tolist()] == [
        [(22, 24), (25, 27), (28, 30), (31, 32)],
        [(12, 14), (15, 16), (17, 19), (20, 21)],
        [(2, 4), (5, 6), (7, 8), (9, 10)],
        [(0, 1), (11, 11)],
    ]
    assert items[..., WINDOW].tolist() == [[3] * 4, [3] * 4, [1] * 4, [0, 2, -1, -1]]
    assert items[:, 0, SPLIT].tolist() == [1, 0, KBLOCK, KWARP]


def test_large_windows_lead_and_medium_ones_end():
    schedule = schedule_of([1, 3, 9, 2, 40, 0, 1], 4, SplitHeuristic(warp_tiles=4, split_tiles=100, sort_segment=3))
    assert schedule.work_items[..., WINDOW].tolist() == [[4] * 4, [1, 3, 0, 6], [5, -1, -1, -1], [2] * 4]
    assert schedule.work_items[..., COUNT].tolist() == [[10] * 4, [3, 2, 1, 1], [0] * 4, [3, 2, 2, 2]]


@pytest.mark.parametrize(("many", "order"), [(8, [4, 1, 3, 2, 0, 5]), (4, [4, 1, 0, 2, 3, 5])])
def test_blocks_start_largest_first_and_many_of_them_by_powers_of_two(monkeypatch, many, order):
    monkeypatch.setattr("plan_oracle.MANY_BLOCKS", many)
    schedule = schedule_of([5, 9, 6, 7, 40, 2], 4, SplitHeuristic(warp_tiles=1, split_tiles=100, sort_segment=32))
    assert schedule.work_items[:, 0, WINDOW].tolist() == order


def test_windows_that_all_run_at_once_are_dealt_to_the_blocks():
    schedule = schedule_of(list(range(1, 12)), 4, SplitHeuristic(warp_tiles=11, split_tiles=64, sort_segment=None))
    assert schedule.work_items[..., COUNT].tolist() == [[9, 8, 3, 2], [10, 7, 4, 1], [11, 6, 5, 0]]
