"""Graphs of up to 100 million nodes and more, whose files are mapped into memory: IGB and ogbn-papers100M."""

import shutil
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic import made_once
from data.canonical import checked_graph
from data.errors import reading
from data.features import as_integers
from data.graph import PARTS, CsrGraph
from data.memory import LOADING_BYTES_PER_EDGE, require_memory
from data.selection import Selection
from data.sources.base import OfficialSource, Remote
from data.sources.pyg import ogb_table


@dataclass(frozen=True)
class Igb(OfficialSource):
    """A homogeneous set of the Illinois Graph Benchmark: `<size>/processed/paper__cites__paper/edge_index.npy` [E, 2],
    `paper/node_feat.npy` float32 [N, 1024] and `paper/node_label_19.npy` [N].

    The paper in the first column of edge_index cites the one in the second, and attends to it. Features and labels of
    the large set are bare float32 arrays under the same names, without npy's header. The split is the one of IGB's own
    loader: in node order 60 % for training, 20 % for validation, the others for the test.

    Attributes:
        size: small, medium or large.
        url: address of the archive that unpacks to the folder `size`; "": the publisher's script makes that folder.
        known_hash: "md5:..." of the archive.
    """

    size: str
    url: str = ""
    known_hash: str = ""

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(self.url, root / self.size, self.size, self.known_hash)]

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        folder = root / self.size / "processed"
        place = folder / "paper__cites__paper" / "edge_index.npy"
        with reading(folder):
            edges = np.load(place, mmap_mode="r")
            label = _classes(_floats(folder / "paper" / "node_label_19.npy"))
            feat = _floats(folder / "paper" / "node_feat.npy", rows=label.size)
            if edges.ndim != 2 or edges.shape[1] != 2 or feat.shape[0] != label.size or feat.dtype != np.float32:
                raise ValueError(
                    f"edge_index has shape {edges.shape}, node_feat {feat.shape} of {feat.dtype}, node_label_19 "
                    f"{label.shape}; [E, 2], float32 [N, F] and [N] are needed"
                )
        ends = int(label.size * 0.6), int(label.size * 0.6) + int(label.size * 0.2)
        splits = dict(zip(PARTS, np.split(np.arange(label.size), ends), strict=True))
        return _graph(place, edges.T, self.url or str(place), {"feat": feat, "label": label}, splits)


class Papers100M(OfficialSource):
    """ogbn-papers100M from ogb's raw arrays, which ogb's own class would read into memory at once.

    ogb compresses them: the first load unpacks them in the folder of the archive (83 GB). 1.4 % of the nodes have a
    label, the others get -1.
    """

    def files(self, root: Path) -> Sequence[Remote]:
        about = ogb_table("nodeproppred", "ogbn-papers100M")
        return [Remote(about["url"], root / "ogbn_papers100M", about["download_name"])]

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        import pandas as pd

        (remote,) = self.files(root)
        folder, splits = remote.target, None
        archive = folder / "raw" / "data.npz"
        with reading(folder):
            edges, feat = (_unpacked(archive, name) for name in ("edge_index", "node_feat"))
            ndata = {"feat": feat}
            if (folder / "raw" / "node-label.npz").is_file():
                with np.load(folder / "raw" / "node-label.npz", allow_pickle=False) as arrays:
                    ndata["label"] = _classes(arrays["node_label"])
                files = {part: folder / "split" / "time" / f"{part}.csv.gz" for part in PARTS}
                splits = {part: pd.read_csv(file, header=None)[0].to_numpy(np.int64) for part, file in files.items()}
        return _graph(archive, edges, remote.url, ndata, splits)


def _graph(
    place: Path, edges: np.ndarray, origin: str, ndata: dict[str, Any], splits: dict[str, np.ndarray] | None
) -> CsrGraph:
    """The graph of mapped edges [2, E], which are read now; its features stay mapped."""
    require_memory(f"{place}: its edges", edges.shape[1] * LOADING_BYTES_PER_EDGE)
    row, col = (np.array(ids, dtype=np.int64) for ids in edges)
    return checked_graph(place, row, col, len(ndata["feat"]), origin=origin, ndata=ndata, splits=splits)


def _unpacked(archive: Path, name: str) -> np.ndarray:
    """An array of an .npz, unpacked beside it once and mapped."""
    target = archive.with_name(f"{name}.npy")
    with made_once(target) as unfinished:
        if unfinished is not None:
            with zipfile.ZipFile(archive) as file, file.open(target.name) as stream, unfinished.open("wb") as made:
                shutil.copyfileobj(stream, made, 2**24)  # zip's checksum is verified at the end
    return np.load(target, mmap_mode="c")  # torch needs writable memory: a change stays in this process


def _floats(path: Path, rows: int | None = None) -> np.ndarray:
    """Map an npy file, or a bare float32 array of so many rows; None: in one dimension."""
    with path.open("rb") as file:
        if file.read(6) == b"\x93NUMPY":
            return np.load(path, mmap_mode="c")
    size = path.stat().st_size
    if size == 0 or size % (4 * (rows or 1)):
        raise ValueError(f"{path.name} has neither npy's header nor float32 numbers for {rows or size / 4} nodes")
    return np.memmap(path, np.float32, mode="c", shape=(size // 4,) if rows is None else (rows, size // 4 // rows))


def _classes(label: np.ndarray) -> np.ndarray:
    """[N] int64, -1 for NaN."""
    return as_integers("the label", np.where(np.isnan(label), -1, label)).reshape(-1)
