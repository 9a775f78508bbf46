"""Positional encoding against its definition, on graphs with known eigenvectors or checked by multiplication."""

import numpy as np
import pytest

from models.laplacian import laplacian_encoding


def laplacian(source, destination, num_nodes):
    adjacency = np.zeros((num_nodes, num_nodes))
    adjacency[source, destination] = adjacency[destination, source] = 1
    np.fill_diagonal(adjacency, 0)
    scale = 1 / np.sqrt(np.maximum(adjacency.sum(1), 1))
    return np.diag((adjacency.sum(1) > 0).astype(float)) - scale[:, None] * adjacency * scale


def random_connected(num_nodes, extra, seed=0):
    rng = np.random.default_rng(seed)
    tree = np.array([(i, rng.integers(0, i)) for i in range(1, num_nodes)], dtype=np.int64).reshape(-1, 2)
    edges = np.concatenate([tree, rng.integers(0, num_nodes, (extra, 2))])
    return edges[:, 0], edges[:, 1]


@pytest.mark.parametrize("dense_nodes", [1000, 3])
def test_columns_are_the_smallest_nontrivial_eigenvectors(dense_nodes):
    source, destination = random_connected(200, 300)
    encoding = laplacian_encoding(source, destination, 200, 6, dense_nodes=dense_nodes)
    matrix = laplacian(source, destination, 200)
    values = np.linalg.eigvalsh(matrix)
    np.testing.assert_allclose(matrix @ encoding, encoding * values[1:7], atol=1e-8)
    np.testing.assert_allclose(encoding.T @ encoding, np.eye(6), atol=1e-8)
    assert (encoding.max(axis=0) >= np.abs(encoding).max(axis=0) * 0.999).all()


def test_clustered_spectrum_of_a_long_path():
    n = 3000  # the first eigenvalues are 1e-6 apart; plain Lanczos does not converge
    encoding = laplacian_encoding(np.arange(n - 1), np.arange(1, n), n, 3)
    position = np.arange(n) / (n - 1)
    for column, vector in enumerate(encoding.T, start=1):
        inner = slice(1, -1)  # the ends have half the degree
        cosine = np.cos(np.pi * column * position)
        assert abs(np.corrcoef(vector[inner], cosine[inner])[0, 1]) > 0.999999


def test_direction_duplicates_and_self_loops_change_nothing():
    source, destination = random_connected(50, 60)
    loops = np.arange(50)
    messy = np.concatenate([destination, source, source, loops]), np.concatenate([source, destination, source, loops])
    expected = laplacian_encoding(source, destination, 50, 4)
    np.testing.assert_allclose(laplacian_encoding(*messy, 50, 4), expected, atol=1e-8)


@pytest.mark.parametrize("dense_nodes", [1000, 3])
def test_each_component_has_its_own_encoding(dense_nodes):
    sizes = [30, 30, 12, 1, 3, 30]
    parts = [random_connected(n, n, seed) for seed, n in enumerate(sizes)]
    offsets = np.cumsum([0, *sizes[:-1]])
    source = np.concatenate([s + o for (s, _), o in zip(parts, offsets, strict=True)])
    destination = np.concatenate([d + o for (_, d), o in zip(parts, offsets, strict=True)])
    # Components need not be contiguous. Their own order is kept: on the path of 3 nodes it decides a sign.
    labels = np.random.default_rng(5).permutation(np.repeat(np.arange(len(sizes)), sizes))
    shuffle = np.argsort(labels, kind="stable")
    whole = laplacian_encoding(shuffle[source], shuffle[destination], sum(sizes), 4, dense_nodes=dense_nodes)[shuffle]
    for (s, d), offset, n in zip(parts, offsets, sizes, strict=True):
        alone = laplacian_encoding(s, d, n, 4)
        np.testing.assert_allclose(whole[offset : offset + n], alone, atol=1e-7)


def test_small_components_are_padded_and_lone_nodes_are_zero():
    encoding = laplacian_encoding(np.array([0, 1]), np.array([1, 2]), 4, 5)
    assert encoding.shape == (4, 5)
    assert np.abs(encoding[:3, :2]).sum(axis=0).min() > 0.5
    assert (encoding[:3, 2:] == 0).all()
    assert (encoding[3] == 0).all()
