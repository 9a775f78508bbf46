"""The fragment maps, and the paper kernel's data path emulated with them, lane by lane and register by register."""

import re
from itertools import product

import numpy as np
import pytest

from kernels.fragments import (
    WARP_SIZE,
    a_element,
    b_element,
    c_element,
    sddmm_dimension,
    spmm_dimension,
    swapped_spmm_dimension,
    table,
)
from kernels.runtime.jit import CUDA_FOLDER

LANES = range(WARP_SIZE)
PERMUTED = pytest.mark.parametrize("permuted", [True, False], ids=["permuted", "plain"])


def test_maps_are_bijections():
    def elements(function, *ranges):
        return sorted(function(*at) for at in product(LANES, *ranges))

    assert elements(a_element, range(4), range(2)) == list(product(range(16), range(16)))
    assert elements(b_element, range(2), range(2)) == list(product(range(16), range(8)))
    assert elements(c_element, range(4)) == list(product(range(16), range(8)))


@PERMUTED
def test_remapped_dimensions_are_bijections(permuted):
    assert sorted(sddmm_dimension(step, k, permuted) for step in range(8) for k in range(16)) == list(range(128))
    columns = product(range(8), range(2), range(8))
    assert sorted(spmm_dimension(*at, permuted) for at in columns) == list(range(128))


def test_comment_in_the_source_is_the_printed_table():
    source = (CUDA_FOLDER / "mma.cuh").read_text(encoding="utf-8")
    comment = [line.removeprefix("//").strip() for line in source.splitlines() if re.match(r"//\s+A\d = ", line)]
    assert comment == [line.strip() for line in table()]


def mma(c: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """m16n8k16 on registers: c [32, 4], a [32, 4, 2], b [32, 2, 2] -> new c. The hardware's contract, from the maps."""
    matrix_a, matrix_b = np.zeros((16, 16)), np.zeros((16, 8))
    for lane in LANES:
        for register, half in product(range(4), range(2)):
            matrix_a[a_element(lane, register, half)] = a[lane, register, half]
        for register, half in product(range(2), range(2)):
            matrix_b[b_element(lane, register, half)] = b[lane, register, half]
    product_ab = matrix_a @ matrix_b
    return c + np.array([[product_ab[c_element(lane, register)] for register in range(4)] for lane in LANES])


def load_row_words(row: np.ndarray, s: int, t: int, permuted: bool) -> np.ndarray:
    """The kernel's function of that name: [4 words, 2 halves], from its addresses, zero past the end of the row."""
    padded = np.concatenate([row, np.zeros(64)])
    starts = [32 * s + 8 * t + 2 * w for w in range(4)] if permuted else [32 * s + 2 * t + 8 * w for w in range(4)]
    return np.array([padded[start : start + 2] for start in starts])


def load_value(rows: np.ndarray, i: int, g: int, permuted: bool) -> np.ndarray:
    """The kernel's function of that name: V of keys 2t, 2t+1, 2t+8, 2t+9 -> [n-tile, register, half]."""
    padded = np.concatenate([rows, np.zeros((4, 32))], axis=1)
    fragments = np.zeros((2, 2, 2))
    for tile, register, half in product(range(2), range(2), range(2)):
        d = 16 * i + 2 * g + tile if permuted else 16 * i + 8 * tile + g
        fragments[tile, register, half] = padded[2 * register + half, d]
    return fragments


@PERMUTED
@pytest.mark.parametrize("dim", [8, 24, 32, 64, 72, 128])
def test_emulated_kernel_multiplies_right(dim, permuted):
    rng = np.random.default_rng(dim)
    q, k, v = rng.standard_normal((16, dim)), rng.standard_normal((16, dim)), rng.standard_normal((16, dim))

    # SDDMM: two TCBs of eight keys, the C registers of each.
    score = np.zeros((2, WARP_SIZE, 4))
    for tcb, s in product(range(2), range(-(-dim // 32))):
        words_top, words_bottom, words_key = [], [], []
        for lane in LANES:
            g, t = divmod(lane, 4)
            words_top.append(load_row_words(q[g], s, t, permuted))
            words_bottom.append(load_row_words(q[g + 8], s, t, permuted))
            words_key.append(load_row_words(k[8 * tcb + g], s, t, permuted))
        top, bottom, key = map(np.array, (words_top, words_bottom, words_key))
        for odd in range(2):  # words x, y, then z, w
            lo, hi = 2 * odd, 2 * odd + 1
            a = np.stack([top[:, lo], bottom[:, lo], top[:, hi], bottom[:, hi]], axis=1)
            score[tcb] = mma(score[tcb], a, key[:, lo : hi + 1])
    expected = q @ k.T
    for tcb, lane, register in product(range(2), LANES, range(4)):
        row, column = c_element(lane, register)
        assert score[tcb, lane, register] == pytest.approx(expected[row, 8 * tcb + column])

    # SpMM: the C registers of the two TCBs are, word for word, the A registers of one k-step.
    a = np.stack([score[0][:, :2], score[0][:, 2:], score[1][:, :2], score[1][:, 2:]], axis=1)
    output = np.zeros((16, dim))
    for i in range(-(-dim // 16)):
        fragments = []
        for lane in LANES:
            g, t = divmod(lane, 4)
            keys = [2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9]
            fragments.append(load_value(v[keys], i, g, permuted))
        b = np.array(fragments)
        c = np.stack([mma(np.zeros((WARP_SIZE, 4)), a, b[:, tile]) for tile in range(2)])
        for lane, half in product(LANES, range(2)):  # store_row
            g, t = divmod(lane, 4)
            values = c[:, lane, 2 * half : 2 * half + 2]  # [n-tile][2]
            for tile, j in product(range(2), range(2)):
                d = 16 * i + 4 * t + 2 * j + tile if permuted else 16 * i + 8 * tile + 2 * t + j
                if d < dim:
                    output[8 * half + g, d] = values[tile, j]
    np.testing.assert_allclose(output, expected @ v, atol=1e-9)


@pytest.mark.parametrize("warps", [4, 8])
@pytest.mark.parametrize("dim", [8, 24, 64, 72, 128, 136, 200, 256])
def test_emulated_split_rows_multiply_right(dim, warps):
    """Each warp multiplies its k-steps for all TCBs; the parts, where shared memory has them, add up to S."""
    rng = np.random.default_rng(dim)
    q, k = rng.standard_normal((16, dim)), rng.standard_normal((warps, 8, dim))
    all_steps = -(-dim // 16)
    steps = -(-all_steps // warps)  # of a warp
    splits = -(-all_steps // steps)
    assert sorted(w * steps + i for w in range(splits) for i in range(steps))[:all_steps] == list(range(all_steps))

    def step_words(row: np.ndarray, step: int, t: int) -> np.ndarray:  # the kernel's load_step_words
        padded = np.concatenate([row, np.zeros(32 * steps)])
        return np.array([padded[start : start + 2] for start in (16 * step + 2 * t, 16 * step + 2 * t + 8)])

    def words(rows: np.ndarray, step: int) -> np.ndarray:  # [lane, register, half], of row g
        return np.array([step_words(rows[lane // 4], step, lane % 4) for lane in LANES])

    partial = np.full((warps * splits * WARP_SIZE, 4), np.nan)
    for warp, slot in product(range(splits), range(warps)):
        part = np.zeros((WARP_SIZE, 4))
        for step in range(warp * steps, (warp + 1) * steps):
            top, bottom = words(q[:8], step), words(q[8:], step)
            a = np.stack([top[:, 0], bottom[:, 0], top[:, 1], bottom[:, 1]], axis=1)
            part = mma(part, a, words(k[slot], step))
        place = (slot * splits + warp) * WARP_SIZE
        assert np.isnan(partial[place : place + WARP_SIZE]).all(), "written by two warps"
        partial[place : place + WARP_SIZE] = part
    for slot in range(warps):
        score = sum(partial[(slot * splits + split) * WARP_SIZE :][:WARP_SIZE] for split in range(splits))
        expected = q @ k[slot].T
        for lane, register in product(LANES, range(4)):
            assert score[lane, register] == pytest.approx(expected[c_element(lane, register)])


@PERMUTED
def test_maps_describe_the_kernels_addresses(permuted):
    row = np.arange(128)
    for s, lane in product(range(4), LANES):
        g, t = divmod(lane, 4)
        words = load_row_words(row, s, t, permuted)
        for odd, register, half in product(range(2), range(2), range(2)):
            k, _ = b_element(lane, register, half)
            assert words[2 * odd + register, half] == sddmm_dimension(2 * s + odd, k, permuted)
        fragments = load_value(np.tile(row, (4, 1)), s, g, permuted)
        for tile in range(2):
            assert (fragments[tile] == spmm_dimension(s, tile, g, permuted)).all()


def test_swapped_dimensions_are_a_bijection():
    assert sorted(swapped_spmm_dimension(*at) for at in product(range(8), range(16))) == list(range(128))


@pytest.mark.parametrize("dim", [8, 24, 32, 64, 72, 128])
def test_emulated_swap_and_transpose_multiplies_right(dim):
    """cuda/flashsparse.cu: S^T = K Q^T and O^T = V^T P^T, eight rows by sixteen keys."""
    rng = np.random.default_rng(dim)
    q, k, v = rng.standard_normal((8, dim)), rng.standard_normal((16, dim)), rng.standard_normal((16, dim))

    # SDDMM: A = K, B = Q^T, C = S^T (key, row).
    c = np.zeros((WARP_SIZE, 4))
    for s in range(-(-dim // 32)):
        words = {"low": [], "high": [], "query": []}
        for lane in LANES:
            g, t = divmod(lane, 4)
            for name, row in (("low", k[g]), ("high", k[g + 8]), ("query", q[g])):
                words[name].append(load_row_words(row, s, t, permuted=True))
        low, high, query = (np.array(words[name]) for name in ("low", "high", "query"))
        for odd in range(2):  # words x, y, then z, w
            first, second = 2 * odd, 2 * odd + 1
            a = np.stack([low[:, first], high[:, first], low[:, second], high[:, second]], axis=1)
            c = mma(c, a, query[:, first : second + 1])
    score = np.zeros((8, 16))
    for lane, j in product(LANES, range(4)):  # the kernel's stores
        g, t = divmod(lane, 4)
        assert c_element(lane, j) == (g + 8 * (j // 2), 2 * t + j % 2)
        score[2 * t + j % 2, g + 8 * (j // 2)] = c[lane, j]
    np.testing.assert_allclose(score, q @ k.T, atol=1e-9)

    # SpMM: A = V^T, B = P^T from P [8][16] row by row, C = O^T (dimension, row).
    output = np.zeros((8, dim))
    padded = np.concatenate([v, np.zeros((16, 16))], axis=1)
    for i in range(-(-dim // 16)):
        a, b = np.zeros((WARP_SIZE, 4, 2)), np.zeros((WARP_SIZE, 2, 2))
        for lane in LANES:
            g, t = divmod(lane, 4)
            word = [padded[key, 16 * i + 2 * g :][:2] for key in (2 * t, 2 * t + 1, 2 * t + 8, 2 * t + 9)]
            for register in range(4):  # low_halves or high_halves of two words
                pair = word[register // 2 * 2 : register // 2 * 2 + 2]
                a[lane, register] = [pair[0][register % 2], pair[1][register % 2]]
                for half in range(2):
                    m, key = a_element(lane, register, half)
                    assert a[lane, register, half] == padded[key, swapped_spmm_dimension(i, m)]
            b[lane] = [score[g, 2 * t : 2 * t + 2], score[g, 2 * t + 8 : 2 * t + 10]]
        c = mma(np.zeros((WARP_SIZE, 4)), a, b)
        for lane, j in product(LANES, range(2)):  # the kernel's stores
            g, t = divmod(lane, 4)
            if (d := 16 * i + 2 * g) < dim:
                output[2 * t + j, d : d + 2] = c[lane, j], c[lane, 2 + j]
    np.testing.assert_allclose(output, score @ v, atol=1e-9)


@pytest.mark.parametrize("values", [4, 8])
def test_emulated_warp_sums(values):
    """cuda/warp.cuh: the halving exchange leaves lane l with the sum over all lanes of x[l * values / 32]."""
    x = np.random.default_rng(values).standard_normal((WARP_SIZE, values))
    expected = x.sum(0)
    lanes = np.arange(WARP_SIZE)
    count, distance = values // 2, WARP_SIZE // 2
    while count:
        upper = (lanes & distance).astype(bool)[:, None]
        kept = np.where(upper, x[:, count : 2 * count], x[:, :count])
        sent = np.where(upper, x[:, :count], x[:, count : 2 * count])
        x = kept + sent[lanes ^ distance]
        count, distance = count // 2, distance // 2
    while distance:
        x = x + x[lanes ^ distance]
        distance //= 2
    np.testing.assert_allclose(x[:, 0], expected[lanes * values // WARP_SIZE])
