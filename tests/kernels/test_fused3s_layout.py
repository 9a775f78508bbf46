"""cuda/fused3s.cu without a GPU: its shared-memory layout and store exchange, emulated, and its schedule."""

from itertools import product

import numpy as np
import pytest
import torch
from attention_cases import EDGE_CASES, load_real_graph

from kernels import BSB
from kernels.backends.fused3s import FEW_WARPS, TILE, WARPS, FusedKernelSpec, goes_through_l1
from kernels.fragments import WARP_SIZE, b_element, c_element, sddmm_dimension, spmm_dimension
from kernels.schedule import OWN_WINDOWS, SHARED_WINDOW, Balance, make_schedule

LANES = range(WARP_SIZE)
DIMS = [8, 24, 32, 64, 72, 96, 128, 192, 256]


def key_layout(dim: int) -> tuple[int, int]:
    """(pitch in bytes, swizzle in pieces) of a stage's K tile."""
    pairs = -(-dim // 32)
    return 64 * pairs, 0 if pairs % 2 else 4


def key_address(row: int, piece: int, dim: int) -> int:
    pitch, swizzle = key_layout(dim)
    return row * pitch + 16 * (piece ^ (row % 2 * swizzle))


def value_address(row: int, piece: int, dim: int) -> int:
    return row * 16 * (2 * -(-dim // 16) + 1) + 16 * piece


@pytest.mark.parametrize("dim", DIMS)
def test_pieces_do_not_overlap(dim):
    for address, pieces in ((key_address, 4 * -(-dim // 32)), (value_address, 2 * -(-dim // 16))):
        places = [address(row, piece, dim) for row, piece in product(range(16), range(pieces))]
        assert len(set(places)) == len(places)
        assert all(place % 16 == 0 for place in places)


@pytest.mark.parametrize("dim", DIMS)
def test_reads_are_free_of_bank_conflicts(dim):
    def banks(address: int) -> set[int]:
        return {address // 4 % 32 + word for word in range(4)}

    # K: 16 bytes a lane, eight lanes (two rows, t = 0 to 3) at a time.
    for pair, rows in product(range(-(-dim // 32)), range(0, 8, 2)):
        lanes = [banks(key_address(row, 4 * pair + t, dim)) for row in (rows, rows + 1) for t in range(4)]
        assert len(set().union(*lanes)) == 32
    # V: the eight rows of an 8 x 8 matrix at a time.
    for piece, first in product(range(2 * -(-dim // 16)), (0, 8)):
        rows = [banks(value_address(row, piece, dim)) for row in range(first, first + 8)]
        assert len(set().union(*rows)) == 32


@pytest.mark.parametrize("dim", DIMS)
def test_key_words_are_the_remapped_b_fragments(dim):
    """A lane's 16 bytes of K, at the address that the kernel computes, are what SDDMM's k-steps 2p and 2p + 1 want."""
    _, swizzle = key_layout(dim)
    for row, pair, lane in product(range(8), range(-(-dim // 32)), LANES):
        g, t = divmod(lane, 4)
        if g != row:
            continue
        exchange = row % 2 * swizzle * 16
        read = row * key_layout(dim)[0] + 16 * t + (-exchange if pair % 2 else exchange) + 64 * pair
        assert read == key_address(row, 4 * pair + t, dim)
        first = 8 * (4 * pair + t)  # dimension of the first of eight elements
        for odd, register, half in product(range(2), range(2), range(2)):
            k, column = b_element(lane, register, half)
            assert column == g
            assert first + 2 * (2 * odd + register) + half == sddmm_dimension(2 * pair + odd, k, permuted=True)


def test_value_matrices_are_the_b_fragments_of_spmm():
    """ldmatrix, transposed: lane l gives row l % 16 and piece l // 16 of a step; register i holds matrix i."""
    for lane, register, half in product(LANES, range(4), range(2)):
        g, t = divmod(lane, 4)
        row_of_matrix, column = 2 * t + half, g  # what .trans puts into this lane and half
        source = 8 * register + row_of_matrix  # the lane that gave the row
        key, dimension = source % 16, 8 * (source // 16) + column
        n_tile, b_register = divmod(register, 2)
        k, n = b_element(lane, b_register, half)
        assert (key, dimension) == (k, spmm_dimension(0, n_tile, n, permuted=False))


def test_stores_write_every_dimension_of_a_step_once_in_runs_of_four():
    written = np.full((16, 16), -1)
    c = np.zeros((2, WARP_SIZE, 4), dtype=int)  # the dimension that each register holds
    for tile, lane, register in product(range(2), LANES, range(4)):
        c[tile, lane, register] = spmm_dimension(0, tile, c_element(lane, register)[1], permuted=False)
    for lane, half in product(LANES, range(2)):
        g, t = divmod(lane, 4)
        odd, neighbour = t % 2, lane ^ 1
        left, right = c[0, lane, 2 * half : 2 * half + 2], c[1, lane, 2 * half : 2 * half + 2]
        got = c[0 if odd ^ 0 == 0 else 1, neighbour, 2 * half : 2 * half + 2]  # what the neighbour gives away
        values = [*got, *right] if odd else [*left, *got]
        start = 8 + 2 * (t - 1) if odd else 2 * t
        assert values == list(range(start, start + 4))
        written[8 * half + g, start : start + 4] = values
    assert (written == np.arange(16)).all()


def test_shared_memory_is_what_the_struct_holds():
    # struct Stage at kDim = 128: key 4096, value 4352, bitmap 32, window and number of keys 16.
    assert FusedKernelSpec(torch.float16, torch.float32, 128).shared_bytes == 4 * 2 * (4096 + 4352 + 32 + 16)


def test_wide_heads_fit_gpus_with_less_shared_memory():
    wide = FusedKernelSpec(torch.float16, torch.float32, 256)
    assert wide.shared_bytes > 99 * 1024
    assert FusedKernelSpec(torch.float16, torch.float32, 256, warps=FEW_WARPS).shared_bytes < 99 * 1024
    assert FusedKernelSpec(torch.float16, torch.float32, 168).shared_bytes < 163 * 1024


def test_gathers_go_past_l1_only_where_device_memory_meets_a_small_l1():
    h200_l2 = 60 << 20
    assert goes_through_l1(80_000, 128, h200_l2)
    assert not goes_through_l1(400_000, 128, h200_l2)  # rings leave little of L1
    assert goes_through_l1(400_000, 64, h200_l2)
    assert goes_through_l1(400_000, 256, h200_l2)


def check_schedule(bsb: BSB, balance: Balance) -> None:
    """Every chunk has one warp, every empty row one writer, every shared block one window, every cut its slots."""
    schedule = make_schedule(bsb, WARPS, balance)
    offset = bsb.tcb_row_offset.tolist()
    counts = np.diff(offset)
    chunk_warps, window_writers = np.zeros(bsb.num_tcbs, int), np.zeros(bsb.num_row_windows, int)
    slots: dict[int, list[int]] = {}
    for slot, warps in zip(schedule.block_slot.tolist(), schedule.warp_range.tolist(), strict=True):
        for begin, end, first_window, end_window in warps:
            assert begin <= end
            chunk_warps[begin:end] += 1
            window_writers[first_window:end_window] += 1
            if slot == OWN_WINDOWS and begin < end:
                assert (begin, end) == (offset[first_window], offset[end_window])
        if slot != OWN_WINDOWS:
            assert warps[0][0] < warps[0][1], "the first warp names the window"
            (window,) = {int(schedule.chunk_window[c]) for begin, end, _, _ in warps for c in range(begin, end)}
            assert max(end - begin for begin, end, _, _ in warps) <= -(-balance.piece // WARPS)
            if slot != SHARED_WINDOW:
                slots.setdefault(window, []).append(slot)
    assert (chunk_warps == 1).all()
    np.testing.assert_array_equal(window_writers, counts <= balance.light)
    assert sorted(slots) == schedule.cut_window.tolist()
    cut_slot = schedule.cut_slot.tolist()
    for i, window in enumerate(schedule.cut_window.tolist()):
        assert sorted(slots[window]) == list(range(cut_slot[i], cut_slot[i + 1]))
    assert cut_slot[-1] == schedule.num_slots


@pytest.mark.parametrize("name", EDGE_CASES)
@pytest.mark.parametrize(
    "balance", [Balance(1, 1, 16), Balance(8, 16, 64), Balance(2, 1, 2), Balance(1, 3, 1)], ids=str
)
def test_schedule_covers_edge_cases(name, balance):
    graph = EDGE_CASES[name]()
    check_schedule(BSB.from_csr(graph.indptr, graph.indices, graph.shape[1], TILE), balance)


@pytest.mark.parametrize("name", ["cora", "pubmed", "soc-epinions1", "ogbg-molhiv"])
def test_schedule_covers_real_graphs(name, real_graph_dir):
    graph = load_real_graph(real_graph_dir, name)
    bsb = BSB.from_csr(graph.indptr, graph.indices, tile=TILE)
    check_schedule(bsb, Balance.of(bsb.num_tcbs, num_sms=132))


def test_windows_of_a_run_are_neighbours_and_heavy_ones_lead():
    counts = torch.tensor([1, 1, 9, 1, 40, 0, 1])
    indptr = torch.repeat_interleave(counts, 16).mul(16).cumsum(0)  # every row of a window has all its columns
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), indptr])
    columns = torch.cat([torch.arange(16 * int(count)) for count in counts for _ in range(16)])
    bsb = BSB.from_csr(indptr, columns, 640, TILE)
    assert bsb.tcb_row_offset.diff().tolist() == counts.tolist()
    schedule = make_schedule(bsb, WARPS, Balance(light=4, target=2, piece=100))
    windows = [int(schedule.chunk_window[warps[0][0]]) for warps in schedule.warp_range[:2].tolist()]
    assert windows == [4, 2]
    assert schedule.warp_range[2, :, 2:].tolist() == [[0, 1], [1, 2], [3, 4], [5, 7]]


def test_lanes_copy_every_piece_of_a_chunk_once():
    for dim in range(8, 257, 8):
        pieces = dim // 8
        lanes_per_row = 1 << (pieces - 1).bit_length()
        rows_at_once = WARP_SIZE // lanes_per_row
        copies = [
            (i * rows_at_once + lane // lanes_per_row, lane % lanes_per_row)
            for i in range(-(-16 // rows_at_once))
            for lane in LANES
            if lane % lanes_per_row < pieces
        ]
        wanted = [(row, piece) for row, piece in copies if row < 16]  # num_keys is 16 at most
        assert sorted(wanted) == sorted(product(range(16), range(pieces)))
        if rows_at_once > 1:  # a lane's rows are all even or all odd: its place under the swizzle never changes
            assert rows_at_once % 2 == 0
