"""Single graphs of the Open Graph Benchmark through ogb's own class for DGL, which reads csv and DGL's binary files.

The first end of a published edge is the query (see `data`): a paper attends to the papers it cites.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DatasetMissingError
from data.graph import RawGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote, from_dgl
from data.sources.dgl_graphs import reading_with_dgl
from data.sources.ogb_graphs import read_splits
from data.sources.ogb_import import import_ogb


@dataclass(frozen=True)
class OgbSource(OfficialSource):
    """Base class of ogb's single graphs.

    Attributes:
        name: ogb's name of the set, such as "ogbn-arxiv".
    """

    name: str

    def files(self, root: Path) -> Sequence[Remote]:
        folder = self.folder(root)
        try:
            about = self.about()
        except DatasetMissingError as error:  # ogb is missing; a surrogate must not hide existing files
            if folder.exists():
                raise ValueError(f"{folder}: {error}") from error
            raise
        return [Remote(about["url"], folder, member=about["download_name"])]

    def about(self) -> Any:
        """ogb's own record of the set: its URL, version and layout."""
        import pandas as pd

        table = Path(self.package().__file__).with_name("master.csv")
        return pd.read_csv(table, index_col=0, keep_default_na=False)[self.name]

    def package(self) -> Any:
        """`ogb.nodeproppred`."""
        return import_ogb("nodeproppred")

    def folder(self, root: Path) -> Path:
        """The folder in which ogb looks for the set."""
        folder = root / self.name.replace("-", "_")
        alternative = folder.with_name(f"{folder.name}_dgl")
        return alternative if alternative.is_dir() else folder

    def checked_folder(self, root: Path) -> Path:
        """`folder`, after a check of its files: ogb asks at the terminal, or downloads again, if one is missing."""
        about, folder = self.about(), self.folder(root)
        release = f"RELEASE_v{about['version']}.txt"
        raw = ["raw/data.npz"]
        if about["binary"] != "True":
            raw = ["raw/edge.csv.gz"]
            if about["has_node_attr"] == "True":
                raw.append("raw/node-feat.csv.gz")  # ogb itself accepts its absence
        processed = (folder / "processed" / "dgl_data_processed").is_file()
        if not all((folder / name).is_file() for name in [release, *(raw if not processed else [])]):
            raise ValueError(
                f"{folder}: incomplete, or of another version; {', '.join([release, *raw])} are needed. Move the "
                "folder away and load again to download it again"
            )
        return folder


class OgbNodes(OgbSource):
    """An ogbn set: one graph with features, labels and the official split."""

    def load(self, root: Path, selection: Selection) -> RawGraph:
        folder = self.checked_folder(root)
        with reading_with_dgl(folder):
            graph, labels = self.package().DglNodePropPredDataset(name=self.name, root=str(root))[0]
            splits = read_splits(folder / "split" / self.about()["split"])
        raw = from_dgl(graph, self.about()["url"])
        label = labels.numpy().reshape(-1).astype(np.int64)
        return replace(raw, row=raw.col, col=raw.row, ndata={**raw.ndata, "label": label}, splits=splits)
