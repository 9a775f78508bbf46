"""Batches cut from a packed collection, by id and in order, against DGL's own batches of the same graphs."""

import numpy as np
import pytest
import torch
from loaded_graphs import loaded_from_dgl

import data
from data import batches as module
from data.dgl import import_dgl


def random_graphs(seed, directed):
    """Graphs of 1 to 40 nodes, some without edges, with self loops; codes, floats on edges."""
    rng = np.random.default_rng(seed)
    graphs = []
    for number, size in enumerate([1, 2, 40, 7, 1, 16, 17, 3, 33, 5]):
        pairs = rng.random((size, size)) < (0 if number in (1, 7) else 0.2)
        pairs = pairs if directed else pairs | pairs.T
        source, target = (torch.from_numpy(ends) for ends in np.nonzero(pairs))
        graph = import_dgl().graph((source, target), num_nodes=size, idtype=torch.int32)
        graph.ndata["feat"] = torch.from_numpy(rng.integers(0, 300 if directed else 9, (size, 3)))
        graph.ndata["random_walk"] = torch.randn(size, 4)
        graph.edata["feat"] = torch.randn(graph.num_edges(), 2)
        graphs.append(graph)
    return graphs


def loaded_from(graphs, task):
    whole = import_dgl().batch(graphs)
    rows = len(graphs) if task == "graph" else whole.num_nodes()
    labels = torch.randn(rows, 2) if task == "graph" else torch.arange(rows)
    sizes = whole.num_nodes(), whole.num_edges(), len(graphs)
    about_features = "categorical", 3, (300,) * 3, "original"
    meta = data.GraphMeta("mine", "file", "", task, *sizes, *about_features, 2, "")
    return loaded_from_dgl(whole, meta, labels=labels)


def edges_of(graph):
    """{(query, key): features}"""
    key, query = (ends.tolist() for ends in graph.edges(order="eid"))
    return dict(zip(zip(query, key, strict=True), graph.edata["feat"].tolist(), strict=True))


def assert_is_batch(found, graphs):
    """Edges sorted with their features, node features and first nodes are those of DGL's batch of the graphs."""
    expected = import_dgl().batch(graphs)
    rows = torch.repeat_interleave(torch.arange(expected.num_nodes()), found.indptr.cpu().diff())
    edges = list(zip(rows.tolist(), found.col.tolist(), strict=True))
    assert edges == sorted(edges)
    assert dict(zip(edges, found.edge_features.tolist(), strict=True)) == edges_of(expected)
    assert torch.equal(found.features.cpu().long(), expected.ndata["feat"])
    assert torch.equal(found.random_walk.cpu(), expected.ndata["random_walk"])
    sizes = expected.batch_num_nodes()
    assert torch.equal(found.graph_starts.cpu(), sizes.cumsum(0) - sizes)


@pytest.mark.parametrize(("task", "directed"), [("graph", False), ("node", True)])
def test_a_batch_is_dgls_batch_of_the_same_graphs(task, directed):
    graphs = random_graphs(0, directed)
    loaded = loaded_from(graphs, task)
    graph_set = data.GraphSet(loaded)
    first = np.cumsum([0, *(graph.num_nodes() for graph in graphs)])
    for ids in ([3], [9, 0, 4], [2, 2, 1], list(range(10)), [7, 1]):
        batch = graph_set.batch(torch.tensor(ids))
        expected = import_dgl().batch([graphs[i] for i in ids])
        assert batch.ids.tolist() == ids
        assert batch.graph.idtype == torch.int32
        assert batch.graph.batch_num_nodes().tolist() == expected.batch_num_nodes().tolist()
        assert batch.graph.batch_num_edges().tolist() == expected.batch_num_edges().tolist()
        assert torch.equal(batch.graph.ndata["feat"], expected.ndata["feat"])
        assert batch.graph.ndata["feat"].dtype == torch.int64
        assert edges_of(batch.graph) == edges_of(expected)
        nodes = np.concatenate([np.arange(first[i], first[i + 1]) for i in ids])
        assert torch.equal(batch.labels, loaded.labels[ids if task == "graph" else nodes])


def test_batches_hold_each_graph_once():
    graph_set = data.GraphSet(loaded_from(random_graphs(1, True), "graph"))
    sizes = [batch.ids.tolist() for batch in graph_set.batches(batch_size=4)]
    assert sizes == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    part = torch.tensor([8, 2, 5])
    assert [batch.ids.tolist() for batch in graph_set.batches(part, 2)] == [[8, 2], [5]]
    mixed = [batch.ids.tolist() for batch in graph_set.batches(batch_size=4, seed=[3, 1])]
    order = [i for ids in mixed for i in ids]
    assert sorted(order) == list(range(10)) != order
    assert mixed == [batch.ids.tolist() for batch in graph_set.batches(batch_size=4, seed=[3, 1])]
    assert mixed != [batch.ids.tolist() for batch in graph_set.batches(batch_size=4, seed=[3, 2])]
    assert len(graph_set) == 10


@pytest.mark.parametrize(("task", "directed"), [("graph", True), ("node", False)])
def test_batches_in_order_are_dgls_batches(task, directed):
    graphs = random_graphs(2, directed)
    first = np.cumsum([0, *(graph.num_nodes() for graph in graphs)]).tolist()
    graph_set = data.GraphSet(loaded_from(graphs, task))
    for each in (range(4), range(4, 8), range(8, 10)):
        rows = len(each) if task == "graph" else first[each.stop] - first[each.start]
        assert graph_set.num_rows(np.array(each)) == rows
        batch = graph_set.slice(each)
        assert batch.indptr.dtype == torch.int64
        assert batch.features.dtype == (torch.int32 if directed else torch.uint8)
        assert_is_batch(batch, graphs[each.start : each.stop])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize(("directed", "kept_share"), [(False, 0.5), (True, 0.0)])
def test_picked_graphs_are_dgls_batch_of_them(monkeypatch, directed, kept_share, device):
    monkeypatch.setattr(module, "KEPT_SHARE", kept_share)  # of GPU memory; the arrays stay on the host with 0
    graphs = random_graphs(3, directed)
    batches = data.GraphSet(loaded_from(graphs, "graph"), torch.device(device))
    for ids in ([7, 0, 3, 0], [5], range(10)):
        found = batches.picked(np.array(ids))
        assert {array.device.type for array in vars(found).values() if array is not None} == {device}
        assert_is_batch(found, [graphs[i] for i in ids])


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("directed", [False, True])
def test_padded_batches_are_dgls_batch_of_their_graphs_and_padding(directed, device):
    graphs = random_graphs(3, directed)
    batches = data.GraphSet(loaded_from(graphs, "graph"), torch.device(device))
    size = batches.largest_size([np.arange(10)])
    assert size.rows % 64 == 0
    for ids in ([7, 0, 3, 0], [5], list(range(10)), []):
        expected = import_dgl().batch([graphs[i] for i in ids] or [import_dgl().graph(([], []), num_nodes=0)])
        there = torch.tensor([*ids, *[10] * (size.graphs - len(ids))], device=device)  # 10 is no graph
        found = batches.padded(there, size)
        assert {array.device.type for array in vars(found).values() if array is not None} == {device}
        num_rows, num_edges = expected.num_nodes(), expected.num_edges()
        assert (len(found.indptr), len(found.col), len(found.features)) == (size.rows + 1, size.edges, size.rows)
        degrees = found.indptr.cpu().diff()
        assert (degrees[num_rows:] == 0).all()
        assert (found.col[num_edges:] == -1).all()
        rows = torch.repeat_interleave(torch.arange(size.rows), degrees)
        edges = list(zip(rows.tolist(), found.col[:num_edges].tolist(), strict=True))
        assert edges == sorted(edges)
        if ids:
            features = found.edge_features[:num_edges].tolist()
            assert dict(zip(edges, features, strict=True)) == edges_of(expected)
            assert torch.equal(found.features[:num_rows].cpu().long(), expected.ndata["feat"])
            assert torch.equal(found.random_walk[:num_rows].cpu(), expected.ndata["random_walk"])
            assert found.row_weights[:num_rows].tolist() == pytest.approx([1 / num_rows] * num_rows)
        for of_rows in (found.features, found.random_walk, found.row_weights):
            assert len(of_rows) == size.rows
            assert not of_rows[num_rows:].any()
        sizes = found.graph_starts.new_tensor([graphs[i].num_nodes() for i in ids])
        ends = [*found.graph_starts[1:].tolist(), size.rows]
        assert torch.equal(found.graph_starts[: len(ids)], sizes.cumsum(0) - sizes)
        assert len(found.graph_starts) == size.all_graphs
        of_padding = [end - start for start, end in zip(found.graph_starts.tolist(), ends, strict=True)][len(ids) :]
        assert sum(of_padding) == size.rows - num_rows
        assert min(of_padding) >= 0
        assert max(of_padding) <= module.PADDING_ROWS


def featured(graph):
    graph.ndata["feat"] = torch.ones(graph.num_nodes(), 1)
    graph.edata["feat"] = torch.ones(graph.num_edges(), 1)
    return graph


def test_sizes_of_padded_batches():
    rng = np.random.default_rng(0)
    sizes = rng.integers(1, 40, 300)
    sizes[7] = 900
    graphs = [featured(import_dgl().graph((torch.arange(n - 1), torch.arange(1, n)), num_nodes=n)) for n in sizes]
    batches = data.GraphSet(loaded_from(graphs, "graph"))
    ids = np.delete(np.arange(300), 7)
    likely = batches.likely_size(ids, 64)
    for seed in range(200):
        assert batches.fits(np.random.default_rng(seed).permutation(ids)[:64], likely)
    assert likely.rows < 1.4 * 64 * batches.sizes[ids].mean()
    assert not batches.fits(ids[:65], likely)
    assert not batches.fits(np.append(ids[:63], 7), likely)
    assert batches.fits(np.array([7]), batches.likely_size(np.arange(300), 2))  # each graph alone
    for every in (299, 5000):
        whole = batches.likely_size(ids, every)
        assert batches.fits(ids, whole)
        assert whole.rows - batches.sizes[ids].sum() < 64
    exact = batches.largest_size([ids[:64], ids[64:]])
    assert exact.edges == max(batches.edge_counts[ids[:64]].sum(), batches.edge_counts[ids[64:]].sum())
    assert 0 <= exact.rows - max(batches.sizes[ids[:64]].sum(), batches.sizes[ids[64:]].sum()) < 64


def test_a_collection_without_edges_is_padded():
    graphs = [featured(import_dgl().graph(([], []), num_nodes=n, idtype=torch.int32)) for n in (3, 1)]
    batches = data.GraphSet(loaded_from(graphs, "graph"))
    size = batches.largest_size([np.arange(2)])
    found = batches.padded(torch.tensor([1, 0]), size)
    assert (found.col.tolist(), found.indptr.max().item(), found.features.sum().item()) == ([-1], 0, 4)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"ids": [10]}, r"ids: got 10; the set has the graphs 0 \.\. 9"),
        ({"ids": []}, r"ids: got shape \(0,\)"),
        ({"ids": torch.tensor([0.0])}, r"dtype float32; one integer or more"),
        ({"batch_size": 0}, "batch_size: got 0; an integer of 1 or more"),
        ({"ids": [True, False]}, "ids: got shape .*bool"),
    ],
)
def test_wrong_arguments_are_errors_at_the_call(arguments, message):
    graph_set = data.GraphSet(loaded_from(random_graphs(1, True), "graph"))
    with pytest.raises(ValueError, match=message):
        graph_set.batches(**arguments)
    with pytest.raises(TypeError, match=r"loaded: got str; the LoadedGraph that data\.load returns is needed"):
        data.GraphSet("ogbg-molhiv")
