"""BSB against a slow construction, its inverse, malformed input. The paper's figures: tests/data/test_official.py."""

import math
import tracemalloc

import numpy as np
import pytest
import scipy.sparse as sp
import torch
from attention_cases import load_real_graph
from edge_cases import EdgeList
from hypothesis import given, settings
from hypothesis import strategies as st

import bench.baselines.bsb_build
from bench.baselines.bsb import BSB
from data.dgl import import_dgl


@st.composite
def edge_lists(draw):
    """(num_rows, num_cols, rows, cols) in any order, with duplicates, empty rows and empty matrices."""
    num_rows, num_cols = draw(st.integers(0, 70)), draw(st.integers(0, 70))
    possible = num_rows > 0 and num_cols > 0
    size = draw(st.integers(0, 150)) if possible else 0
    rows = draw(st.lists(st.integers(0, max(num_rows - 1, 0)), min_size=size, max_size=size))
    cols = draw(st.lists(st.integers(0, max(num_cols - 1, 0)), min_size=size, max_size=size))
    return num_rows, num_cols, np.array(rows, dtype=np.int64), np.array(cols, dtype=np.int64)


def csr_with_duplicates(num_rows: int, rows: np.ndarray, cols: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """CSR arrays with the columns of a row in the order given, duplicates included."""
    order = np.argsort(rows, kind="stable")
    indptr = np.concatenate([[0], np.cumsum(np.bincount(rows, minlength=num_rows))]).astype(np.int64)
    return indptr, cols[order]


def slow_bsb(counts: np.ndarray, r: int, c: int) -> tuple[list[int], list[int], list[np.ndarray]]:
    """The paper's construction, a window and a block at a time; the columns of second copies after all first ones."""
    offset, columns, blocks = [0], [], []
    for start in range(0, counts.shape[0], r):
        window = np.zeros((r, counts.shape[1]), dtype=int)
        window[: counts.shape[0] - start] = counts[start : start + r]
        copies = [window >= copy for copy in range(1, window.max(initial=0) + 1)]
        slots = [(column, copy[:, column]) for copy in copies for column in np.flatnonzero(copy.any(0))]
        for first in range(0, len(slots), c):
            chosen = slots[first : first + c]
            block = np.zeros((r, c), dtype=bool)
            block[:, : len(chosen)] = np.transpose([rows for _, rows in chosen])
            columns += [*(column for column, _ in chosen), *[slots[-1][0]] * (c - len(chosen))]
            blocks.append(block)
        offset.append(len(blocks))
    return offset, columns, blocks


def csr_of(bsb: BSB) -> tuple[torch.Tensor, torch.Tensor]:
    """(indptr, indices), [num_rows + 1] int64 and [nnz] int32: the inverse of `BSB.from_csr` for sorted rows. The
    columns of a row are in slot order: first copies ascending, then second copies, and so on."""
    r, c = bsb.tile
    bits = torch.arange(8, device=bsb.device, dtype=torch.uint8)
    mask = (bsb.bitmap[..., None] >> bits) & 1
    tcb, local_row, column = torch.nonzero(mask.view(-1, r, c), as_tuple=True)
    windows = torch.arange(bsb.num_row_windows, device=bsb.device)
    window = torch.repeat_interleave(windows, bsb.tcb_row_offset.diff().long())
    # TCBs ascend in a window and slots in a TCB: a stable sort by row alone leaves a row's edges in slot order.
    row, by_row = torch.sort(window[tcb] * r + local_row, stable=True)
    indices = bsb.col_sparse_to_dense.view(-1, c)[tcb, column][by_row]
    return torch.nn.functional.pad(torch.bincount(row, minlength=bsb.shape[0]).cumsum(0), (1, 0)), indices


@settings(max_examples=150, deadline=None)
@given(edge_lists(), st.sampled_from([(16, 8), (8, 16), (8, 8), (32, 8)]), st.sampled_from([np.int32, np.int64]))
def test_arrays_equal_the_papers_construction(edges, tile, dtype):
    num_rows, num_cols, rows, cols = edges
    indptr, indices = csr_with_duplicates(num_rows, rows, cols)
    bsb = BSB.from_csr(indptr.astype(dtype), indices.astype(dtype), num_cols, tile)

    counts_of_edges = np.zeros((num_rows, num_cols), dtype=int)
    np.add.at(counts_of_edges, (rows, cols), 1)
    offset, columns, blocks = slow_bsb(counts_of_edges, *tile)
    assert bsb.tcb_row_offset.tolist() == offset
    assert bsb.col_sparse_to_dense.tolist() == columns
    found = np.unpackbits(bsb.bitmap.numpy(), axis=-1, bitorder="little").reshape(-1, *tile)
    np.testing.assert_array_equal(found, np.array(blocks, dtype=bool).reshape(-1, *tile))
    counts = np.diff(offset)
    assert bsb.row_window_order.tolist() == sorted(range(len(counts)), key=lambda window: -counts[window])
    assert bsb.nnz == rows.size


@settings(max_examples=100, deadline=None)
@given(edge_lists(), st.sampled_from([(16, 8), (8, 16)]))
def test_its_edges_are_those_of_the_csr_arrays(edges, tile):
    num_rows, num_cols, rows, cols = edges
    bsb = BSB.from_csr(*csr_with_duplicates(num_rows, rows, cols), num_cols, tile)
    indptr, indices = csr_of(bsb)
    expected = EdgeList(torch.from_numpy(rows), torch.from_numpy(cols), (num_rows, num_cols))
    counts = np.bincount(rows, minlength=num_rows)
    np.testing.assert_array_equal(indptr.numpy(), np.concatenate([[0], np.cumsum(counts)]))
    np.testing.assert_array_equal(indices.numpy(), expected.col[expected.csr_order()])
    assert indptr.dtype == torch.int64
    assert_same_bits(bsb, BSB.from_csr(indptr, indices, num_cols, tile))


@pytest.mark.parametrize("name", ["pubmed"])
def test_long_rows_of_large_graphs_keep_their_edges(name, real_graph_dir):
    """More than 1024 rows, of which some have more than 32 edges: the published preprocessing moves those edges."""
    graph = load_real_graph(real_graph_dir, name)
    assert graph.shape[0] > 1024
    assert np.diff(graph.indptr).max() > 32
    indptr, indices = csr_of(BSB.from_graph(graph))
    np.testing.assert_array_equal(indptr.numpy(), graph.indptr)
    np.testing.assert_array_equal(indices.numpy(), graph.indices)


@settings(max_examples=50, deadline=None)
@given(edge_lists())
def test_build_in_several_passes_is_the_same(edges):
    num_rows, num_cols, rows, cols = edges
    arrays = csr_with_duplicates(num_rows, rows, cols)
    whole = BSB.from_csr(*arrays, num_cols)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench.baselines.bsb_build, "EDGES_PER_PASS", 7)
        in_passes = BSB.from_csr(*arrays, num_cols)
    assert_same_bits(whole, in_passes)


def test_memory_of_several_passes_is_the_result_and_a_part_of_it(monkeypatch):
    """Parts are freed while they are joined: all at once they would take as much as the result."""
    monkeypatch.setattr(bench.baselines.bsb_build, "EDGES_PER_PASS", 10_000)
    rng = np.random.default_rng(0)
    indptr = np.arange(0, 800_001, 8)
    indices = rng.integers(0, 100_000, 800_000, dtype=np.int32)
    tracemalloc.start()
    try:
        arrays = bench.baselines.bsb_build.build_bsb_arrays(np, indptr, indices, 100_000, (16, 8))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    result = arrays.col_sparse_to_dense.nbytes + arrays.bitmap.nbytes
    assert peak < 1.8 * result


def assert_same_bits(left: BSB, right: BSB) -> None:
    for name in ("tcb_row_offset", "col_sparse_to_dense", "bitmap", "row_window_order"):
        first, second = getattr(left, name).cpu(), getattr(right, name).cpu()
        assert first.dtype == second.dtype, name
        assert torch.equal(first, second), name
    assert (left.shape, left.tile, left.nnz) == (right.shape, right.tile, right.nnz)


def test_statistics_of_a_matrix_counted_by_hand():
    # Window 0: columns 0 to 8 in 2 TCBs with 8 and 3 nonzeros. Window 1: empty.
    mask = np.zeros((32, 32), dtype=np.int8)
    mask[0, :8] = 1
    mask[1:4, 8] = 1
    stats = BSB.from_graph(sp.csr_array(mask)).stats()
    assert (stats["num_tcbs"], stats["tcb_per_rw_mean"], stats["tcb_per_rw_cv"]) == (2, 1.0, 1.0)
    assert stats["nnz_per_tcb_mean"] == 5.5
    assert stats["nnz_per_tcb_cv"] == pytest.approx(2.5 / 5.5)


@pytest.mark.parametrize("tile", [(16, 8), (8, 16)])
def test_nbytes_is_the_format_tables_formula(edge_case, tile):
    r, c = tile
    bsb = BSB.from_csr(edge_case.indptr, edge_case.indices, edge_case.shape[1], tile)
    b = bsb.num_tcbs
    offsets = math.ceil(edge_case.shape[0] / r) + 1  # the table writes N / r
    assert bsb.nbytes * 8 == 32 * (offsets + b * c) + b * r * c


def test_every_graph_gives_the_same_matrix():
    dgl = import_dgl()
    dense = np.random.default_rng(0).random((50, 50)) < 0.1  # directed: dense is not symmetric
    csr = sp.csr_array(dense.astype(np.int8))
    expected = BSB.from_csr(csr.indptr, csr.indices)
    query, key = np.nonzero(dense)
    # Node `query` attends to node `key`: in DGL the message flows from key (source) to query (destination).
    assert_same_bits(expected, BSB.from_graph(dgl.graph((key, query), num_nodes=50)))
    assert_same_bits(expected, BSB.from_graph(csr.tocoo()))
    assert_same_bits(expected, BSB.from_graph(torch.from_numpy(dense).float().to_sparse_csr()))
    assert_same_bits(expected, BSB.from_csr(torch.from_numpy(csr.indptr), torch.from_numpy(csr.indices)))


def test_offsets_past_2_to_31_are_refused_not_wrapped():
    # 2^31 TCBs do not fit into memory: a fake array module reports such counts.
    class ManyBlocks:
        def __getattr__(self, name):
            return getattr(np, name)

        @staticmethod
        def concatenate(parts):
            joined = np.concatenate(parts)
            return joined + 2**31 if joined.dtype == np.int64 and joined.size == 3 else joined

    indptr = np.arange(33)
    with pytest.raises(ValueError, match=r"tensor core blocks of 16x8; at most 2147483647"):
        bench.baselines.bsb_build.build_bsb_arrays(ManyBlocks(), indptr, np.arange(32), 32, (16, 8))


@pytest.mark.parametrize(
    ("indptr", "indices", "num_cols", "message"),
    [
        ([0, 2, 1, 3], [0, 1, 2], None, r"indptr: decreases at row 1 \(2 to 1\)"),
        ([1, 2], [0, 0], None, "indptr: starts with 1"),
        ([0, 2], [0], None, "indptr: ends with 2, but indices has 1"),
        ([0, 1, 2], [0, 2], None, "row 1 holds column 2; allowed are 0 to 1"),
        ([0, 1], [5], 5, "row 0 holds column 5; allowed are 0 to 4"),
        ([], [], None, r"indptr: got shape \(0,\)"),
        ([[0, 1]], [0], None, r"indptr: got shape \(1, 2\)"),
        ([0], [], -1, "num_cols: got -1"),
    ],
)
def test_bad_csr_is_named(indptr, indices, num_cols, message):
    with pytest.raises(ValueError, match=message):
        BSB.from_csr(np.array(indptr, dtype=np.int64), np.array(indices, dtype=np.int64), num_cols)


@pytest.mark.parametrize("tile", [(0, 8), (16, 12), (512, 8), "8x8", (16, 8, 1), (16.0, 8), None])
def test_bad_tile_is_named(tile):
    with pytest.raises((ValueError, TypeError), match="tile: got"):
        BSB.from_csr([0], [], tile=tile)


@pytest.mark.gpu
class TestOnGpu:
    def test_same_bits_as_on_the_cpu(self, edge_case):
        arrays = [torch.tensor(array.copy(), device="cuda") for array in (edge_case.indptr, edge_case.indices)]
        on_gpu = BSB.from_csr(*arrays, edge_case.shape[1])
        assert on_gpu.device.type == "cuda"
        assert_same_bits(BSB.from_graph(edge_case), on_gpu)
        for left, right in zip(csr_of(BSB.from_graph(edge_case)), csr_of(on_gpu), strict=True):
            assert torch.equal(left, right.cpu())

    @pytest.mark.parametrize("name", ["cora", "elliptic", "musae-github", "ego-twitter", "ogbg-molhiv"])
    def test_same_bits_on_real_graphs(self, name, real_graph_dir):
        graph = load_real_graph(real_graph_dir, name)
        expected = BSB.from_graph(graph)
        on_gpu = BSB.from_graph(graph, device=torch.device("cuda", 0))
        assert_same_bits(expected, on_gpu)
        assert expected.stats() == pytest.approx(on_gpu.stats())

    @settings(max_examples=30, deadline=None)
    @given(edge_lists(), st.sampled_from([(16, 8), (8, 16)]))
    def test_same_bits_with_duplicates_and_any_order(self, edges, tile):
        num_rows, num_cols, rows, cols = edges
        arrays = csr_with_duplicates(num_rows, rows, cols)
        on_gpu = BSB.from_csr(*(torch.from_numpy(array).cuda() for array in arrays), num_cols, tile)
        assert_same_bits(BSB.from_csr(*arrays, num_cols, tile), on_gpu)
