"""Molecules from SMILES strings, with ogb's atom and bond codes: `ogb.utils.smiles2graph`, which needs RDKit.

The conversion takes about two milliseconds a molecule. Its result is kept beside the table as an .npz without pickles,
so that RDKit is needed once only.
"""

import hashlib
import importlib.util
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.graph import RawGraph
from data.kept import keep, read_kept
from data.packed import join_graphs, rows_of
from data.sources.ogb_import import import_ogb

logger = logging.getLogger(__name__)

MISSING_RDKIT = "converting SMILES strings to graphs needs RDKit, which is not installed (pip install rdkit)"


@dataclass(frozen=True, eq=False)
class Molecules:
    """Molecules of a table, packed; those that RDKit cannot parse are left out.

    Attributes:
        rows: [G] int64, row of each molecule in the table.
        sizes: [G] int64, atoms.
        edge_counts: [G] int64, bonds.
        ends: [E, 2] uint16, the atoms of each bond, listed once.
        atoms: [N, 9] uint8, ogb's codes.
        bonds: [E, 3] uint8, ogb's codes.
        scaffold: [G] int32, molecules with equal numbers have the same Bemis-Murcko scaffold (without chirality).
    """

    rows: np.ndarray
    sizes: np.ndarray
    edge_counts: np.ndarray
    ends: np.ndarray
    atoms: np.ndarray
    bonds: np.ndarray
    scaffold: np.ndarray

    def batch(self, picked: np.ndarray, origin: str) -> RawGraph:
        """The block-diagonal graph of the picked molecules: both directions of each bond, int64 codes."""
        nodes, edges = rows_of(picked, self.sizes), rows_of(picked, self.edge_counts)
        return join_graphs(
            self.sizes[picked],
            self.edge_counts[picked],
            self.ends[edges].astype(np.int64),
            self.atoms[nodes].astype(np.int64),
            self.bonds[edges].astype(np.int64),
            origin,
        )


FIELDS = tuple(Molecules.__dataclass_fields__)


def has_rdkit() -> bool:
    return importlib.util.find_spec("rdkit") is not None


def read_molecules(table: Path, smiles: Sequence[str]) -> Molecules:
    """The molecules of the SMILES strings of a table, from the kept file if there is one, else with RDKit.

    Raises:
        ValueError: RDKit is missing, and there is no kept file that can be used (a warning says why).
    """
    digest = hashlib.sha256("\n".join(smiles).encode()).hexdigest()[:16]
    kept = table.parent / f"{table.name.split('.')[0]}.{digest}.npz"
    if arrays := read_kept(kept, "", _check_kept):
        return Molecules(**{name: arrays[name] for name in FIELDS})
    if not has_rdkit():
        unusable = f", and {kept} cannot be used" if kept.is_file() else ""
        raise ValueError(f"{table}: {MISSING_RDKIT}{unusable}")
    logger.info("%s: converting %s SMILES strings, once", table, f"{len(smiles):,}")
    molecules = convert(smiles)
    if missing := len(smiles) - molecules.rows.size:
        first = np.setdiff1d(np.arange(len(smiles)), molecules.rows)[0]
        text = "%s: RDKit cannot parse %d of %d SMILES strings, which are left out; the first is %r"
        logger.warning(text, table, missing, len(smiles), smiles[first])
    keep(kept, {name: getattr(molecules, name) for name in FIELDS}, compressed=True)
    return molecules


def _check_kept(arrays: Mapping[str, np.ndarray]) -> None:
    molecules = Molecules(**{name: arrays[name] for name in FIELDS})
    rows = molecules.sizes.sum(), molecules.edge_counts.sum(), molecules.edge_counts.sum()
    if rows != (len(molecules.atoms), len(molecules.bonds), len(molecules.ends)):
        raise ValueError("its arrays do not fit together")


def convert(smiles: Sequence[str]) -> Molecules:
    """Convert SMILES strings with RDKit, without its messages."""
    from rdkit import Chem, rdBase
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    smiles2graph: Callable[[str], dict[str, Any]] = import_ogb("utils.mol").smiles2graph
    rows, graphs, scaffolds = [], [], []
    with rdBase.BlockLogs():
        for row, text in enumerate(smiles):
            molecule = Chem.MolFromSmiles(text)
            if molecule is not None and molecule.GetNumAtoms():
                rows.append(row)
                graphs.append(smiles2graph(text))
                scaffolds.append(MurckoScaffoldSmiles(mol=molecule, includeChirality=False))
    if not rows:
        raise ValueError("RDKit can parse none of the SMILES strings")
    return Molecules(
        rows=np.array(rows),
        sizes=np.array([graph["num_nodes"] for graph in graphs]),
        edge_counts=np.array([graph["edge_index"].shape[1] // 2 for graph in graphs]),
        # Every bond is listed twice in a row: begin and end, then end and begin.
        ends=np.concatenate([graph["edge_index"].T[::2] for graph in graphs]).astype(np.uint16),
        atoms=np.concatenate([graph["node_feat"] for graph in graphs]).astype(np.uint8),
        bonds=np.concatenate([graph["edge_feat"][::2] for graph in graphs]).astype(np.uint8),
        scaffold=np.unique(scaffolds, return_inverse=True)[1].astype(np.int32),
    )


def scaffold_split(scaffold: np.ndarray) -> dict[str, np.ndarray]:
    """The deterministic 80/10/10 split by scaffold of MoleculeNet and ogb: molecules of one scaffold stay together.

    Scaffolds are taken from the one with the most molecules on (of equal ones the one that begins last). Each goes to
    the training part if it still fits there, else to the validation part if the two together hold no more than 90 %,
    else to the test part.

    Args:
        scaffold: [G], equal for molecules of one scaffold.
    """
    order = np.argsort(scaffold, kind="stable")
    _, starts, counts = np.unique(scaffold[order], return_index=True, return_counts=True)
    groups = np.split(order, starts[1:])
    parts = {"train": [], "valid": [], "test": []}
    filled, most = {"train": 0, "valid": 0}, 0.8 * scaffold.size
    for group in np.lexsort((order[starts], counts))[::-1]:
        size = int(counts[group])
        if filled["train"] + size <= most:
            part = "train"
        elif filled["train"] + filled["valid"] + size <= 0.9 * scaffold.size:
            part = "valid"
        else:
            part = "test"
        parts[part].append(groups[group])
        filled[part] = filled.get(part, 0) + size
    return {
        part: np.sort(np.concatenate(chosen)) if chosen else np.empty(0, np.int64) for part, chosen in parts.items()
    }
