"""ogbg-molhiv: ogb's files, or the table that it is made of, HIV.csv of MoleculeNet (SMILES strings and labels).

Of molecules that the table lists twice the first is kept, as ogbg-molhiv has each once. The split is computed as ogb
defines it (`scaffold_split`); ogb's own files hold the result for all of its 41,127 molecules.
"""

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from data.graph import RawGraph
from data.selection import Selection, renumbered
from data.sources.base import Remote, reading
from data.sources.molecules import Molecules, read_molecules, scaffold_split
from data.sources.ogb_graphs import OgbGraphs

logger = logging.getLogger(__name__)

MOLECULENET = "https://deepchemdata.s3-us-west-1.amazonaws.com/datasets/HIV.csv"
TABLES = ("moleculenet/HIV.csv", "moleculenet/HIV.csv.gz", "HIV.csv", "HIV.csv.gz")


class MolHiv(OgbGraphs):
    """ogb's files come first; they are also what is downloaded."""

    def files(self, root: Path) -> Sequence[Remote]:
        table = self._table(root)
        return super().files(root) if table is None else [Remote(MOLECULENET, table)]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        table = self._table(root)
        if table is None:
            return super().load(root, selection)
        molecules, labels = read_table(table)
        splits = scaffold_split(molecules.scaffold)
        graphs, place = np.arange(molecules.rows.size), str(table)
        if selection.split:
            graphs, place = (
                splits[{"val": "valid"}.get(selection.split, selection.split)],
                f"{table}, {selection.split}",
            )
        picked = graphs[selection.pick(graphs.size, place)]
        batch = molecules.batch(picked, selection.described(f"{MOLECULENET}, scaffold split computed"))
        return replace(
            batch,
            graph_labels=labels[picked],
            splits=renumbered(splits, picked, molecules.rows.size),
            graph_ids=picked,
            collection_size=graphs.size,
        )

    def _table(self, root: Path) -> Path | None:
        if self.folder(root).exists():
            return None
        return next((root / name for name in TABLES if (root / name).is_file()), None)


def read_table(table: Path) -> tuple[Molecules, np.ndarray]:
    """The molecules, and their labels [G, 1] float32.

    Raises:
        ValueError: the table is damaged, or RDKit is missing.
    """
    import pandas as pd

    with reading(table):
        rows = pd.read_csv(table, usecols=["smiles", "HIV_active"], dtype={"smiles": str})
        if rows.isna().any(axis=None) or not rows["HIV_active"].isin([0, 1]).all():
            raise ValueError("each row needs a SMILES string and HIV_active 0 or 1")
    first = rows.drop_duplicates("smiles")
    if len(first) < len(rows):
        logger.info(
            "%s: %d of %d rows repeat a molecule; the first of each is kept", table, len(rows) - len(first), len(rows)
        )
    molecules = read_molecules(table, first["smiles"].tolist())
    return molecules, first["HIV_active"].to_numpy(np.float32)[molecules.rows, None]
