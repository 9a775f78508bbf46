"""Tables of SMILES strings: the kept conversion, which needs no RDKit, the scaffold split, and RDKit itself."""

import importlib.util
from collections import defaultdict

import numpy as np
import pandas as pd
import pytest

import data
from data.sources import molecules
from data.sources.molecules import convert, scaffold_split
from data.sources.pyg import OgbGraphs

needs_rdkit = pytest.mark.skipif(importlib.util.find_spec("rdkit") is None, reason="RDKit is not installed")
# Five chains of atoms; atom i of a chain has the number i.
SIZES = np.array([3, 1, 4, 2, 2])
PARTS = {"train": [0, 3, 4], "valid": [2], "test": [1]}


def chains(sizes):
    """The arrays of a conversion of chains of these sizes, but for labels and split."""
    feat = np.zeros((sizes.sum(), 9), np.uint8)
    feat[:, 0] = np.concatenate([np.arange(size) for size in sizes])
    ends = np.concatenate([np.arange(size - 1) for size in sizes]).astype(np.uint16)
    edge_feat = np.stack([ends % 5, ends % 6, ends % 2], 1).astype(np.uint8)
    return {
        "node_counts": sizes,
        "edge_counts": sizes - 1,
        "u": ends,
        "v": ends + 1,
        "feat": feat,
        "edge_feat": edge_feat,
    }


@pytest.fixture
def kept(tmp_path):
    """Path of a kept conversion of ogbg-molhiv below tmp_path, and a function that writes one."""
    path = tmp_path / "moleculenet" / "HIV.npz"
    path.parent.mkdir()

    def write(**changes):
        split = {f"{part}_ids": np.array(ids) for part, ids in PARTS.items()}
        arrays = chains(SIZES) | split | {"graph_label": np.array([[1], [0], [0], [1], [0]], np.uint8)}
        np.savez(path, **(arrays | changes))
        return path

    return write


@pytest.fixture
def converted(monkeypatch):
    """RDKit is there: a string of n letters is a chain of n atoms, and "?" cannot be parsed."""

    def convert(smiles):
        parsed = np.array([index for index, text in enumerate(smiles) if text != "?"])
        sizes = np.array([len(smiles[index]) for index in parsed])
        split = scaffold_split(np.arange(sizes.size))
        return parsed, chains(sizes) | {f"{part}_ids": ids for part, ids in split.items()}

    monkeypatch.setattr(molecules, "convert", convert)
    monkeypatch.setattr(molecules.importlib.util, "find_spec", lambda name: name == "rdkit" or None)


def load(root, name="ogbg-molhiv", **options):
    return data.load(name, root=root, **({"batch_size": None, "source": "official"} | options))


def write_table(root, smiles, labels, name="moleculenet/HIV.csv"):
    path = root / name
    path.parent.mkdir(exist_ok=True)
    columns = {"smiles": smiles, "activity": "CI", "HIV_active": labels}
    if name.startswith("b3db"):
        columns = {"NO.": 1, "SMILES": smiles, "BBB+/BBB-": labels}
    pd.DataFrame(columns).to_csv(path, index=False, sep="\t" if ".tsv" in name else ",")


def test_a_kept_conversion_needs_nothing_else(tmp_path, kept):
    kept()
    loaded = load(tmp_path, source="auto", edge_features=True)
    assert (loaded.meta.source, loaded.metric, loaded.meta.collection_size) == ("official", "rocauc", 5)
    assert loaded.graph_sizes.tolist() == SIZES.tolist()
    assert loaded.labels.tolist() == [[1.0], [0.0], [0.0], [1.0], [0.0]]
    assert {part: ids.tolist() for part, ids in loaded.splits.items()} == PARTS
    assert loaded.node_data["feat"][:, 0].tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 0, 1, 0, 1]
    # Rows of A in turn, both directions of each bond with its codes.
    assert loaded.columns.tolist() == [1, 0, 2, 1, 5, 4, 6, 5, 7, 6, 9, 8, 11, 10]
    assert loaded.edge_data["feat"][:, 1].tolist() == [0, 0, 1, 1, 0, 0, 1, 1, 2, 2, 0, 0, 0, 0]


def test_graphs_of_a_split_are_chosen(tmp_path, kept):
    kept()
    loaded = load(tmp_path, split="train", batch_size=2)
    assert (loaded.graph_ids.tolist(), loaded.graph_sizes.tolist(), loaded.meta.collection_size) == ([0, 3], [3, 2], 3)
    assert {part: ids.tolist() for part, ids in loaded.splits.items()} == {"train": [0, 1], "valid": [], "test": []}
    assert load(tmp_path, split="val").graph_ids.tolist() == [2]
    with pytest.raises(ValueError, match=r"HIV\.npz, test has 1 graphs"):
        load(tmp_path, split="test", batch_size=2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"feat": np.zeros((5, 9), np.uint8)}, r"feat of nodes has shape \(5, 9\); 12 rows"),
        ({"v": np.full(7, 9, np.uint16)}, r"edge \[0, 9\] in a graph of 3 nodes"),
        ({"feat": np.full((12, 9), 200, np.uint8)}, "node features hold the code 200"),
        ({"feat": np.full((12, 9), 0.5)}, r"node features have shape \(12, 9\), dtype float64; codes"),
        ({"edge_feat": np.zeros((7, 4), np.uint8)}, "edge features have 4 columns of codes; 3"),
        ({"graph_label": np.full((5, 1), 7, np.uint8)}, "a graph label of 7; 0 and 1"),
        ({"train_ids": np.array([-1, 0])}, "the split holds the id -1; allowed are 0 to 4"),
        ({"valid_ids": np.array([0, 0])}, "the split holds the id 0 twice"),
    ],
)
def test_a_damaged_conversion_is_refused(tmp_path, kept, changes, message):
    kept(**changes)
    with pytest.raises(ValueError, match=message):
        load(tmp_path, edge_features=True)


def test_a_table_is_converted_once(tmp_path, converted, caplog):
    smiles = ["CCCC", "CC", "?", "CCC", "CC", "C"]
    write_table(tmp_path, smiles, [1, 0, 1, 1, 1, 0])
    with caplog.at_level("INFO", logger="data"):
        first = load(tmp_path)
    assert "converting 5 SMILES strings, once; 1 further rows repeat one" in caplog.text
    assert "RDKit cannot parse 1 of 5 SMILES strings, which are left out; the first is '?'" in caplog.text
    assert first.graph_sizes.tolist() == [4, 2, 3, 1]
    assert first.labels.tolist() == [[1.0], [0.0], [1.0], [0.0]]
    (tmp_path / "moleculenet/HIV.csv").unlink()
    assert load(tmp_path).meta == first.meta


def test_tables_of_other_columns(tmp_path, converted):
    write_table(tmp_path, ["CC", "CCC"], ["BBB+", "BBB-"], "b3db/B3DB_classification.tsv.gz")
    loaded = load(tmp_path, "b3db")
    assert (loaded.labels.tolist(), loaded.metric, loaded.meta.task) == ([[1.0], [0.0]], "rocauc", "graph")


def test_labels_that_are_no_classes(tmp_path, converted):
    write_table(tmp_path, ["CCC", "CC"], [0, 2])
    with pytest.raises(ValueError, match=r"HIV\.csv: .*row 1 has HIV_active '2'; 0 and 1 are allowed"):
        load(tmp_path)
    assert not (tmp_path / "moleculenet/HIV.npz").exists()


def test_without_rdkit_the_remedy_is_named(tmp_path, monkeypatch):
    write_table(tmp_path, ["CCC", "CC"], [0, 1])
    monkeypatch.setattr(molecules.importlib.util, "find_spec", lambda name: None)
    remedy = r"needs RDKit, which is not installed: .*\[molecules\].* bring .*HIV\.npz"
    for source in ("official", "auto"):  # a surrogate must not hide the table
        with pytest.raises(ValueError, match=remedy):
            load(tmp_path, source=source)


def test_files_of_ogb_come_first(tmp_path, kept, monkeypatch):
    kept()
    (tmp_path / "ogbg_molhiv").mkdir()

    def read(*_):
        raise ValueError("ogb's files are read")

    monkeypatch.setattr(OgbGraphs, "load", read)
    with pytest.raises(ValueError, match="ogb's files are read"):
        load(tmp_path)


def test_the_split_follows_its_definition():
    """DeepChem's and ogb's, written with a dict of lists."""
    rng = np.random.default_rng(0)
    for count, kinds in ((1, 1), (10, 10), (97, 40), (2000, 300)):
        scaffold = np.minimum(rng.zipf(1.6, count), kinds) - 1
        sets = defaultdict(list)
        for index, key in enumerate(scaffold.tolist()):
            sets[key].append(index)
        train, valid, test = [], [], []
        for group in sorted(sets.values(), key=lambda ids: (len(ids), ids[0]), reverse=True):
            if len(train) + len(group) > 0.8 * count:
                (test if len(train) + len(valid) + len(group) > 0.9 * count else valid).extend(group)
            else:
                train.extend(group)
        found = {part: ids.tolist() for part, ids in scaffold_split(scaffold).items()}
        assert found == {"train": sorted(train), "valid": sorted(valid), "test": sorted(test)}


@needs_rdkit
def test_codes_and_scaffolds_of_known_molecules():
    # Five alkyl benzenes share a scaffold; ethanol and a lone ion have none; the fourth cannot be parsed.
    benzenes = [f"{'C' * length}c1ccccc1" for length in range(1, 6)]
    parsed, arrays = convert(["CCO", *benzenes[:2], "C(C)(C)(C)(C)(C)C", *benzenes[2:], "[Na+]"])
    assert parsed.tolist() == [0, 1, 2, 4, 5, 6, 7]
    assert arrays["node_counts"].tolist() == [3, 7, 8, 9, 10, 11, 1]
    # Atomic number - 1, chirality, degree with hydrogens, charge + 5, hydrogens, radicals, hybridization, aromatic, in
    # a ring.
    ethanol = [[5, 0, 4, 5, 3, 0, 2, 0, 0], [5, 0, 4, 5, 2, 0, 2, 0, 0], [7, 0, 2, 5, 1, 0, 2, 0, 0]]
    assert arrays["feat"][:3].tolist() == ethanol
    assert arrays["edge_feat"].tolist().count([3, 0, 1]) == 5 * 6  # aromatic bonds: type, stereo, conjugated
    assert arrays["train_ids"].tolist() == [1, 2, 3, 4, 5]
