"""The real loader classes of dgl.data and ogb on tiny files in the publishers' layouts."""

import builtins
import shutil
import sys

import numpy as np
import pandas as pd
import pytest
import torch

import data
from data.sources.base import from_dgl
from data.sources.ogb_import import import_ogb
from fused3s_dgl import import_dgl

CORA = "cora_v2_d697a464"  # DGL appends the first digits of its URL's SHA-1
N = 600  # DGL takes 500 nodes for validation
RING = np.r_[np.arange(N), (np.arange(N) + 1) % N], np.r_[(np.arange(N) + 1) % N, np.arange(N)]


@pytest.fixture(autouse=True)
def no_questions(monkeypatch):
    def asked(*_):
        raise AssertionError("a loader asked at the terminal")

    monkeypatch.setattr(builtins, "input", asked)
    monkeypatch.delenv("DGL_REPO", raising=False)


@pytest.mark.parametrize("source", ["official", "auto"])
def test_cora_from_planetoid_files(tmp_path, write_planetoid, capsys, caplog, source):
    write_planetoid(tmp_path / CORA, *RING, N)
    loaded = data.load("cora", root=tmp_path, source=source)
    assert loaded.meta.source == "official"
    assert loaded.meta.origin == "https://data.dgl.ai/dataset/cora_v2.zip"
    assert (loaded.meta.num_nodes, loaded.meta.num_edges, loaded.meta.num_classes) == (N, 2 * N, 7)
    assert (loaded.meta.features, loaded.meta.feature_dim) == ("original", 12)
    assert loaded.graph.ndata["feat"].dtype == torch.float32
    assert loaded.graph.ndata["label"].tolist() == (np.arange(N) % 7).tolist()
    again = data.load("cora", root=tmp_path, source=source)  # now from DGL's own cache
    assert again.meta == loaded.meta
    assert capsys.readouterr().out == ""
    warnings = {record.getMessage() for record in caplog.records}
    size = "600 nodes, and 2,708 are published: another version, or incomplete"
    assert warnings == {f"cora: https://data.dgl.ai/dataset/cora_v2.zip holds {size}"}


def test_real_cora_is_the_same_graph_from_file_and_through_dgl(tmp_path, write_planetoid, real_graph_dir, caplog):
    path = real_graph_dir / "single" / "cora.npz"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    with np.load(path) as archive:
        write_planetoid(tmp_path / CORA, archive["src_li"], archive["dst_li"], int(archive["num_nodes"]))
    official = data.load("cora", root=tmp_path, source="official")
    assert official.meta.sha256 == data.load("cora", path=path).meta.sha256
    assert not caplog.records  # the size is the published one


def test_damaged_planetoid_file_is_an_error_even_for_auto(tmp_path, write_planetoid):
    write_planetoid(tmp_path / CORA, *RING, N)
    file = tmp_path / CORA / "ind.cora_v2.graph"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"{CORA}: the official files exist but cannot be read .*Move"):
        data.load("cora", root=tmp_path)
    assert file.exists()


def test_missing_planetoid_file_is_named(tmp_path, write_planetoid):
    write_planetoid(tmp_path / CORA, *RING, N)
    (tmp_path / CORA / "ind.cora_v2.tx").unlink()
    with pytest.raises(ValueError, match=r"ind\.cora_v2\.tx"):
        data.load("cora", root=tmp_path, source="official")


@pytest.mark.parametrize("folder", ["ogbg_molhiv", "ogbg_molhiv_dgl"])
def test_molecules_from_ogb_files(tmp_path, write_molhiv, capsys, folder):
    write_molhiv(tmp_path / folder)
    loaded = data.load("ogbg-molhiv", root=tmp_path, source="official", batch_size=2)
    assert loaded.graph.batch_num_nodes().tolist() == [3, 2]
    assert loaded.graph.batch_num_edges().tolist() == [4, 2]
    assert loaded.graph.ndata["feat"].dtype == torch.int64
    assert loaded.graph.ndata["feat"][:, 0].tolist() == [5, 5, 7, 5, 6]
    meta = loaded.meta
    assert (meta.source, meta.task, meta.num_graphs, meta.features) == ("official", "graph", 2, "original")
    assert (meta.feature_kind, meta.feature_dim, len(meta.feature_cardinalities)) == ("categorical", 9, 9)
    assert meta.origin.endswith("hiv.zip")
    again = data.load("ogbg-molhiv", root=tmp_path, source="official", batch_size=2)  # from ogb's processed file
    assert again.meta == meta
    assert capsys.readouterr().out == ""


def test_the_reader_of_csv_files_agrees_with_ogb(tmp_path, write_molhiv):
    write_molhiv(tmp_path / "ogbg_molhiv")
    loaded = data.load("ogbg-molhiv", root=tmp_path, source="official", batch_size=None, edge_features=True)
    graphprop = import_ogb("graphproppred")
    theirs = graphprop.DglGraphPropPredDataset(name="ogbg-molhiv", root=str(tmp_path))
    whole = import_dgl().batch(theirs.graphs)
    assert loaded.graph.batch_num_nodes().tolist() == whole.batch_num_nodes().tolist()
    assert torch.equal(loaded.graph.ndata["feat"], whole.ndata["feat"])
    edges = []
    for graph in (loaded.graph, whole):
        ends = (ids.tolist() for ids in graph.edges(order="eid"))
        edges.append(sorted(zip(*ends, graph.edata["feat"].tolist(), strict=True)))
    assert edges[0] == edges[1]
    assert loaded.labels.tolist() == theirs.labels.float().tolist()
    assert {part: ids.tolist() for part, ids in loaded.splits.items()} == {
        part: ids.tolist() for part, ids in theirs.get_idx_split().items()
    }


def test_batch_larger_than_the_data_set(tmp_path, write_molhiv):
    write_molhiv(tmp_path / "ogbg_molhiv")
    with pytest.raises(ValueError, match=r"batch_size: got 4; .*ogbg_molhiv has 3 graphs"):
        data.load("ogbg-molhiv", root=tmp_path, source="official", batch_size=4)


@pytest.mark.parametrize("part", ["RELEASE_v1.txt", "raw", "raw/node-feat.csv.gz"])
def test_incomplete_ogb_folder_asks_and_deletes_nothing(tmp_path, write_molhiv, part):
    folder = tmp_path / "ogbg_molhiv"
    write_molhiv(folder)
    victim = folder / part
    shutil.rmtree(victim) if victim.is_dir() else victim.unlink()
    with pytest.raises(ValueError, match=r"ogbg_molhiv: incomplete, or of another version; RELEASE_v1\.txt, raw"):
        data.load("ogbg-molhiv", root=tmp_path)
    assert folder.is_dir()


@pytest.mark.parametrize("file", ["raw/edge.csv.gz", "raw/node-feat.csv.gz", "split/scaffold/test.csv.gz"])
def test_truncated_ogb_file(tmp_path, write_molhiv, file):
    write_molhiv(tmp_path / "ogbg_molhiv")
    path = tmp_path / "ogbg_molhiv" / file
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(ValueError, match=r"ogbg_molhiv: the official files exist but cannot be read"):
        data.load("ogbg-molhiv", root=tmp_path, source="official", batch_size=1)


def write_arxiv(folder):
    """Four papers as ogb publishes them."""
    tables = {
        "raw/edge": [(0, 1), (2, 1)],
        "raw/num-node-list": [4],
        "raw/num-edge-list": [2],
        "raw/node-feat": np.eye(4) / 2,
        "raw/node-label": [3, 0, 39, 1],
        "raw/node_year": [2010] * 4,
        "split/time/train": [2, 0],
        "split/time/valid": [3],
        "split/time/test": [1],
    }
    for name, rows in tables.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(rows).to_csv(folder / f"{name}.csv.gz", header=False, index=False)
    (folder / "RELEASE_v1.txt").write_text("")


def test_an_interrupted_first_load_leaves_no_half_file(tmp_path, monkeypatch):
    """DGL reads a graph that it wrote itself without a check, and half of one ends the process."""
    import_dgl()
    from dgl.data import heterograph_serialize

    write_arxiv(tmp_path / "ogbn_arxiv")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def killed(filename, *_):
        with open(filename, "wb") as file:
            file.write(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(heterograph_serialize, "_CAPI_SaveHeteroGraphData", killed)
        with pytest.raises(KeyboardInterrupt):
            data.load("ogbn-arxiv", root=tmp_path, source="official")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    loaded = data.load("ogbn-arxiv", root=tmp_path, source="official")
    assert (loaded.metric, loaded.labels.tolist()) == ("accuracy", [3, 0, 39, 1])
    assert {part: ids.tolist() for part, ids in loaded.splits.items()} == {"train": [2, 0], "valid": [3], "test": [1]}


def test_collections_of_ogb_need_no_ogb(tmp_path, monkeypatch, write_molhiv):
    monkeypatch.setitem(sys.modules, "ogb.graphproppred", None)
    assert data.load("ogbg-molhiv", root=tmp_path, batch_size=2).meta.source == "synthetic"
    write_molhiv(tmp_path / "ogbg_molhiv")
    assert data.load("ogbg-molhiv", root=tmp_path, batch_size=2).meta.source == "official"


@pytest.mark.parametrize("source", ["auto", "official"])
def test_without_ogb(tmp_path, monkeypatch, source):
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    options = {"root": tmp_path, "source": source}
    if source == "auto":
        assert data.load("ogbn-arxiv", **options, features=False).meta.source == "synthetic"
    else:
        with pytest.raises(data.DatasetMissingError, match=r"read by ogb, which cannot be imported .*install ogb"):
            data.load("ogbn-arxiv", **options)
    (tmp_path / "ogbn_arxiv").mkdir()  # which a surrogate must not hide
    with pytest.raises(ValueError, match=r"ogbn_arxiv: its files are read by ogb, which cannot be imported"):
        data.load("ogbn-arxiv", **options)


def test_edges_of_a_dgl_graph_keep_their_direction():
    raw = from_dgl(import_dgl().graph(([0, 2], [1, 1]), num_nodes=3), "here")
    assert (raw.row.tolist(), raw.col.tolist()) == ([1, 1], [0, 2])
