"""Collections of small graphs through their classes in `dgl.data`: ZINC and the Long Range Graph Benchmark (LRGB).

The published run's split is `train`. LRGB's classes of superpixels unpickle their publisher's files.
"""

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.download import Fetch
from data.errors import DatasetMissingError
from data.graph import PARTS, RawGraph
from data.memory import require_memory
from data.packed import consecutive, rows_of
from data.selection import Selection, Split, renumbered
from data.sources.array_pickle import read_array_pickle
from data.sources.base import OfficialSource, Remote, batch_of, from_dgl, reading
from data.sources.dgl_graphs import dgl_class, located, reading_with_dgl
from data.sources.molecules import MISSING_RDKIT, has_rdkit, read_molecules
from data.sources.ogb_import import import_ogb

PUBLISHED_SPLIT: Split = "train"
# DGL's class reads all pictures of a split, and then makes a DGLGraph with copies of their tensors for each.
BYTES_PER_BYTE_OF_PICKLE = 3


def lrgb_class(name: str) -> Any:
    """A class of `dgl.data.lrgb`, also where RDKit is missing, without which that module cannot be imported."""
    utils = import_ogb("utils")
    lacks_rdkit = not hasattr(utils, "smiles2graph")
    if lacks_rdkit:  # needed only by the first step of Peptides, see `_require_rdkit`
        utils.smiles2graph = None
    try:
        return getattr(importlib.import_module("dgl.data.lrgb"), name)
    finally:
        if lacks_rdkit:
            del utils.smiles2graph


@dataclass(frozen=True)
class Zinc(OfficialSource):
    """ZINC-12k.

    Attributes:
        splits: those taken, one after the other, where the selection names none.
    """

    splits: tuple[Split, ...] = (PUBLISHED_SPLIT,)

    def files(self, root: Path) -> Sequence[Remote]:
        layout = located(dgl_class("ZINCDataset"), root)
        return [Remote(layout.url, Path(layout.raw_path))]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        (remote,) = self.files(root)
        # All graphs of a set that consists of two splits are those two.
        splits = (selection.split,) if selection.split else self.splits
        if selection.batch_size is None and self.splits == (PUBLISHED_SPLIT,):
            splits = selection.split_or(self.splits)
        graphs, labels, sizes = [], [], {}
        with reading_with_dgl(remote.target):
            for split in splits:
                mode = {"val": "valid"}.get(split, split)
                part = dgl_class("ZINCDataset")(mode=mode, raw_dir=str(root))
                graphs += part._graphs
                labels.append(part._labels["g_label"].numpy().astype(np.float32).reshape(len(part), 1))
                sizes[split] = len(part)
        picked = selection.pick(len(graphs), f"{remote.target}, {' and '.join(splits)}")
        raw = from_dgl(batch_of([graphs[i] for i in picked]), selection.described(remote.url), batched=True)
        ids = renumbered(consecutive(sizes), picked, len(graphs))
        whole = {"graph_ids": picked, "collection_size": len(graphs)}
        return replace(raw, graph_labels=np.concatenate(labels)[picked], splits=ids, **whole)


@dataclass(frozen=True)
class Superpixels(OfficialSource):
    """PascalVOC-SP or COCO-SP with LRGB's choices: SLIC compactness 30 and edges between touching regions.

    Attributes:
        class_name: VOCSuperpixelsDataset or COCOSuperpixelsDataset.
        folder: the folder in the archive.
    """

    class_name: str
    folder: str

    def files(self, root: Path) -> Sequence[Remote]:
        layout = located(lrgb_class(self.class_name), root)
        return [Remote(layout.url.strip(), Path(layout.save_path), member=self.folder)]  # DGL's URLs hold line breaks

    def load(self, root: Path, selection: Selection) -> RawGraph:
        (remote,) = self.files(root)
        splits = selection.split_or((PUBLISHED_SPLIT,))
        graphs, sizes = [], {}
        with reading_with_dgl(remote.target):
            for split in splits:
                file = remote.target / f"{split}.pickle"
                if file.is_file():
                    require_memory(f"{file}: its graphs", BYTES_PER_BYTE_OF_PICKLE * file.stat().st_size)
                part = lrgb_class(self.class_name)(raw_dir=str(root), split=split, verbose=False).graphs
                graphs += part
                sizes[split] = len(part)
        picked = selection.pick(len(graphs), f"{remote.target}, {' and '.join(splits)}")
        raw = from_dgl(batch_of([graphs[i] for i in picked]), selection.described(remote.url), batched=True)
        ids = renumbered(consecutive(sizes), picked, len(graphs))
        nodes = {part: np.sort(rows_of(ids[part], raw.graph_sizes)) for part in ids}
        label = raw.ndata["label"].astype(np.int64)
        whole = {"graph_ids": picked, "collection_size": len(graphs)}
        return replace(raw, ndata={**raw.ndata, "label": label}, splits=nodes, **whole)


@dataclass(frozen=True)
class Peptides(OfficialSource):
    """Peptides-func or Peptides-struct: SMILES strings, which the first load converts to graphs with RDKit.

    Attributes:
        class_name: PeptidesFunctionalDataset or PeptidesStructuralDataset.
        targets: columns of Peptides-struct, each scaled to mean 0 and standard deviation 1 over the whole set, as LRGB
            does; empty for Peptides-func, whose column "labels" lists ten classes of 0 and 1.
    """

    class_name: str
    targets: tuple[str, ...] = ()

    def files(self, root: Path) -> Sequence[Remote]:
        layout = located(lrgb_class(self.class_name), root)
        molecules = Remote(layout.url.strip(), Path(layout.raw_data_path), known_hash=f"md5:{layout.md5sum_data}")
        split_url, split_md5 = layout.url_stratified_split.strip(), layout.md5sum_stratified_split
        return [molecules, Remote(split_url, Path(layout.split_data_path), known_hash=f"md5:{split_md5}")]

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
