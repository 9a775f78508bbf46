"""Official layouts, read here and by the reader that their publisher's users read them with.

That reader is the oracle of the layout: a class of PyG, ogb or DGL, and for files without one networkx, NumPy or SciPy.
Real graphs in these layouts must give the edges of the papers' authors; their features and labels are invented.
"""

import gzip
import json
import os
import pickle
import shutil
from pathlib import Path

import networkx as nx
import numpy as np
import pandas as pd
import pytest
import scipy.io
import scipy.sparse
import torch
import torch_geometric.datasets as pyg

import data
from bench.block_stats import measure, paper_figures
from data.canonical import to_csr
from data.dgl import import_dgl
from data.loader import find_graph
from data.sources.ogb_import import import_ogb

NODES = 40


@pytest.fixture
def edges():
    """(row, col) of a graph in which no direction is like the other, sorted, each edge once, with self loops."""
    chosen = np.sort(np.random.default_rng(0).choice(NODES * NODES, 200, replace=False))
    return chosen // NODES, chosen % NODES


def pairs(first, second):
    return sorted(zip(np.asarray(first).tolist(), np.asarray(second).tolist(), strict=True))


def ours(loaded):
    """(query, key) of the edges of a loaded graph."""
    return pairs(np.repeat(np.arange(loaded.meta.num_nodes), loaded.row_pointers.diff()), loaded.columns)


def load(name, root, **options):
    return data.load(name, root=root, source="official", **options)


def lists(splits):
    return {part: torch.as_tensor(ids).tolist() for part, ids in splits.items()}


def assert_as_pyg_has_it(loaded, other, masks=("train_mask", "val_mask", "test_mask")):
    assert ours(loaded) == pairs(*other.edge_index)
    assert torch.equal(loaded.node_data["feat"], other.x)
    assert torch.equal(loaded.labels, other.y)
    first = [other[mask].reshape(NODES, -1)[:, 0].nonzero()[:, 0].tolist() for mask in masks]
    assert [ids.tolist() for ids in loaded.splits.values()] == first


@pytest.mark.parametrize(("name", "kind"), [("yelp", pyg.Yelp), ("flickr", pyg.Flickr)])
def test_graphsaint(tmp_path, edges, name, kind):
    raw = tmp_path / kind.__name__ / "raw"
    raw.mkdir(parents=True)
    matrix = scipy.sparse.csr_matrix((np.ones(200, bool), edges), shape=(NODES, NODES))
    scipy.sparse.save_npz(raw / "adj_full.npz", matrix)
    np.save(raw / "feats.npy", np.random.default_rng(1).random((NODES, 5)))
    label = {str(node): [node % 2, 1, 0] if name != "flickr" else node % 7 for node in range(NODES)}
    (raw / "class_map.json").write_text(json.dumps(label))
    (raw / "role.json").write_text(json.dumps({"tr": [0, 3], "va": [1], "te": [2, 9]}))
    shutil.copytree(raw, tmp_path / "plain" / "raw")
    for _ in range(2):  # the second time without the raw files' conversion
        assert_as_pyg_has_it(load(name, tmp_path), kind(str(tmp_path / "plain"))[0])


def test_questions(tmp_path, edges):
    raw = tmp_path / "questions" / "raw"
    raw.mkdir(parents=True)
    rng = np.random.default_rng(3)
    part_of = rng.integers(0, 4, (10, NODES))
    arrays = {f"{part}_masks": part_of == nth for nth, part in enumerate(("train", "val", "test"))}
    arrays |= {"node_features": rng.random((NODES, 4), np.float32), "node_labels": np.arange(NODES) % 2}
    np.savez(raw / "questions.npz", edges=np.stack(edges, 1), **arrays)
    shutil.copytree(tmp_path / "questions", tmp_path / "plain" / "questions")
    other = pyg.HeterophilousGraphDataset(str(tmp_path / "plain"), "questions")[0]
    assert_as_pyg_has_it(load("questions", tmp_path), other)


def test_reddit(tmp_path, edges):
    """DGL publishes the graph with self loops, too, and renumbers its nodes by reverse Cuthill-McKee."""
    import_dgl()  # without it, DGL cannot be imported beside a recent PyTorch
    from dgl.data import RedditDataset

    located = type("RedditDataset", (RedditDataset,), {"_load": lambda self: None})
    layout = located(self_loop=True, raw_dir=str(tmp_path / "dgl"))
    between = edges[0] != edges[1]
    once = np.stack(edges)[:, between]
    row, col = np.unique(np.concatenate([once, once[::-1]], 1), axis=1)
    nodes = np.arange(NODES)
    raw, theirs = tmp_path / "Reddit" / "raw", Path(layout.raw_path)
    arrays = {"feature": np.random.default_rng(8).random((NODES, 3)), "label": nodes % 41, "node_ids": nodes}
    for folder, name, self_loops in ((raw, "reddit_graph", nodes[:0]), (theirs, "reddit_self_loop_graph", nodes)):
        folder.mkdir(parents=True)
        ends = np.unique([np.r_[row, self_loops], np.r_[col, self_loops]], axis=1)
        matrix = scipy.sparse.coo_matrix((np.ones(ends[0].size), tuple(ends)), shape=(NODES, NODES))
        scipy.sparse.save_npz(folder / f"{name}.npz", matrix)
        np.savez(folder / "reddit_data.npz", node_types=np.array([1, 2, 3])[nodes % 3], **arrays)
    other = RedditDataset(self_loop=True, raw_dir=str(tmp_path / "dgl"), verbose=False)[0]
    loaded = load("reddit", tmp_path)
    assert ours(loaded) == sorted(set(pairs(*other.edges())))
    assert torch.equal(loaded.node_data["feat"], other.ndata["feat"].float())
    assert loaded.labels.tolist() == other.ndata["label"].tolist()
    assert loaded.splits["valid"].tolist() == other.ndata["val_mask"].nonzero()[:, 0].tolist()


def write_elliptic(root, row, col, num_nodes):
    """Transaction ids in another order than the file's rows."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.choice(10**8, num_nodes, replace=False))
    order = rng.permutation(num_nodes)
    folder = root / "elliptic_bitcoin_dataset"
    folder.mkdir()
    features = pd.DataFrame({0: ids, 1: 1, 2: np.arange(num_nodes) / 8, 3: 0.5}).iloc[order]
    features.to_csv(folder / "elliptic_txs_features.csv", header=False, index=False)
    pd.DataFrame({"txId1": ids[row], "txId2": ids[col]}).to_csv(folder / "elliptic_txs_edgelist.csv", index=False)
    classes = np.array(["unknown", "1", "2"])[np.arange(num_nodes) % 3]
    pd.DataFrame({"txId": ids, "class": classes}).iloc[order].to_csv(folder / "elliptic_txs_classes.csv", index=False)


def test_elliptic(tmp_path, edges, caplog):
    write_elliptic(tmp_path, *edges, NODES)
    loaded = load("elliptic", tmp_path)
    assert ours(loaded) == pairs(*edges)  # the first transaction attends to the second
    assert loaded.node_data["feat"].tolist() == [[node / 8, 0.5] for node in range(NODES)]
    assert loaded.labels.tolist() == [(-1, 1, 0)[node % 3] for node in range(NODES)]
    features = tmp_path / "elliptic_bitcoin_dataset" / "elliptic_txs_features.csv"
    assert "holds 2 feature columns, and 165 are published" in caplog.text
    whole = features.read_text()
    features.write_text(whole.replace(",", ".5,", 1))
    with pytest.raises(ValueError, match=r"a transaction id holds \d+\.5; integers"):
        load("elliptic", tmp_path)
    features.write_text(whole)
    (tmp_path / "elliptic_bitcoin_dataset" / "elliptic_txs_edgelist.csv").unlink()
    with pytest.raises(data.DatasetMissingError, match=r"elliptic_txs_edgelist\.csv\.zip: cannot be reached"):
        load("elliptic", tmp_path)


def test_facebook100(tmp_path, edges):
    (remote,) = data.info("fb100-cornell5").official.files(tmp_path)
    remote.target.parent.mkdir()
    matrix = scipy.sparse.csc_matrix((np.ones(200), edges), shape=(NODES, NODES))
    scipy.io.savemat(remote.target, {"A": matrix + matrix.T, "local_info": np.ones((NODES, 7))})
    raw = tmp_path / "plain" / "cornell5" / "raw"
    raw.mkdir(parents=True)
    shutil.copy(remote.target, raw / "data.mat")  # as PyG names Cornell5.mat
    other = pyg.LINKXDataset(str(tmp_path / "plain"), "cornell5")[0]
    assert ours(load("fb100-cornell5", tmp_path)) == pairs(*other.edge_index)


def by_networkx(graph):
    """(pairs, number of nodes): a node is the rank of its id; an `nx.Graph` gives both directions of each edge."""
    rank = {node: place for place, node in enumerate(sorted(graph))}
    return sorted((rank[i], rank[j]) for i, j in graph.to_directed().edges), graph.number_of_nodes()


@pytest.mark.parametrize(
    ("name", "head", "separator", "kind"),
    [
        ("musae-github", ["id_1,id_2"], ",", nx.Graph),
        ("artist", ["node_1,node_2"], ",", nx.DiGraph),
        ("amazon0505", ["# Nodes: 40 Edges: 200", "# FromNodeId\tToNodeId"], "\t", nx.DiGraph),
        ("ego-twitter", [], " ", nx.Graph),
    ],
)
def test_edge_lists(tmp_path, edges, name, head, separator, kind):
    """Ids with gaps (the order stays), lines in no order, some of them twice."""
    (remote,) = data.info(name).official.files(tmp_path)
    remote.target.parent.mkdir(exist_ok=True)
    ids = np.cumsum(np.random.default_rng(9).integers(4, 14, NODES))
    lines = [f"{i}{separator}{j}" for i, j in zip(*(ids[ends] for ends in edges), strict=True)]
    lines = np.random.default_rng(10).permutation(lines + lines[:50]).tolist()
    text = "".join(f"{line}\n" for line in [*head, *lines]).encode()
    remote.target.write_bytes(gzip.compress(text) if remote.target.suffix == ".gz" else text)
    loaded = load(name, tmp_path)
    other = nx.parse_edgelist(lines, delimiter=separator, nodetype=int, create_using=kind)
    assert (ours(loaded), loaded.meta.num_nodes) == by_networkx(other)
    assert loaded.meta.origin == remote.url


@pytest.mark.parametrize("banner", ["%%MatrixMarket", "%MatrixMarket"])
def test_blog(tmp_path, edges, banner):
    """A Matrix Market file as Network Repository writes it: one "%" in some files, a space at the end of the banner, no
    comments, one triangle. The last five nodes have no edge here."""
    (remote,) = data.info("blog").official.files(tmp_path)
    lower = sorted({(max(i, j), min(i, j)) for i, j in zip(*edges, strict=True) if i != j})
    head = [f"{banner} matrix coordinate pattern symmetric ", f"{NODES + 5} {NODES + 5} {len(lower)}"]
    remote.target.write_text("\n".join([*head, *(f"{i + 1} {j + 1}" for i, j in lower), ""]))
    loaded = load("blog", tmp_path)
    expected = sorted([*lower, *((j, i) for i, j in lower)])
    assert (ours(loaded), loaded.meta.num_nodes) == (expected, NODES + 5)


@pytest.mark.parametrize("name", ["ogbn-arxiv", "ogbn-products"])
def test_ogb_nodes(tmp_path, edges, write_ogb, name):
    row, col = edges
    if name == "ogbn-products":  # each edge once
        row, col = row[row < col], col[row < col]
    tables = {
        "edge": np.stack([row, col], 1),
        "num-node-list": [NODES],
        "num-edge-list": [row.size],
        "node-feat": np.random.default_rng(4).normal(size=(NODES, 6)),
        "node-label": np.arange(NODES) % 40,
        "node_year": np.full(NODES, 2015),
    }
    split = {"train": [4, 0], "valid": [1], "test": [39, 2]}
    write_ogb(tmp_path / name.replace("-", "_"), {"ogbn-arxiv": "time"}.get(name, "sales_ranking"), split, tables)
    dataset = import_ogb("nodeproppred").NodePropPredDataset(name=name, root=str(tmp_path))
    graph, label = dataset[0]
    for _ in range(2):
        loaded = load(name, tmp_path)
        assert ours(loaded) == sorted(set(pairs(*graph["edge_index"])))
        assert np.array_equal(loaded.node_data["feat"].numpy(), graph["node_feat"])
        assert loaded.labels.tolist() == label[:, 0].tolist()
        assert lists(loaded.splits) == lists(dataset.get_idx_split()) == split


@pytest.mark.parametrize("name", ["ogbg-molpcba", "ogbg-ppa", "ogbg-code2"])
def test_ogb_graphs(tmp_path, write_ogb, name):
    entry, rng = data.info(name), np.random.default_rng(6)
    sizes = np.array([3, 5, 4, 2])
    ends = [np.stack([np.arange(1, size) - 1, np.arange(1, size)], 1) for size in sizes]
    count = int((sizes - 1).sum())
    tables = {"edge": np.concatenate(ends), "num-node-list": sizes, "num-edge-list": sizes - 1}
    if name != "ogbg-ppa":
        tables["node-feat"] = rng.integers(0, 2, (sizes.sum(), entry.feature_dim))
    if name.startswith("ogbg-mol"):
        tables["edge-feat"] = rng.integers(0, 2, (count, 3))
        tables["graph-label"] = np.where(rng.random((4, entry.num_classes)) < 0.3, np.nan, 1.0)
    elif name == "ogbg-ppa":
        tables |= {"edge-feat": rng.random((count, 7)), "graph-label": [0, 36, 5, 1]}
    else:
        tables["graph-label"] = ["get name", "run", "a", "b"]
        tables |= dict.fromkeys(("node_is_attributed", "node_dfs_order", "node_depth"), np.zeros(sizes.sum(), int))
    split = {"train": [3, 0], "valid": [1], "test": [2]}
    split_name = {"ogbg-ppa": "species", "ogbg-code2": "project"}.get(name, "scaffold")
    write_ogb(tmp_path / name.replace("-", "_"), split_name, split, tables)
    loaded = load(name, tmp_path, batch_size=None, edge_features=name != "ogbg-code2")
    dataset = import_ogb("graphproppred").GraphPropPredDataset(name=name, root=str(tmp_path))
    # ogb's first end of an edge is the query; both directions are there, but in ogbg-code2.
    first, edges, features = 0, [], []
    for graph, _ in dataset:
        edges += zip(*(graph["edge_index"] + first).tolist(), strict=True)
        features += [] if graph["edge_feat"] is None else graph["edge_feat"].tolist()
        first += graph["num_nodes"]
    assert ours(loaded) == sorted(edges)
    if features:
        expected = dict(zip(edges, features, strict=True))
        assert dict(zip(ours(loaded), loaded.edge_data["feat"].tolist(), strict=True)) == expected
    assert loaded.graph_sizes.tolist() == sizes.tolist()
    if name != "ogbg-ppa":
        feat = np.concatenate([graph["node_feat"] for graph, _ in dataset])
        assert np.array_equal(loaded.node_data["feat"].numpy(), feat)
    if name != "ogbg-code2":
        assert np.array_equal(loaded.labels.numpy(), np.stack([label for _, label in dataset]), equal_nan=True)
    assert lists(loaded.splits) == lists(dataset.get_idx_split()) == split
    folder = tmp_path / name.replace("-", "_")
    (folder / "RELEASE_v1.txt").unlink()  # ogb would ask at the terminal whether to delete the folder
    with pytest.raises(ValueError, match=rf"no RELEASE_v1\.txt in {folder}: incomplete, or of another version"):
        load(name, tmp_path)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_papers100m(tmp_path, edges, write_ogb, save):
    folder = tmp_path / "ogbn_papers100M"
    split = {"train": [0, 3], "valid": [6], "test": [9]}
    write_ogb(folder, "time", split, {})
    arrays = {
        "edge_index": np.stack(edges),
        "node_feat": np.random.default_rng(5).normal(size=(NODES, 6)).astype(np.float32),
        "node_year": np.full((NODES, 1), 2015),
        "num_nodes_list": np.array([NODES]),
        "num_edges_list": np.array([200]),
    }
    save(folder / "raw" / "data.npz", **arrays)
    label = np.where(np.arange(NODES) % 3, np.nan, np.arange(NODES)).astype(np.float32)
    save(folder / "raw" / "node-label.npz", node_label=label[:, None])
    graph, theirs = import_ogb("nodeproppred").NodePropPredDataset("ogbn-papers100M", root=str(tmp_path))[0]
    for _ in range(2):
        loaded = load("ogbn-papers100m", tmp_path)
        assert ours(loaded) == pairs(*graph["edge_index"])
        assert np.array_equal(loaded.node_data["feat"].numpy(), graph["node_feat"])
        assert loaded.labels.tolist() == np.nan_to_num(theirs[:, 0], nan=-1).tolist()
        assert lists(loaded.splits) == split
    _, raw = find_graph("ogbn-papers100m", root=tmp_path, source="official")
    assert isinstance(raw.ndata["feat"], np.memmap)
    save(folder / "raw" / "data.npz", **arrays | {"node_feat": np.full((NODES, 6), np.nan, np.float32)})
    (folder / "raw" / "node_feat.npy").unlink(missing_ok=True)
    with pytest.raises(ValueError, match="node features hold NaN"):
        load("ogbn-papers100m", tmp_path)


@pytest.mark.parametrize("name", ["igb-small", "igb-large"])
def test_igb(tmp_path, monkeypatch, edges, name):
    """As `igb.dataloader.IGB260M` opens the files: np.load, and for the large set np.memmap of float32."""
    folder = tmp_path / name.removeprefix("igb-") / "processed"
    for part in ("paper", "paper__cites__paper"):
        (folder / part).mkdir(parents=True)
    feat = np.random.default_rng(7).random((NODES, 1024), np.float32)
    label = np.where(np.arange(NODES) == 7, np.nan, np.arange(NODES) % 19).astype(np.float32)
    np.save(folder / "paper__cites__paper" / "edge_index.npy", np.stack(edges, 1))
    for part, array in {"node_feat.npy": feat, "node_label_19.npy": label}.items():
        array.tofile(folder / "paper" / part) if name == "igb-large" else np.save(folder / "paper" / part, array)
    loaded = load(name, tmp_path)
    assert np.array_equal(loaded.node_data["feat"].numpy(), feat)
    assert loaded.labels.tolist() == np.nan_to_num(label, nan=-1).tolist()
    assert ours(loaded) == pairs(*edges)
    thirds = {"train": list(range(24)), "valid": list(range(24, 32)), "test": list(range(32, 40))}
    assert (lists(loaded.splits), loaded.metric) == (thirds, "accuracy")
    for part, wrong, message in (
        ("node_feat", feat * np.nan, "node features hold NaN"),
        ("node_label_19", label + 0.5, r"0\.5"),
    ):
        if name == "igb-small":
            whole = (folder / "paper" / f"{part}.npy").read_bytes()
            np.save(folder / "paper" / f"{part}.npy", wrong)
            with pytest.raises(ValueError, match=message):
                load(name, tmp_path)
            (folder / "paper" / f"{part}.npy").write_bytes(whole)
    monkeypatch.setattr("data.memory.available_bytes", lambda: 1000)
    if name == "igb-small":
        with pytest.raises(MemoryError, match=r"edge_index\.npy: its edges: about 0\.0 GiB needed"):
            load(name, tmp_path)


def by_dgl(kind, folder, files):
    """The graph that a class of DGL reads, which finds its files in place."""
    from dgl.data import citation_graph

    loader = getattr(citation_graph, kind)
    layout = type(kind, (loader,), {"_load": lambda self: None})(raw_dir=str(folder))
    shutil.copytree(files, layout.raw_path)
    for file in list((folder / layout.raw_path.rpartition("/")[2]).iterdir()):
        file.rename(file.with_name(file.name.replace("cora.", "cora_v2.")))
    return loader(raw_dir=str(folder), verbose=False)[0]


@pytest.mark.parametrize("name", ["cora", "citeseer", "pubmed"])
def test_planetoid(tmp_path, real_graph_dir, write_planetoid, monkeypatch, name):
    import_dgl()
    published = real_graph_dir / "official" / "planetoid"
    if name == "pubmed":
        write_planetoid(tmp_path / "planetoid", name, np.arange(600), (np.arange(600) * 7 + 3) % 600, 600)
    elif not published.is_dir():
        pytest.skip(f"{published} is not there")
    else:
        (tmp_path / "planetoid").mkdir()
        for file in published.glob(f"ind.{name}.*"):
            shutil.copy(file, tmp_path / "planetoid")
    other = by_dgl(f"{name.capitalize()}GraphDataset", tmp_path / "dgl", tmp_path / "planetoid")
    loaded = load(name, tmp_path)
    assert torch.equal(loaded.node_data["feat"], other.ndata["feat"])  # the same bits
    assert torch.equal(loaded.labels, other.ndata["label"])
    assert ours(loaded) == sorted(set(pairs(*other.edges())))
    for part, mask in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
        assert loaded.splits[part].tolist() == other.ndata[mask].nonzero()[:, 0].tolist()
    monkeypatch.setitem(vars(data.info(name).official), "sha256", {})  # else each change is another hash
    for part, change, message in (
        (
            "tx",
            lambda features: features.data.__setitem__(-1, np.nan),
            r"node features hold NaN, or .*finite ones are needed",
        ),
        ("tx", lambda features: features.indices.__setitem__(-1, 10**9), "cannot be read"),
        ("graph", lambda graph: graph[0].append(0.5), "planetoid: cannot be read .*move it away"),
    ):
        file = tmp_path / "planetoid" / f"ind.{name}.{part}"
        whole = file.read_bytes()
        content = pickle.loads(whole, encoding="latin1")
        change(content)
        file.write_bytes(pickle.dumps(content))
        with pytest.raises(ValueError, match=message):
            data.load(name, root=tmp_path)  # never the surrogate, nor the shipped files
        file.write_bytes(whole)


def test_zinc(tmp_path, path_graph, write_zinc):
    splits = {"train": (2, 5), "val": (3, 4, 6), "test": (7, 2)}
    graphs = {split: [path_graph(size, size) for size in sizes] for split, sizes in splits.items()}
    write_zinc(tmp_path, graphs)
    for name, used in {"zinc": ["train", "val", "test"], "zinc12k-val-test": ["val", "test"]}.items():
        loaded = load(name, tmp_path, batch_size=None, edge_features=True)
        expected = [graph for split in used for graph in graphs[split]]
        sizes = [len(x) for x, *_ in expected]
        assert loaded.graph_sizes.tolist() == sizes
        assert loaded.labels[:, 0].tolist() == [y.item() for *_, y in expected]
        assert torch.equal(loaded.node_data["feat"], torch.cat([x for x, *_ in expected]))
        first, bonds = 0, {}
        for x, kinds, ends, _ in expected:
            bonds |= dict(zip(zip(*(ends + first).tolist(), strict=True), kinds[:, 0].tolist(), strict=True))
            first += len(x)
        assert dict(zip(ours(loaded), loaded.edge_data["feat"][:, 0].tolist(), strict=True)) == bonds
    assert load("zinc12k-val-test", tmp_path, batch_size=4).graph_sizes.tolist() == [3, 4, 6, 7]
    loaded = load("zinc", tmp_path, batch_size=None)
    assert lists(loaded.splits) == {"train": [0, 1], "valid": [2, 3, 4], "test": [5, 6]}
    assert loaded.metric == "mae"


@pytest.mark.parametrize("name", ["pascalvoc-sp", "coco-sp", "peptides-func", "peptides-struct"])
def test_lrgb(tmp_path, path_graph, name):
    entry, rng = data.info(name), np.random.default_rng(2)
    splits = {}
    for split, sizes in {"train": (3, 5), "val": (4, 7), "test": (2, 6)}.items():
        splits[split] = []
        for size in sizes:
            *_, ends, _ = path_graph(size)
            if name.endswith("-sp"):
                x, edge_attr = torch.rand(size, 14).half(), torch.rand(ends.shape[1], 2)
                y = rng.choice([0, 1, 13, 90] if name == "coco-sp" else [0, 20], size).tolist()
            else:
                x, edge_attr = torch.ones(size, 9, dtype=torch.int64), torch.ones(ends.shape[1], 3, dtype=torch.int64)
                y = torch.from_numpy(rng.integers(0, 2, (1, entry.num_classes))).float()
            splits[split].append((x, edge_attr, ends, y))
    raw = tmp_path / name / "raw"
    raw.mkdir(parents=True)
    for split, graphs in splits.items():  # lists of tuples
        if name.endswith("-sp"):
            (raw / f"{split}.pickle").write_bytes(pickle.dumps(graphs))
        else:
            torch.save(graphs, raw / f"{split}.pt")
    shutil.copytree(tmp_path / name, tmp_path / "plain" / name)
    plain = [pyg.LRGBDataset(str(tmp_path / "plain"), name, split) for split in splits]
    graphs = [graph for dataset in plain for graph in dataset]
    loaded = load(name, tmp_path, batch_size=None, edge_features=True)
    assert torch.equal(loaded.node_data["feat"], torch.cat([graph.x for graph in graphs]))
    assert torch.equal(loaded.labels, torch.cat([graph.y for graph in graphs]))
    # PyG's first end of an edge is the source, which is the key.
    first, edges = 0, {}
    for graph in graphs:
        keys, queries = (graph.edge_index + first).tolist()
        edges |= dict(zip(zip(queries, keys, strict=True), graph.edge_attr.tolist(), strict=True))
        first += graph.num_nodes
    found = dict(zip(ours(loaded), loaded.edge_data["feat"].tolist(), strict=True))
    assert found.keys() == edges.keys()
    if name.endswith("-sp"):
        assert found == edges
    sizes = [graph.num_nodes for graph in graphs]
    parts = {"train": [0, 1], "valid": [2, 3], "test": [4, 5]}
    if entry.task == "node":
        parts = {part: [node for node in range(sum(sizes)) if owner(node, sizes) in ids] for part, ids in parts.items()}
    assert lists(loaded.splits) == parts
    assert loaded.metric == entry.metric


class RunsCode:
    """Its pickle makes a folder when it is read as a pickle may be."""

    def __init__(self, place):
        self.place = place

    def __reduce__(self):
        return os.mkdir, (str(self.place),)


def test_planetoid_files_of_another_hash_are_not_read(tmp_path, write_planetoid):
    known = data.info("citeseer").official.sha256
    write_planetoid(tmp_path / "planetoid", "citeseer", np.arange(600), np.arange(600), 600)
    (tmp_path / "planetoid" / "ind.citeseer.x").write_bytes(pickle.dumps(RunsCode(tmp_path / "ran")))
    with pytest.raises(ValueError, match=r"cannot be read .*\.mkdir, which could run code"):
        load("citeseer", tmp_path)
    vars(data.info("citeseer").official)["sha256"] = known
    with pytest.raises(ValueError, match=r"ind\.citeseer\.x: its sha256 is .*, and that of the published file d20de"):
        load("citeseer", tmp_path)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name", ["ZINC", "pascalvoc-sp", "peptides-func"])
def test_raw_files_of_pygs_classes_run_no_code(tmp_path, write_zinc, path_graph, name):
    if name == "ZINC":
        write_zinc(tmp_path, dict.fromkeys(("train", "val", "test"), [path_graph(3)] * 4))
    (tmp_path / name / "raw").mkdir(parents=True, exist_ok=True)
    for split in ("train", "val", "test"):
        with (tmp_path / name / "raw" / f"{split}.pickle").open("wb") as file:
            pickle.dump([RunsCode(tmp_path / "ran")], file)
        torch.save([RunsCode(tmp_path / "ran")], tmp_path / name / "raw" / f"{split}.pt")
    with pytest.raises(ValueError, match="cannot be read"):
        load(name.lower(), tmp_path, batch_size=4)
    assert not (tmp_path / "ran").exists()


def owner(node, sizes):
    """The graph of a node."""
    return int(np.searchsorted(np.cumsum(sizes), node, side="right"))


def write_real(root, name, row, col, num_nodes, write_planetoid, write_ogb):
    """A real graph in the official layout."""
    entry, once = data.info(name), row >= col if data.info(name).symmetric else row >= 0
    if name in ("cora", "citeseer", "pubmed"):
        return write_planetoid(root / "planetoid", name, row, col, num_nodes)
    if name == "elliptic":
        return write_elliptic(root, row, col, num_nodes)
    if name == "ogbn-arxiv":
        counts = {"num-node-list": [num_nodes], "num-edge-list": [row.size], "node_year": np.zeros(num_nodes, int)}
        labels = {"node-feat": np.full((num_nodes, 1), 0.5), "node-label": np.zeros(num_nodes, int)}
        tables = {"edge": np.stack([row, col], 1), **counts, **labels}
        return write_ogb(root / "ogbn_arxiv", "time", {"train": [0], "valid": [1], "test": [2]}, tables)
    (remote,) = entry.official.files(root)
    remote.target.parent.mkdir(exist_ok=True)
    if name == "fb100-cornell5":
        matrix = scipy.sparse.csc_matrix((np.ones(row.size), (row, col)), shape=(num_nodes, num_nodes))
        return scipy.io.savemat(remote.target, {"A": matrix})
    frame = pd.DataFrame({"id_1": row[once], "id_2": col[once]})
    text = remote.target.suffix == ".gz"
    return frame.to_csv(remote.target, sep="\t" if text else ",", header=not text, index=False)


REAL = ["cora", "citeseer", "pubmed", "elliptic", "musae-github", "facebook-large", "soc-epinions1", "ogbn-arxiv"]


@pytest.mark.parametrize("name", [*REAL, "fb100-cornell5"])
def test_real_graphs(tmp_path, real, write_planetoid, write_ogb, name):
    """The official source gives exactly the authors' edges, and with them the paper's statistics."""
    found = real(f"single/{name}")
    row, col, num_nodes = found["src_li"], found["dst_li"], int(found["num_nodes"])
    write_real(tmp_path, name, row, col, num_nodes, write_planetoid, write_ogb)
    source, raw = find_graph(name, root=tmp_path, source="official")
    measured, expected = measure(raw), measure(to_csr(row, col, num_nodes, "real"))
    assert (source, measured.sha256) == ("official", expected.sha256)
    for metric, paper in paper_figures(data.info(name)).items():
        if paper is not None:
            digits = 0 if metric in ("nodes", "nnz") else 2 if metric.endswith("cv") else 1
            assert measured.figures[metric] == pytest.approx(paper, abs=1.01 * 10.0**-digits), metric
    if name == "elliptic":  # the direction
        turned = measure(to_csr(raw.col.astype(np.int64), raw.row, num_nodes, "turned"))
        assert turned.figures["tcb_per_rw_cv"] > 0.7  # the paper has 0.57


def test_real_molecules(tmp_path, real, write_ogb):
    found, entry = real("batched/ogbg-molhiv"), data.info("ogbg-molhiv")
    sizes = found["node_counts"]
    tables = {
        "edge": np.stack([found["u"], found["v"]], 1),
        "num-node-list": sizes,
        "num-edge-list": found["edge_counts"],
        "node-feat": np.zeros((sizes.sum(), 9), int),
        "edge-feat": np.zeros((found["u"].size, 3), int),
        "graph-label": np.zeros(sizes.size, int),
    }
    write_ogb(tmp_path / "ogbg_molhiv", "scaffold", {"train": [0], "valid": [1], "test": [2]}, tables)
    _, raw = find_graph("ogbg-molhiv", root=tmp_path, source="official")
    measured = measure(raw)
    assert (measured.figures["nodes"], measured.figures["nnz"]) == (entry.num_nodes, entry.nnz)
    assert measured.bsb.num_tcbs == entry.published["num_tcbs"]
