"""ZINC through DGL's binary files, whose damage must not end the process that asks for the graphs."""

import numpy as np
import pytest
import torch

import data
from data.sources import zinc
from data.sources.dgl_graphs import dgl_class
from fused3s_dgl import import_dgl

# Taken at import, before conftest's fixture replaces it.
convert_apart = zinc.convert_apart
SIZES = {"train": [9, 12, 1, 30, 17], "valid": [22, 8], "test": [11]}


@pytest.fixture
def apart(monkeypatch):
    monkeypatch.setattr(zinc, "convert_apart", convert_apart)


@pytest.fixture
def folder(tmp_path):
    (remote,) = data.info("zinc").official.files(tmp_path)
    remote.target.mkdir()
    rng = np.random.default_rng(0)
    for mode, sizes in SIZES.items():
        graphs = []
        for size in sizes:
            first = torch.arange(size - 1)
            pairs = torch.cat([first, first + 1]), torch.cat([first + 1, first])
            graph = import_dgl().graph(pairs, num_nodes=size)
            graph.ndata["feat"] = torch.from_numpy(rng.integers(0, 28, size))
            graph.edata["feat"] = torch.from_numpy(rng.integers(0, 4, graph.num_edges()))
            graphs.append(graph)
        labels = {"g_label": torch.from_numpy(rng.normal(size=len(sizes))).float()}
        import_dgl().save_graphs(str(remote.target / f"ZincDGL_{mode}.bin"), graphs, labels)
    return remote.target


def load(root, **options):
    return data.load("zinc", root=root, source="official", edge_features=True, **options)


def test_dgl_reads_the_same(tmp_path, folder, apart, monkeypatch):
    first = load(tmp_path, batch_size=None)
    monkeypatch.setattr(zinc, "convert_apart", None)  # from here on the kept files
    for loaded in (first, load(tmp_path, batch_size=None)):
        parts = [dgl_class("ZINCDataset")(mode=mode, raw_dir=str(tmp_path)) for mode in SIZES]
        theirs = import_dgl().batch([graph for part in parts for graph in part._graphs])
        assert loaded.graph.batch_num_nodes().tolist() == theirs.batch_num_nodes().tolist()
        assert torch.equal(loaded.graph.ndata["feat"][:, 0], theirs.ndata["feat"])
        edges = []
        for graph in (loaded.graph, theirs):
            ends = (ids.tolist() for ids in graph.edges(order="eid"))
            edges.append(sorted(zip(*ends, graph.edata["feat"].flatten().tolist(), strict=True)))
        assert edges[0] == edges[1]
        assert loaded.labels[:, 0].tolist() == torch.cat([part._labels["g_label"] for part in parts]).tolist()
        assert {part: ids.tolist() for part, ids in loaded.splits.items()} == {
            "train": [0, 1, 2, 3, 4],
            "valid": [5, 6],
            "test": [7],
        }


@pytest.mark.parametrize("damage", ["a length", "text"])
def test_a_damaged_file_is_an_error_and_not_the_end(tmp_path, folder, apart, damage):
    file = folder / "ZincDGL_train.bin"
    content = bytearray(file.read_bytes())
    if damage == "a length":  # DGL asks for as many bytes as the file says, and ends the process
        place = content.find((5).to_bytes(8, "little"), 16)
        content[place : place + 8] = (2**60).to_bytes(8, "little")
    else:
        content = b"<html>log in</html>" * 50
    file.write_bytes(content)
    with pytest.raises(ValueError, match=rf"{folder}: the official files .*ZincDGL_train\.bin: DGL") as caught:
        load(tmp_path, batch_size=3)
    assert "Move the folder away and load again" in str(caught.value)
    assert not list(folder.glob("converted-*"))
    if damage == "a length":
        assert "was ended by signal" in str(caught.value)
        assert load(tmp_path, batch_size=2, split="val").meta.num_graphs == 2  # the other file is fine


def test_a_kept_file_that_is_damaged_is_made_again(tmp_path, folder, caplog):
    first = load(tmp_path, batch_size=5)
    (kept,) = folder.glob("converted-ZincDGL_train-*.npz")
    kept.write_bytes(kept.read_bytes()[:200])
    assert load(tmp_path, batch_size=5).meta == first.meta
    assert f"{kept}: cannot be used (" in caplog.text
