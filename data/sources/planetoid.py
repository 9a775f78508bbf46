"""Planetoid's citation graphs: the eight files `ind.NAME.*`, read as `dgl.data.CitationGraphDataset` reads them.

Nodes are numbered as in the files: 0 .. len(allx) - 1, then the test nodes. The rows of tx and ty are in the order of
test.index. Citeseer's test.index lacks 15 ids of its range: these nodes are isolated, and get a zero row of features
and class 0, as in DGL and PyG; no part of the split has them. The split is the public one: the first len(y) nodes for
training (20 a class), the next 500 for validation, and the nodes of test.index.
Features are divided by the sum of their row, as DGL does (PyG's loader leaves this to a transform).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.graph import RawGraph
from data.selection import Selection
from data.sources.array_pickle import CsrArrays, read_array_pickle
from data.sources.base import OfficialSource, Remote, reading
from data.sources.dgl_graphs import dgl_class, located

FILES = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")
NUM_VALID = 500


@dataclass(frozen=True)
class Planetoid(OfficialSource):
    """One citation graph.

    Attributes:
        name: as in the file names that Planetoid publishes: cora, citeseer or pubmed.
        class_name: the class of `dgl.data`, which states the URL, and the folder and file names of the archive.
    """

    name: str
    class_name: str

    def files(self, root: Path) -> Sequence[Remote]:
        layout = located(dgl_class(self.class_name), root)
        return [Remote(layout.url, self._own(root) or Path(layout.raw_path))]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        layout = located(dgl_class(self.class_name), root)
        own = self._own(root)
        return read_planetoid(own or Path(layout.raw_path), self.name if own else layout.name, layout.url)

    def _own(self, root: Path) -> Path | None:
        """The folder with the files under the names that Planetoid publishes; None if there is none."""
        return next(
            (folder for folder in (root / "planetoid", root) if (folder / f"ind.{self.name}.graph").exists()), None
        )


def read_planetoid(folder: Path, name: str, origin: str) -> RawGraph:
    """The graph of the files `ind.<name>.*`: features, labels, masks and the public split.

    Raises:
        ValueError: a file is missing or damaged, or the files do not fit together.
    """
    with reading(folder):
        *pickled, index = [folder / f"ind.{name}.{part}" for part in FILES]
        x, y, tx, ty, allx, ally, neighbours = map(read_array_pickle, pickled)
        test = np.array(index.read_text().split(), np.int64)
        _check(x, y, tx, ty, allx, ally, neighbours, test)
        # float32 throughout and a product with 1 / sum, for the same bits as DGL's.
        num_nodes = int(test.max()) + 1
        feat = np.zeros((num_nodes, allx.shape[1]), np.float32)
        feat[: allx.shape[0]], feat[test] = allx.dense(), tx.dense()
        total = feat.sum(1, keepdims=True)
        np.multiply(feat, np.divide(1, total, out=np.zeros_like(total), where=total != 0), out=feat)
        label = np.zeros(num_nodes, np.int64)
        label[: len(ally)], label[test] = ally.argmax(1), ty.argmax(1)
        ends = np.array([(i, j) for i, others in neighbours.items() for j in others], np.int64).reshape(-1, 2)
        if ends.size and not 0 <= ends.min() <= ends.max() < num_nodes:
            raise ValueError(f"ind.{name}.graph holds ids outside 0 .. {num_nodes - 1}")
    splits = {
        "train": np.arange(len(y)),
        "valid": np.arange(len(y), len(y) + NUM_VALID),
        "test": np.sort(test),
    }
    ndata = {"feat": feat, "label": label}
    for part, mask in (("train", "train_mask"), ("valid", "val_mask"), ("test", "test_mask")):
        ndata[mask] = np.isin(np.arange(num_nodes), splits[part])
    row, col = ends.T
    row, col = np.concatenate([row, col]), np.concatenate([col, row])  # both directions of each edge
    return RawGraph(row, col, num_nodes, origin, ndata=ndata, splits=splits)


def _check(
    x: CsrArrays,
    y: np.ndarray,
    tx: CsrArrays,
    ty: np.ndarray,
    allx: CsrArrays,
    ally: np.ndarray,
    neighbours: dict[int, list[int]],
    test: np.ndarray,
) -> None:
    matrices = isinstance(x, CsrArrays) and isinstance(tx, CsrArrays) and isinstance(allx, CsrArrays)
    arrays = all(isinstance(part, np.ndarray) and part.ndim == 2 for part in (y, ty, ally))
    if not matrices or not arrays or not isinstance(neighbours, dict):
        raise ValueError("x, tx and allx must be CSR matrices, y, ty and ally 2-D arrays, and graph a dict of lists")
    rows = [(part.shape[0], len(labels)) for part, labels in ((x, y), (tx, ty), (allx, ally))]
    if any(a != b for a, b in rows) or len({x.shape[1], tx.shape[1], allx.shape[1]}) != 1:
        raise ValueError(f"the rows (features, labels) of x, tx and allx are {rows}; each pair must agree")
    if test.size != len(ty) or np.unique(test).size != test.size or test.min() < len(ally):
        raise ValueError(f"test.index must list {len(ty)} different nodes from {len(ally)} on")
    if len(y) + NUM_VALID > len(ally):
        raise ValueError(
            f"{len(y)} training and {NUM_VALID} validation nodes do not fit into {len(ally)} labelled ones"
        )
