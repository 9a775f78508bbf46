"""The Elliptic bitcoin transactions: three csv files. PyG's class numbers the nodes in the order of the file; the
statistics that the paper states are those of the order by transaction id."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from data.canonical import checked_graph
from data.errors import reading
from data.features import as_integers
from data.graph import CsrGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote

FOLDER = "elliptic_bitcoin_dataset"  # as in the publisher's archive on Kaggle, which asks for a login
MIRROR = "https://data.pyg.org/datasets/elliptic"
FEATURES, EDGES, CLASSES = "elliptic_txs_features.csv", "elliptic_txs_edgelist.csv", "elliptic_txs_classes.csv"
LABELS = {"1": 1, "2": 0, "unknown": -1}  # 1 is illicit


class Elliptic(OfficialSource):
    """Nodes are numbered by the rank of their transaction id. The first transaction of a pair attends to the second."""

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(f"{MIRROR}/{name}.zip", root / FOLDER / name, name) for name in (FEATURES, EDGES, CLASSES)]

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        import pandas as pd

        folder = root / FOLDER
        with reading(folder):
            # Columns: transaction id, time step, features.
            table = pd.read_csv(folder / FEATURES, header=None).sort_values(0)
            ids, feat = as_integers("a transaction id", table[0].to_numpy()), table.iloc[:, 2:].to_numpy(np.float32)
            pairs = pd.read_csv(folder / EDGES)[["txId1", "txId2"]]
            row, col = (pd.Index(ids).get_indexer(pairs[end]).astype(np.int64) for end in pairs)  # -1 for unknown
            classes = pd.read_csv(folder / CLASSES, index_col="txId", dtype={"class": str})["class"]
            label = classes.map(LABELS).reindex(ids).to_numpy(np.float64)
            if np.isnan(label).any():
                raise ValueError(f"{CLASSES} must give each transaction one of the classes {', '.join(LABELS)}")
            ndata = {"feat": feat, "label": label.astype(np.int64)}
            return checked_graph(folder / EDGES, row, col, ids.size, origin=MIRROR, ndata=ndata)
