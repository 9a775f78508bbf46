"""AmazonProducts as GraphSAINT publishes it: `adj_full.npz` (SciPy) and `feats.npy`.

Labels (a json file with 107 numbers for each node) are neither fetched nor read.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.files import read_graph
from data.graph import RawGraph
from data.memory import require_memory
from data.selection import Selection
from data.sources.base import OfficialSource, Remote, reading

DRIVE = "https://drive.usercontent.google.com/download?confirm=t&id="


@dataclass(frozen=True)
class GraphSaint(OfficialSource):
    """One folder of GraphSAINT's Google Drive.

    Attributes:
        folder: its name, on the Drive and below the root.
        adjacency_id: Google's id of adj_full.npz.
        features_id: Google's id of feats.npy.
    """

    folder: str
    adjacency_id: str
    features_id: str

    def files(self, root: Path) -> Sequence[Remote]:
        return [
            Remote(DRIVE + self.adjacency_id, root / self.folder / "adj_full.npz"),
            Remote(DRIVE + self.features_id, root / self.folder / "feats.npy"),
        ]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        adjacency, features = self.files(root)
        with reading(root / self.folder):
            raw = read_graph(adjacency.target, selection)
            feat = np.load(features.target, mmap_mode="r")
            if feat.shape[0] != raw.num_nodes:
                raise ValueError(f"feats.npy has {feat.shape[0]} rows for {raw.num_nodes} nodes")
            require_memory(f"{features.target}: its {feat.shape} numbers", feat.size * 4)
            feat = feat.astype(np.float32)
        return replace(raw, origin=adjacency.url, ndata={"feat": feat})
