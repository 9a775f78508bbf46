"""Sequence masks against masks built token by token from the papers' definitions."""

import logging
from pathlib import Path

import numpy as np
import pytest

import data
from configs import load_config
from configs.bench import BenchConfig
from data.canonical import to_csr
from data.registry.masks import MASKS
from data.selection import Selection
from data.sources.sequence_masks import BigBird, Longformer
from kernels import BSB

NAMES = [entry.name for entry in MASKS]


def dense(mask) -> np.ndarray:
    """[N, N] bool, from edges that occur once."""
    raw = mask.load("nowhere", Selection())
    matrix = np.zeros((raw.num_nodes, raw.num_nodes), int)
    np.add.at(matrix, (raw.row, raw.col), 1)
    assert matrix.max() == 1
    return matrix.astype(bool)


@pytest.mark.parametrize(
    ("tokens", "window", "num_global"), [(40, 8, 1), (40, 8, 0), (37, 6, 5), (12, 30, 2), (9, 0, 9)]
)
def test_longformer_is_its_definition(tokens, window, num_global):
    expected = np.zeros((tokens, tokens), bool)
    for query in range(tokens):
        for key in range(tokens):
            is_near = -window / 2 <= key - query <= window / 2
            expected[query, key] = is_near or query < num_global or key < num_global
    np.testing.assert_array_equal(dense(Longformer(tokens, window, num_global)), expected)


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
    mask = BigBird(4_096, 16)
    blocks = mask.block_mask()
    np.testing.assert_array_equal(blocks, BigBird(4_096, 16).block_mask())
    assert (blocks != BigBird(4_096, 16, seed=1).block_mask()).any()
    query, key = np.nonzero(blocks)
    is_random = (np.abs(query - key) > 1) & (np.minimum(query, key) > 0) & (np.maximum(query, key) < len(blocks) - 1)
    query, key = query[is_random], key[is_random]
    assert query.size == 3 * 254
    assert not np.array_equal(blocks, blocks.T)
    # 762 uniform draws: about 190 in each quarter of the sequence, standard deviation 12.
    assert np.bincount(key * 4 // len(blocks), minlength=4).min() > 140


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Longformer(100, 7), "window: got 7; an even number"),
        (lambda: Longformer(100, 8, 101), "num_global: got 101; 0 to 100"),
        (lambda: BigBird(1_000), "num_tokens: got 1000; a multiple of the block size 64 is needed, 512 or more"),
        (lambda: BigBird(448), "num_tokens: got 448; .* 512 or more"),
    ],
)
def test_impossible_parameters_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


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
    with pytest.raises(
        data.DatasetMissingError, match=f"{name}: has no surrogate, since the mask is exact by definition"
    ):
        data.load(name, root=tmp_path, source="synthetic")


@pytest.mark.parametrize("name", NAMES)
def test_registered_symmetry_and_published_parameters(name):
    entry = data.info(name)
    small = {"longformer": Longformer(512, 64), "bigbird": BigBird(1_024)}[name.split("-")[0]]
    matrix = dense(small)
    assert np.array_equal(matrix, matrix.T) == entry.symmetric
    published = {
        "longformer-4096": Longformer(num_tokens=4_096, window=512, num_global=1),
        "longformer-16384": Longformer(num_tokens=16_384, window=1_024, num_global=1),
        "bigbird-4096": BigBird(num_tokens=4_096, block=64, random_blocks=3),
        "bigbird-16384": BigBird(num_tokens=16_384, block=64, random_blocks=3),
    }
    assert entry.official == published[name]


@pytest.mark.parametrize("name", ["longformer-4096", "bigbird-4096"])
def test_features_are_random_and_blocks_nearly_full(name, tmp_path):
    loaded = data.load(name, root=tmp_path)
    assert loaded.meta.features == "random"
    assert loaded.graph.ndata["feat"].shape == (4_096, 64)
    indptr, indices, _ = loaded.graph.adj_tensors("csc")
    bsb = BSB.from_csr(indptr, indices)
    assert bsb.nnz / bsb.num_tcbs > 110  # of 128: a gathered key serves nearly all 16 queries


@pytest.mark.parametrize("mask", [Longformer(300, 32, 3), BigBird(1_024)])
def test_edges_are_sorted(mask):
    row, col = mask.edges()
    assert (np.diff(row * mask.num_tokens + col) > 0).all()
    assert to_csr(mask.load("nowhere", Selection())).removed == 0


def test_readme_lists_every_mask():
    text = (Path(data.__file__).parent / "README.md").read_text()
    for entry in MASKS:
        assert f"| `{entry.name}` | {entry.task} | {entry.num_nodes:,} | {entry.nnz:,} |" in text


def test_config_measures_every_mask_with_both_plans():
    config = load_config("configs/bench/masks.yaml", schema=BenchConfig)
    assert list(config.data.names) == NAMES
    assert config.kernel.plans == ("fixed", "rebuilt")
