"""Graphs published as one edge list or matrix: SNAP's text, MUSAE's and GEMSEC's csv, Network Repository's mtx, the
MATLAB files of Facebook100."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.canonical import checked_graph
from data.files import ranked_graph, read_graph, read_pairs
from data.graph import CsrGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote, reading


@dataclass(frozen=True)
class EdgeList(OfficialSource):
    """One file, read as `data.files` reads it: the first column is the query, and ids with gaps become ranks.

    Attributes:
        url: address of the file, or of an archive that contains it.
        file: path below the root.
        member: path in the archive.
        both_directions: whether A gets both directions of each edge, which the file lists once.
        keeps_ids: whether a node keeps its id, in SNAP's text; ids up to the largest that have no edge are nodes, too.
    """

    url: str
    file: str
    member: str = ""
    both_directions: bool = False
    keeps_ids: bool = False

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(self.url, root / self.file, self.member)]

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        path = root / self.file
        if self.both_directions and path.suffix in (".mtx", ".mat"):
            raise ValueError(f"both_directions: {path} says itself whether it is symmetric; leave the option out")
        if path.suffix == ".mtx":
            graph = read_graph(path, selection)
        elif path.suffix == ".mat":
            graph = _read_mat(path)
        elif self.keeps_ids:
            pairs = read_pairs(path)
            graph = checked_graph(path, *pairs.T, int(pairs.max()) + 1, both_directions=self.both_directions)
        else:
            graph = ranked_graph(path, read_pairs(path), self.both_directions)
        return replace(graph, origin=self.url)


def _read_mat(path: Path) -> CsrGraph:
    """The symmetric matrix `A` of a MATLAB file. Personal attributes beside it (`local_info`) are not read."""
    import scipy.io

    with reading(path):
        matrix = scipy.io.loadmat(path, variable_names=["A"])["A"]
        matrix.check_format(full_check=True)  # SciPy's conversions trust the arrays
        return checked_graph(path, *matrix.tocoo().coords, matrix.shape[0])
