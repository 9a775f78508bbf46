"""Collections of the Open Graph Benchmark from its csv files, packed in arrays: neither ogb nor a DGLGraph per graph.

The layout is that of `ogb.io.read_graph_raw.read_csv_graph_raw`: below `raw`, gzipped csv files without a header hold
one row for each graph (num-node-list, num-edge-list, graph-label), edge (edge: two node ids local to the graph;
edge-feat) or node (node-feat), one graph after the other. `split/NAME` holds the ids of the graphs of each part.

The first end of an edge is the query (see `data`): a node of a syntax tree attends to its children. Only this direction
gives ogbg-code2 the paper's number of blocks: in the other, a window of 16 rows with one parent each fills at most 2
blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.graph import PARTS, RawGraph
from data.memory import LOADING_BYTES_PER_EDGE, require_memory
from data.packed import join_graphs, rows_of
from data.selection import Selection, renumbered
from data.sources.base import OfficialSource, Remote, reading

URL = "http://snap.stanford.edu/ogb/data/graphproppred"
RELEASE = "RELEASE_v1.txt"  # ogb's own classes ask for another download without it
ROWS_AT_A_TIME = 1 << 20  # of a csv file; only the rows of the chosen graphs are kept


@dataclass(frozen=True)
class OgbGraphs(OfficialSource):
    """One collection. The published run took its graphs from the whole set.

    Attributes:
        name: ogb's name of the set, such as "ogbg-molhiv".
        archive: path of the archive below `URL`, without .zip.
        split: ogb's name of the split.
        both_directions: whether A gets both directions of each edge, which the files list once.
        node_features: whether there is a node-feat file.
        labelled: whether graph-label holds numbers (ogbg-code2's are words, which are not read).
    """

    name: str
    archive: str
    split: str
    both_directions: bool = True
    node_features: bool = True
    labelled: bool = True

    @property
    def url(self) -> str:
        return f"{URL}/{self.archive}.zip"

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(self.url, self.folder(root), member=Path(self.archive).name)]

    def folder(self, root: Path) -> Path:
        """The folder in which ogb looks for the set."""
        folder = root / self.name.replace("-", "_")
        alternative = folder.with_name(f"{folder.name}_dgl")
        return alternative if alternative.is_dir() else folder

    def load(self, root: Path, selection: Selection) -> RawGraph:
        folder = self.folder(root)
        self._check_files(folder)
        raw = folder / "raw"
        with reading(folder):
            sizes, edge_counts = (read_column(raw / f"num-{kind}-list.csv.gz") for kind in ("node", "edge"))
            if sizes.size != edge_counts.size or sizes.min(initial=1) < 1 or edge_counts.min(initial=0) < 0:
                raise ValueError("num-node-list and num-edge-list do not list the same graphs, of 1 node or more each")
            splits = read_splits(folder / "split" / self.split)
            if any(ids.size and not 0 <= ids.min() <= ids.max() < sizes.size for ids in (splits or {}).values()):
                raise ValueError(f"split/{self.split} lists graphs outside 0 .. {sizes.size - 1}")
        graphs, place = np.arange(sizes.size), str(folder)
        if selection.split:
            if splits is None:
                raise ValueError(f"{folder / 'split' / self.split}: missing, and split={selection.split!r} needs it")
            graphs, place = (
                splits[{"val": "valid"}.get(selection.split, selection.split)],
                f"{folder}, {selection.split}",
            )
        picked = graphs[selection.pick(graphs.size, place)]
        directions = 1 + self.both_directions
        require_memory(f"{self.name}: its edges", int(edge_counts[picked].sum()) * directions * LOADING_BYTES_PER_EDGE)

        with reading(folder):
            nodes, edges = rows_of(picked, sizes), rows_of(picked, edge_counts)
            feat = read_rows(raw / "node-feat.csv.gz", nodes) if self.node_features else None
            edge_file = raw / "edge-feat.csv.gz"
            batch = join_graphs(
                sizes[picked],
                edge_counts[picked],
                read_rows(raw / "edge.csv.gz", edges),
                feat,
                read_rows(edge_file, edges) if edge_file.is_file() else None,
                selection.described(self.url),
                both_directions=self.both_directions,
            )
            labels = read_rows(raw / "graph-label.csv.gz", picked).astype(np.float32) if self.labelled else None
        return replace(
            batch,
            graph_labels=labels,
            splits=splits and renumbered(splits, picked, sizes.size),
            graph_ids=picked,
            collection_size=graphs.size,
        )

    def _check_files(self, folder: Path) -> None:
        needed = [RELEASE, *(f"raw/{name}.csv.gz" for name in ("edge", "num-node-list", "num-edge-list"))]
        needed += ["raw/node-feat.csv.gz"] * self.node_features + ["raw/graph-label.csv.gz"] * self.labelled
        if not all((folder / name).is_file() for name in needed):
            raise ValueError(
                f"{folder}: incomplete, or of another version; {', '.join(needed)} are needed. Move the folder "
                "away and load again to download it again"
            )


def read_splits(folder: Path) -> dict[str, np.ndarray] | None:
    """ogb's split: int64 ids of each of `PARTS`; None without the folder."""
    if not folder.is_dir():
        return None
    return {part: read_column(folder / f"{part}.csv.gz") for part in PARTS}


def read_column(path: Path) -> np.ndarray:
    """The first column of a file of integers, int64."""
    import pandas as pd

    return pd.read_csv(path, header=None, usecols=[0], dtype=np.int64)[0].to_numpy()


def read_rows(path: Path, rows: np.ndarray) -> np.ndarray:
    """Chosen rows of a file of numbers, in the given order: int64, or float32 where it has other numbers or gaps.

    Args:
        rows: [n] int64, all different.

    Raises:
        ValueError: the file has fewer rows.
    """
    import pandas as pd

    order = np.argsort(rows)
    ascending, last = rows[order], rows.max(initial=-1)
    parts, first = [], 0
    with pd.read_csv(path, header=None, chunksize=ROWS_AT_A_TIME) as chunks:
        for chunk in chunks:
            values, (begin, end) = chunk.to_numpy(), np.searchsorted(ascending, (first, first + len(chunk)))
            values = values[ascending[begin:end] - first]
            parts.append(values.astype(np.int64 if values.dtype.kind in "iu" else np.float32))
            first += len(chunk)
            if first > last:
                break
    if first <= last:
        raise ValueError(f"{path.name} has {first} rows, and row {last} is needed")
    integers = all(part.dtype.kind == "i" for part in parts)
    values = np.empty((rows.size, parts[0].shape[1]), np.int64 if integers else np.float32)
    values[order] = np.concatenate(parts)
    return values
