"""The Elliptic bitcoin transactions: three csv files."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.graph import RawGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote, reading

FOLDER = "elliptic_bitcoin_dataset"  # as in the publisher's archive on Kaggle, which asks for a login
MIRROR = "https://data.pyg.org/datasets/elliptic"
FEATURES, EDGES, CLASSES = "elliptic_txs_features.csv", "elliptic_txs_edgelist.csv", "elliptic_txs_classes.csv"
LABELS = {"1": 1, "2": 0, "unknown": -1}  # 1 is illicit


class Elliptic(OfficialSource):
    """Nodes are numbered by the rank of their transaction id. The first transaction of a pair attends to the second."""

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(f"{MIRROR}/{name}.zip", root / FOLDER / name, name) for name in (FEATURES, EDGES, CLASSES)]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        import pandas as pd

        folder = root / FOLDER
        with reading(folder):
            # Columns: transaction id, time step, features.
            table = pd.read_csv(folder / FEATURES, header=None).sort_values(0)
            ids, feat = table[0].to_numpy(np.int64), table.iloc[:, 2:].to_numpy(np.float32)
            pairs = pd.read_csv(folder / EDGES)[["txId1", "txId2"]].to_numpy(np.int64)
            rank = np.minimum(np.searchsorted(ids, pairs), ids.size - 1)
            unknown = np.flatnonzero((ids[rank] != pairs).any(1))
            if unknown.size:
                raise ValueError(f"{EDGES} lists transactions {pairs[unknown[0]]}, which {FEATURES} lacks")
            classes = pd.read_csv(folder / CLASSES, index_col="txId", dtype={"class": str})["class"]
            label = classes.map(LABELS).reindex(ids).to_numpy(np.float64)
            if np.isnan(label).any():
                raise ValueError(f"{CLASSES} must give each transaction one of the classes {', '.join(LABELS)}")
        ndata = {"feat": feat, "label": label.astype(np.int64)}
        return RawGraph(rank[:, 0].copy(), rank[:, 1].copy(), ids.size, MIRROR, ndata=ndata)
