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
    table,
)
from kernels.jit import CUDA_FOLDER

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
