"""Degrees of the power-law graphs against the expectation of their formula."""

import numpy as np
import pytest

from data.sources import power_law
from data.sources.power_law import PowerLaw


@pytest.mark.parametrize("num_edges", [60_000, 200_000])
def test_degrees_follow_the_formula(num_edges, monkeypatch):
    monkeypatch.setattr(power_law, "BATCH", 1 << 16)
    nodes = 2_000
    graph = PowerLaw(nodes, num_edges).load(None, None)
    assert (len(graph.indptr), graph.indptr[0], graph.indptr[-1]) == (nodes + 1, 0, num_edges)
    rows = [graph.col[first:last] for first, last in zip(graph.indptr, graph.indptr[1:], strict=False)]
    assert all((np.diff(row) > 0).all() for row in rows)  # in order, no edge twice
    of_queries, of_keys = np.diff(graph.indptr), np.bincount(graph.col, minlength=nodes)
    for degrees in (of_queries, of_keys):
        ranked = np.sort(degrees)[::-1]
        # The first r nodes have a share sqrt(r / N) of the ends; hubs lose repeated edges, and sorting favours noise.
        for share in (0.1, 0.25, 0.5):
            assert ranked[: int(share * nodes)].sum() / num_edges == pytest.approx(share**0.5, rel=0.16)
    assert abs(np.corrcoef(of_queries, np.arange(nodes))[0, 1]) < 0.1  # hubs are anywhere
    assert np.array_equal(graph.col, PowerLaw(nodes, num_edges).load(None, None).col)


def test_more_edges_than_can_be_drawn_are_refused():
    with pytest.raises(ValueError, match="got 30; 1 to a quarter"):
        PowerLaw(10, 30)
