"""cuda/fused3s.cu without a GPU: its shared-memory layout and store exchange, emulated, and its schedule."""

from itertools import product

import numpy as np
import pytest
import torch
from attention_cases import EDGE_CASES, load_real_graph

from kernels import BSB
from kernels.backends.fused3s import FEW_WARPS, RECORDS, SLOT_BYTES, STAGES, TILE, WARPS, FusedKernelSpec
from kernels.formats.schedule import (
    BEGIN,
    BITMAP,
    CHUNK_KEYS,
    CHUNK_WORDS,
    COUNT,
    CUT,
    DONE,
    FINISH,
    FIRST,
    JOB_WORDS,
    KEYS,
    NUM_KEYS,
    SECOND,
    SHARED,
    WINDOW,
    Balance,
    make_schedule,
)
from kernels.fragments import WARP_SIZE, b_element, c_element, sddmm_dimension, spmm_dimension

LANES = range(WARP_SIZE)
DIMS = [8, 24, 32, 64, 72, 96, 128, 192, 256]


def key_layout(dim: int) -> tuple[int, int]:
    """(pitch, swizzle) of a stage's K tile, in bytes."""
    pairs = -(-dim // 32)
    return 64 * pairs, 0 if pairs % 2 else 64


def key_address(row: int, piece: int, dim: int) -> int:
    pitch, swizzle = key_layout(dim)
    return row * pitch + (16 * piece ^ (row % 2 * swizzle))


def value_layout(dim: int) -> tuple[int, int, int]:
    """(pitch in bytes, period in rows, spread in pieces) of a stage's V tile."""
    steps = -(-dim // 16)
    period = 1 if steps % 4 == 0 else 2 if steps % 2 == 0 else 4
    return 32 * steps, period, 8 // period


def value_swizzle(row: int, dim: int) -> int:
    _, period, spread = value_layout(dim)
    return 16 * (row // period % spread)


def value_address(row: int, piece: int, dim: int) -> int:
    return row * value_layout(dim)[0] + (16 * piece ^ value_swizzle(row, dim))


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
        exchange = row % 2 * swizzle
        read = row * key_layout(dim)[0] + 16 * t + (-exchange if pair % 2 else exchange) + 64 * pair
        assert read == key_address(row, 4 * pair + t, dim)
        first = 8 * (4 * pair + t)  # dimension of the first of eight elements
        for odd, register, half in product(range(2), range(2), range(2)):
            k, column = b_element(lane, register, half)
            assert column == g
            assert first + 2 * (2 * odd + register) + half == sddmm_dimension(2 * pair + odd, k, permuted=True)


@pytest.mark.parametrize("dim", DIMS)
def test_value_addresses_of_the_kernel_are_those_of_the_layout(dim):
    pitch, _, spread = value_layout(dim)
    for row, high, step in product(range(16), range(2), range(-(-dim // 16))):
        first = row * pitch + (16 * high ^ value_swizzle(row, dim))
        read = (first ^ (32 * step % (16 * spread))) + 32 * step // (16 * spread) * (16 * spread)
        assert read == value_address(row, 2 * step + high, dim)


@pytest.mark.parametrize("dim", [64, 128, 192, 256])
def test_lines_of_whole_rows_stay_lines_in_shared_memory(dim):
    for address, row, line in product((key_address, value_address), range(16), range(dim // 64)):
        assert len({address(row, 8 * line + piece, dim) // 128 for piece in range(8)}) == 1


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


def test_shared_memory_is_what_the_structs_hold():
    # At kDim = 128: two stages of K 4096 and V 4096, and four slots of 128 for a struct Chunk a warp.
    assert FusedKernelSpec(torch.float16, torch.float32, 128).shared_bytes == 4 * (2 * (4096 + 4096) + 4 * 128)


@pytest.mark.parametrize("dim", range(8, 257, 8))
@pytest.mark.parametrize("warps", [WARPS, FEW_WARPS])
def test_slots_of_a_warp_are_aligned_to_their_size(dim, warps):
    """The kernel counts them, and flips between those two apart, in the low bits of their address."""
    shared_bytes = FusedKernelSpec(torch.float16, torch.float32, dim, warps).shared_bytes
    assert (shared_bytes - warps * RECORDS * SLOT_BYTES) % (RECORDS * SLOT_BYTES) == 0
    for i in range(2 * RECORDS):
        assert (i + STAGES) % RECORDS * SLOT_BYTES == i % RECORDS * SLOT_BYTES ^ STAGES * SLOT_BYTES


def test_a_job_lies_in_the_slots_as_it_comes():
    assert FIRST.start == 0
    assert SECOND.start * 4 == SLOT_BYTES
    assert BEGIN == FIRST.stop == CHUNK_WORDS
    assert SECOND.stop == JOB_WORDS == SECOND.start + CHUNK_WORDS


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_a_part_of_a_window_fits_a_ring(dim):
    steps, pairs = -(-dim // 16), -(-dim // 32)
    # struct Partial: a step has two n-tiles, 16 bytes a lane, and two floats for each of 16 rows.
    assert steps * (2 * 32 * 16 + 2 * 16 * 4) <= 2 * (16 * 64 * pairs + 16 * 32 * steps)


def test_wide_heads_fit_gpus_with_less_shared_memory():
    wide = FusedKernelSpec(torch.float16, torch.float32, 256)
    assert wide.shared_bytes > 99 * 1024
    assert FusedKernelSpec(torch.float16, torch.float32, 256, warps=FEW_WARPS).shared_bytes < 99 * 1024
    assert FusedKernelSpec(torch.float16, torch.float32, 168).shared_bytes < 163 * 1024


def check_schedule(bsb: BSB, warps: int, balance: Balance) -> None:
    """The jobs hold every edge once; every window has one writer, every cut its slots."""
    schedule = make_schedule(bsb, warps, balance)
    chunks, jobs = schedule.chunks.numpy(), schedule.warp_jobs.numpy()
    assert jobs.shape == (schedule.num_blocks, warps, JOB_WORDS)
    indptr, indices = bsb.to_csr()
    rows = np.repeat(np.arange(bsb.shape[0]), indptr.diff().numpy())
    edges = sorted(edge for job in jobs.reshape(-1, JOB_WORDS) for edge in edges_of(job, chunks))
    assert edges == sorted(zip(rows, indices.numpy(), strict=True))

    writers, slots = np.zeros(bsb.num_row_windows, int), {}
    for block in jobs:
        if (block[:, FINISH] == DONE).all():  # every warp has a window of its own, or nothing
            for window in block[block[:, WINDOW] >= 0, WINDOW]:
                writers[window] += 1
            assert (block[:, COUNT] <= balance.light).all()
            assert (block[block[:, WINDOW] < 0, COUNT] == 0).all()
            continue
        shared = [WINDOW, FINISH, *range(CUT.start, CUT.stop)]
        assert (block[:, shared] == block[0, shared]).all()
        window, finish = block[0, WINDOW], block[0, FINISH]
        assert block[:, COUNT].sum() <= balance.piece
        assert np.ptp(block[:, COUNT]) <= 1
        if finish == SHARED:
            writers[window] += 1
        else:
            slots.setdefault((window, *block[0, CUT]), []).append(finish)
    taken = []
    for (window, first_slot, num_pieces), of_window in slots.items():
        assert sorted(of_window) == list(range(first_slot, first_slot + num_pieces))
        writers[window] += 1
        taken += of_window
    assert sorted(taken) == list(range(schedule.num_slots))
    assert (writers == 1).all()


def edges_of(job: np.ndarray, chunks: np.ndarray) -> list[tuple[int, int]]:
    """What a warp takes for the edges of A, by the two chunks that its job brings along and those that it fetches."""
    mine = chunks[job[BEGIN] : job[BEGIN] + job[COUNT]].copy()
    mine[:2] = np.stack([job[FIRST], job[SECOND]])[: len(mine)]
    num_keys = (mine[:, KEYS] >= 0).sum(1)
    assert (num_keys[:-1] == CHUNK_KEYS).all()
    assert len(mine) == 0 or num_keys[-1] == job[NUM_KEYS] > 0
    bits = np.unpackbits(np.ascontiguousarray(mine[:, BITMAP]).view(np.uint8), axis=1, bitorder="little")
    chunk, pair, half, column = np.nonzero(bits.reshape(-1, 8, 2, 16))
    assert (column < num_keys[chunk]).all()
    return list(zip(job[WINDOW] * 16 + 8 * half + pair, mine[chunk, column], strict=True))


@pytest.mark.parametrize("name", EDGE_CASES)
@pytest.mark.parametrize(
    "balance", [Balance(1, 16, 3), Balance(8, 64, 100), Balance(2, 2, None), Balance(0, 1, 2)], ids=str
)
def test_schedule_covers_edge_cases(name, balance):
    graph = EDGE_CASES[name]()
    for warps in (WARPS, FEW_WARPS):
        check_schedule(BSB.from_csr(graph.indptr, graph.indices, graph.shape[1], TILE), warps, balance)


@pytest.mark.parametrize("name", ["cora", "pubmed", "soc-epinions1", "ogbg-molhiv"])
def test_schedule_covers_real_graphs(name, real_graph_dir):
    graph = load_real_graph(real_graph_dir, name)
    bsb = BSB.from_csr(graph.indptr, graph.indices, tile=TILE)
    check_schedule(bsb, WARPS, Balance.of(bsb.tcb_row_offset.diff(), WARPS, 1584))


@pytest.mark.parametrize(
    ("counts", "balance"),
    [
        ([], Balance(1, 1, 32)),
        ([1, 5, 0], Balance(3, 32, None)),  # less than the GPU: even small windows are shared
        ([2, 1] * 10, Balance(3, 32, 32)),
        ([4] * 35 + [9] * 5, Balance(5, 138, 32)),  # seven eighths have up to 4
        ([8] * 80, Balance(10, 256, 32)),
        ([4] * 7 + [20], Balance(5, 36, None)),  # few, and all under way at once
        ([4] * 7 + [21], Balance(5, 36, 32)),  # but for one, which comes first
        ([9] * 8, Balance(12, 54, 32)),
        ([20] * 4 + [1] * 4, Balance(14, 63, 32)),  # 1.4 times a warp's share
        ([20] * 4 + [1] * 5, Balance(9, 63, 32)),  # 0.9 times, since one is too many to run at once
        ([20] * 4 + [1] * 8, Balance(7, 66, 32)),  # 0.7 times where there are many more
        ([60] * 80, Balance(22, 256, 32)),
    ],
)
def test_balance_follows_the_windows(counts, balance):
    """On a GPU that runs two blocks of four warps."""
    assert Balance.of(torch.tensor(counts, dtype=torch.int32), WARPS, resident_warps=8) == balance


def bsb_of_windows(counts):
    """Windows of so many chunks: every row of a window has the same columns."""
    counts = torch.tensor(counts)
    indptr = torch.cat([torch.zeros(1, dtype=torch.int64), counts.repeat_interleave(16).mul(16).cumsum(0)])
    columns = torch.cat([torch.arange(16 * int(count)) for count in counts for _ in range(16)])
    bsb = BSB.from_csr(indptr, columns, 16 * int(counts.max()), TILE)
    assert bsb.tcb_row_offset.diff().tolist() == counts.tolist()
    return bsb


def test_heavy_windows_lead_light_ones_are_sorted_in_segments_and_medium_ones_end():
    bsb = bsb_of_windows([1, 3, 9, 2, 40, 0, 1])
    schedule = make_schedule(bsb, WARPS, Balance(light=4, piece=100, segment=3))
    assert schedule.warp_jobs[..., WINDOW].tolist() == [[4] * 4, [1, 3, 0, 6], [5, -1, -1, -1], [2] * 4]
    assert schedule.warp_jobs[..., COUNT].tolist() == [[10] * 4, [3, 2, 1, 1], [0] * 4, [3, 2, 2, 2]]


@pytest.mark.parametrize(("many", "order"), [(8, [4, 1, 3, 2, 0, 5]), (4, [4, 1, 0, 2, 3, 5])])
def test_shared_windows_start_longest_first_and_many_of_them_by_powers_of_two(monkeypatch, many, order):
    monkeypatch.setattr("kernels.formats.schedule.MANY_BLOCKS", many)
    bsb = bsb_of_windows([5, 9, 6, 7, 40, 2])
    schedule = make_schedule(bsb, WARPS, Balance(light=1, piece=100, segment=32))
    assert schedule.warp_jobs[:, 0, WINDOW].tolist() == order


def test_light_windows_that_run_at_once_are_dealt_to_the_blocks():
    bsb = bsb_of_windows(range(1, 12))
    schedule = make_schedule(bsb, WARPS, Balance(light=11, piece=64, segment=None))
    assert schedule.warp_jobs[..., COUNT].tolist() == [[9, 8, 3, 2], [10, 7, 4, 1], [11, 6, 5, 0]]


@pytest.mark.parametrize("dim", range(8, 257, 8))
def test_lanes_copy_every_piece_of_a_chunk_once(dim):
    pieces = dim // 8
    lanes_per_row = 2 if pieces == 1 else 1 << (pieces - 1).bit_length()
    rows_per_lane = 16 * lanes_per_row // WARP_SIZE
    copies = [
        (lane // lanes_per_row * rows_per_lane + i, lane % lanes_per_row, i)
        for i in range(rows_per_lane)
        for lane in LANES
        if lane % lanes_per_row < pieces
    ]
    assert sorted((row, piece) for row, piece, _ in copies) == sorted(product(range(16), range(pieces)))
    pitch, swizzle = key_layout(dim)
    for row, piece, i in copies:  # the address that the kernel computes
        exchange = (row - i if rows_per_lane == 1 else i) % 2 * swizzle
        place = (row - i) * pitch + 16 * piece
        assert (place ^ exchange) + i * pitch == key_address(row, piece, dim)
        value_pitch = value_layout(dim)[0]
        place = (row - i) * value_pitch + (16 * piece ^ value_swizzle(row - i, dim))
        assert (place ^ value_swizzle(i, dim)) + i * value_pitch == value_address(row, piece, dim)
