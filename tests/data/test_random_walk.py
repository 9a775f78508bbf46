"""The random-walk encoding against powers of dense matrices, and against PyG's transform."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from torch_geometric.data import Data
from torch_geometric.transforms import AddRandomWalkPE

import data
from data import random_walk
from data.random_walk import random_walk_encoding


@pytest.fixture
def directed_graphs():
    """(indptr, col, sizes) of directed graphs of 1 to 30 nodes, with self loops and nodes without edges."""
    rng = np.random.default_rng(0)
    sizes = rng.permutation(np.r_[np.ones(3, int), rng.integers(1, 31, 40)])
    rows, first = [], 0
    for size in sizes:
        is_edge = rng.random((size, size)) < 2 / size
        rows += [first + np.flatnonzero(row) for row in is_edge]
        first += size
    return np.cumsum([0, *map(len, rows)]), np.concatenate(rows), sizes


def dense(indptr, col):
    matrix = np.zeros((len(indptr) - 1,) * 2)
    for row, (begin, end) in enumerate(pairwise(indptr)):
        matrix[row, col[begin:end]] = 1
    return matrix


@pytest.mark.parametrize(("steps", "block_nodes"), [(1, 4096), (2, 7), (16, 4096), (5, 1)])
def test_it_is_the_diagonals_of_powers(directed_graphs, monkeypatch, steps, block_nodes):
    monkeypatch.setattr(random_walk, "BLOCK_NODES", block_nodes)
    indptr, col, sizes = directed_graphs
    adjacency = dense(indptr, col)
    walk = adjacency / np.maximum(adjacency.sum(1, keepdims=True), 1)
    wanted = [np.diag(np.linalg.matrix_power(walk, step)) for step in range(1, steps + 1)]
    found = random_walk_encoding(indptr, col, sizes, steps)
    assert found.dtype == np.float32
    np.testing.assert_allclose(found, np.stack(wanted, 1), atol=1e-7)


def test_loaded_graphs_have_the_encoding_of_pyg(tmp_path):
    rng = np.random.default_rng(1)
    sizes = rng.integers(2, 20, 9)
    edges = 2 * sizes
    u, v = rng.integers(0, np.repeat(sizes, edges), (2, edges.sum()))
    np.savez(tmp_path / "c.npz", node_counts=sizes, edge_counts=edges, u=u, v=v)
    loaded = data.load("mine", path=tmp_path / "c.npz", batch_size=None, random_walk=20)
    row = torch.repeat_interleave(torch.arange(sizes.sum()), loaded.row_pointers.diff())
    whole = Data(edge_index=torch.stack([row, loaded.columns.long()]), num_nodes=int(sizes.sum()))
    torch.testing.assert_close(loaded.node_data["random_walk"], AddRandomWalkPE(20)(whole).random_walk_pe)
    assert torch.equal(loaded.graph.ndata["random_walk"], loaded.node_data["random_walk"])


def test_a_graph_too_large_is_refused():
    size = random_walk.MOST_NODES + 1
    with pytest.raises(ValueError, match=r"random_walk: got 3 with a graph of 4,097 nodes; .* up to 4,096"):
        random_walk_encoding(np.zeros(size + 1, int), np.empty(0, int), np.array([5, size]), 3)
