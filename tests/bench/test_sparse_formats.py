"""Footprints of sparse formats: counts against a dense matrix, and stored arrays against the paper's formulas."""

import numpy as np
import pytest

from bench import sparse_formats as formats
from bench.baselines.bsb import BSB
from bench.sparse_formats import C, R, count_bcsr_blocks, count_vectors, formula_bits, stored_bits

N = 200  # the last window is not full


@pytest.fixture(scope="module")
def dense():
    matrix = np.random.default_rng(0).random((N, N)) < 0.03
    matrix[16:32] = False  # an empty window
    matrix[40] = True  # a hub
    return matrix


def csr(dense):
    row, col = dense.nonzero()
    return np.concatenate([[0], np.cumsum(np.bincount(row, minlength=N))]), col


def test_counts_are_those_of_the_dense_matrix(dense, monkeypatch):
    padded = np.zeros((208, 200), bool)
    padded[:N] = dense
    windows = padded.reshape(-1, R, N)
    assert count_vectors(*csr(dense)) == windows.any(1).sum()
    expected = windows.reshape(-1, R, N // C, C).any((1, 3)).sum()
    for edges in (formats.EDGES_AT_A_TIME, 1, 70):
        monkeypatch.setattr(formats, "EDGES_AT_A_TIME", edges)
        assert count_bcsr_blocks(*csr(dense)) == expected


def test_stored_arrays_are_as_large_as_the_formula_but_for_what_the_module_tells(dense):
    indptr, indices = csr(dense)
    bsb, vectors = BSB.from_csr(indptr, indices), count_vectors(indptr, indices)
    b, z, windows = bsb.num_tcbs, indices.size, -(-N // R)
    formula, stored = (
        one(N, z, b, 30) if one is formula_bits else one(N, z, b, 30, vectors) for one in (formula_bits, stored_bits)
    )
    rounding = 32 * 2 * (windows - N / R)  # of N / r windows
    for name, offsets in (("CSR", 1), ("SR-BCSR", 0), ("BCSR", 1), ("TCF", 1)):
        assert stored[name] == pytest.approx(formula[name] + 32 * offsets, abs=rounding)
    assert formula["ME-BCRS"] - stored["ME-BCRS"] == pytest.approx(32 * (R + 1) * (b * C - vectors), abs=32 + rounding)
    assert stored["ME-TCF"] - formula["ME-TCF"] == pytest.approx(32 * (b * C - z), abs=64 + rounding)
    assert stored["BitTCF"] - stored["ME-TCF"] == b * R * C - 8 * z
