"""Graphs of up to 100 million nodes and more, whose files are mapped into memory: IGB and ogbn-papers100M."""

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.download import fetch
from data.errors import DatasetMissingError
from data.features import as_integers
from data.files import checked_graph
from data.graph import PARTS, RawGraph
from data.mapped_arrays import map_floats, map_npz_array
from data.memory import LOADING_BYTES_PER_EDGE, require_memory
from data.selection import Selection
from data.sources.base import OfficialSource, Remote, reading
from data.sources.pyg import ogb_table


class LargeGraph(OfficialSource):
    """Edges, features and labels in files."""

    @abstractmethod
    def place(self, root: Path) -> Path:
        """The file of the edges."""

    @abstractmethod
    def mapped(self, root: Path) -> RawGraph:
        """The graph, without a check of its ids: its edges and features are mapped and not yet read.

        Raises:
            ValueError: the files cannot be read, or do not fit together.
        """

    def load(self, root: Path, selection: Selection) -> RawGraph:
        raw, place = self.mapped(root), self.place(root)
        require_memory(f"{place}: its edges", raw.row.size * LOADING_BYTES_PER_EDGE)
        row, col = (np.array(ids, dtype=np.int64) for ids in (raw.row, raw.col))
        origin = self.files(root)[0].url or str(place)
        return checked_graph(place, row, col, raw.num_nodes, origin=origin, ndata=raw.ndata, splits=raw.splits)


@dataclass(frozen=True)
class Igb(LargeGraph):
    """A homogeneous set of the Illinois Graph Benchmark: `<size>/processed/paper__cites__paper/edge_index.npy` [E, 2],
    `paper/node_feat.npy` float32 [N, 1024] and `paper/node_label_19.npy` [N].

    The paper in the first column of edge_index cites the one in the second, and attends to it. Features and labels of
    the large set are bare float32 arrays under the same names, without npy's header. The split is the one of IGB's own
    loader: in node order 60 % for training, 20 % for validation, the others for the test.

    Attributes:
        size: small, medium or large.
        url: address of the archive that unpacks to the folder `size`; "" if the publisher offers only a script.
        known_hash: "md5:..." of the archive.
    """

    size: str
    url: str = ""
    known_hash: str = ""

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(self.url, root / self.size, self.size, self.known_hash)]

    def fetch(self, root: Path) -> None:
        if not self.url and not self.is_present(root):
            raise DatasetMissingError(
                f"{root / self.size}: no such folder, and the data set is published through a script only: "
                "https://github.com/IllinoisGraphBenchmark/IGB-Datasets, igb/download_igb_large.sh. Its files go into "
                "that folder: node_feat.npy and node_label_19.npy into processed/paper, edge_index.npy into "
                "processed/paper__cites__paper"
            )
        super().fetch(root)

    def place(self, root: Path) -> Path:
        return root / self.size / "processed" / "paper__cites__paper" / "edge_index.npy"

    def mapped(self, root: Path) -> RawGraph:
        folder = root / self.size / "processed"
        with reading(folder):
            edges = np.load(self.place(root), mmap_mode="r")
            label = _classes(map_floats(folder / "paper" / "node_label_19.npy"))
            feat = map_floats(folder / "paper" / "node_feat.npy", rows=label.size)
            if edges.ndim != 2 or edges.shape[1] != 2 or feat.shape[0] != label.size or feat.dtype != np.float32:
                raise ValueError(
                    f"edge_index has shape {edges.shape}, node_feat {feat.shape} of {feat.dtype}, node_label_19 "
                    f"{label.shape}; [E, 2], float32 [N, F] and [N] are needed"
                )
        ends = int(label.size * 0.6), int(label.size * 0.6) + int(label.size * 0.2)
        splits = dict(zip(PARTS, np.split(np.arange(label.size), ends), strict=True))
        ndata = {"feat": feat, "label": label}
        return RawGraph(edges[:, 0], edges[:, 1], label.size, str(self.place(root)), ndata=ndata, splits=splits)


@dataclass(frozen=True)
class Papers100M(LargeGraph):
    """ogbn-papers100M from ogb's raw arrays, which ogb's own class would read into memory at once.

    ogb compresses them: the first load unpacks them in the folder of the archive (83 GB). 1.4 % of the nodes have a
    label, the others get -1.
    """

    name: str = "ogbn-papers100M"

    def folder(self, root: Path) -> Path:
        return root / self.name.replace("-", "_")

    def files(self, root: Path) -> Sequence[Remote]:
        about = ogb_table("nodeproppred", self.name)
        return [Remote(about["url"], self.folder(root), about["download_name"])]

    def is_present(self, root: Path) -> bool:
        return self.folder(root).exists()

    def fetch(self, root: Path) -> None:
        (remote,) = self.files(root)
        fetch(remote.url, remote.target, remote.member)

    def place(self, root: Path) -> Path:
        return self.folder(root) / "raw" / "data.npz"

    def mapped(self, root: Path) -> RawGraph:
        import pandas as pd

        folder, splits = self.folder(root), None
        with reading(folder):
            edges, feat = (map_npz_array(self.place(root), name) for name in ("edge_index", "node_feat"))
            ndata = {"feat": feat}
            if (folder / "raw" / "node-label.npz").is_file():
                with np.load(folder / "raw" / "node-label.npz", allow_pickle=False) as arrays:
                    ndata["label"] = _classes(arrays["node_label"])
                files = {part: folder / "split" / "time" / f"{part}.csv.gz" for part in PARTS}
                splits = {part: pd.read_csv(file, header=None)[0].to_numpy(np.int64) for part, file in files.items()}
        return RawGraph(edges[0], edges[1], len(feat), str(self.place(root)), ndata=ndata, splits=splits)


def _classes(label: np.ndarray) -> np.ndarray:
    """[N] int64, -1 for NaN."""
    return as_integers("the label", np.where(np.isnan(label), -1, label)).reshape(-1)
