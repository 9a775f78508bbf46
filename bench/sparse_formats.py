"""Footprints of the sparse formats in the paper's table: by its formulas, and of the arrays that a format stores.

Blocks are r x c = 16 x 8. In a window of r rows the compacted formats keep only columns with a nonzero. Notation of the
paper: N rows, z nonzeros, b blocks; the kept columns are `vectors` <= b c.

Formats whose arrays differ from the formula by more than the extra offset of the row pointers:

    BCSR      columns are not compacted: its b is counted separately, also for the formula
    ME-BCRS   no padding of blocks: vectors columns and r vectors values instead of b c and b r c
    ME-TCF    one column per slot of a block (b c), where the formula has one per nonzero (z)
    BitTCF    the same, and a bitmap of r c bits per block, where the formula has one bit per nonzero
"""

import numpy as np

from data.canonical import distinct

R, C = 16, 8
EDGES_AT_A_TIME = 1 << 24


def formula_bits(num_rows: int, nnz: int, blocks: int, bcsr_blocks: int) -> dict[str, float]:
    """The paper's table, with 32-bit indices and values, for blocks of 16 x 8.

    Args:
        num_rows: N.
        nnz: z.
        blocks: b of the compacted formats.
        bcsr_blocks: b of BCSR.
    """
    n, z, b = num_rows, nnz, blocks
    return {
        "CSR": 32 * (n + 2 * z),
        "SR-BCSR": 32 * (2 * n / R + b * C + b * R * C),
        "ME-BCRS": 32 * (n / R + b * C + b * R * C),
        "BCSR": 32 * (n / R + bcsr_blocks + bcsr_blocks * R * C),
        "TCF": 32 * (n / R + n + 3 * z),
        "ME-TCF": 32 * (n / R + b + z) + 8 * z,
        "BitTCF": 32 * (n / R + b + z) + z,
        "BSB": 32 * (n / R + b * C) + b * R * C,
    }


def stored_bits(num_rows: int, nnz: int, blocks: int, bcsr_blocks: int, vectors: int) -> dict[str, int]:
    """Bits of the arrays that a format stores, with 32-bit offsets and values; BSB's are those of `BSB.nbytes`.

    Args:
        vectors: columns with a nonzero, summed over the windows; others as of `formula_bits`.
    """
    n, z, b, windows = num_rows, nnz, blocks, -(-num_rows // R)
    return {
        "CSR": 32 * (n + 1 + 2 * z),
        "SR-BCSR": 32 * (2 * windows + b * C + b * R * C),  # start and end of each window
        "ME-BCRS": 32 * (windows + 1 + vectors + vectors * R),
        "BCSR": 32 * (windows + 1 + bcsr_blocks + bcsr_blocks * R * C),
        "TCF": 32 * (n + 1 + windows + 3 * z),  # blocks of each window; column, compacted column and row of a nonzero
        "ME-TCF": 32 * (windows + 1 + b + 1 + b * C) + 8 * z,  # a byte for the place in a block
        "BitTCF": 32 * (windows + 1 + b + 1 + b * C) + b * R * C,
    }


def count_vectors(indptr: np.ndarray, indices: np.ndarray) -> int:
    """Columns with a nonzero, summed over the windows of 16 rows."""
    num_rows = indptr.size - 1
    row = np.repeat(np.arange(num_rows), np.diff(indptr))
    return int(distinct(np, (row // R) * num_rows + indices).size)


def count_bcsr_blocks(indptr: np.ndarray, indices: np.ndarray) -> int:
    """Blocks of 16 x 8 with a nonzero, without compaction of columns."""
    num_rows = indptr.size - 1
    blocks = 0
    first = 0
    while first < num_rows:  # in slices: the keys of all edges would double the memory
        last = int(np.searchsorted(indptr, indptr[first] + EDGES_AT_A_TIME, side="right")) - 1
        last = min(max(last // R * R, first + R), num_rows)
        rows = np.repeat(np.arange(first, last) // R, np.diff(indptr[first : last + 1]))
        blocks += distinct(np, rows * (num_rows // C + 1) + indices[indptr[first] : indptr[last]] // C).size
        first = last
    return blocks
