"""The real loader classes of dgl.data and ogb on tiny files in the publishers' layouts."""

import builtins
import errno
import shutil
import sys
import types

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
    again = data.load("cora", root=tmp_path, source=source)
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
    again = data.load("ogbg-molhiv", root=tmp_path, source="official", batch_size=2)
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
    write_arxiv(tmp_path / "ogbn_arxiv")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}

    def killed(file, **_):
        file.write_bytes(b"half")
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(np, "savez", killed)
        with pytest.raises(KeyboardInterrupt):
            data.load("ogbn-arxiv", root=tmp_path, source="official")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
    for _ in range(2):  # the second time from the kept file
        loaded = data.load("ogbn-arxiv", root=tmp_path, source="official")
        assert (loaded.metric, loaded.labels.tolist()) == ("accuracy", [3, 0, 39, 1])
        splits = {part: ids.tolist() for part, ids in loaded.splits.items()}
        assert splits == {"train": [2, 0], "valid": [3], "test": [1]}


def test_a_kept_graph_is_made_again_if_its_files_change(tmp_path):
    write_arxiv(tmp_path / "ogbn_arxiv")
    first = data.load("ogbn-arxiv", root=tmp_path, source="official")
    (kept,) = (tmp_path / "ogbn_arxiv").glob("converted-*.npz")
    pd.DataFrame([3, 0, 39, 2]).to_csv(tmp_path / "ogbn_arxiv" / "raw" / "node-label.csv.gz", header=False, index=False)
    second = data.load("ogbn-arxiv", root=tmp_path, source="official")
    assert (first.labels.tolist(), second.labels.tolist()) == ([3, 0, 39, 1], [3, 0, 39, 2])
    assert kept.is_file()


@pytest.mark.parametrize("damage", ["flipped", "truncated", "empty", "DGL's"])
def test_a_damaged_kept_graph_is_named_and_made_again(tmp_path, caplog, damage):
    write_arxiv(tmp_path / "ogbn_arxiv")
    first = data.load("ogbn-arxiv", root=tmp_path, source="official")
    (kept,) = (tmp_path / "ogbn_arxiv").glob("converted-*.npz")
    content = bytearray(kept.read_bytes())
    caplog.clear()
    if damage == "flipped":
        content[400:440] = bytes(byte ^ 255 for byte in content[400:440])
    elif damage == "DGL's":  # ogb's own cache, which used to be read without a check
        (tmp_path / "ogbn_arxiv" / "processed").mkdir()
        (tmp_path / "ogbn_arxiv" / "processed" / "dgl_data_processed").write_bytes(b"damaged")
    else:
        content = content[: len(content) // 2 if damage == "truncated" else 0]
    kept.write_bytes(content)
    again = data.load("ogbn-arxiv", root=tmp_path, source="official")
    assert again.meta == first.meta
    assert again.graph.ndata["feat"].equal(first.graph.ndata["feat"])
    warnings = [record.getMessage() for record in caplog.records if "published" not in record.getMessage()]
    assert len(warnings) == (damage != "DGL's")
    assert all(text.startswith(f"{kept}: cannot be used (") and "delete the file" in text for text in warnings)
    assert kept.read_bytes() == content


@pytest.mark.parametrize("change", ["two graphs", "an edge too far", "a short table"])
def test_ogbn_tables_that_do_not_fit_together(tmp_path, change):
    raw = tmp_path / "ogbn_arxiv" / "raw"
    write_arxiv(tmp_path / "ogbn_arxiv")
    name, rows, message = {
        "two graphs": ("num-node-list", [4, 4], "hold 2 and 1 graphs, not one"),
        "an edge too far": ("edge", [(0, 1), (2, 4)], r"ids outside 0 \.\. 3"),
        "a short table": ("node-feat", np.eye(3), r"node-feat\.csv\.gz has 3 rows, and row 3 is needed"),
    }[change]
    pd.DataFrame(rows).to_csv(raw / f"{name}.csv.gz", header=False, index=False)
    with pytest.raises(ValueError, match=rf"ogbn_arxiv: the official files exist but cannot be read .*{message}"):
        data.load("ogbn-arxiv", root=tmp_path, source="official")


def test_collections_of_ogb_need_no_ogb(tmp_path, monkeypatch, write_molhiv):
    monkeypatch.setitem(sys.modules, "ogb.graphproppred", None)
    assert data.load("ogbg-molhiv", root=tmp_path, batch_size=2).meta.source == "synthetic"
    write_molhiv(tmp_path / "ogbg_molhiv")
    assert data.load("ogbg-molhiv", root=tmp_path, batch_size=2).meta.source == "official"


def test_ogbn_sets_need_no_ogb(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ogb.nodeproppred", None)
    assert data.load("ogbn-arxiv", root=tmp_path, features=False).meta.source == "synthetic"
    write_arxiv(tmp_path / "ogbn_arxiv")
    assert data.load("ogbn-arxiv", root=tmp_path).meta.source == "official"


def test_a_dgl_graph_with_ids_that_it_does_not_have_is_refused():
    """DGL trusts its binary files: of a damaged one the ids may be anything."""
    graph = import_dgl().graph(([0, 2], [1, 1]), num_nodes=3)
    damaged = types.SimpleNamespace(
        **{"edges": lambda order: (torch.tensor([0, 2]), torch.tensor([1, -1])), "ndata": {}, "edata": {}},
        num_nodes=graph.num_nodes,
    )
    with pytest.raises(ValueError, match=r"ids outside 0 \.\. 2"):
        from_dgl(damaged, "here")


def test_files_that_the_system_refuses_are_not_called_damaged(tmp_path, monkeypatch):
    write_arxiv(tmp_path / "ogbn_arxiv")

    def refused(*_, **__):
        raise PermissionError(errno.EACCES, "Permission denied", "edge.csv.gz")

    monkeypatch.setattr(pd, "read_csv", refused)
    with pytest.raises(
        ValueError, match=r"ogbn_arxiv: the official files cannot be read .*Permission denied.*"
    ) as caught:
        data.load("ogbn-arxiv", root=tmp_path, source="official")
    assert "they may be fine: check permissions and the disk" in str(caught.value)
    assert "Move" not in str(caught.value)


def test_edges_of_a_dgl_graph_keep_their_direction():
    raw = from_dgl(import_dgl().graph(([0, 2], [1, 1]), num_nodes=3), "here")
    assert (raw.row.tolist(), raw.col.tolist()) == ([1, 1], [0, 2])
