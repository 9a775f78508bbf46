"""PATTERN and CLUSTER against the probabilities that define them, and the published means of their sizes."""

import numpy as np
import pytest

import data
from data.selection import Selection
from data.sources.block_models import SbmCluster, SbmPattern

SMALL = {"num_train": 300, "num_held_out": 100}
SIZES = np.arange(5, 35)  # of a block, all equally likely


def graphs_of(source, numbers):
    """Adjacency, features and labels of each graph."""
    return [source.graph(number) for number in numbers]


def share(found, probability):
    """Whether a share of independent draws, bool [n], is within 4.5 standard errors of a probability."""
    return abs(found.mean() - probability) < 4.5 * np.sqrt(probability * (1 - probability) / found.size)


def pairs(adjacency, first, second):
    """Entries of the adjacency between two sets of nodes, each pair once."""
    upper = np.triu(np.ones(adjacency.shape, bool), 1)
    wanted = (first[:, None] & second) | (second[:, None] & first)
    return adjacency[upper & wanted]


def test_cluster_joins_nodes_by_their_blocks():
    inner, outer, sizes = [], [], []
    for adjacency, features, labels in graphs_of(SbmCluster(**SMALL), range(200)):
        np.testing.assert_array_equal(adjacency, adjacency.T)
        assert not adjacency.diagonal().any()
        assert sorted(features[features > 0]) == [1, 2, 3, 4, 5, 6]
        assert (labels[features > 0] == features[features > 0] - 1).all()
        sizes.append(np.bincount(labels, minlength=6))
        upper = np.triu(np.ones(adjacency.shape, bool), 1)
        same = labels == labels[:, None]
        inner.append(adjacency[upper & same])
        outer.append(adjacency[upper & ~same])
    assert share(np.concatenate(inner), 0.55)
    assert share(np.concatenate(outer), 0.25)
    sizes = np.array(sizes)
    assert (sizes.min(), sizes.max()) == (5, 34)
    assert abs(sizes.mean() - SIZES.mean()) < 4.5 * SIZES.std() / np.sqrt(sizes.size)


def test_pattern_hides_a_block_that_graphs_share():
    source = SbmPattern(**SMALL)
    numbers = [*range(200), *range(300, 330)]
    inner, outer, rest, symbols, patterns = [], [], [], [], {}
    for number, (adjacency, features, labels) in zip(numbers, graphs_of(source, numbers), strict=True):
        np.testing.assert_array_equal(adjacency, adjacency.T)
        assert not adjacency.diagonal().any()
        hidden = labels == 1
        inner.append(pairs(adjacency, hidden, hidden))
        outer.append(pairs(adjacency, hidden, ~hidden))
        rest.append(pairs(adjacency, ~hidden, ~hidden))
        symbols.append(features[~hidden])
        # Up to the order of its nodes a pattern is the same in its graphs of the training and the validation split.
        degrees = sorted(zip(adjacency[np.ix_(hidden, hidden)].sum(1), features[hidden], strict=True))
        place = number // 3 if number < 300 else (number - 300) % 100
        assert patterns.setdefault(place, degrees) == degrees
    assert len({str(each) for each in patterns.values()}) == len(patterns)
    assert share(np.concatenate(outer), 0.5)
    assert share(np.concatenate([inner[number] for number in range(0, 200, 3)]), 0.5)
    # A pair of nodes outside of the pattern is in one block with the probability of E[n (n - 1)] / 2 of its pairs.
    within = 5 * (SIZES * (SIZES - 1)).mean() / 2
    between = 10 * SIZES.mean() ** 2
    expected = (0.5 * within + 0.35 * between) / (within + between)
    assert np.concatenate(rest).mean() == pytest.approx(expected, abs=0.004)
    symbols = np.concatenate(symbols)
    assert all(share(symbols == symbol, 1 / 3) for symbol in range(3))


# PyG's table of GNNBenchmarkDataset: nodes and directed edges of a graph, over all graphs. PATTERN has 100 sizes of a
# pattern, which spread its mean; CLUSTER's sizes are independent.
@pytest.mark.parametrize(
    ("name", "nodes", "edges", "spread"), [("pattern", 118.9, 6098.9, 0.02), ("cluster", 117.2, 4303.9, 0.01)]
)
def test_the_first_graphs_have_the_published_sizes(tmp_path, name, nodes, edges, spread):
    entry, loaded = data.info(name), data.load(name, root=tmp_path)
    assert list(tmp_path.iterdir()) == []
    meta = loaded.meta
    assert (meta.num_nodes, meta.num_edges, meta.num_graphs) == (entry.num_nodes, entry.nnz, 1024)
    assert meta.num_nodes / 1024 == pytest.approx(nodes, rel=spread)
    assert meta.num_edges / 1024 == pytest.approx(edges, rel=2 * spread)


def test_a_graph_is_the_same_in_any_batch(tmp_path):
    source = SbmCluster(**SMALL)
    whole = source.load(tmp_path, Selection(None, name="cluster"))
    held_out = source.load(tmp_path, Selection(20, split="val", order="random", name="cluster"))
    assert (whole.graph_sizes.size, held_out.collection_size) == (500, 100)
    starts = np.append(0, whole.graph_sizes.cumsum())
    assert [len(whole.splits[part]) for part in ("train", "valid", "test")] == np.diff(
        starts[[0, 300, 400, 500]]
    ).tolist()
    assert np.array_equal(
        np.concatenate([whole.splits[part] for part in ("train", "valid", "test")]), np.arange(starts[-1])
    )
    assert np.array_equal(held_out.splits["valid"], np.arange(held_out.num_nodes))
    first = 0
    for size, number in zip(held_out.graph_sizes, held_out.graph_ids, strict=True):
        mine, all_of_it = slice(first, first + size), slice(starts[300 + number], starts[301 + number])
        for key in ("feat", "label"):
            assert np.array_equal(held_out.ndata[key][mine], whole.ndata[key][all_of_it])
        mine, all_of_it = (
            graph.col[graph.indptr[nodes.start] : graph.indptr[nodes.stop]] - nodes.start
            for graph, nodes in ((held_out, mine), (whole, all_of_it))
        )
        assert np.array_equal(mine, all_of_it)
        first += size
    other = SbmCluster(**SMALL, seed=1).load(tmp_path, Selection(20, name="cluster"))
    assert other.sha256 != source.load(tmp_path, Selection(20, name="cluster")).sha256
