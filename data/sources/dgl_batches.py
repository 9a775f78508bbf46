"""Collections of small graphs through their classes in `dgl.data`: ZINC and the Long Range Graph Benchmark (LRGB).

The published run's split is `train`. LRGB's classes unpickle files, and only their publisher's own.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.graph import RawGraph
from data.selection import Selection, Split
from data.sources.base import OfficialSource, Remote, batch_of, from_dgl
from data.sources.dgl_graphs import dgl_class, located, reading_with_dgl
from data.sources.ogb_import import import_ogb

PUBLISHED_SPLIT: Split = "train"


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
        splits = (selection.split,) if selection.split else self.splits
        graphs = []
        with reading_with_dgl(remote.target):
            for split in splits:
                mode = {"val": "valid"}.get(split, split)
                graphs += dgl_class("ZINCDataset")(mode=mode, raw_dir=str(root))._graphs
        batch = batch_of(graphs, selection, f"{remote.target}, {' and '.join(splits)}")
        return from_dgl(batch, selection.described(remote.url), batched=True)


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
        split = selection.split or PUBLISHED_SPLIT
        with reading_with_dgl(remote.target):
            graphs = lrgb_class(self.class_name)(raw_dir=str(root), split=split, verbose=False).graphs
        batch = batch_of(graphs, selection, f"{remote.target}, {split}")
        return from_dgl(batch, selection.described(remote.url), batched=True)


@dataclass(frozen=True)
class Peptides(OfficialSource):
    """Peptides-func or Peptides-struct. The first load converts SMILES strings to graphs, which needs RDKit.

    Attributes:
        class_name: PeptidesFunctionalDataset or PeptidesStructuralDataset.
    """

    class_name: str

    def files(self, root: Path) -> Sequence[Remote]:
        layout = located(lrgb_class(self.class_name), root)
        molecules = Remote(layout.url.strip(), Path(layout.raw_data_path), known_hash=f"md5:{layout.md5sum_data}")
        split_url, split_md5 = layout.url_stratified_split.strip(), layout.md5sum_stratified_split
        return [molecules, Remote(split_url, Path(layout.split_data_path), known_hash=f"md5:{split_md5}")]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        loader = lrgb_class(self.class_name)
        layout = located(loader, root)
        folder = Path(layout.raw_path)
        if not layout.has_cache():
            _require_rdkit(folder)
        split = selection.split or PUBLISHED_SPLIT
        with reading_with_dgl(folder):
            dataset = loader(raw_dir=str(root), verbose=False)
            graphs = [dataset.graphs[i] for i in dataset.get_idx_split()[split].tolist()]
        batch = batch_of(graphs, selection, f"{folder}, {split}")
        return from_dgl(batch, selection.described(layout.url.strip()), batched=True)


def _require_rdkit(folder: Path) -> None:
    try:
        import rdkit  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{folder}: holds SMILES strings; converting them to graphs needs RDKit, which is not installed "
            "(pip install rdkit, then load again)"
        ) from error
