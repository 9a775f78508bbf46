"""Planetoid's citation graphs: the eight pickles and tables `ind.NAME.*`.

Nodes are numbered as in the files: 0 .. len(allx) - 1, then the test nodes. Citeseer's test.index lacks 15 ids of its
range: these nodes are isolated, and get a zero row of features and class 0; no part of the split has them. The split is
the public one: the first len(y) nodes for training (20 a class), the next 500 for validation, and the nodes of
test.index. Features are divided by the sum of their row, as DGL does. PyG's class is not used: it drops the 124 self
loops of Citeseer, which the published count of edges includes, and its import takes longer than a run on Cora.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from data.canonical import checked_graph
from data.errors import reading
from data.graph import CsrGraph
from data.selection import Selection
from data.sources import pickles
from data.sources.base import OfficialSource, Remote

URL = "https://github.com/kimiyoung/planetoid"
NUM_VALID = 500
FILES = ("x", "y", "tx", "ty", "allx", "ally", "graph", "test.index")


@dataclass(frozen=True)
class Planetoid(OfficialSource):
    """One citation graph, in `<root>/planetoid`.

    Attributes:
        name: NAME of its files `ind.NAME.*`: cora, citeseer or pubmed.
        sha256: of the files, by their endings in `FILES`.
    """

    name: str
    sha256: Mapping[str, str] = field(default_factory=dict)

    def files(self, root: Path) -> Sequence[Remote]:
        found = []
        for part in FILES:
            name, known = f"ind.{self.name}.{part}", self.sha256.get(part)
            url = f"{URL}/raw/master/data/{name}"
            found.append(Remote(url, root / "planetoid" / name, known_hash=f"sha256:{known}" if known else ""))
        return found

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        folder = root / "planetoid"
        with reading(folder):
            *pickled, index = [folder / f"ind.{self.name}.{part}" for part in FILES]
            _, y, tx, ty, allx, ally, neighbours = (
                pickles.load(io.BytesIO(file.read_bytes()), encoding="latin1") for file in pickled
            )
            test = np.array(index.read_text(encoding="utf-8").split(), np.int64)
            num_nodes = int(test.max()) + 1
            feat = np.zeros((num_nodes, allx.shape[1]), np.float32)
            for matrix in (allx, tx):
                matrix.check_format(full_check=True)  # `toarray` trusts its arrays
            feat[: allx.shape[0]], feat[test] = allx.toarray(), tx.toarray()
            total = feat.sum(1, keepdims=True)
            feat *= np.divide(1, total, out=np.zeros_like(total), where=total != 0)  # the same bits as DGL's
            label = np.zeros(num_nodes, np.int64)
            label[: len(ally)], label[test] = ally.argmax(1), ty.argmax(1)
            ends = np.array([(i, j) for i, others in neighbours.items() for j in others]).T
            ends = ends.astype(np.int64, casting="safe")
        row, col = np.concatenate([ends, ends[::-1]], axis=1)  # both directions of each edge
        splits = {"train": np.arange(len(y)), "valid": len(y) + np.arange(NUM_VALID), "test": np.sort(test)}
        ndata = {"feat": feat, "label": label}
        return checked_graph(folder, row, col, len(label), origin=URL, ndata=ndata, splits=splits)
