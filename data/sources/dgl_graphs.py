"""Single graphs through their classes in `dgl.data`, in the layout that DGL keeps below its `raw_dir`.

DGL's own cache, `dgl_graph.bin`, is neither written nor read: it has no checksums, and DGL may end the process on a
damaged one. The graph is kept in our format instead (`data.kept`).
"""

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.canonical import to_csr
from data.graph import PARTS, CsrGraph
from data.kept import fingerprint, kept_graph, kept_path
from data.memory import require_memory
from data.npz import Npz
from data.selection import Selection
from data.sources.base import OfficialSource, Remote, from_dgl, reading
from fused3s_dgl import import_dgl

KEPT_VERSION = 1  # incremented when kept files hold other arrays
KEPT = "converted"
CONVERTING_BYTES_PER_EDGE = 100  # peak of DGL's classes: 27 (flickr) to 97 (reddit, whose nodes are renumbered)


def dgl_class(name: str) -> Any:
    """A class of `dgl.data`."""
    import_dgl()
    return getattr(importlib.import_module("dgl.data"), name)


def located(loader: Any, root: Path, **options: Any) -> Any:
    """An instance of a `dgl.data` class with its URL and its paths below `root`, and nothing loaded."""
    inert = type(loader.__name__, (loader,), {"_load": lambda self: None})
    return inert(raw_dir=str(root), **options)


def converting(loader: Any) -> Any:
    """A `dgl.data` class that converts the published files, and neither downloads nor caches."""
    return type(loader.__name__, (loader,), {"_load": lambda self: self.process()})


@dataclass(frozen=True)
class DglGraph(OfficialSource):
    """A single graph.

    Attributes:
        class_name: a class of `dgl.data`.
        options: its arguments besides raw_dir and verbose.
        file: name of the published file in DGL's folder, of a graph that is quick to convert; "" if a zip archive is
            published: then the graph is kept beside its files.
    """

    class_name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""

    def files(self, root: Path) -> Sequence[Remote]:
        layout = located(dgl_class(self.class_name), root, **self.options)
        return [Remote(layout.url, Path(layout.raw_path, self.file))]

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        (remote,) = self.files(root)
        folder = remote.target
        if self.file:
            return self._convert(remote, root)
        with reading(folder):
            published = [path for path in folder.iterdir() if path.suffix != ".bin" and not path.name.startswith(KEPT)]
            recipe = f"{KEPT_VERSION} {self} {fingerprint(path for path in published if path.is_file())}"
        return kept_graph(kept_path(folder, KEPT, recipe), recipe, lambda: self._convert(remote, root))

    def _convert(self, remote: Remote, root: Path) -> CsrGraph:
        with reading(remote.target):
            edges = listed_edges(remote.target)
            require_memory(f"{remote.target}: its {edges:,} edges", edges * CONVERTING_BYTES_PER_EDGE)
            graph = converting(dgl_class(self.class_name))(raw_dir=str(root), verbose=False, **self.options)[0]
            raw = from_dgl(graph, remote.url)
        return to_csr(replace(raw, splits=split_of_masks(raw.ndata)))


def listed_edges(place: Path) -> int:
    """Edges of a file, or of the files of a folder, as SciPy or `edges` hold them; 0 if there are none."""
    archives = [place] if place.is_file() else sorted(place.glob("*.npz"))
    headers = (Npz(path) for path in archives if not path.name.startswith(KEPT))
    names = ("indices", "row", "edges")
    return max((one[name].shape[0] for one in headers for name in names if name in one), default=0)


def split_of_masks(ndata: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """The split that DGL keeps as masks [N], or [N, K] for K splits: then the first. None without masks."""
    masks = [ndata.get(name) for name in ("train_mask", "val_mask", "test_mask")]
    if any(mask is None for mask in masks):
        return None
    return {part: np.flatnonzero(mask.reshape(len(mask), -1)[:, 0]) for part, mask in zip(PARTS, masks, strict=True)}
