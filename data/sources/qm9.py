"""QM9 (Ramakrishnan et al. 2014) from the package `qm9pack`: molecules of up to 9 heavy atoms, with positions of their
atoms and properties computed by B3LYP. The package leaves out the 3,054 molecules that failed a consistency check.

The package's tables are converted once, to `<root>/qm9/qm9.npz`, which may also be copied there. An atom attends to all
atoms within CUTOFF of it, itself included. The features of this edge are the values of NUM_CENTRES Gaussians of the
distance. Node features are the element and the number of atoms of the molecule, which a mean over the atoms hides.

The split is random, and the same for all targets: 110,000 molecules for training, 10,000 for validation, the rest for
the test.
"""

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.atomic import made_once
from data.canonical import to_csr
from data.errors import DatasetMissingError, reading
from data.graph import CsrGraph
from data.memory import LOADING_BYTES_PER_EDGE, require_memory
from data.packed import consecutive, rows_of
from data.selection import Selection, renumbered
from data.sources.base import OfficialSource, Remote
from data.synthetic.random import shuffled

URL = "https://pypi.org/project/qm9pack"
VERSION = "1.0.3"
TABLES = ("qm9_part1.csv", "qm9_part2.csv", "qm9_part3.csv")
ELEMENTS = {"H": 1, "C": 6, "N": 7, "O": 8, "F": 9}  # atomic numbers; a code is a place in this table
# Published with the data, in hartree: U0 of single atoms.
ATOM_U0 = {"H": -0.500273, "C": -37.846772, "N": -54.583861, "O": -75.064579, "F": -99.718730}
HARTREE = 27.211386245988  # eV
# Column of the tables, and its unit in that of the target.
TARGETS = {
    "mu": ("Dipole_debye", 1.0),
    "alpha": ("Polarizability_bohr3", 1.0),
    "gap": ("HOMO_LUMO_gap_au", HARTREE),
    "r2": ("R2_bohr2", 1.0),
    "u0": ("InternalEnergy_0K_au", HARTREE),
}
COLUMNS = tuple(column for column, _ in TARGETS.values())
PARTS = {"train": 110_000, "val": 10_000}
SPLIT_SEED = 0
CUTOFF = 5.0  # angstrom
NUM_CENTRES = 16
BYTES_PER_PAIR = 4 * NUM_CENTRES + LOADING_BYTES_PER_EDGE


@dataclass(frozen=True)
class Qm9(OfficialSource):
    """QM9 with one target.

    Attributes:
        target: a name of TARGETS; of u0 the energies of the single atoms are subtracted.
    """

    target: str

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(URL, root / "qm9" / "qm9.npz")]

    def fetch(self, root: Path) -> None:
        with made_once(self.files(root)[0].target) as unfinished:
            if unfinished is not None:
                np.savez_compressed(unfinished, **converted(installed_tables()))

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        path = self.files(root)[0].target
        with reading(path), np.load(path, allow_pickle=False) as file:
            sizes, numbers, positions, values = (file[key] for key in ("sizes", "numbers", "positions", self.target))
            sizes = sizes.astype(np.int64)
        graphs = split_of(sizes.size)
        picked, available = selection.pick(sizes.size, str(path), graphs)
        atoms = rows_of(picked, sizes)
        element = np.searchsorted(list(ELEMENTS.values()), numbers[atoms])
        label = values[picked] * TARGETS[self.target][1]
        if self.target == "u0":
            owner = np.repeat(np.arange(picked.size), sizes[picked])
            of_atoms = np.array(list(ATOM_U0.values()))[element]
            label -= HARTREE * np.bincount(owner, of_atoms, picked.size)
        sizes = sizes[picked]
        positions = positions[atoms]
        graph = to_csr(
            *near_pairs(positions, sizes),
            atoms.size,
            selection.described(URL),
            graph_sizes=sizes,
            ndata={"feat": np.stack([element, np.repeat(sizes, sizes)], 1)},
            graph_labels=label.astype(np.float32)[:, None],
            splits=renumbered(graphs, picked, len(values)),
            graph_ids=picked,
            collection_size=available,
        )
        if selection.edge_features:
            return replace(graph, edata={"feat": gaussians(_distance(positions, graph.row, graph.col))})
        return graph


def split_of(count: int) -> dict[str, np.ndarray]:
    """Ids of the molecules of each part."""
    order = shuffled(np, np.arange(count), SPLIT_SEED, 0)
    sizes = PARTS | {"test": count - sum(PARTS.values())}
    return {part: np.sort(order[places]) for part, places in consecutive(sizes).items()}


def near_pairs(positions: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both ends [nnz] of all pairs of atoms of a molecule within CUTOFF, each atom and itself included.

    Args:
        positions: [N, 3] in angstrom; sizes: [B] atoms of each molecule.
    """
    from scipy.spatial import cKDTree

    require_memory(f"QM9: {sizes.size:,} molecules", int((sizes**2).sum()) * BYTES_PER_PAIR)
    apart = positions.astype(np.float64)  # molecules one beside the other, too far for a pair of two of them
    apart[:, 0] += np.repeat(np.arange(sizes.size) * (np.ptp(apart[:, 0]) + 2 * CUTOFF), sizes)
    first, second = cKDTree(apart).query_pairs(1.001 * CUTOFF, output_type="ndarray").T
    near = _distance(positions, first, second) <= CUTOFF
    first, second, own = first[near], second[near], np.arange(len(positions))
    return np.concatenate([first, second, own]), np.concatenate([second, first, own])


def _distance(positions: np.ndarray, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return np.linalg.norm(positions[first] - positions[second], axis=1)


def gaussians(distance: np.ndarray) -> np.ndarray:
    """[n] -> [n, NUM_CENTRES] float32: Gaussians of unit height around centres from 0 to CUTOFF, as wide as their
    spacing."""
    centres = np.linspace(0, CUTOFF, NUM_CENTRES, dtype=np.float32)
    found = distance.astype(np.float32)[:, None] - centres
    found /= centres[1]  # in place: the largest array of the process
    np.square(found, out=found)
    found *= -0.5
    return np.exp(found, out=found)


def installed_tables() -> Path:
    """The folder of the package's tables. Its import would need pkg_resources, which setuptools has dropped."""
    spec = importlib.util.find_spec("qm9pack")
    if spec is None:
        raise DatasetMissingError(
            f"QM9 comes with the package qm9pack, which is not installed: pip install qm9pack=={VERSION} (104 MB)"
        )
    return Path(spec.submodule_search_locations[0], "data")


def converted(tables: Path) -> dict[str, np.ndarray]:
    """Arrays of the kept file: sizes [G], numbers [N], positions [N, 3] float32 and the targets [G] float64. Molecules
    are in the order of their published numbers."""
    import pandas as pd

    columns = ["Index", "Elements", "XYZ_Ang", *COLUMNS]
    with reading(tables):
        table = pd.concat([pd.read_csv(tables / name, usecols=columns) for name in TABLES]).sort_values("Index")
        elements = table["Elements"].str.findall("[A-Z][a-z]*")
        numbers = elements.explode().map(ELEMENTS).to_numpy(np.float64)
        text = ",".join(table["XYZ_Ang"]).translate(str.maketrans("", "", "[]"))
        positions = np.fromstring(text, np.float64, sep=",").reshape(-1, 3).astype(np.float32)
        if len(numbers) != len(positions) or np.isnan(numbers).any():
            raise ValueError(f"{len(numbers)} elements for {len(positions)} positions; {', '.join(ELEMENTS)} are known")
    targets = {name: table[column].to_numpy(np.float64) for name, (column, _) in TARGETS.items()}
    sizes = elements.str.len().to_numpy(np.uint8)
    return {"sizes": sizes, "numbers": numbers.astype(np.uint8), "positions": positions, **targets}
