"""PascalVOC-SP and COCO-SP, written as LRGB's own script writes them and read by DGL's and PyG's classes, too.

That script dumps a list of (features, edge features, edge_index, labels) with `pickle.dump`: `ndata["feat"].half()`,
`edata["feat"]`, `torch.stack(graph.edges())` and a NumPy array of uint8.
"""

import builtins
import pickle

import numpy as np
import pytest
import torch
import torch_geometric.datasets as pyg

import data
from data.sources.ogb_import import import_ogb
from data.sources.superpixels import COCO_CATEGORIES
from data.sources.tensor_pickle import index_tensors, values
from fused3s_dgl import import_dgl

SIZES = {"train": [40, 70, 1, 55, 90], "val": [30, 20], "test": [25]}
NAMES = ["pascalvoc-sp", "coco-sp"]


def picture(rng, size, name):
    ends = rng.integers(0, size, (2, 3 * size)) if size > 1 else np.zeros((2, 1), int)
    labels = rng.choice(COCO_CATEGORIES, size) if name == "coco-sp" else rng.integers(0, 21, size)
    return (
        torch.from_numpy(rng.random((size, 14))).half(),
        torch.from_numpy(rng.random((ends.shape[1], 2), np.float32)),
        torch.from_numpy(ends),
        labels.astype(np.uint8),
    )


def write(root, name, protocol=4, change=lambda pictures: pictures):
    (remote,) = data.info(name).official.files(root)
    remote.target.mkdir(parents=True)
    rng = np.random.default_rng(0)
    written = {}
    for split, sizes in SIZES.items():
        written[split] = [picture(rng, size, name) for size in sizes]
        pictures = change(written[split]) if split == "train" else written[split]
        content = pickle.dumps(pictures, protocol=protocol)
        if protocol == 3:  # under the name that it had in NumPy 1
            content = content.replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n")
        (remote.target / f"{split}.pickle").write_bytes(content)
    return remote.target, written


def load(name, root, **options):
    return data.load(name, root=root, source="official", **options)


@pytest.fixture
def lrgb(monkeypatch):
    """`dgl.data.lrgb`, whose import needs RDKit only for Peptides."""
    import_dgl()
    if not hasattr(import_ogb("utils"), "smiles2graph"):
        monkeypatch.setattr(import_ogb("utils"), "smiles2graph", None, raising=False)
    from dgl.data import lrgb

    return lrgb


def edges_of(queries, keys, features):
    rows = zip(queries.tolist(), keys.tolist(), features.tolist(), strict=True)
    first = {}
    for query, key, feature in rows:
        first.setdefault((query, key), feature)
    return sorted(first.items())


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("protocol", [3, 4])  # Python's own up to 3.7, and from 3.8 on
def test_dgl_reads_the_same(tmp_path, lrgb, name, protocol):
    write(tmp_path, name, protocol)
    kind = {"pascalvoc-sp": lrgb.VOCSuperpixelsDataset, "coco-sp": lrgb.COCOSuperpixelsDataset}[name]
    loaded = load(name, tmp_path, batch_size=None, edge_features=True)
    parts = [kind(raw_dir=str(tmp_path), split=split, verbose=False).graphs for split in SIZES]
    theirs = import_dgl().batch([graph for part in parts for graph in part])
    assert loaded.graph.batch_num_nodes().tolist() == theirs.batch_num_nodes().tolist()
    assert torch.equal(loaded.graph.ndata["feat"], theirs.ndata["feat"])
    assert loaded.labels.tolist() == theirs.ndata["label"].tolist()
    keys, queries = loaded.graph.edges(order="eid")
    their_keys, their_queries = theirs.edges(order="eid")
    assert edges_of(queries, keys, loaded.graph.edata["feat"]) == edges_of(
        their_queries, their_keys, theirs.edata["feat"]
    )
    assert loaded.meta.num_graphs == loaded.meta.collection_size == 8
    ends = np.cumsum([sum(sizes) for sizes in SIZES.values()])
    assert [ids.tolist() for ids in loaded.splits.values()] == [
        list(range(first, last)) for first, last in zip([0, *ends], ends, strict=False)
    ]


@pytest.mark.parametrize("name", NAMES)
def test_pyg_reads_the_same(tmp_path, name):
    folder, _ = write(tmp_path, name)
    place = tmp_path / "pyg" / {"pascalvoc-sp": "pascalvoc-sp", "coco-sp": "coco-sp"}[name]
    place.mkdir(parents=True)
    folder.rename(place / "raw")
    theirs = [graph for split in SIZES for graph in pyg.LRGBDataset(str(tmp_path / "pyg"), name, split=split)]
    (place / "raw").rename(folder)
    loaded = load(name, tmp_path, batch_size=None)
    assert torch.equal(loaded.graph.ndata["feat"], torch.cat([graph.x for graph in theirs]))
    assert loaded.labels.tolist() == torch.cat([graph.y for graph in theirs]).tolist()
    first = np.cumsum([0, *(graph.num_nodes for graph in theirs)])
    # Messages flow along edge_index in PyG, too: from the key to the query.
    pairs = [graph.edge_index + start for graph, start in zip(theirs, first, strict=False)]
    keys, queries = torch.cat(pairs, 1)
    ours = loaded.graph.edges()
    assert sorted(zip(*(ids.tolist() for ids in ours), strict=True)) == sorted(
        set(zip(keys.tolist(), queries.tolist(), strict=True))
    )


def test_only_the_chosen_pictures_are_read(tmp_path, monkeypatch):
    folder, written = write(tmp_path, "coco-sp")
    read = []
    monkeypatch.setattr("data.sources.superpixels.values", lambda file, of: read.append(of) or values(file, of))
    loaded = load("coco-sp", tmp_path, batch_size=2, order="random", seed=3)
    assert len(read) == 8
    ids = loaded.graph_ids.tolist()
    assert loaded.graph.batch_num_nodes().tolist() == [SIZES["train"][i] for i in ids]
    assert torch.equal(loaded.graph.ndata["feat"], torch.cat([written["train"][i][0] for i in ids]).float())
    assert loaded.meta.collection_size == 5
    size = (folder / "train.pickle").stat().st_size
    monkeypatch.setattr("data.memory.available_bytes", lambda: size // 4)
    read.clear()
    with pytest.raises(MemoryError, match=r"edge_wt_region_boundary: 3 of its graphs: about 0\.0 GiB needed"):
        load("coco-sp", tmp_path, batch_size=3)
    assert not read


def test_parts_of_larger_tensors(tmp_path):
    """A tensor that is a slice, or turned, of a storage, is read as such."""
    whole = torch.arange(600.0).reshape(20, 30)
    tensors = [whole[3:7, 5:9], whole.T[4:6], whole[0, 0], torch.zeros(0, 14), torch.tensor([True, False])]
    (tmp_path / "t.pickle").write_bytes(pickle.dumps(tensors))
    listed = index_tensors(tmp_path / "t.pickle")
    with (tmp_path / "t.pickle").open("rb") as file:
        for tensor, read in zip(tensors, listed, strict=True):
            assert np.array_equal(values(file, read), tensor.numpy())
            assert values(file, read).dtype == tensor.numpy().dtype


class Call:
    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


@pytest.mark.parametrize("place", ["list", "features", "labels", "storage", "of torch"])
def test_no_code_runs(tmp_path, monkeypatch, place):
    ran = tmp_path / "ran"
    code = Call(builtins.open, str(ran), "w")
    inside = {
        "list": lambda pictures: [*pictures, code],
        "features": lambda pictures: [(code, *pictures[0][1:])],
        "labels": lambda pictures: [(*pictures[0][:3], code)],
        "storage": lambda pictures: [(Call(torch.storage._load_from_bytes, pickle.dumps(code) * 20), *pictures[0][1:])],
        "of torch": lambda pictures: [(Call(torch.load, str(ran)), *pictures[0][1:])],
    }
    write(tmp_path, "pascalvoc-sp", change=inside[place])
    with pytest.raises(ValueError, match="the official files exist but cannot be read") as caught:
        load("pascalvoc-sp", tmp_path, batch_size=1)
    assert not ran.exists()
    assert place == "storage" or "which is refused" in str(caught.value)


@pytest.mark.parametrize("cut", [10, 500, 5000, -1, -200])
def test_a_truncated_pickle(tmp_path, cut):
    folder, _ = write(tmp_path, "pascalvoc-sp")
    file = folder / "train.pickle"
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"edge_wt_region_boundary: the official files exist but cannot be read"):
        load("pascalvoc-sp", tmp_path, batch_size=5)


def test_flipped_bytes_are_errors_or_other_numbers(tmp_path):
    folder, _ = write(tmp_path, "pascalvoc-sp")
    file = folder / "train.pickle"
    content, rng = file.read_bytes(), np.random.default_rng(0)
    for _ in range(150):
        damaged = bytearray(content)
        for place in rng.integers(0, 9000, 3):
            damaged[place] ^= int(rng.integers(1, 256))
        file.write_bytes(damaged)
        try:
            loaded = load("pascalvoc-sp", tmp_path, batch_size=3)
        except ValueError as error:
            text = str(error)
        else:
            text = f"{folder}" if loaded.meta.num_graphs == 3 else ""
        assert str(folder) in text


BAD = {
    "no list": (lambda pictures: tuple(pictures), "a list of .features, edge features, edge_index, labels. is needed"),
    "three of four": (lambda pictures: [one[:3] for one in pictures], "a list of"),
    "labels of another graph": (
        lambda pictures: [(*pictures[0][:3], pictures[1][3])],
        "a graph of 40 nodes with 70 labels",
    ),
    "edge features of another": (lambda pictures: [(pictures[0][0], pictures[1][1], *pictures[0][2:])], "of shapes"),
    "an id too far": (
        lambda pictures: [(*pictures[0][:2], pictures[0][2] + 39, pictures[0][3])],
        r"ids outside 0 \.\. 39",
    ),
    "labels of words": (lambda pictures: [(*pictures[0][:3], ["cat"] * 40)], "a list of <U3; integers are needed"),
    "objects": (lambda pictures: [(*pictures[0][:3], np.array([None] * 40))], "an array"),
}


@pytest.mark.parametrize("case", BAD)
def test_pictures_that_do_not_fit_together(tmp_path, case):
    change, message = BAD[case]
    write(tmp_path, "pascalvoc-sp", change=change)
    with pytest.raises(ValueError, match=rf"edge_wt_region_boundary: the official files .*{message}"):
        load("pascalvoc-sp", tmp_path, batch_size=1)


def test_a_label_that_is_no_category(tmp_path):
    def change(pictures):
        pictures[0][3][5] = 12  # a street sign, which COCO's annotations do not use
        return pictures

    write(tmp_path, "coco-sp", change=change)
    with pytest.raises(ValueError, match="a label of 12, which is none of the 81 categories"):
        load("coco-sp", tmp_path, batch_size=1)
