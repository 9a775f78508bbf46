"""No test here reaches a network; official data sets are written in their publishers' on-disk layouts."""

import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import requests
import scipy.sparse
import torch

import data


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    def retrieve(*_: Any, **__: Any) -> None:
        raise requests.ConnectionError("tests are offline")

    monkeypatch.setattr("pooch.retrieve", retrieve)


@pytest.fixture
def real(real_graph_dir: Path) -> Callable[[str], dict[str, np.ndarray]]:
    """The arrays of a real graph or collection, such as "single/cora", as int64."""

    def read(name: str) -> dict[str, np.ndarray]:
        path = real_graph_dir / f"{name}.npz"
        if not path.is_file():
            pytest.skip(f"{path} is not there")
        with np.load(path) as archive:
            return {key: archive[key].astype(np.int64) for key in archive}

    return read


@pytest.fixture
def write_planetoid(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Writes `ind.NAME.*` as kimiyoung/planetoid publishes them: pickles, test nodes last and in shuffled order. Their
    contents are others, of which no hash is known."""

    def write(folder: Path, name: str, row: np.ndarray, col: np.ndarray, num_nodes: int) -> None:
        monkeypatch.setitem(vars(data.info(name).official), "sha256", {})
        folder.mkdir(parents=True, exist_ok=True)
        rng = np.random.default_rng(0)
        noise = rng.random((num_nodes, 12)) < 0.1
        features = scipy.sparse.csr_matrix(np.eye(num_nodes, 12, dtype=np.float32) + noise, dtype=np.float32)
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
def write_ogb() -> Callable[..., None]:
    """Writes tables as ogb publishes them: gzipped csv files without headers; `split` holds the ids of each part."""

    def write(folder: Path, split_name: str, split: dict[str, list[int]], tables: dict[str, Any]) -> None:
        split_folder = folder / "split" / split_name
        for made in (folder / "raw", split_folder, folder / "processed"):  # the last for ogb's own cache
            made.mkdir(parents=True)
        (folder / "RELEASE_v1.txt").write_text("")
        options = {"compression": {"method": "gzip", "compresslevel": 1}, "header": False, "index": False}
        for name, rows in tables.items():
            pd.DataFrame(rows).to_csv(folder / "raw" / f"{name}.csv.gz", **options)
        for part, ids in split.items():
            pd.DataFrame(ids).to_csv(split_folder / f"{part}.csv.gz", **options)

    return write


Graph = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Any]  # x, edge_attr, edge_index, y


@pytest.fixture
def path_graph() -> Callable[..., Graph]:
    """Makes a path with features that tell the graphs apart."""

    def make(size: int, value: int = 1) -> Graph:
        first, second = torch.arange(size - 1), torch.arange(1, size)
        ends = torch.stack([torch.cat([first, second]), torch.cat([second, first])])
        kinds = torch.arange(2 * (size - 1))[:, None] % 3 + 1
        return torch.full((size, 1), value), kinds, ends, torch.tensor([value / 2])

    return make


@pytest.fixture
def write_zinc() -> Callable[[Path, dict[str, list[Graph]]], None]:
    """Writes molecules as benchmarking-gnns publishes them: pickles of dicts; those in *.index are ZINC-12k."""

    def write(root: Path, splits: dict[str, list[Graph]]) -> None:
        raw = root / "ZINC" / "raw"
        raw.mkdir(parents=True)
        for split, graphs in splits.items():
            molecules = []
            for x, edge_attr, edge_index, y in graphs:
                bonds = torch.zeros(len(x), len(x), dtype=torch.int64)
                bonds[edge_index[0], edge_index[1]] = edge_attr[:, 0]
                molecules.append({"atom_type": x[:, 0], "bond_type": bonds, "logP_SA_cycle_normalized": y})
            other = {**molecules[0], "atom_type": torch.full((1,), 27), "bond_type": torch.zeros(1, 1)}
            (raw / f"{split}.pickle").write_bytes(pickle.dumps([other, *molecules]))
            (raw / f"{split}.index").write_text(",".join(map(str, range(1, len(graphs) + 1))) + "\n")

    return write
