"""Molecules from a published table of SMILES strings, with ogb's codes of atoms and bonds (`ogb.utils.smiles2graph`).

RDKit converts a table once, which takes minutes. The result is kept below the root as an .npz without pickles; where
that file is, neither the table nor RDKit is needed.
"""

import importlib.util
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic import made_once
from data.errors import reading
from data.files import read_collection
from data.graph import PARTS, CsrGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote
from data.sources.ogb_import import import_ogb
from data.sources.pyg import OgbGraphs

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class SmilesTable(OfficialSource):
    """A table with a molecule a row, and its scaffold split (80 / 10 / 10).

    Of rows with the same SMILES string the first counts. Molecules that RDKit cannot parse are left out.

    Attributes:
        url: address of the table.
        file: its path below the root, a .csv or .tsv; `file`.gz is read, too.
        smiles, label: its columns.
        classes: the texts of the labels 0 and 1.
        package: Python package that holds the table, read if it is not below the root.
    """

    url: str
    file: str
    smiles: str
    label: str
    classes: tuple[str, str]
    package: str = ""

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(self.url, root / self.file)]

    def is_present(self, root: Path) -> bool:
        return self.kept(root).is_file() or self.table(root) is not None

    def kept(self, root: Path) -> Path:
        """The converted table. Arrays as in a collection of `data.files`, with codes: `feat` and `edge_feat`."""
        return (root / self.file).with_suffix(".npz")

    def table(self, root: Path) -> Path | None:
        places = [root / self.file, root / f"{self.file}.gz"]
        if self.package and (found := importlib.util.find_spec(self.package)):
            places.append(Path(found.origin).with_name(Path(self.file).name))
        return next((place for place in places if place.is_file()), None)

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        kept = self.kept(root)
        if not kept.is_file():
            with made_once(kept) as unfinished:
                if unfinished is not None:
                    np.savez_compressed(unfinished, **self._converted(self.table(root), kept))
        origin = selection.described(f"{self.url}, scaffold split computed")
        return replace(read_collection(kept, selection), origin=origin)

    def _converted(self, table: Path, kept: Path) -> Mapping[str, np.ndarray]:
        import pandas as pd

        if importlib.util.find_spec("rdkit") is None:
            raise ValueError(
                f"{table}: converting SMILES strings needs RDKit, which is not installed: pip install "
                f"'.[molecules]' in this clone, or bring {kept} from a machine that has it"
            )
        with reading(table):
            options = {"sep": "\t" if ".tsv" in table.name else ",", "dtype": str, "keep_default_na": False}
            rows = pd.read_csv(table, usecols=[self.smiles, self.label], **options)
            wrong = rows[~rows[self.label].isin(self.classes)]
            if len(wrong):
                row, value = wrong.index[0], wrong[self.label].iloc[0]
                raise ValueError(f"row {row} has {self.label} {value!r}; {' and '.join(self.classes)} are allowed")
        first = rows.drop_duplicates(self.smiles)
        text = "%s: converting %s SMILES strings, once; %s further rows repeat one"
        logger.info(text, table, f"{len(first):,}", f"{len(rows) - len(first):,}")
        smiles = first[self.smiles].tolist()
        parsed, arrays = convert(smiles)
        if missing := len(smiles) - parsed.size:
            text = "%s: RDKit cannot parse %d of %d SMILES strings, which are left out; the first is %r"
            logger.warning(text, table, missing, len(smiles), smiles[np.setdiff1d(np.arange(len(smiles)), parsed)[0]])
        label = (first[self.label] == self.classes[1]).to_numpy(np.uint8)
        return {**arrays, "graph_label": label[parsed, None]}


@dataclass(frozen=True)
class OgbMolecules(OgbGraphs):
    """A set of ogb, from ogb's files, or without them from the table that it was made of.

    Attributes:
        table: fields of its `SmilesTable`.
    """

    table: Mapping[str, Any] = ()

    def is_present(self, root: Path) -> bool:
        return super().is_present(root) or SmilesTable(**self.table).is_present(root)

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        if super().is_present(root):
            return super().load(root, selection)
        return SmilesTable(**self.table).load(root, selection)


def convert(smiles: Sequence[str]) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The molecules that RDKit can parse: their indices [G] int64, and the arrays of `SmilesTable.kept` but labels.

    Raises:
        ValueError: it can parse none.
    """
    from rdkit import Chem, rdBase
    from rdkit.Chem.Scaffolds.MurckoScaffold import MurckoScaffoldSmiles

    smiles2graph = import_ogb("utils.mol").smiles2graph
    parsed, graphs, scaffolds = [], [], []
    with rdBase.BlockLogs():
        for index, text in enumerate(smiles):
            molecule = Chem.MolFromSmiles(text)
            if molecule is not None and molecule.GetNumAtoms():
                parsed.append(index)
                graphs.append(smiles2graph(text))
                scaffolds.append(MurckoScaffoldSmiles(mol=molecule, includeChirality=False))
    if not parsed:
        raise ValueError(f"RDKit can parse none of {len(smiles)} SMILES strings; the first is {smiles[:1]}")
    # smiles2graph lists each bond twice in a row: begin and end, then end and begin.
    u, v = np.concatenate([graph["edge_index"][:, ::2] for graph in graphs], axis=1).astype(np.uint16)
    splits = scaffold_split(scaffolds)
    return np.array(parsed), {
        "node_counts": np.array([graph["num_nodes"] for graph in graphs], np.int32),
        "edge_counts": np.array([graph["edge_index"].shape[1] // 2 for graph in graphs], np.int32),
        "u": u,
        "v": v,
        "feat": np.concatenate([graph["node_feat"] for graph in graphs]).astype(np.uint8),
        "edge_feat": np.concatenate([graph["edge_feat"][::2] for graph in graphs]).astype(np.uint8),
        **{f"{part}_ids": ids.astype(np.int32) for part, ids in splits.items()},
    }


def scaffold_split(scaffolds: Sequence[str]) -> dict[str, np.ndarray]:
    """The split of MoleculeNet and ogb, 80 / 10 / 10: molecules of one scaffold stay together.

    Scaffolds are assigned in descending order of size; of two of the same size, the one whose first molecule comes
    later goes first. A scaffold goes to the training split while that holds at most 80 % of the molecules, then to the
    validation split while both hold at most 90 %, and otherwise to the test split.
    """
    groups: dict[str, list[int]] = {}
    for molecule, scaffold in enumerate(scaffolds):
        groups.setdefault(scaffold, []).append(molecule)
    parts: dict[str, list[int]] = {part: [] for part in PARTS}
    for group in sorted(groups.values(), key=lambda ids: (len(ids), ids[0]), reverse=True):
        train, valid = (len(parts[part]) for part in PARTS[:2])
        if train + len(group) <= 0.8 * len(scaffolds):
            parts["train"] += group
        elif train + valid + len(group) <= 0.9 * len(scaffolds):
            parts["valid"] += group
        else:
            parts["test"] += group
    return {part: np.sort(np.array(ids, np.int64)) for part, ids in parts.items()}
