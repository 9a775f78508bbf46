"""Single graphs of the Open Graph Benchmark from its csv files, without ogb, which would write and read DGL's binary
files: those have no checksums.

The first end of a published edge is the query (see `data`): a paper attends to the papers it cites.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.canonical import to_csr
from data.graph import CsrGraph, RawGraph
from data.kept import fingerprint, kept_graph, kept_path
from data.memory import LOADING_BYTES_PER_EDGE, require_memory
from data.selection import Selection
from data.sources.base import OfficialSource, Remote, check_ids, reading
from data.sources.ogb_graphs import RELEASE, read_column, read_rows, read_splits

URL = "http://snap.stanford.edu/ogb/data/nodeproppred"
KEPT_VERSION = 1  # incremented when kept files hold other arrays


@dataclass(frozen=True)
class OgbSource(OfficialSource):
    """Base class of ogb's single graphs.

    Attributes:
        name: ogb's name of the set, such as "ogbn-arxiv".
        archive: name of the archive below `URL`, without .zip.
        split: ogb's name of the split.
    """

    name: str
    archive: str
    split: str

    @property
    def url(self) -> str:
        return f"{URL}/{self.archive}.zip"

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(self.url, self.folder(root), member=self.archive)]

    def folder(self, root: Path) -> Path:
        """The folder in which ogb looks for the set."""
        folder = root / self.name.replace("-", "_")
        alternative = folder.with_name(f"{folder.name}_dgl")
        return alternative if alternative.is_dir() else folder

    def checked_folder(self, root: Path, *raw: str) -> Path:
        """`folder`, after a check that it holds these files."""
        folder = self.folder(root)
        needed = [RELEASE, *(f"raw/{name}" for name in raw)]
        if not all((folder / name).is_file() for name in needed):
            raise ValueError(
                f"{folder}: incomplete, or of another version; {', '.join(needed)} are needed. Move the folder away "
                "and load again to download it again"
            )
        return folder


@dataclass(frozen=True)
class OgbNodes(OgbSource):
    """An ogbn set in csv files: one graph with features, labels and the official split.

    The graph is kept beside the files, since they take minutes to read.

    Attributes:
        both_directions: whether A gets both directions of each edge, which the files list once.
    """

    both_directions: bool = False

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        names = [f"{name}.csv.gz" for name in ("edge", "num-node-list", "num-edge-list", "node-feat", "node-label")]
        folder = self.checked_folder(root, *names)
        with reading(folder):
            files = [*(folder / "raw" / name for name in names), *(folder / "split" / self.split).glob("*.csv.gz")]
            recipe = f"{KEPT_VERSION} {self} {fingerprint(files)}"
        return kept_graph(kept_path(folder, "converted", recipe), recipe, lambda: self._convert(folder))

    def _convert(self, folder: Path) -> CsrGraph:
        raw = folder / "raw"
        with reading(folder):
            nodes, edges = (read_column(raw / f"num-{kind}-list.csv.gz") for kind in ("node", "edge"))
            if nodes.size != 1 or edges.size != 1:
                raise ValueError(f"num-node-list and num-edge-list hold {nodes.size} and {edges.size} graphs, not one")
            num_nodes, num_edges = int(nodes[0]), int(edges[0])
        needed = num_edges * (1 + self.both_directions) * LOADING_BYTES_PER_EDGE
        require_memory(f"{self.name}: its {num_edges:,} edges", needed)
        with reading(folder):
            row, col = read_rows(raw / "edge.csv.gz", np.arange(num_edges)).T
            check_ids(row, col, num_nodes)
            if self.both_directions:
                row, col = np.concatenate([row, col]), np.concatenate([col, row])
            every = np.arange(num_nodes)
            feat = read_rows(raw / "node-feat.csv.gz", every).astype(np.float32)
            label = read_rows(raw / "node-label.csv.gz", every)[:, 0]
            label = np.where(np.isnan(label), -1, label).astype(np.int64)
            splits = read_splits(folder / "split" / self.split)
        return to_csr(RawGraph(row, col, num_nodes, self.url, ndata={"feat": feat, "label": label}, splits=splits))
