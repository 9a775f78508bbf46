"""QM9 from tables in the form of the package, against the molecules that were written."""

import json
import sys

import numpy as np
import pandas as pd
import pytest

import data
from data.sources import qm9

COUNT = 14
ATOM_U0 = {"H": -0.500273, "C": -37.846772, "N": -54.583861, "O": -75.064579, "F": -99.718730}


@pytest.fixture
def molecules():
    """Molecules of 1 to 29 atoms, some farther apart than the cutoff."""
    rng = np.random.default_rng(0)
    found = []
    for index in range(COUNT):
        count = [1, 29][index] if index < 2 else int(rng.integers(2, 12))
        found.append(
            {
                "Index": 100 + index,
                "Elements": rng.choice(list(ATOM_U0), count).tolist(),
                "XYZ_Ang": np.round(rng.uniform(-4, 4, (count, 3)), 10).tolist(),
                **dict(zip(qm9.COLUMNS, rng.uniform(1, 9, len(qm9.COLUMNS)), strict=True)),
            }
        )
    return found


@pytest.fixture
def package(tmp_path, monkeypatch, molecules):
    """The package with these molecules in its three tables, the last ones first."""
    monkeypatch.setattr(qm9, "PARTS", {"train": 7, "val": 4})
    tables = tmp_path / "site" / "qm9pack" / "data"
    tables.mkdir(parents=True)
    (tables.parent / "__init__.py").write_text("raise ImportError('needs pkg_resources')\n")
    rows = [
        one
        | {
            "N_atoms": len(one["Elements"]),
            "Elements": str(one["Elements"]).replace(" ", ""),
            "XYZ_Ang": json.dumps(one["XYZ_Ang"]).replace(" ", ""),
            "SMILES": "C",
        }
        for one in molecules
    ]
    for name, part in zip(qm9.TABLES, (rows[9:], rows[4:9], rows[:4]), strict=True):
        pd.DataFrame(part).to_csv(tables / name, index=False)
    monkeypatch.syspath_prepend(tables.parents[1])
    return tables


def test_atoms_pairs_and_targets(tmp_path, package, molecules):
    root = tmp_path / "root"
    gap = data.load("qm9-gap", root=root, batch_size=None, edge_features=True)
    energy = data.load("qm9-u0", root=root, batch_size=None)
    assert [path.name for path in (root / "qm9").glob("*.npz")] == ["qm9.npz"]
    assert (gap.metric, gap.meta.unit, gap.meta.num_classes) == ("rmse", "eV", 1)
    centres = np.linspace(0, 5, 16)
    node, edge, far = 0, 0, 0
    for number, one in enumerate(molecules):
        elements, positions = one["Elements"], np.array(one["XYZ_Ang"])
        size = len(elements)
        expected = [[list(ATOM_U0).index(symbol), size] for symbol in elements]
        assert gap.node_data["feat"][node : node + size].tolist() == expected
        assert gap.labels[number].item() == pytest.approx(27.211386 * one["HOMO_LUMO_gap_au"], rel=1e-6)
        atoms = sum(ATOM_U0[symbol] for symbol in elements)
        expected = 27.211386 * (one["InternalEnergy_0K_au"] - atoms)
        assert energy.labels[number].item() == pytest.approx(expected, rel=1e-6)
        for query in range(size):
            keys = gap.columns[gap.row_pointers[node + query] : gap.row_pointers[node + query + 1]] - node
            distances = [
                np.sqrt(sum((a - b) ** 2 for a, b in zip(positions[query], other, strict=True))) for other in positions
            ]
            assert keys.tolist() == [key for key in range(size) if distances[key] <= 5]
            far += size - len(keys)
            for key in keys.tolist():
                width = 5 / 15
                expected = np.exp(-((distances[key] - centres) ** 2) / (2 * width**2))
                np.testing.assert_allclose(gap.edge_data["feat"][edge], expected, atol=2e-6)
                edge += 1
        node += size
    assert (edge, node) == (gap.meta.num_edges, gap.meta.num_nodes)
    assert far > 20


def test_the_split_is_random_and_of_all_targets(tmp_path, package):
    first, second = (data.load(f"qm9-{name}", root=tmp_path, batch_size=None) for name in ("mu", "r2"))
    sizes = {part: len(ids) for part, ids in first.splits.items()}
    assert sizes == {"train": 7, "valid": 4, "test": 3}
    assert np.sort(np.concatenate(list(first.splits.values()))).tolist() == list(range(COUNT))
    assert first.splits["train"].tolist() != list(range(7))
    assert {part: ids.tolist() for part, ids in first.splits.items()} == {
        part: ids.tolist() for part, ids in second.splits.items()
    }
    held_out = data.load("qm9-mu", root=tmp_path, batch_size=None, split="val")
    assert held_out.graph_ids.tolist() == first.splits["valid"].tolist()
    assert held_out.labels.equal(first.labels[first.splits["valid"]])


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "qm9pack", None)
    with pytest.raises(data.DatasetMissingError, match=r"qm9-mu: .*pip install qm9pack==1\.0\.3"):
        data.load("qm9-mu", root=tmp_path)


def test_an_unknown_element_is_named(tmp_path, package):
    path = package / "qm9_part1.csv"
    path.write_text(path.read_text().replace("'C'", "'Si'"))
    with pytest.raises(ValueError, match=r"positions; H, C, N, O, F are known"):
        data.load("qm9-mu", root=tmp_path)
