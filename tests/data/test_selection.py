"""Graphs of a collection that form the batch: order, split, and sources without either."""

import pickle

import numpy as np
import pandas as pd
import pytest
import torch

import data
from data.selection import Selection
from fused3s_dgl import import_dgl

PICKED = [0, 1, 9, 2, 5]  # of ten graphs, by seed 7 under the name zinc
SIZES = np.array([2, 3, 4, 5, 6, 7, 8, 9])  # paths of so many nodes: a batch tells which graphs it holds


def dgl_paths(sizes, feature):
    graphs = []
    for size in sizes.tolist():
        first, second = torch.arange(size - 1), torch.arange(1, size)
        graph = import_dgl().graph((torch.cat([first, second]), torch.cat([second, first])), num_nodes=size)
        graph.ndata["feat"] = feature(size)
        graphs.append(graph)
    return graphs


@pytest.fixture
def own(tmp_path):
    """A user's file with all eight paths."""
    v = np.concatenate([np.arange(1, size) for size in SIZES])
    np.savez(tmp_path / "own.npz", node_counts=SIZES, edge_counts=SIZES - 1, u=v - 1, v=v)
    return tmp_path / "own.npz"


@pytest.fixture
def ogb(tmp_path):
    """The paths as an ogbg set: even numbers train, 1 and 5 are val, 3 and 7 test."""
    folder = tmp_path / "ogbg_molhiv"
    split = folder / "split" / "scaffold"
    for made in (folder / "raw", split):
        made.mkdir(parents=True)
    (folder / "RELEASE_v1.txt").write_text("")
    v = np.concatenate([np.arange(1, size) for size in SIZES])
    tables = {
        "edge": np.stack([v - 1, v], 1),
        "num-node-list": SIZES,
        "num-edge-list": SIZES - 1,
        "node-feat": np.repeat(np.arange(8), SIZES)[:, None] * np.eye(1, 9, dtype=int),
        "graph-label": SIZES % 2,
    }
    for name, rows in tables.items():
        pd.DataFrame(rows).to_csv(folder / "raw" / f"{name}.csv.gz", header=False, index=False)
    for part, rows in {"train": [6, 0, 2, 4], "valid": [1, 5], "test": [3, 7]}.items():
        pd.DataFrame(rows).to_csv(split / f"{part}.csv.gz", header=False, index=False)
    return tmp_path


@pytest.fixture
def zinc(tmp_path):
    (remote,) = data.info("zinc").official.files(tmp_path)
    remote.target.mkdir()
    for mode, sizes in {"train": SIZES[:4], "valid": SIZES[4:6], "test": SIZES[6:]}.items():
        graphs = dgl_paths(sizes, lambda n: torch.zeros(n, dtype=torch.int64))
        labels = {"g_label": torch.tensor([size / 2 for size in sizes])}
        import_dgl().save_graphs(str(remote.target / f"ZincDGL_{mode}.bin"), graphs, labels)
    return tmp_path


@pytest.fixture
def peptides(tmp_path, chains_of_carbon):
    molecules, split = data.info("peptides-func").official.files(tmp_path)
    molecules.target.parent.mkdir()
    table = {
        "smiles": ["C" * size for size in SIZES],
        "labels": [str([int(size == i) for i in range(10)]) for size in SIZES],
    }
    pd.DataFrame(table).to_csv(molecules.target, index=False)
    split.target.write_bytes(pickle.dumps({"train": np.arange(4), "val": np.array([7, 4]), "test": np.array([5, 6])}))
    return tmp_path


@pytest.fixture
def pictures(tmp_path):
    (remote,) = data.info("pascalvoc-sp").official.files(tmp_path)
    remote.target.mkdir(parents=True)
    for split, sizes in {"train": SIZES[:4], "val": SIZES[4:6], "test": SIZES[6:]}.items():
        graphs = []
        for graph in dgl_paths(sizes, lambda n: torch.ones(n, 14)):
            pairs = torch.stack(graph.edges())
            graphs.append(
                (graph.ndata["feat"], torch.ones(pairs.shape[1], 2), pairs, [graph.num_nodes()] * graph.num_nodes())
            )
        (remote.target / f"{split}.pickle").write_bytes(pickle.dumps(graphs))
    return tmp_path


def load(name, root, **options):
    return data.load(name, root=root, source="official", **options)


def sizes_of(loaded):
    return loaded.graph.batch_num_nodes().tolist()


SPLITS = {
    "ogb": ("ogbg-molhiv", {None: [2, 3, 4, 5, 6, 7, 8, 9], "train": [8, 2, 4, 6], "val": [3, 7], "test": [5, 9]}),
    "zinc": ("zinc", {None: [2, 3, 4, 5], "train": [2, 3, 4, 5], "val": [6, 7], "test": [8, 9]}),
    "peptides": ("peptides-func", {None: [2, 3, 4, 5], "train": [2, 3, 4, 5], "val": [9, 6], "test": [7, 8]}),
    "pictures": ("pascalvoc-sp", {None: [2, 3, 4, 5], "train": [2, 3, 4, 5], "val": [6, 7], "test": [8, 9]}),
}


@pytest.mark.parametrize("layout", SPLITS)
def test_split_and_order(layout, request):
    root = request.getfixturevalue(layout)
    name, splits = SPLITS[layout]
    for split, sizes in splits.items():
        whole = load(name, root, batch_size=len(sizes), split=split)
        assert sizes_of(whole) == sizes
        assert sizes_of(load(name, root, batch_size=2, split=split)) == sizes[:2]
        mixed = load(name, root, batch_size=len(sizes), split=split, order="random")
        assert sorted(sizes_of(mixed)) == sorted(sizes)
        assert whole.meta.origin.endswith(f" ({split} split)" if split else (".zip", "?dl=1"))
        words = f"{split} split, random order of seed 0" if split else "random order of seed 0"
        assert mixed.meta.origin.endswith(f" ({words})")
        with pytest.raises(
            ValueError, match=rf"batch_size: got 9; .* has {len(sizes)} graphs\. Set batch_size \(data\.b"
        ):
            load(name, root, batch_size=9, split=split)


WHOLE = {
    "ogb": (SIZES % 2, {"train": [2, 4, 6, 8], "valid": [3, 7], "test": [5, 9]}, "rocauc"),
    "zinc": (SIZES / 2, {"train": [2, 3, 4, 5], "valid": [6, 7], "test": [8, 9]}, "mae"),
    "peptides": (np.eye(10)[SIZES], {"train": [2, 3, 4, 5], "valid": [6, 9], "test": [7, 8]}, "ap"),
    "pictures": (SIZES, {"train": [2, 3, 4, 5], "valid": [6, 7], "test": [8, 9]}, "f1"),
}


@pytest.mark.parametrize("layout", WHOLE)
def test_all_graphs_with_labels_and_splits(layout, request):
    root = request.getfixturevalue(layout)
    name, _ = SPLITS[layout]
    labels, splits, metric = WHOLE[layout]
    loaded = load(name, root, batch_size=None)
    sizes = sizes_of(loaded)
    assert sizes == SIZES.tolist()
    assert loaded.metric == metric
    if loaded.meta.task == "graph":
        assert loaded.labels.dtype == torch.float32
        assert loaded.labels.tolist() == labels.reshape(8, -1).tolist()
        sizes_by_row = sizes
    else:
        assert loaded.labels.dtype == torch.int64
        assert loaded.labels.tolist() == np.repeat(labels, SIZES).tolist()
        sizes_by_row = np.repeat(SIZES, SIZES).tolist()
    for part, expected in splits.items():
        rows = loaded.splits[part]
        assert rows.dtype == torch.int64
        assert sorted({sizes_by_row[i] for i in rows.tolist()}) == expected
        assert rows.numel() == (len(expected) if loaded.meta.task == "graph" else sum(expected))
    assert load(name, root, batch_size=None, order="random").meta.num_nodes == SIZES.sum()
    assert sorted(sizes_of(load(name, root, batch_size=None, split="test"))) == splits["test"]


def test_the_split_of_a_batch_holds_only_its_graphs(ogb):
    loaded = load("ogbg-molhiv", ogb, batch_size=5, order="random", seed=3)
    sizes = sizes_of(loaded)
    of_part = {part: [sizes[i] for i in ids.tolist()] for part, ids in loaded.splits.items()}
    assert sorted(size for part in of_part.values() for size in part) == sorted(sizes)
    for part, expected in WHOLE["ogb"][1].items():
        assert set(of_part[part]) == set(expected) & set(sizes)
    assert loaded.labels[:, 0].tolist() == [size % 2 for size in sizes]


def test_a_surrogate_has_no_whole(tmp_path):
    with pytest.raises(ValueError, match=r"batch_size: got None \(all graphs\); the surrogate of zinc needs a number"):
        data.load("zinc", root=tmp_path, source="synthetic", batch_size=None)
    with pytest.raises(data.DatasetMissingError, match="only with a batch_size"):
        data.load("zinc", root=tmp_path, batch_size=None)


def test_labels_and_split_of_a_users_collection(own):
    with np.load(own) as archive:
        arrays = dict(archive)
    arrays["feat"] = np.repeat(SIZES, SIZES)[:, None] / 2
    arrays["graph_label"] = np.stack([SIZES, np.where(SIZES < 5, np.nan, 1)], 1)
    arrays |= {"train_ids": np.array([6, 0, 2, 4]), "valid_ids": np.array([1, 5]), "test_ids": np.array([3])}
    np.savez(own, **arrays)
    loaded = data.load("mine", path=own, batch_size=None, order="random", seed=1)
    sizes = sizes_of(loaded)
    assert loaded.labels[:, 0].tolist() == sizes
    assert loaded.labels[:, 1].isnan().tolist() == [size < 5 for size in sizes]
    assert loaded.graph.ndata["feat"][:, 0].tolist() == (np.repeat(sizes, sizes) / 2).tolist()
    assert [sorted(sizes[i] for i in loaded.splits[part]) for part in ("train", "valid", "test")] == [
        [2, 4, 6, 8],
        [3, 7],
        [5],
    ]
    assert loaded.metric is None
    wrong = {
        r"graph_label has shape \(8,\), dtype int64; numbers of shape \[8, tasks\]": {"graph_label": SIZES},
        r"test_ids hold 8; allowed are 0 to 7": {"test_ids": np.array([8])},
        r"test_ids hold 5 twice; each id may be in one part": {"test_ids": np.array([5])},
    }
    for message, change in wrong.items():
        np.savez(own, **(arrays | change))
        with pytest.raises(ValueError, match=message):
            data.load("mine", path=own, batch_size=None)
    del arrays["valid_ids"]
    np.savez(own, **arrays)
    with pytest.raises(ValueError, match=r"a split needs train_ids, .*; valid_ids is missing"):
        data.load("mine", path=own, batch_size=None)


def test_a_graph_keeps_its_features_and_edges_in_a_random_order(ogb):
    loaded = load("ogbg-molhiv", ogb, batch_size=5, order="random", seed=3)
    sizes = sizes_of(loaded)
    assert sizes != sorted(sizes)
    number = np.repeat(np.array(sizes) - 2, sizes)  # of each graph in the set, which is its features
    assert loaded.graph.ndata["feat"][:, 0].tolist() == number.tolist()
    assert loaded.graph.batch_num_edges().tolist() == [2 * (size - 1) for size in sizes]


def test_files_have_an_order_and_no_splits(own):
    def load(**options):
        return data.load("mine", path=own, **options)

    assert sizes_of(load(batch_size=3)) == [2, 3, 4]
    mixed = load(batch_size=8, order="random", seed=1)
    assert sizes_of(mixed) != sorted(sizes_of(mixed)) == SIZES.tolist()
    assert sizes_of(load(batch_size=3, order="random", seed=1)) == sizes_of(mixed)[:3]
    assert sizes_of(load(batch_size=8, order="random", seed=2)) != sizes_of(mixed)
    assert mixed.meta.origin == f"{own} (random order of seed 1)"
    assert load(batch_size=8).meta.origin == str(own)
    keys, queries = (ids.numpy() for ids in mixed.graph.edges())
    assert np.array_equal(np.abs(keys - queries), np.ones(2 * (SIZES.sum() - 8)))  # each is still a path
    with pytest.raises(ValueError, match=r"split: got 'val'; .*own\.npz holds no splits: only None .*\(data\.split in"):
        load(batch_size=3, split="val")


def test_file_and_official_give_the_same_random_batch(own, ogb):
    options = {"batch_size": 6, "order": "random", "seed": 4}
    from_file = data.load("ogbg-molhiv", path=own, **options)
    assert from_file.meta.sha256 == load("ogbg-molhiv", ogb, **options).meta.sha256


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"order": "sorted"}, "order: got 'sorted'; allowed are dataset, random"),
        ({"split": "valid"}, "split: got 'valid'; allowed are None, train, val, test"),
        ({"name": "cora", "split": "test"}, "split: got 'test'; cora is a single graph: only None is allowed"),
        ({"name": "cora", "order": "random"}, "order: got 'random'; cora is a single graph: only 'dataset' is allowed"),
        ({"source": "synthetic", "split": "test"}, "split: got 'test'; a surrogate has neither"),
        ({"source": "synthetic", "order": "random"}, "order: got 'random'; a surrogate has neither"),
    ],
)
def test_choices_that_are_refused(tmp_path, arguments, message):
    with pytest.raises(ValueError, match=message):
        data.load(**({"name": "zinc", "root": tmp_path} | arguments))


def test_a_file_of_one_graph_has_no_order(tmp_path):
    np.savez(tmp_path / "one.npz", src_li=[0], dst_li=[1], num_nodes=2)
    with pytest.raises(ValueError, match=r"order: got 'random'; .*one\.npz holds one graph: only 'dataset'"):
        data.load("one", path=tmp_path / "one.npz", order="random")


def test_auto_makes_no_surrogate_of_a_split(tmp_path):
    with pytest.raises(data.DatasetMissingError, match=r"tests are offline.* only with a batch_size, order 'dataset'"):
        data.load("zinc", root=tmp_path, split="test")


def test_a_damaged_split_file_is_named(ogb):
    (ogb / "ogbg_molhiv" / "split" / "scaffold" / "valid.csv.gz").unlink()
    for split in (None, "val"):
        with pytest.raises(
            ValueError, match=r"ogbg_molhiv: the official files exist but cannot be read .*valid\.csv\.gz"
        ):
            load("ogbg-molhiv", ogb, batch_size=2, split=split)


def test_ogb_files_without_a_split(ogb):
    (ogb / "ogbg_molhiv" / "split" / "scaffold").rename(ogb / "elsewhere")
    assert load("ogbg-molhiv", ogb, batch_size=None).splits is None
    with pytest.raises(ValueError, match=r"scaffold: missing, and split='val' needs it"):
        load("ogbg-molhiv", ogb, split="val")


def test_random_order_is_the_same_on_every_machine():
    picked = Selection(batch_size=5, order="random", seed=7, name="zinc").pick(10, "")
    assert picked.tolist() == PICKED
    assert Selection(batch_size=5, order="random", seed=7, name="cora").pick(10, "").tolist() != PICKED
