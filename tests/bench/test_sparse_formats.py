"""Each built format holds the whole matrix; its size follows the paper's formula, or the module explains why not."""

import numpy as np
import pytest
import scipy.sparse

from bench import sparse_formats as formats
from bench.sparse_formats import C, Compacted, R, build, built_bits, count_bcsr_blocks, formula_bits
from kernels.formats.bsb import BSB

N = 200  # the last window is not full


@pytest.fixture(scope="module")
def matrix():
    random = scipy.sparse.random_array((N, N), density=0.03, format="csr", rng=np.random.default_rng(0))
    random.data[:] = 1
    random = random.tolil()
    random[16:32] = 0  # an empty window
    random[40, :] = 1  # a hub
    csr = random.tocsr()
    csr.eliminate_zeros()
    csr.sort_indices()
    return csr


@pytest.fixture(scope="module")
def compacted(matrix):
    return Compacted.from_csr(matrix.indptr.astype(np.int64), matrix.indices.astype(np.int64))


@pytest.fixture(scope="module")
def built(compacted):
    return build(compacted)


def test_blocks_are_those_of_bsb(matrix, compacted):
    bsb = BSB.from_csr(matrix.indptr, matrix.indices)
    assert compacted.window_blocks.tolist() == bsb.tcb_row_offset.diff().tolist()


def windows_of(offsets, c):
    return np.repeat(np.arange(offsets.size - 1), np.diff(offsets) * c)


def dense_of_blocks(values, window, columns):
    """[vectors, r] values of columns to a dense matrix."""
    dense = np.zeros((-(-N // R) * R, N))
    for vector, (w, column) in enumerate(zip(window, columns, strict=True)):
        dense[w * R : (w + 1) * R, column] += values[vector]
    return dense[:N]


def unpacked(name, a):
    """The dense matrix out of a built format."""
    if name == "CSR":
        return scipy.sparse.csr_array((a["values"], a["columns"], a["row_pointers"]), shape=(N, N)).toarray()
    if name == "TCF":
        dense = np.zeros((N, N))
        dense[a["row"], a["columns"]] = 1
        return dense
    if name == "BCSR":
        dense = np.zeros((-(-N // R) * R, -(-N // C) * C + C))
        for block, w in enumerate(windows_of(a["row_pointers"], 1)):
            column = a["columns"][block] * C
            dense[w * R : (w + 1) * R, column : column + C] = a["values"][block]
        return dense[:N, :N]
    if name == "ME-BCRS":
        return dense_of_blocks(a["values"], windows_of(a["row_pointers"], 1), a["columns"])
    if name == "SR-BCSR":
        starts = np.append(a["row_starts"], a["columns"].size)
        return dense_of_blocks(a["values"], windows_of(starts, 1), a["columns"])
    window = windows_of(a["window_offsets"], C)
    values = np.zeros((a["columns"].size, R))
    if name == "ME-TCF":
        block = np.repeat(np.arange(a["block_offsets"].size - 1), np.diff(a["block_offsets"]))
        values[block * C + a["place_in_block"] % C, a["place_in_block"] // C] = 1
    else:
        bits = np.unpackbits(a["bitmap"], axis=1, bitorder="little").reshape(-1, R, C)
        values = bits.transpose(0, 2, 1).reshape(-1, R)
    return dense_of_blocks(values, window, a["columns"])


@pytest.mark.parametrize("name", formats._BUILDERS)
def test_a_built_format_holds_the_matrix(matrix, built, name):
    assert np.array_equal(unpacked(name, built[name]), matrix.toarray())


def test_tcf_knows_the_compacted_column(compacted, built):
    first = np.cumsum(compacted.window_vectors) - compacted.window_vectors
    place = first[built["TCF"]["row"] // R] + built["TCF"]["compacted_column"]
    assert np.array_equal(compacted.columns[place], built["TCF"]["columns"])


def test_sizes_against_the_formulas(matrix, compacted, built):
    z, b, vectors, windows = matrix.nnz, int(compacted.window_blocks.sum()), compacted.columns.size, -(-N // R)
    bcsr_blocks = count_bcsr_blocks(matrix.indptr, matrix.indices)
    formula = formula_bits(N, z, b, bcsr_blocks)
    fraction = 32 * (windows - N / R)  # a window that is not full has an offset too
    offset = 32  # a row pointer array has one entry more than rows
    assert built_bits(built["CSR"]) == formula["CSR"] + offset
    assert built_bits(built["SR-BCSR"]) == formula["SR-BCSR"] + 2 * fraction
    assert built_bits(built["BCSR"]) == formula["BCSR"] + offset + fraction
    assert built_bits(built["TCF"]) == formula["TCF"] + offset + fraction
    assert BSB.from_csr(matrix.indptr, matrix.indices).nbytes * 8 == formula["BSB"] + offset + fraction
    # formats that differ from their formula, see the module
    assert built_bits(built["ME-BCRS"]) == 32 * (windows + 1 + vectors + R * vectors)
    assert built_bits(built["ME-TCF"]) == 32 * (windows + 1 + b + 1 + b * C) + 8 * z
    assert built_bits(built["BitTCF"]) == 32 * (windows + 1 + b + 1 + b * C) + b * R * C


def test_bcsr_blocks_are_counted_in_pieces(matrix, monkeypatch):
    whole = count_bcsr_blocks(matrix.indptr, matrix.indices)
    monkeypatch.setattr(formats, "EDGES_AT_A_TIME", 40)
    assert count_bcsr_blocks(matrix.indptr, matrix.indices) == whole
    assert whole == np.unique(np.stack([matrix.tocoo().row // R, matrix.indices // C]), axis=1).shape[1]
