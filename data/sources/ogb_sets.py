"""Open Graph Benchmark sets through ogb's own classes for DGL.

Nothing here unpickles: those classes read csv, npz and DGL's binary files, and for the labels of ogbg-code2 call
`torch.load` with its safe default.

The first end of a published edge is the query (see `data`): a paper attends to those that it cites, a node of a syntax
tree to its children. Only so has ogbg-code2 the paper's number of blocks; the other way round a window of 16 rows, each
with one parent, fills 2 blocks at most.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.errors import DatasetMissingError
from data.graph import RawGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote, batch_of, from_dgl
from data.sources.dgl_graphs import reading_with_dgl


@dataclass(frozen=True)
class OgbSource(OfficialSource):
    """What ogb's sets share.

    Attributes:
        name: ogb's name of the set, such as "ogbg-molhiv".
    """

    name: str

    def files(self, root: Path) -> Sequence[Remote]:
        folder = self.folder(root)
        try:
            about = self.about()
        except DatasetMissingError as error:  # of the library: a stand-in must not hide files that are there
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
        """`ogb.nodeproppred` or `ogb.graphproppred`, whichever has the set."""
        from data.sources.ogb_import import import_ogb  # it imports DGL and torch

        return import_ogb("nodeproppred" if self.name.startswith("ogbn") else "graphproppred")

    def folder(self, root: Path) -> Path:
        """Where ogb looks for the set."""
        folder = root / self.name.replace("-", "_")
        alternative = folder.with_name(f"{folder.name}_dgl")
        return alternative if alternative.is_dir() else folder

    def checked_folder(self, root: Path) -> Path:
        """`folder`, with the files without which ogb would ask at the terminal, or download over what is there."""
        about, folder = self.about(), self.folder(root)
        release = f"RELEASE_v{about['version']}.txt"
        raw = ["raw/data.npz"]
        if about["binary"] != "True":
            raw = ["raw/edge.csv.gz"]
            if about["has_node_attr"] == "True":
                raw.append("raw/node-feat.csv.gz")  # without which ogb would go on
        processed = (folder / "processed" / "dgl_data_processed").is_file()
        if not all((folder / name).is_file() for name in [release, *(raw if not processed else [])]):
            raise ValueError(
                f"{folder}: incomplete, or of another version; {', '.join([release, *raw])} must be there. Move the "
                "folder away and load again to fetch it anew"
            )
        return folder


class OgbGraphs(OgbSource):
    """Graphs of an ogbg set as one batch without edge features; the published run took them from the set as a whole."""

    def load(self, root: Path, selection: Selection) -> RawGraph:
        folder = self.checked_folder(root)
        with reading_with_dgl(folder):
            dataset = self.package().DglGraphPropPredDataset(name=self.name, root=str(root))
            graphs = dataset.graphs
            if selection.split:
                ids = dataset.get_idx_split()[{"val": "valid"}.get(selection.split, selection.split)]
                graphs = [graphs[i] for i in ids.tolist()]
        batch = batch_of(graphs, selection, f"{folder}, {selection.split}" if selection.split else str(folder))
        raw = from_dgl(batch, selection.described(self.about()["url"]), batched=True)
        return replace(raw, row=raw.col, col=raw.row)


class OgbNodes(OgbSource):
    """An ogbn set: one graph with features and labels."""

    def load(self, root: Path, selection: Selection) -> RawGraph:
        folder = self.checked_folder(root)
        with reading_with_dgl(folder):
            graph, labels = self.package().DglNodePropPredDataset(name=self.name, root=str(root))[0]
        raw = from_dgl(graph, self.about()["url"])
        label = labels.numpy().reshape(-1).astype(np.int64)
        return replace(raw, row=raw.col, col=raw.row, ndata={**raw.ndata, "label": label})
