"""Graphs of a collection that form the batch: order, split, and sources without either."""

import numpy as np
import pytest

import data
from data.selection import Selection

PICKED = [0, 1, 9, 2, 5]  # of ten graphs, by seed 7 under the name zinc
SIZES = np.array([2, 3, 4, 5, 6, 7, 8, 9])  # paths of so many nodes: a batch tells which graphs it holds


@pytest.fixture
def own(tmp_path):
    """A user's file with all eight paths."""
    v = np.concatenate([np.arange(1, size) for size in SIZES])
    np.savez(tmp_path / "own.npz", node_counts=SIZES, edge_counts=SIZES - 1, u=v - 1, v=v)
    return tmp_path / "own.npz"


@pytest.fixture
def ogb(tmp_path, write_ogb):
    """The paths as an ogbg set: even numbers train, 1 and 5 are val, 3 and 7 test."""
    v = np.concatenate([np.arange(1, size) for size in SIZES])
    tables = {
        "edge": np.stack([v - 1, v], 1),
        "num-node-list": SIZES,
        "num-edge-list": SIZES - 1,
        "node-feat": np.repeat(np.arange(8), SIZES)[:, None] * np.eye(1, 9, dtype=int),
        "edge-feat": np.zeros((v.size, 3), int),
        "graph-label": SIZES % 2,
    }
    write_ogb(tmp_path / "ogbg_molhiv", "scaffold", {"train": [6, 0, 2, 4], "valid": [1, 5], "test": [3, 7]}, tables)
    return tmp_path


@pytest.fixture
def zinc(tmp_path, path_graph, write_zinc):
    """The four smallest paths train, the next two are val."""
    graphs = [path_graph(size) for size in SIZES.tolist()]
    write_zinc(tmp_path, {"train": graphs[:4], "val": graphs[4:6], "test": graphs[6:]})
    return tmp_path


def load(name, root, **options):
    return data.load(name, root=root, source="official", **options)


def sizes_of(loaded):
    return loaded.graph_sizes.tolist()


# name, sizes of the graphs by split
LAYOUTS = {
    "ogb": ("ogbg-molhiv", {None: SIZES.tolist(), "train": [8, 2, 4, 6], "val": [3, 7], "test": [5, 9]}),
    "zinc": ("zinc", {None: [2, 3, 4, 5], "train": [2, 3, 4, 5], "val": [6, 7], "test": [8, 9]}),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_split_and_order(layout, request):
    root = request.getfixturevalue(layout)
    name, splits = LAYOUTS[layout]
    for split, sizes in splits.items():
        whole = load(name, root, batch_size=len(sizes), split=split)
        assert sizes_of(whole) == sizes
        assert sizes_of(load(name, root, batch_size=2, split=split)) == sizes[:2]
        mixed = load(name, root, batch_size=len(sizes), split=split, order="random")
        assert sorted(sizes_of(mixed)) == sorted(sizes)
        assert mixed.meta.origin.endswith(f"{split} split, random order of seed 0)" if split else " order of seed 0)")
        with pytest.raises(ValueError, match=rf"batch_size: got 9; .* has {len(sizes)} graphs\. Set batch_size"):
            load(name, root, batch_size=9, split=split)


def test_fewer_graphs_than_the_default_batch_are_all_taken(own, caplog):
    caplog.set_level("INFO")
    assert sizes_of(data.load("own", path=own)) == SIZES.tolist()
    assert "has 8 graphs, fewer than a batch of 1024: all are taken" in caplog.text


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
    assert loaded.node_data["feat"][:, 0].tolist() == (np.repeat(sizes, sizes) / 2).tolist()
    assert [sorted(sizes[i] for i in ids) for ids in loaded.splits.values()] == [[2, 4, 6, 8], [3, 7], [5]]
    assert loaded.metric == "mae"
    wrong = {
        r"graph_label has shape \(8,\), dtype float64; numbers of shape \[8, tasks\] or classes": {
            "graph_label": SIZES / 2
        },
        r"a label of -2; 0 to 9, and -1 for unknown": {"graph_label": np.where(SIZES == 3, -2, SIZES)},
        r"the split holds the id 8; allowed are 0 to 7": {"test_ids": np.array([8])},
        r"the split holds the id 5 twice; each may be in one part": {"test_ids": np.array([5])},
    }
    for message, change in wrong.items():
        np.savez(own, **(arrays | change))
        with pytest.raises(ValueError, match=message):
            data.load("mine", path=own, batch_size=None)
    del arrays["valid_ids"]
    np.savez(own, **arrays)
    with pytest.raises(ValueError, match=r"a split needs train_ids, .*; valid_ids is missing"):
        data.load("mine", path=own, batch_size=None)


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
    rows = np.repeat(np.arange(mixed.meta.num_nodes), mixed.row_pointers.diff())
    assert np.array_equal(np.abs(mixed.columns - rows), np.ones(2 * (SIZES.sum() - 8)))  # each is still a path
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
    with pytest.raises(data.DatasetMissingError, match=r"cannot be reached.* only with a batch_size, order 'dataset'"):
        data.load("zinc", root=tmp_path, split="test")


def test_a_damaged_split_file_is_named(ogb):
    (ogb / "ogbg_molhiv" / "split" / "scaffold" / "valid.csv.gz").unlink()
    for split in (None, "val"):
        with pytest.raises(ValueError, match=r"ogbg_molhiv: cannot be read .*valid\.csv\.gz"):
            load("ogbg-molhiv", ogb, batch_size=2, split=split)


def test_random_order_is_the_same_on_every_machine():
    picked = Selection(batch_size=5, order="random", seed=7, name="zinc").pick(10, "")[0]
    assert picked.tolist() == PICKED
    assert Selection(batch_size=5, order="random", seed=7, name="cora").pick(10, "")[0].tolist() != PICKED
