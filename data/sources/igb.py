"""The homogeneous sets of the Illinois Graph Benchmark: npy files, memory-mapped.

The features and labels of the large set are bare float32 arrays under the same names, without npy's header.
The split is the one of IGB's own loader: in node order 60 % for training, 20 % for validation, the others for the test.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.download import Fetch
from data.errors import DatasetMissingError
from data.graph import PARTS, RawGraph
from data.memory import LOADING_BYTES_PER_EDGE, require_memory
from data.selection import Selection
from data.sources.base import OfficialSource, Remote, check_ids, reading


@dataclass(frozen=True)
class Igb(OfficialSource):
    """`<size>/processed/paper__cites__paper/edge_index.npy` [E, 2] and `paper/node_feat.npy` float32 [N, 1024].

    The paper in the first column of edge_index cites the one in the second, and attends to it.

    Attributes:
        size: small, medium or large.
        url: address of the archive that unpacks to the folder `size`; "" if the publisher offers only a script.
        known_hash: "md5:..." of the archive.
    """

    size: str
    url: str = ""
    known_hash: str = ""

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(self.url, root / self.size, member=self.size, known_hash=self.known_hash)]

    def fetch(self, root: Path, fetch: Fetch) -> None:
        if not self.url and not (root / self.size).exists():
            raise DatasetMissingError(
                f"{root / self.size}: no such folder, and the data set is published through a script only: "
                "https://github.com/IllinoisGraphBenchmark/IGB-Datasets, igb/download_igb_large.sh. Its files go into "
                "that folder: node_feat.npy and node_label_19.npy into processed/paper, edge_index.npy into "
                "processed/paper__cites__paper"
            )
        super().fetch(root, fetch)

    def load(self, root: Path, selection: Selection) -> RawGraph:
        folder = root / self.size / "processed"
        with reading(folder):
            edges = np.load(folder / "paper__cites__paper" / "edge_index.npy", mmap_mode="r")
            label = map_floats(folder / "paper" / "node_label_19.npy").reshape(-1)
            label = np.where(np.isnan(label), -1, label).astype(np.int64)
            feat = map_floats(folder / "paper" / "node_feat.npy", rows=label.size)
            if edges.ndim != 2 or edges.shape[1] != 2 or feat.shape[0] != label.size or feat.dtype != np.float32:
                raise ValueError(
                    f"edge_index has shape {edges.shape}, node_feat {feat.shape} of {feat.dtype}, node_label_19 "
                    f"{label.shape}; [E, 2], float32 [N, F] and [N] are needed"
                )
            require_memory(f"IGB-{self.size}: its edges", edges.shape[0] * LOADING_BYTES_PER_EDGE)
            row, col = (np.array(edges[:, end], dtype=np.int64) for end in (0, 1))
            check_ids(row, col, label.size)
        ends = int(label.size * 0.6), int(label.size * 0.6) + int(label.size * 0.2)
        splits = dict(zip(PARTS, np.split(np.arange(label.size), ends), strict=True))
        ndata = {"feat": feat, "label": label}
        return RawGraph(row, col, label.size, self.url or str(folder), ndata=ndata, splits=splits)


def map_floats(path: Path, rows: int | None = None) -> np.ndarray:
    """Map an npy file, or a bare float32 array, into memory (copy on write, as torch requires).

    Args:
        rows: rows of a bare array; None for an array in one dimension.

    Raises:
        ValueError: a bare array is not `rows` times as long as one row.
    """
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            return np.load(path, mmap_mode="c")
    size = path.stat().st_size
    if size == 0 or size % (4 * (rows or 1)):
        raise ValueError(f"{path.name} has neither npy's header nor float32 numbers for {rows or size / 4} nodes")
    return np.memmap(path, np.float32, mode="c", shape=(size // 4,) if rows is None else (rows, size // 4 // rows))
