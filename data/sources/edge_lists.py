"""Graphs published as one edge list or matrix: SNAP's text, MUSAE's and GEMSEC's csv, Network Repository's mtx, the
MATLAB files of Facebook100."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from data.canonical import checked_graph
from data.files import matrix_graph, ranked_graph, read_pairs
from data.graph import CsrGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote


@dataclass(frozen=True)
class EdgeList(OfficialSource):
    """One file, read as `data.files` reads it: the first column is the query, and ids with gaps become ranks.

    Attributes:
        url: address of the file, or of an archive that contains it.
        member: path in the archive.
        file: path below the root; "": `member`, or the file of the url.
        both_directions: whether A gets both directions of each edge, which a text lists once.
        keeps_ids: whether a node keeps its id, in SNAP's text; ids up to the largest that have no edge are nodes, too.
    """

    url: str
    member: str = ""
    file: str = ""
    both_directions: bool = False
    keeps_ids: bool = False

    def files(self, root: Path) -> Sequence[Remote]:
        file = self.file or self.member or self.url.rpartition("/")[2]
        return [Remote(self.url, root / file, self.member)]

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        (remote,) = self.files(root)
        path = remote.target
        if path.suffix in (".mtx", ".mat"):
            graph = matrix_graph(path, _matrix)
        elif self.keeps_ids:
            pairs = read_pairs(path)
            graph = checked_graph(path, *pairs.T, int(pairs.max()) + 1, both_directions=self.both_directions)
        else:
            graph = ranked_graph(path, read_pairs(path), self.both_directions)
        return replace(graph, origin=self.url)


def _matrix(path: Path) -> Any:
    import scipy.io

    if path.suffix == ".mtx":
        return scipy.io.mmread(path)
    return scipy.io.loadmat(path, variable_names=["A"])["A"]  # personal attributes beside it are not read
