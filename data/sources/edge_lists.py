"""Graphs published as one edge list or matrix: SNAP's text, MUSAE's and GEMSEC's csv, Network Repository's mtx."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.edge_text import read_snap_edges
from data.files import read_graph
from data.graph import RawGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote


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
        return [Remote(self.url, root / self.file, member=self.member)]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        if self.keeps_ids:
            row, col = np.ascontiguousarray(read_snap_edges(root / self.file).T)
            raw = RawGraph(row, col, int(max(row.max(), col.max())) + 1, self.url)
        else:
            raw = replace(read_graph(root / self.file, selection), origin=self.url)
        if not self.both_directions:
            return raw
        return replace(raw, row=np.concatenate([raw.row, raw.col]), col=np.concatenate([raw.col, raw.row]))
