"""Data sets as partitions, against the graph that `data.load` gives: also those whose files are only mapped."""

import numpy as np
import pytest
import torch

import data
from parallel import load_part, partition_graph
from parallel.datasets import dataset_source, loaded_part, meta_of
from parallel.errors import CollectionError

NODES, EDGES = 40, 150


@pytest.fixture
def edges():
    """Directed, some repeated."""
    return np.random.default_rng(0).integers(0, NODES, (2, EDGES))


def features(columns):
    return np.random.default_rng(1).standard_normal((NODES, columns)).astype(np.float32)


def write_papers100m(root, edges):
    folder = root / "ogbn_papers100M"
    for made in ("raw", "split/time"):
        (folder / made).mkdir(parents=True)
    (folder / "RELEASE_v1.txt").write_text("")
    labels = np.where(np.arange(NODES) % 3, np.nan, np.arange(NODES) % 172)
    np.savez(folder / "raw" / "data.npz", edge_index=edges, node_feat=features(128))
    np.savez(folder / "raw" / "node-label.npz", node_label=labels[:, None])
    for part, ids in zip(("train", "valid", "test"), np.split(np.arange(0, NODES, 3), [5, 9]), strict=True):
        np.savetxt(folder / "split" / "time" / f"{part}.csv.gz", ids, fmt="%d")


def write_igb_large(root, edges):
    folder = root / "large" / "processed"
    for part in ("paper", "paper__cites__paper"):
        (folder / part).mkdir(parents=True)
    np.save(folder / "paper__cites__paper" / "edge_index.npy", edges.T)
    features(1024).tofile(folder / "paper" / "node_feat.npy")
    (np.arange(NODES) % 19).astype(np.float32).tofile(folder / "paper" / "node_label_19.npy")


def write_own(root, edges):
    np.savez(
        root / "mine.npz", src_li=edges[0], dst_li=edges[1], num_nodes=NODES, feat=features(5), label=np.arange(NODES)
    )


WRITERS = {"ogbn-papers100m": write_papers100m, "igb-large": write_igb_large, "mine": write_own}


@pytest.mark.parametrize("name", WRITERS)
def test_parts_are_the_graph_that_load_gives(tmp_path, monkeypatch, edges, name):
    WRITERS[name](tmp_path, edges)
    chosen = {"root": str(tmp_path), "source": "auto", "path": None}
    loaded = data.load(name, **chosen)
    if name != "mine":  # nothing but the mapped files is read
        monkeypatch.setattr(data, "load", lambda *_, **__: pytest.fail("the graph was loaded"))
    partition_graph(dataset_source(name, **chosen, seed=0), tmp_path / "parts", 3, "contiguous", edges_per_block=20)
    parts = [load_part(tmp_path / "parts", rank=rank) for rank in range(3)]
    indptr, col, _ = (tensor.numpy() for tensor in loaded.graph.adj_tensors("csc"))
    expected = np.zeros((NODES, NODES), bool)
    expected[np.repeat(np.arange(NODES), np.diff(indptr)), col] = True
    in_order = np.concatenate([part.rows for part in parts])
    for part in parts:
        columns = in_order[np.r_[part.partition.offsets[part.rank] + np.arange(part.num_rows), part.halo]]
        for row, first, last in zip(part.rows, part.indptr, part.indptr[1:], strict=False):
            assert sorted(columns[part.indices[first:last]]) == np.flatnonzero(expected[row]).tolist()
        of_part = loaded_part(part)
        assert np.array_equal(part.node_data["feat"], loaded.graph.ndata["feat"].numpy()[part.rows])
        assert torch.equal(of_part.labels, loaded.labels[torch.from_numpy(part.rows.copy())])
        for split, ids in (loaded.splits or {}).items():
            assert set(part.rows[of_part.splits[split].numpy()]) == set(ids.tolist()) & set(part.rows.tolist())
    meta = meta_of(parts[0].partition)
    for key in ("num_nodes", "num_edges", "feature_dim", "feature_kind", "num_classes", "task", "source"):
        assert getattr(meta, key) == getattr(loaded.meta, key), key
    assert of_part.metric == loaded.metric


def test_parts_keep_the_ids_of_an_edge_list(tmp_path):
    (tmp_path / "mine.csv").write_text("30,7\n7,500\n12,30\n500,30\n")
    source = dataset_source("mine", root="", source="file", path=str(tmp_path / "mine.csv"), seed=0)
    partition_graph(source, tmp_path / "parts", 2, "contiguous")
    for part in (load_part(tmp_path / "parts", rank=rank) for rank in range(2)):
        assert loaded_part(part).node_data["id"].tolist() == np.array([7, 12, 30, 500])[part.rows].tolist()


def test_collections_have_no_partition(tmp_path, monkeypatch):
    with pytest.raises(CollectionError, match="ogbg-molhiv: is a collection of graphs; a partition is of one graph"):
        dataset_source("ogbg-molhiv", root=str(tmp_path), source="auto", path=None, seed=0)
    counts = {"node_counts": [2, 3], "edge_counts": [1, 2], "u": [0, 0, 1], "v": [1, 1, 2]}
    np.savez(tmp_path / "mine.npz", **{key: np.array(values) for key, values in counts.items()})
    with pytest.raises(CollectionError, match="mine: is a collection"):
        dataset_source("mine", root=str(tmp_path), source="file", path=None, seed=0)
