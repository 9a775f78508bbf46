"""No test here reaches a network; official data sets are written in their publishers' on-disk layouts."""

import pickle
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import scipy.sparse

import data.download
from data.sources import molecules, zinc


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the tests that need a network unless they are asked for by `-m network`."""
    if "network" in config.getoption("markexpr"):
        return
    for item in items:
        if item.get_closest_marker("network"):
            item.add_marker(pytest.mark.skip(reason="needs a network: pytest -m network"))


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(data.download, "why_unreachable", lambda url: "tests are offline")


@pytest.fixture(autouse=True)
def zinc_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZINC's files are converted here, since a process of its own takes seconds."""

    def convert(files: Sequence[Path]) -> list[dict[str, np.ndarray]]:
        with tempfile.TemporaryDirectory() as folder:
            zinc.convert(folder, *map(str, files))
            return [dict(np.load(Path(folder, f"{number}.npz"))) for number in range(len(files))]

    monkeypatch.setattr(zinc, "convert_apart", convert)


@pytest.fixture
def chains_of_carbon(monkeypatch: pytest.MonkeyPatch) -> None:
    """In place of RDKit: the SMILES string "CCC" is a chain of three atoms, a scaffold of its own."""

    def convert(smiles: Sequence[str]) -> molecules.Molecules:
        assert all(set(text) == {"C"} for text in smiles)
        sizes = np.array([len(text) for text in smiles])
        second = np.concatenate([np.arange(1, size) for size in sizes])
        return molecules.Molecules(
            rows=np.arange(sizes.size),
            sizes=sizes,
            edge_counts=sizes - 1,
            ends=np.stack([second - 1, second], 1).astype(np.uint16),
            atoms=np.full((sizes.sum(), 9), 1, np.uint8),
            bonds=np.full((second.size, 3), 1, np.uint8),
            scaffold=sizes.astype(np.int32),
        )

    monkeypatch.setattr(molecules, "convert", convert)
    monkeypatch.setattr(molecules, "has_rdkit", lambda: True)


@pytest.fixture
def write_planetoid() -> Callable[..., None]:
    """Writes `ind.NAME.*` as kimiyoung/planetoid publishes them: pickles, test nodes last and in shuffled order."""

    def write(folder: Path, row: np.ndarray, col: np.ndarray, num_nodes: int, name: str = "cora_v2") -> None:
        folder.mkdir(parents=True)
        rng = np.random.default_rng(0)
        features = scipy.sparse.csr_matrix(
            np.eye(num_nodes, 12, dtype=np.float32) + (rng.random((num_nodes, 12)) < 0.1)
        )
        classes = {"citeseer": 6, "pubmed": 3}.get(name, 7)
        one_hot = np.eye(classes, dtype=np.int32)[np.arange(num_nodes) % classes]
        train, rest, test = 20, num_nodes - 50, rng.permutation(np.arange(num_nodes - 50, num_nodes))
        neighbours = {node: [] for node in range(num_nodes)}
        for i, j in zip(row.tolist(), col.tolist(), strict=True):
            neighbours[i].append(j)
        parts = {
            "x": features[:train],
            "y": one_hot[:train],
            "allx": features[:rest],
            "ally": one_hot[:rest],
            "tx": features[test],
            "ty": one_hot[test],
            "graph": neighbours,
        }
        for part, content in parts.items():
            (folder / f"ind.{name}.{part}").write_bytes(pickle.dumps(content))
        (folder / f"ind.{name}.test.index").write_text("".join(f"{node}\n" for node in test))

    return write


@pytest.fixture
def write_molhiv() -> Callable[..., None]:
    """Writes three molecules as OGB publishes them: gzipped csv files without headers, each bond once."""

    def write(folder: Path) -> None:
        (folder / "raw").mkdir(parents=True)
        (folder / "RELEASE_v1.txt").write_text("")
        atoms = np.zeros((9, 9), int)
        atoms[:, 0] = [5, 5, 7, 5, 6, 5, 5, 5, 16]
        tables = {
            "edge": [(0, 1), (1, 2), (0, 1), (0, 1), (1, 2), (2, 3), (3, 0)],
            "num-node-list": [(3,), (2,), (4,)],
            "num-edge-list": [(2,), (1,), (4,)],
            "node-feat": atoms.tolist(),
            "edge-feat": [(0, 0, 0)] * 7,
            "graph-label": [(0,), (1,), (0,)],
        }
        for name, rows in tables.items():
            pd.DataFrame(rows).to_csv(folder / "raw" / f"{name}.csv.gz", header=False, index=False)
        for part, rows in {"train": [0], "valid": [1], "test": [2]}.items():
            (folder / "split" / "scaffold").mkdir(parents=True, exist_ok=True)
            pd.DataFrame(rows).to_csv(folder / "split" / "scaffold" / f"{part}.csv.gz", header=False, index=False)

    return write
