"""Samples of neighbourhoods against the edges of the graph, read one by one."""

import numpy as np
import pytest

from data.neighbours import NeighbourSampler

NODES = 60


@pytest.fixture
def neighbours():
    """For each node its sources, ascending: none, a few or most nodes, some of them the node itself."""
    rng = np.random.default_rng(0)
    sizes = rng.choice([0, 1, 2, 3, 5, 40], NODES)
    return [np.sort(rng.permutation(NODES)[:size]) for size in sizes]


def sampler_of(neighbours, fan_out):
    indptr = np.cumsum([0, *map(len, neighbours)])
    return NeighbourSampler(indptr, np.concatenate(neighbours).astype(np.int32), fan_out)


def test_a_sample_has_the_new_nodes_of_each_hop_with_so_many_of_their_edges(neighbours):
    fan_out, rng = (4, 2, 3), np.random.default_rng(1)
    sampler = sampler_of(neighbours, fan_out)
    for _ in range(20):
        seeds = rng.permutation(NODES)[:7]
        found = sampler.sample(seeds, rng)
        assert (found.num_seeds, len(found.indptr)) == (7, len(found.nodes) + 1)
        assert found.nodes[:7].tolist() == seeds.tolist()
        assert len({*found.nodes.tolist()}) == len(found.nodes)
        rows = [found.nodes[part].tolist() for part in np.split(found.col, found.indptr[1:-1])]
        known, hop = 0, seeds.tolist()
        for most in fan_out:
            reached = []
            for node, row in zip(hop, rows[known : known + len(hop)], strict=True):
                sources = neighbours[node].tolist()
                assert len({*row}) == len(row) == min(most, len(sources))
                assert {*row} <= {*sources}
                assert node in row or node not in sources
                reached += row
            known += len(hop)
            hop = [node for node in dict.fromkeys(found.nodes[known:].tolist()) if node in reached]
            assert found.nodes[known : known + len(hop)].tolist() == hop
        assert known + len(hop) == len(found.nodes)
        assert not any(rows[known:])


@pytest.mark.parametrize("fan_out", [NODES, 10**9])
def test_a_large_fan_out_takes_the_whole_neighbourhood(neighbours, fan_out):
    found = sampler_of(neighbours, (fan_out, fan_out)).sample(np.array([3, 8]), np.random.default_rng(0))
    once = {3, 8}.union(neighbours[3].tolist(), neighbours[8].tolist())
    twice = once.union(*(neighbours[node].tolist() for node in once))
    assert {*found.nodes.tolist()} == twice
    assert len(found.col) == sum(len(neighbours[node]) for node in once)


def test_every_set_of_neighbours_is_as_likely():
    rows, degree = 6_000, 5
    sources = [np.arange(rows, rows + degree)] * rows + [np.arange(0)] * degree
    found = sampler_of(sources, (2,)).sample(np.arange(rows), np.random.default_rng(0))
    pairs = np.sort(found.nodes[found.col].reshape(rows, 2) - rows, axis=1)
    counts = np.bincount(pairs @ [degree, 1], minlength=degree**2)
    expected = rows / 10
    assert np.count_nonzero(counts) == 10
    assert (np.abs(counts[counts > 0] - expected) < 5 * np.sqrt(expected)).all()


def test_a_sample_depends_on_its_numbers_alone(neighbours):
    first, second = (sampler_of(neighbours, (2, 2)) for _ in range(2))
    first.sample(np.arange(20), np.random.default_rng(5))
    a, b = (sampler.sample(np.array([1, 2]), np.random.default_rng(6)) for sampler in (first, second))
    assert all(np.array_equal(getattr(a, name), getattr(b, name)) for name in ("nodes", "indptr", "col"))
