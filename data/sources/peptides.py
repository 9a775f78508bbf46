"""Peptides-func and Peptides-struct of the Long Range Graph Benchmark (LRGB): a table of SMILES strings and a split."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.download import Fetch
from data.errors import DatasetMissingError
from data.graph import PARTS, RawGraph
from data.selection import Selection, Split, renumbered
from data.sources.array_pickle import read_array_pickle
from data.sources.base import OfficialSource, Remote, reading
from data.sources.molecules import MISSING_RDKIT, has_rdkit, read_molecules

PUBLISHED_SPLIT: Split = "train"


@dataclass(frozen=True)
class LrgbFile:
    """A file with the checksum that `dgl.data.lrgb` states."""

    url: str
    file: str
    md5: str


@dataclass(frozen=True)
class Peptides(OfficialSource):
    """Peptides-func or Peptides-struct: SMILES strings, which the first load converts to graphs with RDKit.

    Attributes:
        folder: folder below the root, where `dgl.data.lrgb` looks for the files.
        table: molecules and labels, gzipped csv.
        parts: the split, a pickle of three arrays.
        targets: columns of Peptides-struct, each scaled to mean 0 and standard deviation 1 over the whole set, as LRGB
            does; empty for Peptides-func, whose column "labels" lists ten classes of 0 and 1.
    """

    folder: str
    table: LrgbFile
    parts: LrgbFile
    targets: tuple[str, ...] = ()

    def files(self, root: Path) -> Sequence[Remote]:
        published = (self.table, self.parts)
        return [Remote(one.url, root / self.folder / one.file, known_hash=f"md5:{one.md5}") for one in published]

    def fetch(self, root: Path, fetch: Fetch) -> None:
        if not has_rdkit() and not all(remote.target.exists() for remote in self.files(root)):
            raise DatasetMissingError(MISSING_RDKIT)
        super().fetch(root, fetch)

    def load(self, root: Path, selection: Selection) -> RawGraph:
        import pandas as pd

        table, split_file = (remote.target for remote in self.files(root))
        with reading(table):
            rows = pd.read_csv(table)
            smiles = rows["smiles"].tolist()
            if self.targets:
                columns = rows[list(self.targets)]
                labels = ((columns - columns.mean()) / columns.std()).to_numpy(np.float32)
            else:
                labels = np.array([json.loads(text) for text in rows["labels"]], np.float32)
            if labels.ndim != 2 or not all(isinstance(text, str) for text in smiles):
                raise ValueError("each row needs a SMILES string, and as many labels as the others")
        molecules = read_molecules(table, smiles)
        if molecules.rows.size != len(rows):
            raise ValueError(f"{table}: this version of RDKit cannot parse all of its molecules; install another")
        with reading(split_file):
            ids = read_array_pickle(split_file)
            splits = {part: ids[{"valid": "val"}.get(part, part)].astype(np.int64) for part in PARTS}
        if selection.split or selection.batch_size is not None:
            split = selection.split or PUBLISHED_SPLIT
            graphs, place = splits[{"val": "valid"}.get(split, split)], f"{table.parent}, {split}"
        else:
            graphs, place = np.arange(len(rows)), str(table.parent)
        picked = graphs[selection.pick(graphs.size, place)]
        batch = molecules.batch(picked, selection.described(self.files(root)[0].url))
        splits = renumbered(splits, picked, len(rows))
        whole = {"graph_ids": picked, "collection_size": graphs.size}
        return replace(batch, graph_labels=labels[picked], splits=splits, **whole)
