"""Sequence masks against masks built token by token from the papers' definitions."""

import logging

import numpy as np
import pytest

import data
from data.selection import Selection
from data.sources.sequence_masks import BigBird, Longformer, SequenceMask

NAMES = [name for name in data.names() if isinstance(data.info(name).official, SequenceMask)]


def dense(mask) -> np.ndarray:
    """[N, N] bool, from edges that occur once."""
    raw = mask.load("nowhere", Selection())
    matrix = np.zeros((raw.num_nodes, raw.num_nodes), int)
    np.add.at(matrix, (raw.row, raw.col), 1)
    assert matrix.max() == 1
    return matrix.astype(bool)


@pytest.mark.parametrize(("tokens", "window"), [(40, 8), (37, 6), (12, 30), (9, 0), (1, 2)])
def test_longformer_is_its_definition(tokens, window):
    expected = np.zeros((tokens, tokens), bool)
    for query in range(tokens):
        for key in range(tokens):
            is_near = -window / 2 <= key - query <= window / 2
            expected[query, key] = is_near or query == 0 or key == 0
    np.testing.assert_array_equal(dense(Longformer(tokens, window)), expected)


def bigbird_blocks(matrix: np.ndarray, block: int) -> np.ndarray:
    """[blocks, blocks] bool; every block must be full or empty."""
    count = len(matrix) // block
    filled = matrix.reshape(count, block, count, block).sum((1, 3))
    assert set(np.unique(filled)) <= {0, block**2}
    return filled > 0


@pytest.mark.parametrize(("tokens", "block", "random_blocks"), [(96, 4, 3), (64, 8, 2), (40, 4, 0), (32, 4, 3)])
def test_bigbird_is_its_definition(tokens, block, random_blocks):
    blocks = bigbird_blocks(dense(BigBird(tokens, block, random_blocks)), block)
    last = len(blocks) - 1
    for query, row in enumerate(blocks):
        keys = set(np.flatnonzero(row))
        if query in (0, last):
            assert keys == set(range(last + 1))
            continue
        ruled = {0, last, query - 1, query, query + 1}
        assert ruled <= keys
        assert len(keys - ruled) == random_blocks


def test_random_blocks_are_seeded_one_way_and_from_the_whole_sequence():
    blocks = BigBird(4_096, 16).mask()[::16, ::16]
    np.testing.assert_array_equal(blocks, BigBird(4_096, 16).mask()[::16, ::16])
    query, key = np.nonzero(blocks)
    is_random = (np.abs(query - key) > 1) & (np.minimum(query, key) > 0) & (np.maximum(query, key) < len(blocks) - 1)
    query, key = query[is_random], key[is_random]
    assert query.size == 3 * 254
    assert not np.array_equal(blocks, blocks.T)
    # 762 uniform draws: about 190 in each quarter of the sequence, standard deviation 12.
    assert np.bincount(key * 4 // len(blocks), minlength=4).min() > 140


@pytest.mark.parametrize("name", NAMES)
def test_registered_masks_load_without_files_or_network(name, tmp_path, caplog):
    entry = data.info(name)
    with caplog.at_level(logging.INFO, logger="data"):
        loaded = data.load(name, root=tmp_path, features=False)
    assert caplog.records == []
    assert list(tmp_path.iterdir()) == []
    meta = loaded.meta
    assert (meta.source, meta.task, meta.num_graphs) == ("official", "node", 1)
    assert (meta.num_nodes, meta.num_edges) == (entry.num_nodes, entry.nnz)
    assert str(entry.num_nodes) in meta.origin
    with pytest.raises(data.DatasetMissingError, match=f"{name}: has no surrogate"):
        data.load(name, root=tmp_path, source="synthetic")


def test_a_sequence_ends_with_a_block():
    with pytest.raises(ValueError, match="num_tokens: got 100; a multiple of the block size 8"):
        BigBird(100, 8).mask()
