"""Work of lane groups: every edge in one item, parts of long rows in order, the other rows sorted within segments."""

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import EDGE_CASES, load_real_graph
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_oracle import ITEM_SORT_SEGMENT, RowItems, make_row_items

ROW, FIRST, COUNT, PART = range(4)


def expected_items(counts: list[int], ids: list[int], part_edges: int) -> tuple[list[list[int]], list[list[int]]]:
    """Items and parts, row by row: first the parts of long rows, then segments of whole rows, longest first."""
    shared, parts, whole, first = [], [], [], 0
    for count, row in zip(counts, ids, strict=True):
        if count <= part_edges:
            whole.append([row, first, count, -1])
        else:
            number, begin = len(parts), 0
            total = -(-count // part_edges)
            for index in range(total):
                end = count * (index + 1) // total
                shared.append([row, first + begin, end - begin, len(parts)])
                parts.append([number, total])
                begin = end
        first += count
    alone = []
    for start in range(0, len(whole), ITEM_SORT_SEGMENT):
        alone += sorted(whole[start : start + ITEM_SORT_SEGMENT], key=lambda item: -item[COUNT])
    return shared + alone, parts


def check(counts: list[int], part_edges: int, permuted: bool = False) -> RowItems:
    """Items of rows with so many edges, against `expected_items` and against what a lane group needs of them."""
    indptr = torch.tensor([0, *np.cumsum(counts, dtype=np.int64)], dtype=torch.int64)
    row_ids = torch.randperm(len(counts), generator=torch.Generator().manual_seed(1)).int() if permuted else None
    work = make_row_items(indptr, row_ids, part_edges)
    items, parts = work.items.tolist(), work.parts.tolist()
    ids = list(range(len(counts))) if row_ids is None else row_ids.tolist()
    assert (items, parts) == expected_items(counts, ids, part_edges)
    assert work.part_edges == part_edges
    assert (work.items.dtype, work.parts.dtype) == (torch.int32, torch.int32)
    assert (work.items.shape[1], work.parts.shape[1]) == (4, 2)

    covered = sorted(edge for _, first, count, _ in items for edge in range(first, first + count))
    assert covered == list(range(sum(counts))), "an edge in no item, or in two"
    assert {item[ROW] for item in items} == set(ids), "a row without an item: its output would not be written"
    assert all(count <= part_edges for _, _, count, _ in items)
    assert [item[PART] for item in items if item[PART] >= 0] == list(range(len(parts)))
    return work


@pytest.mark.parametrize("permuted", [False, True])
@pytest.mark.parametrize("part_edges", [1, 16, 1000])
@pytest.mark.parametrize("name", EDGE_CASES)
def test_items_of_edge_cases(name, part_edges, permuted):
    check(np.diff(EDGE_CASES[name]().indptr).tolist(), part_edges, permuted)


@pytest.mark.parametrize("name", ["pubmed", "ogbg-molhiv"])
def test_items_of_real_graphs(name, real_graph_dir):
    check(np.diff(load_real_graph(real_graph_dir, name).indptr).tolist(), 16)


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.one_of(st.integers(0, 4), st.integers(0, 90)), max_size=600),
    part_edges=st.integers(1, 70),
    permuted=st.booleans(),
)
def test_items_of_any_rows(counts, part_edges, permuted):
    check(counts, part_edges, permuted)


def test_example():
    work = check([2, 7, 0, 3, 1], part_edges=3)
    assert work.items.tolist() == [
        [1, 2, 2, 0],  # seven edges in three parts
        [1, 4, 2, 1],
        [1, 6, 3, 2],
        [3, 9, 3, -1],
        [0, 0, 2, -1],
        [4, 12, 1, -1],
        [2, 9, 0, -1],
    ]
    assert work.parts.tolist() == [[0, 3]] * 3


@pytest.mark.parametrize("num_rows", [0, 1, 300])
def test_graphs_without_edges(num_rows):
    work = check([0] * num_rows, part_edges=16)
    assert work.items.shape == (num_rows, 4)
    assert work.parts.shape == (0, 2)


def test_rows_are_sorted_within_segments_only():
    counts = [1] * ITEM_SORT_SEGMENT + [9] * ITEM_SORT_SEGMENT
    work = check(counts, part_edges=16)
    assert work.items[:, COUNT].tolist() == counts, "neighbouring rows were torn apart"


def test_row_ids_may_be_longer_than_the_rows():
    """A row order that pads the last row window, as plans keep it."""
    graph = sp.csr_array(np.eye(3, 5, dtype=np.int8))
    work = make_row_items(torch.from_numpy(graph.indptr).long(), torch.tensor([2, 0, 1, 3, 3]).int(), 16)
    assert work.items[:, ROW].tolist() == [2, 0, 1]
