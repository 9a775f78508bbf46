import logging

import numpy as np
import pytest

import data


@pytest.fixture
def own_npz(tmp_path):
    path = tmp_path / "cora.npz"
    np.savez(path, src_li=np.array([0, 1]), dst_li=np.array([1, 2]), num_nodes=3)
    return path


def test_auto_prefers_path_then_official_then_npz(tmp_path, write_planetoid, own_npz):
    ring = np.arange(600), (np.arange(600) + 1) % 600
    assert data.load("cora", root=tmp_path).meta.origin == str(own_npz)
    write_planetoid(tmp_path / "planetoid", "cora", *ring, 600)
    assert data.load("cora", root=tmp_path).meta.source == "official"
    with_path = data.load("cora", root=tmp_path, path=own_npz).meta
    assert (with_path.source, with_path.num_nodes, with_path.num_classes) == ("file", 3, 7)


@pytest.mark.parametrize("name", ["pubmed", "zinc"])
def test_auto_offline_gives_the_surrogate_with_one_warning(tmp_path, caplog, name):
    with caplog.at_level(logging.INFO, logger="data"):
        loaded = data.load(name, root=tmp_path, batch_size=8)
    assert loaded.meta.source == "synthetic"
    (warning,) = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert warning.startswith(f"{name}: not under {tmp_path}; using a synthetic surrogate (source=synthetic): ")
    assert "\n" not in warning
    assert "cannot be reached (ConnectionError)" in warning
    assert all(path.suffix == ".lock" or path.is_dir() for path in tmp_path.rglob("*"))


def test_official_offline_says_what_where_and_the_remedy(tmp_path):
    with pytest.raises(data.DatasetMissingError) as caught:
        data.load("pubmed", root=tmp_path, source="official")
    for part in ("pubmed.npz", str(tmp_path), "cannot be reached (ConnectionError)", "source='synthetic'"):
        assert part in str(caught.value)


def test_auto_does_not_generate_a_huge_surrogate(tmp_path, monkeypatch):
    monkeypatch.setattr("data.synthetic.generate.surrogate", None)
    with pytest.raises(data.DatasetMissingError, match=r"igb-large: not under .*; source='synthetic' gives"):
        data.load("igb-large", root=tmp_path)


def test_features_do_not_depend_on_the_source_of_the_edges(tmp_path):
    surrogate = data.load("cora", source="synthetic", seed=5)
    rows = np.repeat(np.arange(2708), surrogate.row_pointers.diff())
    np.savez(tmp_path / "cora.npz", src_li=rows, dst_li=surrogate.columns.numpy(), num_nodes=2708)
    read = data.load("cora", root=tmp_path, seed=5)
    assert read.meta.sha256 == surrogate.meta.sha256
    assert read.node_data["feat"].equal(surrogate.node_data["feat"])


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"path": 3}, TypeError, "PathLike"),
        ({"name": ["cora"]}, TypeError, r"name: got \['cora'\]; a text"),
        (
            {"name": "coral", "source": "synthetic"},
            ValueError,
            "name: got 'coral'; registered are cora, citeseer.*path=",
        ),
        ({"source": "web"}, ValueError, "source: got 'web'; allowed are auto, official, file, synthetic"),
        ({"source": "synthetic", "path": "a.npz"}, ValueError, "path: got 'a.npz' with source='synthetic'"),
        ({"batch_size": 0}, ValueError, "batch_size: got 0; 1 or more"),
        ({"batch_size": True}, TypeError, "batch_size: got True; an integer"),
        ({"seed": -1}, ValueError, "seed: got -1; 0 or more"),
        ({"seed": 1.5}, TypeError, "seed: got 1.5; an integer"),
        ({"batch_size": 10**40, "name": "zinc", "source": "synthetic"}, MemoryError, "the surrogate of zinc, "),
        ({"order": None}, ValueError, "order: got None; allowed are dataset, random"),
        ({"split": ["train"]}, ValueError, r"split: got \['train'\]; allowed are None, train"),
        ({"path": ""}, ValueError, r"\.: cannot be read: a folder"),
    ],
)
def test_bad_arguments(tmp_path, arguments, error, message):
    with pytest.raises(error, match=message):
        data.load(**({"name": "cora", "root": tmp_path} | arguments))


def test_the_dgl_graph_is_made_on_use_and_shares_the_tensors():
    loaded = data.load("zinc", source="synthetic", batch_size=4, edge_features=True)
    assert "graph" not in vars(loaded)
    graph = loaded.graph
    keys, queries = graph.edges(order="eid")
    rows = np.repeat(np.arange(loaded.meta.num_nodes), loaded.row_pointers.diff())
    assert (queries.tolist(), keys.tolist()) == (rows.tolist(), loaded.columns.tolist())
    assert graph.batch_num_nodes().tolist() == loaded.graph_sizes.tolist()
    owner = np.repeat(np.arange(4), loaded.graph_sizes)
    assert graph.batch_num_edges().tolist() == np.bincount(owner[rows], minlength=4).tolist()
    assert graph.ndata["feat"].data_ptr() == loaded.node_data["feat"].data_ptr()
    assert graph.edata["feat"].equal(loaded.edge_data["feat"])
    assert graph.adj_tensors("csc")[1].data_ptr() == loaded.columns.data_ptr()


def test_auto_and_file_take_an_unregistered_npz_under_root(tmp_path, own_npz):
    own_npz.rename(tmp_path / "mine.npz")
    for source in ("auto", "file"):
        meta = data.load("mine", root=tmp_path, source=source).meta
        assert (meta.source, meta.name, meta.task) == ("file", "mine", "node")
    with pytest.raises(data.DatasetMissingError, match=r"other\.npz: no such file"):
        data.load("other", root=tmp_path, source="file")
