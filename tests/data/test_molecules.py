"""ogbg-molhiv from MoleculeNet's table: molecules, labels and the scaffold split; with RDKit where it is installed."""

import gzip
import logging
from collections import defaultdict

import numpy as np
import pandas as pd
import pytest
import torch

import data
from data.sources import molecules
from data.sources.molecules import has_rdkit, scaffold_split

needs_rdkit = pytest.mark.skipif(not has_rdkit(), reason="RDKit is not installed")


def write_table(root, smiles, active, name="HIV.csv.gz"):
    table = root / "moleculenet" / name
    table.parent.mkdir(parents=True, exist_ok=True)
    activity = ["CA" if label else "CI" for label in active]
    pd.DataFrame({"smiles": smiles, "activity": activity, "HIV_active": active}).to_csv(table, index=False)
    return table


def load(root, **options):
    return data.load("ogbg-molhiv", root=root, source="official", **{"batch_size": None, **options})


def test_the_table_gives_graphs_labels_and_a_split(tmp_path, chains_of_carbon, caplog):
    lengths = [4, 2, 7, 2, 3, 5, 6, 4, 9, 8, 10, 11]  # 4 and 2 are listed twice
    active = [1, 0, 0, 1, 0, 1, 0, 0, 0, 1, 0, 0]
    table = write_table(tmp_path, ["C" * length for length in lengths], active)
    with caplog.at_level(logging.INFO, logger="data"):
        loaded = load(tmp_path, edge_features=True)
    assert "2 of 12 rows repeat a molecule; the first of each is kept" in caplog.text
    assert loaded.graph.batch_num_nodes().tolist() == [4, 2, 7, 3, 5, 6, 9, 8, 10, 11]
    assert loaded.graph.batch_num_edges().tolist() == [2 * (size - 1) for size in (4, 2, 7, 3, 5, 6, 9, 8, 10, 11)]
    assert loaded.labels.tolist() == [[1.0], [0.0], [0.0], [0.0], [1.0], [0.0], [0.0], [1.0], [0.0], [0.0]]
    assert (loaded.metric, loaded.meta.num_graphs, loaded.meta.feature_dim) == ("rocauc", 10, 9)
    assert loaded.graph.edata["feat"].shape == (loaded.meta.num_edges, 3)
    # Every chain is a scaffold of its own, in the table's order; the last are taken first.
    splits = {part: ids.tolist() for part, ids in loaded.splits.items()}
    assert splits == {"train": list(range(2, 10)), "valid": [1], "test": [0]}
    assert load(tmp_path, batch_size=1, split="test").labels.tolist() == [[1.0]]
    assert load(tmp_path, batch_size=3).splits["train"].tolist() == [2]
    assert table.exists()


def test_the_conversion_is_kept(tmp_path, chains_of_carbon, monkeypatch, caplog):
    table = write_table(tmp_path, ["CCC", "CC"], [0, 1], "HIV.csv")
    first = load(tmp_path)
    monkeypatch.setattr(molecules, "has_rdkit", lambda: False)
    assert load(tmp_path).meta == first.meta
    (kept,) = table.parent.glob("*.npz")
    write_table(tmp_path, ["CCC", "CCCC"], [0, 1], "HIV.csv")  # another table
    with pytest.raises(ValueError, match=r"HIV\.csv: converting SMILES .* needs RDKit, .*\(pip install rdkit\)"):
        load(tmp_path)
    with pytest.raises(ValueError, match="needs RDKit"):  # a surrogate must not hide the table
        data.load("ogbg-molhiv", root=tmp_path)
    write_table(tmp_path, ["CCC", "CC"], [0, 1], "HIV.csv")
    kept.write_bytes(kept.read_bytes()[:100])
    with pytest.raises(ValueError, match=rf"HIV\.csv: .* needs RDKit, .*, and .*{kept.name} cannot be used"):
        load(tmp_path)
    monkeypatch.setattr(molecules, "has_rdkit", lambda: True)
    assert load(tmp_path).meta == first.meta
    assert f"{kept}: cannot be used (not an .npz archive, or truncated), and is made again for this run" in caplog.text


def test_a_conversion_that_cannot_be_kept(tmp_path, chains_of_carbon, monkeypatch, caplog):
    table = write_table(tmp_path, ["CCC", "CC"], [0, 1])

    def full(*_, **__):
        raise OSError("no space left on device")

    monkeypatch.setattr(np, "savez_compressed", full)
    assert load(tmp_path).meta.num_graphs == 2
    assert "not kept (no space left on device): the next run makes it again" in caplog.text
    assert list(table.parent.iterdir()) == [table]


def test_files_of_ogb_come_first(tmp_path, write_molhiv):
    write_table(tmp_path, ["CCC", "CC"], [0, 1])
    write_molhiv(tmp_path / "ogbg_molhiv")
    loaded = load(tmp_path)
    assert loaded.labels.tolist() == [[0.0], [1.0], [0.0]]
    assert [loaded.splits[part].tolist() for part in ("train", "valid", "test")] == [[0], [1], [2]]


@pytest.mark.parametrize("active", [[0, 2], [0, np.nan]])
def test_labels_that_are_no_classes(tmp_path, active):
    write_table(tmp_path, ["CCC", "CC"], active)
    with pytest.raises(ValueError, match=r"HIV\.csv\.gz: .*HIV_active 0 or 1"):
        load(tmp_path)


def test_scaffold_split_follows_the_definition():
    """DeepChem's and ogb's, written with a dict of lists."""
    rng = np.random.default_rng(0)
    for count, kinds in ((1, 1), (10, 10), (97, 40), (2000, 300)):
        scaffold = np.minimum(rng.zipf(1.6, count), kinds) - 1
        sets = defaultdict(list)
        for i, key in enumerate(scaffold.tolist()):
            sets[key].append(i)
        train, valid, test = [], [], []
        for group in sorted(sets.values(), key=lambda ids: (len(ids), ids[0]), reverse=True):
            if len(train) + len(group) > 0.8 * count:
                if len(train) + len(valid) + len(group) > 0.9 * count:
                    test += group
                else:
                    valid += group
            else:
                train += group
        parts = scaffold_split(scaffold.astype(np.int32))
        assert {part: ids.tolist() for part, ids in parts.items()} == {
            "train": sorted(train),
            "valid": sorted(valid),
            "test": sorted(test),
        }


@needs_rdkit
def test_molecules_are_those_of_the_published_set(tmp_path, real_graph_dir):
    folder = real_graph_dir / "batched"
    path = folder / "ogbg-molhiv.smiles.txt.gz"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    smiles = gzip.decompress(path.read_bytes()).decode().split()[:120]
    with np.load(folder / "ogbg-molhiv.npz") as archive:
        node_counts, edge_counts, u, v = (archive[key].astype(int) for key in ("node_counts", "edge_counts", "u", "v"))
    write_table(tmp_path, smiles, np.arange(120) % 2)
    loaded = load(tmp_path)
    assert loaded.graph.batch_num_nodes().tolist() == node_counts[:120].tolist()
    first = np.repeat(np.cumsum(node_counts) - node_counts, edge_counts)[: edge_counts[:120].sum()]
    u, v = u[: first.size] + first, v[: first.size] + first
    keys, queries = (ends.numpy() for ends in loaded.graph.edges())
    assert set(zip(queries, keys, strict=True)) == set(zip(np.r_[u, v], np.r_[v, u], strict=True))
    assert (loaded.graph.ndata["feat"] < torch.tensor(loaded.meta.feature_cardinalities)).all()


@needs_rdkit
def test_codes_and_scaffolds_of_known_molecules(tmp_path, caplog):
    # Two alkyl benzenes share a scaffold; ethanol and a lone ion have none; the last cannot be parsed.
    smiles = ["CCc1ccccc1", "CCO", "CCCc1ccccc1", "[Na+]", "C(C)(C)(C)(C)(C)C"]
    write_table(tmp_path, smiles, [0, 1, 0, 1, 1])
    loaded = load(tmp_path, edge_features=True)
    assert "RDKit cannot parse 1 of 5 SMILES strings, which are left out; the first is 'C(C)" in caplog.text
    assert loaded.graph.batch_num_nodes().tolist() == [8, 3, 9, 1]
    assert loaded.labels.tolist() == [[0.0], [1.0], [0.0], [1.0]]
    # Atomic number - 1, chirality, degree with hydrogens, charge + 5, hydrogens, radicals, hybridization, aromatic, in
    # a ring.
    ethanol = loaded.graph.ndata["feat"][8:11].tolist()
    assert ethanol == [[5, 0, 4, 5, 3, 0, 2, 0, 0], [5, 0, 4, 5, 2, 0, 2, 0, 0], [7, 0, 2, 5, 1, 0, 2, 0, 0]]
    aromatic = [3, 0, 1]  # type, stereo, conjugated
    assert loaded.graph.edata["feat"].tolist().count(aromatic) == 2 * 2 * 6
    (kept,) = (tmp_path / "moleculenet").glob("*.npz")
    with np.load(kept) as arrays:
        assert arrays["scaffold"][[0, 1]].tolist() == arrays["scaffold"][[2, 3]].tolist()
        assert arrays["scaffold"][0] != arrays["scaffold"][1]
