"""Sparse formats of the paper's format table: footprint by its formulas, and of arrays that are built.

Blocks are r x c = 16 x 8. In a window of r rows the compacted formats keep only columns with a nonzero. Notation of the
paper: N rows, z nonzeros, b blocks; `vectors` counts the kept columns, so vectors <= b c.

Formats that differ from their formula by more than the extra offset of the row pointers:

    BCSR      columns are not compacted: its b is counted separately, also for the formula
    ME-BCRS   no padding of blocks: vectors columns and r vectors values instead of b c and b r c
    ME-TCF    one column per slot of a block (b c), where the formula has one per nonzero (z)
    BitTCF    the same, and a bitmap of r c bits per block, where the formula has one bit per nonzero
"""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from data.canonical import distinct

R, C = 16, 8
EDGES_AT_A_TIME = 1 << 24
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True, eq=False)
class Compacted:
    """A binary matrix with the columns of each row window compacted.

    Attributes:
        indptr: [N + 1] int64.
        indices: [z] int64, ascending in each row.
        row: [z] int64, row of each nonzero.
        window_vectors: [W] int64, kept columns of each window.
        columns: [vectors] int64, the original columns, ascending in each window.
        vector: [z] int64, index in `columns` of each nonzero's column.
    """

    indptr: np.ndarray
    indices: np.ndarray
    row: np.ndarray
    window_vectors: np.ndarray
    columns: np.ndarray
    vector: np.ndarray

    @classmethod
    def from_csr(cls, indptr: np.ndarray, indices: np.ndarray) -> "Compacted":
        num_rows = indptr.size - 1
        row = np.repeat(np.arange(num_rows), np.diff(indptr))
        key, vector = np.unique((row // R) * num_rows + indices, return_inverse=True)
        window_vectors = np.bincount(key // num_rows, minlength=-(-num_rows // R))
        return cls(indptr, indices, row, window_vectors, key % num_rows, vector)

    @property
    def window_blocks(self) -> np.ndarray:
        """[W] int64, blocks of each window."""
        return -(-self.window_vectors // C)

    @property
    def slot(self) -> np.ndarray:
        """[vectors] int64, slot of each kept column among the b c slots of all blocks."""
        first_slot = (np.cumsum(self.window_blocks) - self.window_blocks) * C
        first_vector = np.cumsum(self.window_vectors) - self.window_vectors
        shift = np.repeat(first_slot - first_vector, self.window_vectors)
        return np.arange(self.columns.size) + shift


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


def build(matrix: Compacted) -> dict[str, Arrays]:
    """All formats except BSB (`kernels.formats.bsb`); values are ones."""
    return {name: builder(matrix) for name, builder in _BUILDERS.items()}


def built_bits(arrays: Arrays) -> int:
    return 8 * sum(array.nbytes for array in arrays.values())


def _csr(m: Compacted) -> Arrays:
    return {
        "row_pointers": m.indptr.astype(np.int32),
        "columns": m.indices.astype(np.int32),
        "values": np.ones(m.indices.size, np.float32),
    }


def _bcsr(m: Compacted) -> Arrays:
    blocks_across = m.indptr.size // C + 1
    key, block = np.unique((m.row // R) * blocks_across + m.indices // C, return_inverse=True)
    values = np.zeros((key.size, R, C), np.float32)
    values[block, m.row % R, m.indices % C] = 1
    per_window = np.bincount(key // blocks_across, minlength=m.window_vectors.size)
    return {"row_pointers": _offsets(per_window), "columns": (key % blocks_across).astype(np.int32), "values": values}


def _sr_bcsr(m: Compacted) -> Arrays:
    """Vectors of r x 1, each window padded to whole blocks, with start and end of each window."""
    ends = np.cumsum(m.window_blocks) * C
    starts = ends - m.window_blocks * C
    columns = np.zeros(ends[-1], np.int32)
    columns[m.slot] = m.columns
    values = np.zeros((ends[-1], R), np.float32)
    values[m.slot[m.vector], m.row % R] = 1
    return {
        "row_starts": starts.astype(np.int32),
        "row_ends": (starts + m.window_vectors).astype(np.int32),
        "columns": columns,
        "values": values,
    }


def _me_bcrs(m: Compacted) -> Arrays:
    """The same vectors without padding."""
    values = np.zeros((m.columns.size, R), np.float32)
    values[m.vector, m.row % R] = 1
    return {"row_pointers": _offsets(m.window_vectors), "columns": m.columns.astype(np.int32), "values": values}


def _tcf(m: Compacted) -> Arrays:
    first = np.cumsum(m.window_vectors) - m.window_vectors
    return {
        "row_pointers": m.indptr.astype(np.int32),
        "columns": m.indices.astype(np.int32),
        "blocks_of_window": m.window_blocks.astype(np.int32),
        "compacted_column": (m.vector - first[m.row // R]).astype(np.int32),
        "row": m.row.astype(np.int32),
    }


def _me_tcf(m: Compacted) -> Arrays:
    slot = m.slot[m.vector]
    order = np.lexsort((slot % C, m.row, slot // C))  # by block, then row
    columns = np.zeros(int(m.window_blocks.sum()) * C, np.int32)
    columns[m.slot] = m.columns
    return {
        "window_offsets": _offsets(m.window_blocks),
        "block_offsets": _offsets(np.bincount(slot // C, minlength=columns.size // C)),
        "columns": columns,
        "place_in_block": ((m.row % R) * C + slot % C)[order].astype(np.uint8),
    }


def _bit_tcf(m: Compacted) -> Arrays:
    arrays = _me_tcf(m)
    slot = m.slot[m.vector]
    bits = np.zeros((arrays["columns"].size // C, R, C), bool)
    bits[slot // C, m.row % R, slot % C] = True
    del arrays["place_in_block"]
    return arrays | {"bitmap": np.packbits(bits.reshape(-1, R * C), axis=1, bitorder="little")}


def _offsets(counts: np.ndarray) -> np.ndarray:
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)


_BUILDERS: dict[str, Callable[[Compacted], Arrays]] = {
    "CSR": _csr,
    "SR-BCSR": _sr_bcsr,
    "ME-BCRS": _me_bcrs,
    "BCSR": _bcsr,
    "TCF": _tcf,
    "ME-TCF": _me_tcf,
    "BitTCF": _bit_tcf,
}
