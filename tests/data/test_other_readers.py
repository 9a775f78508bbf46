"""Files in the official layouts, read here and by the reader that their publisher's users read them with.

That reader is the oracle of the layout: a class of PyG, ogb or DGL, and for files without one networkx, NumPy or SciPy.
A file that only the writers of these tests understand fails in it.
"""

import gzip
import json
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
from data.sources.dgl_graphs import dgl_class
from data.sources.molecules import has_rdkit
from data.sources.ogb_import import import_ogb
from data.sources.ogb_sets import OgbSource
from fused3s_dgl import import_dgl

NODES = 40


@pytest.fixture
def edges():
    """(row, col) of a graph in which no direction is like the other, sorted, each edge once."""
    chosen = np.random.default_rng(0).choice(NODES * NODES, 200, replace=False)
    return np.unique(chosen // NODES * NODES + chosen % NODES) // NODES, np.unique(chosen) % NODES


def pairs(first, second):
    return sorted(zip(np.asarray(first).tolist(), np.asarray(second).tolist(), strict=True))


def ours(loaded):
    """(query, key) of the edges of a loaded graph."""
    keys, queries = loaded.graph.edges()
    return pairs(queries, keys)


def load(name, root, **options):
    return data.load(name, root=root, source="official", **options)


def theirs(kind, root, raw, folder="raw", **options):
    """The only graph of a class of PyG, which finds its raw files in place."""
    shutil.copytree(raw, root / "pyg" / folder)
    return kind(str(root / "pyg"), **options)[0]


@pytest.mark.parametrize(("name", "kind"), [("yelp", pyg.Yelp), ("flickr", pyg.Flickr), ("amazon-products", None)])
def test_graphsaint(tmp_path, edges, name, kind):
    row, col = edges
    target = data.info(name).official.files(tmp_path)[0].target
    folder = target if kind else target.parent
    folder.mkdir()
    matrix = scipy.sparse.csr_matrix((np.ones(row.size, bool), (row, col)), shape=(NODES, NODES))
    scipy.sparse.save_npz(folder / "adj_full.npz", matrix)
    np.save(folder / "feats.npy", np.random.default_rng(1).random((NODES, 5)))
    label = {str(node): [node % 2, 1, 0] if name != "flickr" else node % 7 for node in range(NODES)}
    (folder / "class_map.json").write_text(json.dumps(label))
    (folder / "role.json").write_text(json.dumps({"tr": [0, 3], "va": [1], "te": [2, 9]}))
    other = theirs(kind or pyg.AmazonProducts, tmp_path, folder)
    for _ in range(2):  # the second time the kept graph
        loaded = load(name, tmp_path)
        # A row of GraphSAINT's matrix is the first end of an edge. DGL makes an edge row -> column of it: for its sets
        # the column is the query; for amazon-products, read without DGL, the row. All of these matrices are symmetric.
        found = pairs(*other.edge_index)
        assert ours(loaded) == (found if name == "amazon-products" else sorted((j, i) for i, j in found))
        assert torch.equal(loaded.graph.ndata["feat"], other.x)
        if kind:
            assert torch.equal(loaded.labels, other.y)
            masks = other.train_mask, other.val_mask, other.test_mask
            assert [ids.tolist() for ids in loaded.splits.values()] == [mask.nonzero()[:, 0].tolist() for mask in masks]


def test_elliptic(tmp_path, edges):
    row, col = edges
    ids = np.sort(np.random.default_rng(2).choice(10**6, NODES, replace=False))
    folder = tmp_path / "elliptic_bitcoin_dataset"
    folder.mkdir()
    table = pd.DataFrame({0: ids, 1: np.arange(NODES) % 49 + 1, 2: ids / 7, 3: 0.5})
    table.to_csv(folder / "elliptic_txs_features.csv", header=False, index=False)
    pd.DataFrame({"txId1": ids[row], "txId2": ids[col]}).to_csv(folder / "elliptic_txs_edgelist.csv", index=False)
    classes = np.array(["unknown", "1", "2"])[np.arange(NODES) % 3]
    pd.DataFrame({"txId": ids, "class": classes}).to_csv(folder / "elliptic_txs_classes.csv", index=False)
    other = theirs(pyg.EllipticBitcoinDataset, tmp_path, folder)
    loaded = load("elliptic", tmp_path)
    assert ours(loaded) == pairs(*other.edge_index)  # the first transaction attends to the second
    assert torch.equal(loaded.graph.ndata["feat"], other.x[:, 0:2])
    assert loaded.labels.tolist() == [{2: -1}.get(label, label) for label in other.y.tolist()]


def test_questions(tmp_path, edges):
    row, col = edges
    (remote,) = data.info("questions").official.files(tmp_path)
    remote.target.parent.mkdir()
    masks = {
        f"{part}_masks": np.random.default_rng(i).random((10, NODES)) < 0.3
        for i, part in enumerate(("train", "val", "test"))
    }
    features = np.random.default_rng(3).random((NODES, 4), np.float32)
    np.savez(
        remote.target, edges=np.stack([row, col], 1), node_features=features, node_labels=np.arange(NODES) % 2, **masks
    )
    other = theirs(
        pyg.HeterophilousGraphDataset, tmp_path, remote.target.parent, name="questions", folder="questions/raw"
    )
    loaded = load("questions", tmp_path)
    assert ours(loaded) == pairs(*other.edge_index)
    assert torch.equal(loaded.graph.ndata["feat"], other.x)
    assert torch.equal(loaded.labels, other.y)
    first = [mask[:, 0].nonzero()[:, 0].tolist() for mask in (other.train_mask, other.val_mask, other.test_mask)]
    assert [ids.tolist() for ids in loaded.splits.values()] == first


def test_facebook100(tmp_path, edges):
    row, col = edges
    (remote,) = data.info("fb100-cornell5").official.files(tmp_path)
    remote.target.parent.mkdir()
    matrix = scipy.sparse.csc_matrix((np.ones(row.size), (row, col)), shape=(NODES, NODES))
    scipy.io.savemat(remote.target, {"A": matrix + matrix.T, "local_info": np.ones((NODES, 7))})
    raw = tmp_path / "raw"
    raw.mkdir()
    shutil.copy(remote.target, raw / "data.mat")  # as PyG names Cornell5.mat
    other = theirs(pyg.LINKXDataset, tmp_path, raw, name="cornell5", folder="cornell5/raw")
    assert ours(load("fb100-cornell5", tmp_path)) == pairs(*other.edge_index)


def test_epinions(tmp_path, edges):
    row, col = edges
    (remote,) = data.info("soc-epinions1").official.files(tmp_path)
    head = [
        "# Directed graph (each unordered pair of nodes is saved once): soc-Epinions1.txt ",
        "# Who-trusts-whom",
        f"# Nodes: {NODES} Edges: {row.size}",
        "# FromNodeId\tToNodeId",
    ]
    lines = [f"{i}\t{j}" for i, j in zip(row.tolist(), col.tolist(), strict=True)]
    with gzip.open(remote.target, "wt") as file:
        file.write("\n".join([*head, *lines, ""]))
    raw = tmp_path / "raw"
    raw.mkdir()
    with gzip.open(remote.target) as file:
        (raw / "soc-Epinions1.txt").write_bytes(file.read())
    other = theirs(pyg.SNAPDataset, tmp_path, raw, name="soc-epinions1", folder="soc-epinions1/raw")
    loaded = load("soc-epinions1", tmp_path)
    assert (ours(loaded), loaded.meta.num_nodes) == (pairs(*other.edge_index), other.num_nodes)


def with_gaps(*ends):
    """The ends with other ids, 4 to 13 apart; their order stays."""
    ids = np.cumsum(np.random.default_rng(9).integers(4, 14, NODES))
    return [ids[end] for end in ends]


def lines_of(first, second, separator):
    return [f"{i}{separator}{j}" for i, j in zip(first.tolist(), second.tolist(), strict=True)]


def by_networkx(graph):
    """(pairs, number of nodes): a node is the rank of its id; an `nx.Graph` gives both directions of each edge."""
    rank = {node: place for place, node in enumerate(sorted(graph))}
    return sorted((rank[i], rank[j]) for i, j in graph.to_directed().edges), graph.number_of_nodes()


@pytest.mark.parametrize(
    ("name", "header", "kind"),
    [
        ("musae-github", "id_1,id_2", nx.Graph),
        ("facebook-large", "id_1,id_2", nx.Graph),
        ("artist", "node_1,node_2", nx.DiGraph),
    ],
)
def test_musae_and_gemsec(tmp_path, edges, name, header, kind):
    """A header, then the ends of each edge. MUSAE's and GEMSEC's code builds a networkx graph of these lines, too; self
    loops, which MUSAE's then drops, stay here."""
    (remote,) = data.info(name).official.files(tmp_path)
    remote.target.parent.mkdir()
    remote.target.write_text("\n".join([header, *lines_of(*edges, ","), ""]))
    loaded = load(name, tmp_path)
    assert (edges[0] == edges[1]).any()  # facebook-large has self loops
    without_header = remote.target.read_text().splitlines()[1:]
    other = nx.parse_edgelist(without_header, delimiter=",", nodetype=int, create_using=kind)
    assert (ours(loaded), loaded.meta.num_nodes) == by_networkx(other)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize(("name", "gaps"), [("com-amazon", True), ("amazon0505", False)])
def test_amazon(tmp_path, edges, name, gaps, end):
    """Tables of SNAP with a head of four lines. PyG's class reads wiki-Vote from such a file, with ids as ranks."""
    (remote,) = data.info(name).official.files(tmp_path)
    head = {
        "com-amazon": ["# Undirected graph: ../../data/output/amazon.ungraph.txt", "# Amazon"],
        "amazon0505": [
            "# Directed graph (each unordered pair of nodes is saved once): Amazon0505.txt ",
            "# Amazon product co-purchaisng network from May 05 2003",
        ],
    }[name]
    head += [f"# Nodes: {NODES} Edges: {edges[0].size}", "# FromNodeId\tToNodeId"]
    lines = [*head, *lines_of(*(with_gaps(*edges) if gaps else edges), "\t")]
    text = "".join(line + end for line in lines).encode()
    remote.target.write_bytes(gzip.compress(text))
    raw = tmp_path / "raw"
    raw.mkdir()
    (raw / "wiki-Vote.txt").write_bytes(text)
    other = theirs(pyg.SNAPDataset, tmp_path, raw, name="wiki-vote", folder="wiki-vote/raw")
    loaded = load(name, tmp_path)
    assert (ours(loaded), loaded.meta.num_nodes) == (pairs(*other.edge_index), other.num_nodes)
    third = nx.read_edgelist(remote.target, nodetype=int, create_using=nx.DiGraph)
    assert (ours(loaded), loaded.meta.num_nodes) == by_networkx(third)


def test_ego_twitter(tmp_path, edges):
    """SNAP's combined list of both ends, with Twitter's ids, lines in no order, some of them twice."""
    (remote,) = data.info("ego-twitter").official.files(tmp_path)
    lines = lines_of(*with_gaps(*edges), " ")
    lines = np.random.default_rng(10).permutation(lines + lines[:50]).tolist()
    with gzip.open(remote.target, "wt") as file:
        file.writelines(f"{line}\n" for line in lines)
    loaded = load("ego-twitter", tmp_path)
    other = nx.read_edgelist(remote.target, nodetype=int, create_using=nx.Graph)
    assert (ours(loaded), loaded.meta.num_nodes) == by_networkx(other)


@pytest.mark.parametrize("banner", ["%%MatrixMarket", "%MatrixMarket"])
def test_blog(tmp_path, edges, banner):
    """A Matrix Market file as Network Repository writes it: one "%" in some files, a space at the end of the banner, no
    comments, one triangle. The last five nodes have no edge here."""
    (remote,) = data.info("blog").official.files(tmp_path)
    row, col = np.array(sorted({(max(i, j) + 1, min(i, j) + 1) for i, j in zip(*edges, strict=True) if i != j})).T
    size = NODES + 5
    head = [f"{banner} matrix coordinate pattern symmetric ", f"{size} {size} {row.size}"]
    remote.target.write_text("\n".join([*head, *lines_of(row, col, " "), ""]))
    other = scipy.io.mmread(remote.target)
    loaded = load("blog", tmp_path)
    assert (ours(loaded), loaded.meta.num_nodes) == (pairs(other.row, other.col), other.shape[0])


@pytest.mark.parametrize(
    ("name", "header", "separator", "lines"),
    [
        ("musae-github", "id_1,id_2\n", ",", 289_003),
        ("facebook-large", "id_1,id_2\n", ",", 171_002),
        ("ego-twitter", "", " ", 1_342_310),  # of SNAP's 1,768,149 those that are not another one reversed
    ],
)
def test_real_edge_lists(tmp_path, real_graph_dir, name, header, separator, lines):
    """Every edge and degree of the real graph, and the published number of lines; NumPy is the other reader."""
    path = real_graph_dir / "single" / f"{name}.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    with np.load(path) as archive:
        once = archive["src_li"] <= archive["dst_li"]
        ends = np.stack([archive["src_li"][once], archive["dst_li"][once]], 1)
    (remote,) = data.info(name).official.files(tmp_path)
    remote.target.parent.mkdir(exist_ok=True)
    content = (header + pd.DataFrame(ends).to_csv(sep=separator, header=False, index=False)).encode()
    remote.target.write_bytes(gzip.compress(content, 1) if remote.target.suffix == ".gz" else content)
    skipped = len(header.splitlines())
    first, second = np.loadtxt(remote.target, np.int64, delimiter=separator, skiprows=skipped, unpack=True)
    assert first.size == lines
    size = data.info(name).num_nodes
    other = scipy.sparse.csr_array((np.ones(lines), (first, second)), shape=(size, size))
    other = other + other.T - scipy.sparse.diags_array(other.diagonal())
    keys, queries = load(name, tmp_path, features=False).graph.edges()
    found = scipy.sparse.csr_array((np.ones(keys.numel()), (queries, keys)), shape=(size, size))
    assert abs(found - other).nnz == 0
    assert found.sum() == data.info(name).nnz
    assert np.array_equal(found.sum(0), np.bincount(np.r_[first, second[first != second]], minlength=size))


def write_csv(path, rows):
    path.parent.mkdir(parents=True, exist_ok=True)
    (path.parents[1] / "processed").mkdir(exist_ok=True)  # in ogb's archives, for its own cache
    pd.DataFrame(rows).to_csv(path, header=False, index=False)


@pytest.mark.parametrize("name", ["ogbn-arxiv", "ogbn-products"])
def test_ogb_nodes(tmp_path, edges, name):
    row, col = edges
    if name == "ogbn-products":
        row, col = row[row < col], col[row < col]
    folder = tmp_path / name.replace("-", "_")
    raw = {
        "edge": np.stack([row, col], 1),
        "num-node-list": [NODES],
        "num-edge-list": [row.size],
        "node-feat": np.random.default_rng(4).normal(size=(NODES, 6)),
        "node-label": np.arange(NODES) % 40,
        "node_year": np.full(NODES, 2015),
    }
    for file, rows in raw.items():
        write_csv(folder / "raw" / f"{file}.csv.gz", rows)
    for part, rows in {"train": [4, 0], "valid": [1], "test": [39, 2]}.items():
        write_csv(folder / "split" / data.info(name).official.split / f"{part}.csv.gz", rows)
    (folder / "RELEASE_v1.txt").write_text("")
    loaded = load(name, tmp_path)
    kept = load(name, tmp_path)
    assert torch.equal(kept.graph.ndata["feat"], loaded.graph.ndata["feat"])
    assert (kept.meta, kept.labels.tolist()) == (loaded.meta, loaded.labels.tolist())
    dataset = import_ogb("nodeproppred").NodePropPredDataset(name=name, root=str(tmp_path))
    graph, label = dataset[0]
    assert ours(loaded) == sorted(set(pairs(*graph["edge_index"])))
    assert np.array_equal(loaded.graph.ndata["feat"].numpy(), graph["node_feat"])
    assert loaded.labels.tolist() == label[:, 0].tolist()
    for read in (loaded, kept):
        assert {part: ids.tolist() for part, ids in read.splits.items()} == {
            part: ids.tolist() for part, ids in dataset.get_idx_split().items()
        }


def test_papers100m(tmp_path, edges):
    row, col = edges
    folder = tmp_path / "ogbn_papers100M"
    feat = np.random.default_rng(5).normal(size=(NODES, 6)).astype(np.float32)
    for made in ("raw", "processed"):
        (folder / made).mkdir(parents=True)
    np.savez_compressed(
        folder / "raw" / "data.npz",
        edge_index=np.stack([row, col]),
        node_feat=feat,
        node_year=np.full((NODES, 1), 2015),
        num_nodes_list=np.array([NODES]),
        num_edges_list=np.array([row.size]),
    )
    label = np.where(np.arange(NODES) % 3, np.nan, np.arange(NODES)).astype(np.float32)[:, None]
    np.savez_compressed(folder / "raw" / "node-label.npz", node_label=label)
    for part, rows in {"train": [0, 3], "valid": [6], "test": [9]}.items():
        write_csv(folder / "split" / "time" / f"{part}.csv.gz", rows)
    (folder / "RELEASE_v1.txt").write_text("")
    loaded = load("ogbn-papers100m", tmp_path)
    dataset = import_ogb("nodeproppred").NodePropPredDataset(name="ogbn-papers100M", root=str(tmp_path))
    graph, label = dataset[0]
    assert ours(loaded) == pairs(*graph["edge_index"])
    assert np.array_equal(loaded.graph.ndata["feat"].numpy(), graph["node_feat"])
    assert loaded.labels.tolist() == np.nan_to_num(label[:, 0], nan=-1).tolist()
    assert {part: ids.tolist() for part, ids in loaded.splits.items()} == {
        part: ids.tolist() for part, ids in dataset.get_idx_split().items()
    }


@pytest.mark.parametrize("name", ["ogbg-molhiv", "ogbg-molpcba", "ogbg-ppa", "ogbg-code2"])
def test_ogb_graphs(tmp_path, name):
    entry = data.info(name)
    rng = np.random.default_rng(6)
    sizes = np.array([3, 5, 4, 2])
    ends = [np.stack([np.arange(1, size) - 1, np.arange(1, size)], 1) for size in sizes]
    edge_count = int((sizes - 1).sum())
    raw = {"edge": np.concatenate(ends), "num-node-list": sizes, "num-edge-list": sizes - 1}
    if name != "ogbg-ppa":
        raw["node-feat"] = rng.integers(0, 2, (sizes.sum(), entry.feature_dim))
    if name.startswith("ogbg-mol"):
        raw["edge-feat"] = rng.integers(0, 2, (edge_count, 3))
        raw["graph-label"] = np.where(rng.random((4, entry.num_classes)) < 0.3, np.nan, 1.0)
    elif name == "ogbg-ppa":
        raw["edge-feat"] = rng.random((edge_count, 7))
        raw["graph-label"] = [0, 36, 5, 1]
    else:
        raw["graph-label"] = ["get name", "run", "a", "b"]
        raw |= dict.fromkeys(("node_is_attributed", "node_dfs_order", "node_depth"), np.zeros(sizes.sum(), int))
    folder = tmp_path / name.replace("-", "_")
    for file, rows in raw.items():
        write_csv(folder / "raw" / f"{file}.csv.gz", rows)
    for part, rows in {"train": [3, 0], "valid": [1], "test": [2]}.items():
        write_csv(folder / "split" / entry.official.split / f"{part}.csv.gz", rows)
    (folder / "RELEASE_v1.txt").write_text("")
    loaded = load(name, tmp_path, batch_size=None, edge_features=name != "ogbg-code2")
    dataset = import_ogb("graphproppred").GraphPropPredDataset(name=name, root=str(tmp_path))
    # ogb's first end of an edge is the query; both directions are there, but in ogbg-code2.
    first, edges, bonds = 0, [], {}
    for graph, _ in dataset:
        both = graph["edge_index"] + first
        first += graph["num_nodes"]
        edges += pairs(*both)
        if graph["edge_feat"] is not None:
            bonds |= zip(zip(*both.tolist(), strict=True), graph["edge_feat"].tolist(), strict=True)
    assert ours(loaded) == sorted(edges)
    if bonds:
        keys, queries = loaded.graph.edges(order="eid")
        ends = zip(queries.tolist(), keys.tolist(), strict=True)
        assert dict(zip(ends, loaded.graph.edata["feat"].tolist(), strict=True)) == bonds
    assert loaded.graph.batch_num_nodes().tolist() == [graph["num_nodes"] for graph, _ in dataset]
    if name != "ogbg-ppa":
        assert torch.equal(
            loaded.graph.ndata["feat"], torch.cat([torch.from_numpy(g["node_feat"]) for g, _ in dataset])
        )
    if name != "ogbg-code2":
        assert np.array_equal(loaded.labels.numpy(), np.stack([label for _, label in dataset]), equal_nan=True)
    assert {part: ids.tolist() for part, ids in loaded.splits.items()} == {
        part: ids.tolist() for part, ids in dataset.get_idx_split().items()
    }


@pytest.mark.parametrize("name", ["igb-small", "igb-large"])
def test_igb(tmp_path, edges, name):
    """As `igb.dataloader.IGB260M` opens the files: np.load, and for the large set np.memmap of float32."""
    size = name.removeprefix("igb-")
    folder = tmp_path / size / "processed"
    for part in ("paper", "paper__cites__paper"):
        (folder / part).mkdir(parents=True)
    feat = np.random.default_rng(7).random((NODES, 1024), np.float32)
    label = np.arange(NODES, dtype=np.float32) % 19
    np.save(folder / "paper__cites__paper" / "edge_index.npy", np.stack(edges, 1))
    places = folder / "paper" / "node_feat.npy", folder / "paper" / "node_label_19.npy"
    for place, array in zip(places, (feat, label), strict=True):
        if size == "large":
            mapped = np.memmap(place, dtype="float32", mode="w+", shape=array.shape)
            mapped[:] = array
            mapped.flush()
        else:
            np.save(place, array)
    if size == "large":
        theirs = [np.memmap(places[0], "float32", "r", shape=(NODES, 1024)), np.memmap(places[1], "float32", "r")]
    else:
        theirs = [np.load(place, mmap_mode="r") for place in places]
    loaded = load(name, tmp_path)
    assert np.array_equal(loaded.graph.ndata["feat"].numpy(), theirs[0])
    assert loaded.labels.tolist() == theirs[1].tolist()
    assert ours(loaded) == pairs(*np.load(folder / "paper__cites__paper" / "edge_index.npy").T)


def test_reddit(tmp_path, edges):
    """As DGL's class converts the files: it renumbers the nodes by reverse Cuthill-McKee."""
    row, col = edges
    (remote,) = data.info("reddit").official.files(tmp_path)
    remote.target.mkdir()
    matrix = scipy.sparse.coo_matrix((np.ones(2 * row.size), (np.r_[row, col], np.r_[col, row])), shape=(NODES, NODES))
    scipy.sparse.save_npz(remote.target / "reddit_self_loop_graph.npz", matrix)
    arrays = {"feature": np.random.default_rng(8).random((NODES, 3)), "label": np.arange(NODES) % 41}
    types = np.array([1, 2, 3])[np.arange(NODES) % 3]
    np.savez(remote.target / "reddit_data.npz", node_types=types, node_ids=np.arange(NODES), **arrays)
    loaded = load("reddit", tmp_path)
    assert not (remote.target / "dgl_graph.bin").exists()
    from dgl.data import RedditDataset

    theirs = RedditDataset(self_loop=True, raw_dir=str(tmp_path), verbose=False)[0]
    assert (remote.target / "dgl_graph.bin").exists()
    keys, queries = theirs.edges()
    assert ours(loaded) == sorted(set(pairs(queries, keys)))
    assert torch.equal(loaded.graph.ndata["feat"], theirs.ndata["feat"])
    assert loaded.labels.tolist() == theirs.ndata["label"].tolist()
    assert loaded.splits["valid"].tolist() == theirs.ndata["val_mask"].nonzero()[:, 0].tolist()
    (remote.target / "dgl_graph.bin").write_bytes(b"damaged")  # DGL's cache is not read
    assert torch.equal(load("reddit", tmp_path).labels, loaded.labels)


def test_pubmed(tmp_path, write_planetoid):
    ring = np.arange(600), (np.arange(600) + 1) % 600
    write_planetoid(data.info("pubmed").official.files(tmp_path)[0].target, *ring, 600, name="pubmed")
    loaded = load("pubmed", tmp_path)
    other = dgl_class("PubmedGraphDataset")(raw_dir=str(tmp_path), verbose=False)[0]
    assert ours(loaded) == pairs(*other.edges())
    assert torch.equal(loaded.graph.ndata["feat"], other.ndata["feat"])
    assert torch.equal(loaded.labels, other.ndata["label"])
    for part, mask in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
        assert loaded.splits[part].tolist() == other.ndata[mask].nonzero()[:, 0].tolist()


@pytest.mark.skipif(not has_rdkit(), reason="RDKit is not installed")
@pytest.mark.parametrize("name", ["peptides-func", "peptides-struct"])
def test_peptides(tmp_path, monkeypatch, name):
    from dgl.data import lrgb

    import_dgl()
    table, split = data.info(name).official.files(tmp_path)
    table.target.parent.mkdir()
    smiles = ["CC(=O)NC(C)C(=O)O", "N[C@@H](CO)C(=O)O", "C1CCCCC1", "CCO", "OC(=O)CCN"]
    rng = np.random.default_rng(9)
    rows = pd.DataFrame({"smiles": smiles})
    if name == "peptides-func":
        rows["labels"] = [str(row) for row in rng.integers(0, 2, (5, 10)).tolist()]
    else:
        rows[list(data.info(name).official.targets)] = rng.normal(4, 2, (5, 11))
        # DGL passes pandas' rows to torch, which the pinned versions of the two refuse.
        tensor = lrgb.F.tensor

        def of_rows(rows, dtype=None):
            return tensor([row.tolist() for row in rows] if isinstance(rows[0], pd.Series) else rows, dtype=dtype)

        monkeypatch.setattr(lrgb.F, "tensor", of_rows)
    rows.to_csv(table.target, index=False)
    split.target.write_bytes(
        pickle.dumps({"train": np.array([3, 0]), "val": np.array([1]), "test": np.array([4, 2])}, protocol=4)
    )
    loaded = load(name, tmp_path, batch_size=None, edge_features=True)
    kind = {"peptides-func": "PeptidesFunctionalDataset", "peptides-struct": "PeptidesStructuralDataset"}[name]
    other = getattr(lrgb, kind)(raw_dir=str(tmp_path), verbose=False)
    whole = import_dgl().batch(other.graphs)
    assert loaded.graph.batch_num_nodes().tolist() == whole.batch_num_nodes().tolist()
    assert torch.equal(loaded.graph.ndata["feat"], whole.ndata["feat"])
    edges = []
    for graph in (loaded.graph, whole):
        ends = (ids.tolist() for ids in graph.edges(order="eid"))
        edges.append(sorted(zip(*ends, graph.edata["feat"].tolist(), strict=True)))
    assert edges[0] == edges[1]
    assert torch.allclose(loaded.labels, other.labels)
    theirs = {{"val": "valid"}.get(part, part): ids.tolist() for part, ids in other.get_idx_split().items()}
    assert {part: ids.tolist() for part, ids in loaded.splits.items()} == theirs


def test_addresses_and_layouts_are_those_of_ogb():
    for package, names in (
        ("nodeproppred", ["ogbn-arxiv", "ogbn-products", "ogbn-papers100M"]),
        ("graphproppred", ["ogbg-molhiv", "ogbg-molpcba", "ogbg-ppa", "ogbg-code2"]),
    ):
        table = Path(import_ogb(package).__file__).with_name("master.csv")
        about = pd.read_csv(table, index_col=0, keep_default_na=False)
        for name in names:
            source = data.info(name.lower()).official
            assert source.url == about[name]["url"]
            (remote,) = source.files(Path("root"))
            assert remote.member == about[name]["download_name"]
            assert (source.split, "1") == (about[name]["split"], about[name]["version"])
            binary = about[name]["binary"] == "True"
            assert isinstance(source, OgbSource) == (package == "nodeproppred")
            if not binary:
                assert str(source.both_directions) == about[name]["add_inverse_edge"]


def test_dgl_and_lrgb_addresses(tmp_path, monkeypatch):
    """URLs, checksums and folders that are written out here are those of `dgl.data.lrgb`."""
    import_dgl()
    utils = import_ogb("utils")
    if not hasattr(utils, "smiles2graph"):  # without RDKit
        monkeypatch.setattr(utils, "smiles2graph", None, raising=False)
    from dgl.data import lrgb

    def located(kind):
        return type(kind.__name__, (kind,), {"_load": lambda self: None})(raw_dir=str(tmp_path))

    for name, kind in {"pascalvoc-sp": lrgb.VOCSuperpixelsDataset, "coco-sp": lrgb.COCOSuperpixelsDataset}.items():
        (remote,), layout = data.info(name).official.files(tmp_path), located(kind)
        assert (remote.url, str(remote.target)) == (layout.url.strip(), layout.save_path)
    for name, kind in {
        "peptides-func": lrgb.PeptidesFunctionalDataset,
        "peptides-struct": lrgb.PeptidesStructuralDataset,
    }.items():
        (table, split), layout = data.info(name).official.files(tmp_path), located(kind)
        assert (table.url, str(table.target)) == (layout.url.strip(), layout.raw_data_path)
        assert (split.url, str(split.target)) == (layout.url_stratified_split.strip(), layout.split_data_path)
        assert (table.known_hash, split.known_hash) == (
            f"md5:{layout.md5sum_data}",
            f"md5:{layout.md5sum_stratified_split}",
        )
