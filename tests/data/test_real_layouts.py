"""Real graphs in their publishers' on-disk layouts, through the official classes, offline.

Features and labels are small and invented.
"""

import gzip
import json
import logging
import pickle
import shutil
import time
from collections import namedtuple
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pandas as pd
import pytest
import scipy.io
import scipy.sparse
import torch

import data
from bench.block_stats import measure, paper_figures
from data.download import MAGIC
from data.graph import RawGraph
from data.loader import find_graph
from data.sources.papers100m import map_npz_array
from fused3s_dgl import import_dgl

MOLECULES = 1024


@pytest.fixture
def real(real_graph_dir):
    """(row, col, num_nodes) of a real single graph."""

    def read(name):
        path = real_graph_dir / "single" / f"{name}.npz"
        if not path.is_file():
            pytest.skip(f"{path} is not there")
        with np.load(path) as archive:
            return archive["src_li"].astype(np.int64), archive["dst_li"].astype(np.int64), int(archive["num_nodes"])

    return read


@pytest.fixture
def molecules(real_graph_dir):
    """(node_counts, edge_counts, u, v) of a real collection, each undirected edge once."""

    def read(name):
        path = real_graph_dir / "batched" / f"{name}.npz"
        if not path.is_file():
            pytest.skip(f"{path} is not there")
        with np.load(path) as archive:
            return tuple(archive[key].astype(np.int64) for key in ("node_counts", "edge_counts", "u", "v"))

    return read


def dgl_graphs(node_counts, edge_counts, u, v, feature):
    """The collection as DGLGraphs with both directions."""
    graphs, first = [], 0
    for nodes, edges in zip(node_counts.tolist(), edge_counts.tolist(), strict=True):
        a, b = (torch.from_numpy(ids[first : first + edges]) for ids in (u, v))
        graph = import_dgl().graph((torch.cat([a, b]), torch.cat([b, a])), num_nodes=nodes)
        graph.ndata["feat"] = feature(nodes)
        graph.edata["feat"] = torch.zeros(2 * edges, 3, dtype=torch.int64)
        graphs.append(graph)
        first += edges
    return graphs


def assert_is_the_real_graph(name, root, real_edges):
    """The official source gives exactly these edges, and with them the paper's statistics."""
    source, raw = find_graph(name, root=root, source="official")
    row, col, num_nodes = real_edges
    ours, theirs = measure(raw), measure(RawGraph(row, col, num_nodes, "real"))
    assert source == "official"
    assert ours.sha256 == theirs.sha256
    entry = data.info(name)
    for metric, paper in paper_figures(entry).items():
        if paper is not None:
            digits = 0 if metric in ("nodes", "nnz") else 2 if metric.endswith("cv") else 1
            assert ours.figures[metric] == pytest.approx(paper, abs=1.01 * 10.0**-digits), metric
    return raw


@pytest.mark.parametrize("name", ["cora", "citeseer", "pubmed"])
def test_planetoid(tmp_path, real, write_planetoid, name):
    (remote,) = data.info(name).official.files(tmp_path)
    write_planetoid(remote.target, *real(name), name="cora_v2" if name == "cora" else name)
    assert_is_the_real_graph(name, tmp_path, real(name))


def test_musae_csv(tmp_path, real):
    row, col, num_nodes = real("musae-github")
    once = row < col
    (tmp_path / "git_web_ml").mkdir()
    edges = pd.DataFrame({"id_1": row[once], "id_2": col[once]})
    edges.to_csv(tmp_path / "git_web_ml" / "musae_git_edges.csv", index=False)
    assert_is_the_real_graph("musae-github", tmp_path, (row, col, num_nodes))


def write_elliptic(folder, row, col, num_nodes):
    """Transaction ids in another order than the file's rows."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.choice(10**8, num_nodes, replace=False))
    order = rng.permutation(num_nodes)
    folder.mkdir()
    features = pd.DataFrame({0: ids, 1: 1, 2: np.arange(num_nodes) / 8, 3: 0.5}).iloc[order]
    features.to_csv(folder / "elliptic_txs_features.csv", header=False, index=False)
    pd.DataFrame({"txId1": ids[row], "txId2": ids[col]}).to_csv(folder / "elliptic_txs_edgelist.csv", index=False)
    classes = np.array(["unknown", "1", "2"])[np.arange(num_nodes) % 3]
    pd.DataFrame({"txId": ids, "class": classes}).iloc[order].to_csv(folder / "elliptic_txs_classes.csv", index=False)


def test_elliptic_csv_and_its_direction(tmp_path, real):
    row, col, num_nodes = real("elliptic")
    write_elliptic(tmp_path / "elliptic_bitcoin_dataset", row, col, num_nodes)
    raw = assert_is_the_real_graph("elliptic", tmp_path, (row, col, num_nodes))
    assert raw.ndata["feat"][:3].tolist() == [[0.0, 0.5], [0.125, 0.5], [0.25, 0.5]]
    assert raw.ndata["label"][:3].tolist() == [-1, 1, 0]
    assert measure(RawGraph(col, row, num_nodes, "turned")).figures["tcb_per_rw_cv"] > 0.7  # the paper has 0.57


@pytest.mark.parametrize("damage", ["edge", "class", "missing"])
def test_damaged_elliptic_is_named(tmp_path, damage):
    folder = tmp_path / "elliptic_bitcoin_dataset"
    write_elliptic(folder, np.array([0, 1]), np.array([1, 2]), 3)
    if damage == "edge":
        (folder / "elliptic_txs_edgelist.csv").write_text("txId1,txId2\n-5,-6\n")
    elif damage == "class":
        (folder / "elliptic_txs_classes.csv").write_text("txId,class\n1,3\n")
    else:
        (folder / "elliptic_txs_edgelist.csv").unlink()
    if damage == "missing":
        with pytest.raises(data.DatasetMissingError, match=r"elliptic_txs_edgelist\.csv\.zip: cannot be reached"):
            data.load("elliptic", root=tmp_path, source="official")
        return
    with pytest.raises(ValueError, match=rf"{folder}: the official files exist but cannot be read .*elliptic_txs_"):
        data.load("elliptic", root=tmp_path, source="official")


def write_ogb_nodes(folder, row, col, num_nodes, num_classes):
    (folder / "raw").mkdir(parents=True)
    (folder / "RELEASE_v1.txt").write_text("")
    tables = {
        "edge": np.stack([row, col], 1),
        "num-node-list": [[num_nodes]],
        "num-edge-list": [[row.size]],
        "node-feat": np.full((num_nodes, 2), 0.5),
        "node-label": np.arange(num_nodes)[:, None] % num_classes,
        "node_year": np.full((num_nodes, 1), 2020),
    }
    for name, rows in tables.items():
        options = {"compression": {"method": "gzip", "compresslevel": 1}, "header": False, "index": False}
        pd.DataFrame(rows).to_csv(folder / "raw" / f"{name}.csv.gz", **options)


def test_ogbn_arxiv_csv_and_its_direction(tmp_path, real):
    row, col, num_nodes = real("ogbn-arxiv")
    write_ogb_nodes(tmp_path / "ogbn_arxiv", row, col, num_nodes, num_classes=40)
    raw = assert_is_the_real_graph("ogbn-arxiv", tmp_path, (row, col, num_nodes))
    figures = measure(raw).figures
    shown = [round(figures[key], 2) for key in ("tcb_per_rw_mean", "tcb_per_rw_cv", "nnz_per_tcb_mean")]
    assert shown == [13.75, 0.50, 8.02]
    assert raw.ndata["label"][:3].tolist() == [0, 1, 2]


def test_ogbn_products_csv_holds_each_edge_once(tmp_path, real):
    row, col, num_nodes = real("cora")
    once = row < col
    write_ogb_nodes(tmp_path / "ogbn_products", row[once], col[once], num_nodes, num_classes=47)
    (tmp_path / "ogbn_products" / "raw" / "node_year.csv.gz").unlink()
    for _ in range(2):  # the second time from the kept graph
        loaded = data.load("ogbn-products", root=tmp_path, source="official")
        assert loaded.meta.sha256 == measure(RawGraph(row, col, num_nodes, "")).sha256
        assert (loaded.meta.features, loaded.meta.feature_dim, loaded.meta.num_classes) == ("original", 2, 47)
        assert loaded.graph.ndata["label"][:3].tolist() == [0, 1, 2]


def test_facebook_large_csv(tmp_path, real):
    row, col, num_nodes = real("facebook-large")
    (remote,) = data.info("facebook-large").official.files(tmp_path)
    remote.target.parent.mkdir()
    once = row >= col  # with self loops
    lines = [f"{i},{j}" for i, j in zip(row[once], col[once], strict=True)]
    remote.target.write_text("\n".join(["id_1,id_2", *lines, ""]))
    assert_is_the_real_graph("facebook-large", tmp_path, (row, col, num_nodes))


def test_epinions_text_keeps_ids_without_an_edge(tmp_path, real):
    row, col, num_nodes = real("soc-epinions1")
    assert np.unique([row, col]).size == 75_879 == num_nodes - 9
    (remote,) = data.info("soc-epinions1").official.files(tmp_path)
    with gzip.open(remote.target, "wt", compresslevel=1) as file:
        file.write("# Directed graph (each unordered pair of nodes is saved once): soc-Epinions1.txt \n")
        file.write("# Nodes: 75879 Edges: 508837\n# FromNodeId\tToNodeId\n")
        file.writelines(f"{i}\t{j}\n" for i, j in zip(row.tolist(), col.tolist(), strict=True))
    assert_is_the_real_graph("soc-epinions1", tmp_path, (row, col, num_nodes))


def test_twitter_text_numbers_nodes_by_the_rank_of_their_id(tmp_path, real):
    row, col, num_nodes = real("ego-twitter")
    rng = np.random.default_rng(0)
    ids = np.sort(rng.choice(10**9, num_nodes, replace=False))
    part = (row < 5000) & (col < 5000)
    row, col = row[part], col[part]
    once = np.flatnonzero(row <= col)
    lines = rng.permutation(np.concatenate([once, once[:500]]))  # in no order, some twice
    (remote,) = data.info("ego-twitter").official.files(tmp_path)
    with gzip.open(remote.target, "wt", compresslevel=1) as file:
        file.writelines(f"{i} {j}\n" for i, j in zip(ids[col[lines]].tolist(), ids[row[lines]].tolist(), strict=True))
    nodes = np.unique(row)
    row, col = (np.searchsorted(nodes, ends) for ends in (row, col))
    _, raw = find_graph("ego-twitter", root=tmp_path, source="official")
    assert measure(raw).sha256 == measure(RawGraph(row, col, nodes.size, "")).sha256


def test_facebook100_matlab_matrix(tmp_path, real):
    row, col, num_nodes = real("fb100-cornell5")
    (remote,) = data.info("fb100-cornell5").official.files(tmp_path)
    remote.target.parent.mkdir()
    matrix = scipy.sparse.csc_matrix((np.ones(row.size), (row, col)), shape=(num_nodes, num_nodes))
    scipy.io.savemat(remote.target, {"A": matrix, "local_info": np.ones((num_nodes, 7))})
    assert remote.target.read_bytes().startswith(MAGIC[".mat"])  # of a download
    assert_is_the_real_graph("fb100-cornell5", tmp_path, (row, col, num_nodes))
    scipy.io.savemat(remote.target, {"A": matrix[:9]})
    with pytest.raises(ValueError, match=r"Cornell5\.mat: the official files exist but cannot be read .*\(9, 18660\)"):
        data.load("fb100-cornell5", root=tmp_path, source="official")
    remote.target.write_bytes(remote.target.read_bytes()[:300])
    with pytest.raises(ValueError, match=r"Cornell5\.mat: the official files exist but cannot be read"):
        data.load("fb100-cornell5", root=tmp_path, source="official")


def test_snap_text_with_gaps_in_its_ids(tmp_path, real):
    row, col, num_nodes = real("cora")
    frame = pd.DataFrame({"from": 7 * row + 3, "to": 7 * col + 3})
    text = "# Undirected graph\n# FromNodeId\tToNodeId\n" + frame.to_csv(sep="\t", header=False, index=False)
    path = tmp_path / "com-amazon.ungraph.txt.gz"
    path.write_bytes(gzip.compress(text.encode()))
    _, raw = find_graph("com-amazon", root=tmp_path, source="official")
    assert measure(raw).sha256 == measure(RawGraph(row, col, num_nodes, "")).sha256
    assert raw.origin.startswith("https://snap.stanford.edu/")


def test_network_repository_matrix(tmp_path, real):
    row, col, num_nodes = real("cora")
    lower = row > col
    matrix = scipy.sparse.coo_array((np.ones(lower.sum()), (row[lower], col[lower])), shape=(num_nodes, num_nodes))
    scipy.io.mmwrite(tmp_path / "soc-BlogCatalog.mtx", matrix, field="pattern", symmetry="general")
    text = (tmp_path / "soc-BlogCatalog.mtx").read_text()
    (tmp_path / "soc-BlogCatalog.mtx").write_text(text.replace("general", "symmetric"))
    _, raw = find_graph("blog", root=tmp_path, source="official")
    assert measure(raw).sha256 == measure(RawGraph(row, col, num_nodes, "")).sha256


def write_graphsaint(folder, row, col, num_nodes, several_labels):
    folder.mkdir(parents=True)
    matrix = scipy.sparse.csr_matrix((np.ones(row.size, bool), (row, col)), shape=(num_nodes, num_nodes))
    scipy.sparse.save_npz(folder / "adj_full.npz", matrix)
    np.save(folder / "feats.npy", np.eye(num_nodes, 4))
    label_of = {str(node): [node % 2, 1] if several_labels else node % 7 for node in range(num_nodes)}
    (folder / "class_map.json").write_text(json.dumps(label_of))
    (folder / "role.json").write_text(json.dumps({"tr": [0], "va": [1], "te": [2]}))


@pytest.mark.parametrize("name", ["yelp", "flickr", "amazon-products"])
def test_graphsaint_files(tmp_path, real, name):
    row, col, num_nodes = real("cora")
    target = data.info(name).official.files(tmp_path)[0].target
    folder = target.parent if name == "amazon-products" else target
    write_graphsaint(folder, row, col, num_nodes, several_labels=name != "flickr")
    loaded = data.load(name, root=tmp_path, source="official")
    assert loaded.meta.sha256 == measure(find_graph(name, root=tmp_path, source="official")[1]).sha256
    assert (loaded.meta.num_nodes, loaded.meta.num_edges) == (num_nodes, row.size)
    assert loaded.graph.ndata["feat"].dtype == torch.float32
    if name != "amazon-products":
        assert {part: ids.tolist() for part, ids in loaded.splits.items()} == {"train": [0], "valid": [1], "test": [2]}
        assert loaded.metric == ("f1" if name == "yelp" else "accuracy")
        assert loaded.labels.shape == ((num_nodes, 2) if name == "yelp" else (num_nodes,))
    else:
        assert (loaded.labels, loaded.splits, loaded.metric) == (None, None, None)
        np.save(folder / "feats.npy", np.eye(3))
        with pytest.raises(ValueError, match=r"feats\.npy has 3 rows for 2708 nodes"):
            data.load(name, root=tmp_path, source="official")
        with np.load(folder / "adj_full.npz") as archive:
            arrays = dict(archive)
        np.savez(folder / "adj_full.npz", **arrays | {"indices": arrays["indices"] + num_nodes})
        with pytest.raises(ValueError, match=r"adj_full\.npz: edge 0 has the column .* allowed are 0 to 2707"):
            data.load(name, root=tmp_path, source="official")


def test_reddit_with_self_loops(tmp_path, real):
    row, col, num_nodes = real("cora")
    (remote,) = data.info("reddit").official.files(tmp_path)
    remote.target.mkdir()
    nodes = np.arange(num_nodes)
    row, col = np.concatenate([row, nodes]), np.concatenate([col, nodes])
    matrix = scipy.sparse.coo_matrix((np.ones(row.size), (row, col)), shape=(num_nodes, num_nodes))
    scipy.sparse.save_npz(remote.target / "reddit_self_loop_graph.npz", matrix)
    types = np.array([1, 2, 3])[nodes % 3]
    arrays = {"feature": np.eye(num_nodes, 4), "label": nodes % 41, "node_types": types}
    np.savez(remote.target / "reddit_data.npz", **arrays)
    _, raw = find_graph("reddit", root=tmp_path, source="official")
    assert (raw.num_nodes, raw.row.size, (raw.row == raw.col).sum()) == (num_nodes, row.size, num_nodes)
    # DGL renumbers the nodes: the graph is the same up to their order
    assert [(raw.ndata["feat"][ids, 3] > 0).sum() for ids in raw.splits.values()] == [1, 0, 0]  # node 3 has type 1
    assert [ids.size for ids in raw.splits.values()] == [903, 903, 902]
    degrees = [np.sort(np.bincount(ids)) for ids in (row, raw.row)]
    assert np.array_equal(*degrees)


def test_questions_npz(tmp_path, real):
    row, col, num_nodes = real("cora")
    (remote,) = data.info("questions").official.files(tmp_path)
    remote.target.parent.mkdir()
    arrays = {"edges": np.stack([row, col], 1)[row < col], "node_features": np.eye(num_nodes, 4, dtype=np.float32)}
    for first, part in enumerate(("train", "val", "test")):  # ten splits, of which the first is taken
        arrays[f"{part}_masks"] = np.eye(10, num_nodes, 7 * first, dtype=bool)
    np.savez(remote.target, node_labels=np.arange(num_nodes) % 2, **arrays)
    _, raw = find_graph("questions", root=tmp_path, source="official")
    assert {part: ids.tolist() for part, ids in raw.splits.items()} == {"train": [0], "valid": [7], "test": [14]}
    assert measure(raw).sha256 == measure(RawGraph(row, col, num_nodes, "")).sha256


def write_igb(root, row, col, num_nodes, size="small"):
    folder = root / size / "processed"
    for part in ("paper", "paper__cites__paper"):
        (folder / part).mkdir(parents=True)
    np.save(folder / "paper__cites__paper" / "edge_index.npy", np.stack([row, col], 1))
    np.save(folder / "paper" / "node_feat.npy", np.ones((num_nodes, 8), np.float32))
    np.save(folder / "paper" / "node_label_19.npy", np.arange(num_nodes) % 19.0)
    return folder


def test_igb_arrays_are_mapped(tmp_path, real):
    row, col, num_nodes = real("cora")
    folder = write_igb(tmp_path, row, col, num_nodes)
    _, raw = find_graph("igb-small", root=tmp_path, source="official")
    assert measure(raw).sha256 == measure(RawGraph(row, col, num_nodes, "")).sha256
    assert isinstance(raw.ndata["feat"], np.memmap)
    assert data.load("igb-small", root=tmp_path, source="official").graph.ndata["feat"].shape == (num_nodes, 8)
    np.save(folder / "paper__cites__paper" / "edge_index.npy", np.array([[0, num_nodes]]))
    with pytest.raises(ValueError, match=r"edge_index holds ids outside 0 \.\. 2707"):
        data.load("igb-small", root=tmp_path, source="official")
    np.save(folder / "paper" / "node_feat.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match="cannot be read"):
        data.load("igb-small", root=tmp_path, source="official")


def test_igb_large_has_bare_arrays(tmp_path):
    folder = write_igb(tmp_path, np.arange(9), np.arange(1, 10), 10, "large") / "paper"
    labels = np.array([0, 18, np.nan, 3, 4, 5, 6, 7, 8, 9], np.float32)
    feat = np.random.default_rng(0).random((10, 1024), np.float32)
    labels.tofile(folder / "node_label_19.npy")  # as np.memmap writes them
    feat.tofile(folder / "node_feat.npy")
    loaded = data.load("igb-large", root=tmp_path, source="official")
    assert np.array_equal(loaded.graph.ndata["feat"].numpy(), feat)
    assert loaded.labels.tolist() == [0, 18, -1, 3, 4, 5, 6, 7, 8, 9]
    splits = {part: ids.tolist() for part, ids in loaded.splits.items()}
    assert splits == {"train": list(range(6)), "valid": [6, 7], "test": [8, 9]}
    assert loaded.metric == "accuracy"
    with (folder / "node_feat.npy").open("ab") as file:
        file.write(b"more")
    with pytest.raises(ValueError, match=r"node_feat\.npy has neither npy's header nor float32 numbers for 10 nodes"):
        data.load("igb-large", root=tmp_path, source="official")


def test_igb_large_names_the_publishers_script(tmp_path):
    with pytest.raises(
        data.DatasetMissingError, match=r"large: no such folder, and the data set is published through a script only"
    ):
        data.load("igb-large", root=tmp_path, source="official")


def test_a_graph_that_does_not_fit_is_refused(tmp_path, monkeypatch):
    write_igb(tmp_path, np.zeros(50, int), np.ones(50, int), 3)
    monkeypatch.setattr("data.memory.available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match=r"IGB-small: its edges: about 0\.0 GiB needed"):
        data.load("igb-small", root=tmp_path, source="official")


@pytest.mark.parametrize("name", ["flickr", "questions", "ogbn-arxiv", "amazon-products"])
def test_official_graphs_that_do_not_fit_are_refused_before_they_are_converted(tmp_path, monkeypatch, name):
    row, col = np.arange(50) % 7, np.arange(50) % 11
    (remote, *_) = data.info(name).official.files(tmp_path)
    if name == "questions":
        remote.target.parent.mkdir()
        np.savez(remote.target, edges=np.stack([row, col], 1))
    elif name == "ogbn-arxiv":
        write_ogb_nodes(remote.target, row, col, 11, 40)
    else:
        write_graphsaint(remote.target if name == "flickr" else remote.target.parent, row, col, 11, False)
    monkeypatch.setattr("data.memory.available_bytes", lambda: 1000)
    with pytest.raises(MemoryError, match=r"about 0\.0 GiB needed, 0\.0 GiB available") as caught:
        data.load(name, root=tmp_path, source="official")
    assert name in str(caught.value) or str(tmp_path) in str(caught.value)
    assert not list(tmp_path.rglob("converted-*"))


def test_papers100m_arrays_are_mapped(tmp_path, real):
    row, col, num_nodes = real("cora")
    folder = tmp_path / "ogbn_papers100M"
    (folder / "raw").mkdir(parents=True)
    (folder / "RELEASE_v1.txt").write_text("")
    arrays = {"edge_index": np.stack([row, col]), "node_feat": np.eye(num_nodes, 4, dtype=np.float32)}
    np.savez(folder / "raw" / "data.npz", num_nodes_list=[num_nodes], num_edges_list=[row.size], **arrays)
    _, raw = find_graph("ogbn-papers100m", root=tmp_path, source="official")
    assert measure(raw).sha256 == measure(RawGraph(row, col, num_nodes, "")).sha256
    assert isinstance(raw.ndata["feat"], np.memmap)
    assert np.array_equal(raw.ndata["feat"], arrays["node_feat"])
    np.savez(folder / "raw" / "data.npz", **arrays | {"node_feat": np.eye(9, 4, dtype=np.float32)})
    with pytest.raises(ValueError, match=r"edge_index holds ids outside 0 \.\. 8"):
        find_graph("ogbn-papers100m", root=tmp_path, source="official")


def test_papers100m_compressed_as_ogb_writes_it(tmp_path, monkeypatch):
    folder = tmp_path / "ogbn_papers100M"
    for made in ("raw", "split/time"):
        (folder / made).mkdir(parents=True)
    (folder / "RELEASE_v1.txt").write_text("")
    feat = np.random.default_rng(0).random((5, 4), np.float32)
    arrays = {"edge_index": np.array([[0, 2, 4], [1, 1, 3]]), "node_feat": feat, "node_year": np.full((5, 1), 2010)}
    np.savez_compressed(folder / "raw" / "data.npz", num_nodes_list=[5], num_edges_list=[3], **arrays)
    labels = np.array([[np.nan], [171], [np.nan], [0], [7]], np.float32)
    np.savez_compressed(folder / "raw" / "node-label.npz", node_label=labels)
    for part, rows in {"train": [3], "valid": [1], "test": [4]}.items():
        pd.DataFrame(rows).to_csv(folder / "split" / "time" / f"{part}.csv.gz", header=False, index=False)
    for _ in range(2):
        loaded = data.load("ogbn-papers100m", root=tmp_path, source="official")
        assert np.array_equal(loaded.graph.ndata["feat"].numpy(), feat)
        assert loaded.labels.tolist() == [-1, 171, -1, 0, 7]
        assert {part: ids.tolist() for part, ids in loaded.splits.items()} == {"train": [3], "valid": [1], "test": [4]}
        keys, queries = loaded.graph.edges()
        assert (queries.tolist(), keys.tolist()) == ([0, 2, 4], [1, 1, 3])
        monkeypatch.setattr("data.sources.papers100m._unpack", None)  # not needed again
    assert sorted(path.name for path in (folder / "raw").iterdir()) == [
        "data.npz",
        "edge_index.npy",
        "node-label.npz",
        "node_feat.npy",
    ]


def test_papers100m_is_unpacked_once_by_several_processes(tmp_path, monkeypatch, caplog):
    np.savez_compressed(tmp_path / "data.npz", node_feat=np.eye(300))
    copy, copied = shutil.copyfileobj, []

    def slow(*arguments):
        copied.append(arguments)
        time.sleep(0.5)
        copy(*arguments)

    monkeypatch.setattr("data.sources.papers100m.shutil.copyfileobj", slow)
    with caplog.at_level(logging.INFO, logger="data"), ThreadPoolExecutor() as pool:
        arrays = list(pool.map(map_npz_array, [tmp_path / "data.npz"] * 3, ["node_feat"] * 3))
    assert len(copied) == 1
    assert all(np.array_equal(array, np.eye(300)) for array in arrays)
    assert caplog.text.count(f"another process is unpacking {tmp_path / 'node_feat.npy'}; waiting for it") == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data.npz", "node_feat.npy"]


def test_papers100m_without_room_on_the_disk(tmp_path, monkeypatch):
    folder = tmp_path / "ogbn_papers100M"
    (folder / "raw").mkdir(parents=True)
    (folder / "RELEASE_v1.txt").write_text("")
    np.savez_compressed(folder / "raw" / "data.npz", edge_index=np.zeros((2, 9), int), node_feat=np.eye(4))
    usage = namedtuple("usage", "free")
    monkeypatch.setattr("data.sources.papers100m.shutil.disk_usage", lambda path: usage(100))
    with pytest.raises(MemoryError, match=r"edge_index\.npy: 0\.0 GiB needed, 0\.0 GiB free on the disk"):
        data.load("ogbn-papers100m", root=tmp_path, source="official")
    assert [path.name for path in (folder / "raw").iterdir()] == ["data.npz"]


def write_ogb_graphs(folder, node_counts, edges, counts, features=None):
    (folder / "raw").mkdir(parents=True)
    (folder / "RELEASE_v1.txt").write_text("")
    tables = {
        "edge": edges,
        "num-node-list": node_counts[:, None],
        "num-edge-list": counts[:, None],
        "graph-label": np.zeros((node_counts.size, 1), int),
    }
    if features is not None:
        tables["node-feat"] = features
    for name, rows in tables.items():
        pd.DataFrame(rows).to_csv(folder / "raw" / f"{name}.csv.gz", header=False, index=False)


def test_ogbg_molhiv_csv(tmp_path, molecules):
    node_counts, edge_counts, u, v = molecules("ogbg-molhiv")
    features = np.zeros((node_counts.sum(), 9), int)
    write_ogb_graphs(tmp_path / "ogbg_molhiv", node_counts, np.stack([u, v], 1), edge_counts, features)
    _, raw = find_graph("ogbg-molhiv", root=tmp_path, source="official", batch_size=MOLECULES)
    figures = measure(raw).figures
    entry = data.info("ogbg-molhiv")
    assert (figures["nodes"], figures["nnz"]) == (entry.num_nodes, entry.nnz)
    assert measure(raw).bsb.num_tcbs == entry.published.num_tcbs
    assert raw.graph_sizes.tolist() == node_counts[:MOLECULES].tolist()


def test_ogbg_ppa_csv_without_node_features(tmp_path):
    folder = tmp_path / "ogbg_ppa"
    edges = np.array([[0, 1], [0, 2], [1, 2], [0, 1]])  # each once; ogb adds the other direction
    write_ogb_graphs(folder, np.array([3, 4]), edges, np.array([3, 1]))
    pd.DataFrame(np.ones((4, 7))).to_csv(folder / "raw" / "edge-feat.csv.gz", header=False, index=False)
    for _ in range(2):
        loaded = data.load("ogbg-ppa", root=tmp_path, source="official", batch_size=2)
        assert (loaded.meta.features, loaded.meta.feature_kind, loaded.meta.feature_dim) == ("random", "float", 128)
        assert (loaded.meta.num_nodes, loaded.meta.num_edges, loaded.meta.task) == (7, 8, "graph")
        assert loaded.graph.ndata["feat"].shape == (7, 128)
        assert loaded.graph.batch_num_edges().tolist() == [6, 2]
        assert not loaded.graph.edata


def test_ogbg_molpcba_csv_with_unknown_labels(tmp_path, molecules):
    node_counts, edge_counts, u, v = molecules("ogbg-molhiv")
    node_counts, edge_counts = node_counts[:40], edge_counts[:40]
    u, v = u[: edge_counts.sum()], v[: edge_counts.sum()]
    folder = tmp_path / "ogbg_molpcba"
    write_ogb_graphs(folder, node_counts, np.stack([u, v], 1), edge_counts, np.ones((node_counts.sum(), 9), int))
    labels = np.full((40, 128), np.nan)  # most of the 128 assays of a molecule were not made
    labels[:, ::7] = 1.0
    pd.DataFrame(labels).to_csv(folder / "raw" / "graph-label.csv.gz", header=False, index=False)
    loaded = data.load("ogbg-molpcba", root=tmp_path, source="official", batch_size=32)
    assert (loaded.meta.num_graphs, loaded.meta.num_classes, loaded.meta.features) == (32, 128, "original")
    assert loaded.graph.batch_num_nodes().tolist() == node_counts[:32].tolist()
    assert loaded.meta.num_edges == 2 * edge_counts[:32].sum()
    assert loaded.labels.shape == (32, 128)
    assert loaded.labels[:, ::7].eq(1).all()
    assert loaded.labels.isnan().sum() == 32 * (128 - 19)
    assert (loaded.metric, loaded.splits) == ("ap", None)


def test_ogbg_code2_a_parent_attends_to_its_children(tmp_path):
    folder = tmp_path / "ogbg_code2"
    edges = np.array([[0, 1], [0, 2], [2, 3], [0, 1]])  # parent, child: two trees
    write_ogb_graphs(folder, np.array([4, 2]), edges, np.array([3, 1]), np.zeros((6, 2), int))
    for name in ("edge_is_dfs", "node_is_attributed", "node_dfs_order", "node_depth"):
        size = 4 if name.startswith("edge") else 6
        pd.DataFrame(np.zeros((size, 1), int)).to_csv(folder / "raw" / f"{name}.csv.gz", header=False, index=False)
    pd.DataFrame(["get name", "run"]).to_csv(folder / "raw" / "graph-label.csv.gz", header=False, index=False)
    for _ in range(2):  # the second time from the kept graphs
        _, raw = find_graph("ogbg-code2", root=tmp_path, source="official", batch_size=2)
        pairs = list(zip(raw.row.tolist(), raw.col.tolist(), strict=True))
        assert pairs == [(0, 1), (0, 2), (2, 3), (4, 5)]


STRUCTURE = ["Inertia_mass_a", "Inertia_mass_b", "Inertia_mass_c", "Inertia_valence_a", "Inertia_valence_b"]
STRUCTURE += ["Inertia_valence_c", "length_a", "length_b", "length_c", "Spherocity", "Plane_best_fit"]


@pytest.mark.parametrize("name", ["peptides-func", "peptides-struct"])
def test_peptides_tables(tmp_path, chains_of_carbon, name):
    lengths = np.arange(3, 43)
    rng = np.random.default_rng(0)
    table, split = data.info(name).official.files(tmp_path)
    table.target.parent.mkdir()
    rows = pd.DataFrame({"Unnamed": lengths, "smiles": ["C" * length for length in lengths]})
    if name == "peptides-func":
        labels = rng.integers(0, 2, (40, 10))
        rows["labels"] = [str(row) for row in labels.tolist()]
    else:
        rows[STRUCTURE] = rng.normal(5, 3, (40, 11))
        values = rows[STRUCTURE].to_numpy()
        labels = (values - values.mean(0)) / values.std(0, ddof=1)
    rows.sample(frac=1, axis=1, random_state=0).to_csv(table.target, index=False)  # columns are found by name
    parts = {"train": rng.permutation(30), "val": np.arange(30, 36), "test": np.arange(36, 40)}
    split.target.write_bytes(pickle.dumps(parts))
    loaded = data.load(name, root=tmp_path, source="official", batch_size=20)
    assert loaded.graph.batch_num_nodes().tolist() == lengths[parts["train"][:20]].tolist()
    assert loaded.meta.num_edges == 2 * (lengths[parts["train"][:20]] - 1).sum()
    assert loaded.labels.numpy() == pytest.approx(labels[parts["train"][:20]], rel=1e-6)
    assert {part: ids.tolist() for part, ids in loaded.splits.items()} == {
        "train": list(range(20)),
        "valid": [],
        "test": [],
    }
    whole = data.load(name, root=tmp_path, source="official", batch_size=None)
    assert whole.graph.batch_num_nodes().tolist() == lengths.tolist()
    assert [whole.splits[part].tolist() for part in ("train", "valid", "test")] == [
        ids.tolist() for ids in parts.values()
    ]
    assert whole.metric == ("ap" if name == "peptides-func" else "mae")


def test_peptides_without_rdkit(tmp_path, monkeypatch):
    monkeypatch.setattr("data.sources.molecules.has_rdkit", lambda: False)
    monkeypatch.setattr("data.sources.peptides.has_rdkit", lambda: False)
    with pytest.raises(data.DatasetMissingError, match=r"needs RDKit, which is not installed \(pip install rdkit\)"):
        data.load("peptides-func", root=tmp_path, source="official")  # nothing is downloaded
    assert data.load("peptides-func", root=tmp_path, batch_size=2).meta.source == "synthetic"
    table, split = data.info("peptides-func").official.files(tmp_path)
    table.target.parent.mkdir()
    pd.DataFrame({"smiles": ["CC"], "labels": ["[1]"]}).to_csv(table.target)
    split.target.write_bytes(pickle.dumps({"train": np.array([0])}))
    with pytest.raises(ValueError, match=r"peptide_multi_class_dataset\.csv\.gz: .*needs RDKit"):
        data.load("peptides-func", root=tmp_path)


def test_zinc_as_dgl_publishes_it(tmp_path, molecules):
    node_counts, edge_counts, u, v = molecules("zinc12k-val-test")
    (remote,) = data.info("zinc").official.files(tmp_path)
    graphs = dgl_graphs(node_counts, edge_counts, u, v, lambda n: torch.zeros(n, dtype=torch.int64))
    remote.target.mkdir()
    labels = {"g_label": torch.zeros(len(graphs))}
    import_dgl().save_graphs(str(remote.target / "ZincDGL_train.bin"), graphs, labels)
    loaded = data.load("zinc", root=tmp_path, source="official", batch_size=MOLECULES)
    assert (loaded.meta.num_nodes, loaded.meta.num_edges) == (23_614, 50_830)
    assert loaded.graph.ndata["feat"].shape == (23_614, 1)
    (remote.target / "ZincDGL_train.bin").unlink()
    with pytest.raises(ValueError, match=r"zinc_\w+: the official files exist but cannot be read"):
        data.load("zinc", root=tmp_path, source="official")


def test_zinc_val_and_test_one_after_the_other(tmp_path, molecules):
    node_counts, edge_counts, u, v = molecules("zinc12k-val-test")
    (remote,) = data.info("zinc12k-val-test").official.files(tmp_path)
    remote.target.mkdir()
    graphs = dgl_graphs(node_counts, edge_counts, u, v, lambda n: torch.zeros(n, dtype=torch.int64))
    for mode, part in {"valid": graphs[:1000], "test": graphs[1000:]}.items():
        labels = {"g_label": torch.zeros(len(part))}
        import_dgl().save_graphs(str(remote.target / f"ZincDGL_{mode}.bin"), part, labels)
    own = tmp_path / "own" / "zinc12k-val-test.npz"
    own.parent.mkdir()
    np.savez(own, node_counts=node_counts, edge_counts=edge_counts, u=u, v=v)
    for batch_size in (1000, 1024):  # the whole of val; and beyond
        official = data.load("zinc12k-val-test", root=tmp_path, source="official", batch_size=batch_size)
        from_file = data.load("zinc12k-val-test", root=own.parent, batch_size=batch_size)
        assert from_file.meta.source == "file"
        assert official.meta.sha256 == from_file.meta.sha256
    assert (official.meta.num_nodes, official.meta.num_edges) == (23_614, 50_830)
    only = data.load("zinc12k-val-test", root=tmp_path, source="official", batch_size=100, split="test")
    assert only.graph.batch_num_nodes().tolist() == node_counts[1000:].tolist()
    with pytest.raises(ValueError, match=r"batch_size: got 1101; .*, val and test has 1100 graphs"):
        data.load("zinc12k-val-test", root=tmp_path, source="official", batch_size=1101)


@pytest.mark.parametrize("name", ["pascalvoc-sp", "coco-sp"])
def test_superpixels_as_lrgb_publishes_them(tmp_path, molecules, name):
    node_counts, edge_counts, u, v = molecules("superpixel-bsds500")
    (remote,) = data.info(name).official.files(tmp_path)
    graphs = []
    for graph in dgl_graphs(node_counts[:4], edge_counts[:4], u, v, lambda n: torch.ones(n, 14)):
        pairs = torch.stack(graph.edges())
        labels = [1] * graph.num_nodes()
        graphs.append((graph.ndata["feat"], torch.ones(pairs.shape[1], 2), pairs, labels))
    remote.target.mkdir(parents=True)
    (remote.target / "train.pickle").write_bytes(pickle.dumps(graphs))
    loaded = data.load(name, root=tmp_path, source="official", batch_size=3)
    assert (loaded.meta.task, loaded.meta.num_graphs) == ("node", 3)
    assert loaded.graph.batch_num_nodes().tolist() == node_counts[:3].tolist()
    assert loaded.graph.ndata["feat"].shape == (node_counts[:3].sum(), 14)
    assert loaded.graph.num_edges() == 2 * edge_counts[:3].sum()
