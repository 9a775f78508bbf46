"""Collections of small graphs through their classes in `dgl.data`: ZINC and the Long Range Graph Benchmark (LRGB).

The published run's split is `train`. LRGB's classes unpickle their publisher's own files, and no others.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.graph import RawGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote, batch_of, from_dgl
from data.sources.dgl_graphs import dgl_class, located, reading_with_dgl

PUBLISHED_SPLIT = "train"


def lrgb_class(name: str) -> Any:
    """The class of that name in `dgl.data.lrgb`, a module that by itself imports only where RDKit is installed."""
    from data.sources.ogb_import import import_ogb

    utils = import_ogb("utils")
    lacks_rdkit = not hasattr(utils, "smiles2graph")
    if lacks_rdkit:  # which only Peptides' first step needs, see `_require_rdkit`
        utils.smiles2graph = None
    try:
        return getattr(importlib.import_module("dgl.data.lrgb"), name)
    finally:
        if lacks_rdkit:
            del utils.smiles2graph


@dataclass(frozen=True)
class Zinc(OfficialSource):
    """ZINC-12k."""

    def files(self, root: Path) -> Sequence[Remote]:
        there = located(dgl_class("ZINCDataset"), root)
        return [Remote(there.url, Path(there.raw_path))]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        (remote,) = self.files(root)
        split = selection.split or PUBLISHED_SPLIT
        mode = {"val": "valid"}.get(split, split)
        with reading_with_dgl(remote.target):
            graphs = dgl_class("ZINCDataset")(mode=mode, raw_dir=str(root))._graphs
        batch = batch_of(graphs, selection, f"{remote.target}, {split}")
        return from_dgl(batch, selection.described(remote.url), batched=True)


@dataclass(frozen=True)
class Superpixels(OfficialSource):
    """PascalVOC-SP or COCO-SP with SLIC compactness 30 and edges between touching regions, which is LRGB's choice.

    Attributes:
        class_name: VOCSuperpixelsDataset or COCOSuperpixelsDataset.
        folder: the folder in the archive.
    """

    class_name: str
    folder: str

    def files(self, root: Path) -> Sequence[Remote]:
        there = located(lrgb_class(self.class_name), root)
        return [Remote(there.url.strip(), Path(there.save_path), member=self.folder)]  # DGL's URLs hold line breaks

    def load(self, root: Path, selection: Selection) -> RawGraph:
        (remote,) = self.files(root)
        split = selection.split or PUBLISHED_SPLIT
        with reading_with_dgl(remote.target):
            graphs = lrgb_class(self.class_name)(raw_dir=str(root), split=split, verbose=False).graphs
        batch = batch_of(graphs, selection, f"{remote.target}, {split}")
        return from_dgl(batch, selection.described(remote.url), batched=True)


@dataclass(frozen=True)
class Peptides(OfficialSource):
    """Peptides-func or Peptides-struct. Making the graphs from SMILES strings, which is done once, needs RDKit.

    Attributes:
        class_name: PeptidesFunctionalDataset or PeptidesStructuralDataset.
    """

    class_name: str

    def files(self, root: Path) -> Sequence[Remote]:
        there = located(lrgb_class(self.class_name), root)
        molecules = Remote(there.url.strip(), Path(there.raw_data_path), known_hash=f"md5:{there.md5sum_data}")
        split_url, split_md5 = there.url_stratified_split.strip(), there.md5sum_stratified_split
        return [molecules, Remote(split_url, Path(there.split_data_path), known_hash=f"md5:{split_md5}")]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        loader = lrgb_class(self.class_name)
        there = located(loader, root)
        folder = Path(there.raw_path)
        if not there.has_cache():
            _require_rdkit(folder)
        split = selection.split or PUBLISHED_SPLIT
        with reading_with_dgl(folder):
            dataset = loader(raw_dir=str(root), verbose=False)
            graphs = [dataset.graphs[i] for i in dataset.get_idx_split()[split].tolist()]
        batch = batch_of(graphs, selection, f"{folder}, {split}")
        return from_dgl(batch, selection.described(there.url.strip()), batched=True)


def _require_rdkit(folder: Path) -> None:
    try:
        import rdkit  # noqa: F401
    except ImportError as error:
        raise ValueError(
            f"{folder}: holds SMILES strings; making graphs of them needs RDKit, which is not installed "
            "(pip install rdkit, then load again)"
        ) from error
