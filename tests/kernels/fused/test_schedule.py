"""The oracle of plans (tests/support/plan_oracle.py) against examples by hand; kernels are compared with it."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_oracle import (
    BEGIN,
    COUNT,
    KBLOCK,
    KWARP,
    SPLIT,
    SPLITS,
    TILE_WORDS,
    WINDOW,
    Schedule,
    SplitHeuristic,
    make_row_items,
    make_schedule,
    transpose_csr,
)

from fused3s.fused.planning.schedule import ScheduleForm, most_splits_of


def schedule_of(counts: list[int], warps: int, rule: SplitHeuristic) -> Schedule:
    """Schedule of windows with so many KV tiles."""
    offset = torch.tensor([0, *np.cumsum(counts, dtype=np.int64)], dtype=torch.int32)
    return make_schedule(torch.full((sum(counts) + 2, TILE_WORDS), -1, dtype=torch.int32), offset, warps, rule)


@settings(max_examples=150, deadline=None)
@given(
    counts=st.lists(st.one_of(st.integers(0, 6), st.integers(0, 120)), max_size=40),
    warps=st.sampled_from([1, 2, 4, 8]),
    rule=st.builds(SplitHeuristic, st.integers(0, 30), st.integers(1, 60), st.sampled_from([None, 1, 7, 32])),
)
def test_every_tile_is_in_one_item_of_its_window(counts, warps, rule):
    schedule = schedule_of(counts, warps, rule)
    start = np.cumsum([0, *counts])
    items = [item for item in schedule.work_items.flatten(0, 1).tolist() if item[WINDOW] >= 0]
    tiles = sorted(tile for item in items for tile in range(item[BEGIN], item[BEGIN] + item[COUNT]))
    assert tiles == list(range(sum(counts)))
    assert {item[WINDOW] for item in items} == set(range(len(counts)))
    for item in items:
        assert start[item[WINDOW]] <= item[BEGIN] <= item[BEGIN] + item[COUNT] <= start[item[WINDOW] + 1]
        assert item[COUNT] <= (rule.warp_tiles if item[SPLIT] == KWARP else -(-rule.split_tiles // warps))
        assert item[SPLIT] < 0 or item[SPLITS][0] <= item[SPLIT] < sum(item[SPLITS])
    assert {item[SPLIT] for item in items} - {KWARP, KBLOCK} == set(range(schedule.num_splits))


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
    assert schedule.windows == (2, 1, 1)


@pytest.mark.parametrize(("many", "order"), [(8, [4, 1, 3, 2, 0, 5]), (4, [4, 1, 0, 2, 3, 5])])
def test_blocks_start_largest_first_and_many_of_them_by_powers_of_two(monkeypatch, many, order):
    monkeypatch.setattr("plan_oracle.MANY_BLOCKS", many)
    schedule = schedule_of([5, 9, 6, 7, 40, 2], 4, SplitHeuristic(warp_tiles=1, split_tiles=100, sort_segment=32))
    assert schedule.work_items[:, 0, WINDOW].tolist() == order


def test_windows_that_all_run_at_once_are_dealt_to_the_blocks():
    schedule = schedule_of(list(range(1, 12)), 4, SplitHeuristic(warp_tiles=11, split_tiles=64, sort_segment=None))
    assert schedule.work_items[..., COUNT].tolist() == [[9, 8, 3, 2], [10, 7, 4, 1], [11, 6, 5, 0]]


def test_row_items_by_hand():
    items, parts = make_row_items(torch.tensor([0, 2, 9, 9, 12, 13]), None, part_edges=3)
    assert items.tolist() == [
        *([1, 2, 2, 0], [1, 4, 2, 1], [1, 6, 3, 2]),  # seven edges in three parts
        *([3, 9, 3, -1], [0, 0, 2, -1], [4, 12, 1, -1], [2, 9, 0, -1]),
    ]
    assert parts.tolist() == [[0, 3]] * 3


def test_a_transpose_by_hand():
    """Rows 0: columns 1, 2 and 1 again; row 1: column 1; the second copy comes behind all first ones."""
    indptr, rows, edges = transpose_csr(torch.tensor([0, 3, 4]), torch.tensor([1, 2, 1, 1]).int(), 3)
    assert (indptr.tolist(), rows.tolist(), edges.tolist()) == ([0, 0, 3, 4], [0, 1, 0, 0], [0, 3, 2, 1])


def test_at_most_two_splits_for_each_share_of_a_block():
    """132 blocks of four warps at once: up to 4/3 of them, of windows with more than 32 tiles, and two more."""
    assert most_splits_of(200_000, 1600, ScheduleForm(1, 4, 4 * 132)) == 132 * 4 * 33 // (3 * 32) + 2
