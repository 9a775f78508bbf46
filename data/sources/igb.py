"""The homogeneous sets of the Illinois Graph Benchmark: npy files, memory-mapped."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.download import Fetch
from data.errors import DatasetMissingError
from data.graph import RawGraph
from data.memory import require_memory
from data.selection import Selection
from data.sources.base import LOADING_BYTES_PER_EDGE, OfficialSource, Remote, check_ids, reading


@dataclass(frozen=True)
class Igb(OfficialSource):
    """`<size>/processed/paper__cites__paper/edge_index.npy` [E, 2] and `paper/node_feat.npy` float32 [N, 1024].

    The paper in the first column of edge_index cites the one in the second, and attends to it.

    Attributes:
        size: small, medium or large.
        url: address of the archive that unpacks to the folder `size`; "" if the publisher offers only a script.
    """

    size: str
    url: str = ""

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(self.url, root / self.size, member=self.size)]

    def fetch(self, root: Path, fetch: Fetch) -> None:
        if not self.url and not (root / self.size).exists():
            raise DatasetMissingError(
                f"{root / self.size}: no such folder, and the data set is published through a script only: "
                "https://github.com/IllinoisGraphBenchmark/IGB-Datasets; let it write to that folder"
            )
        super().fetch(root, fetch)

    def load(self, root: Path, selection: Selection) -> RawGraph:
        folder = root / self.size / "processed"
        with reading(folder):
            edges = np.load(folder / "paper__cites__paper" / "edge_index.npy", mmap_mode="r")
            feat = np.load(folder / "paper" / "node_feat.npy", mmap_mode="c")  # writable, as torch requires
            label = np.load(folder / "paper" / "node_label_19.npy").reshape(-1).astype(np.int64)
            if edges.ndim != 2 or edges.shape[1] != 2 or feat.shape[0] != label.size or feat.dtype != np.float32:
                raise ValueError(
                    f"edge_index has shape {edges.shape}, node_feat {feat.shape} of {feat.dtype}, node_label_19 "
                    f"{label.shape}; [E, 2], float32 [N, F] and [N] are needed"
                )
            require_memory(f"IGB-{self.size}: its edges", edges.shape[0] * LOADING_BYTES_PER_EDGE)
            row, col = (np.array(edges[:, end], dtype=np.int64) for end in (0, 1))
            check_ids(row, col, label.size)
        return RawGraph(row, col, label.size, self.url or str(folder), ndata={"feat": feat, "label": label})
