"""Single graphs through their classes in `dgl.data`, in the layout that DGL keeps below its `raw_dir`."""

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic import replacing
from data.graph import PARTS, RawGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote, from_dgl, reading
from fused3s_dgl import import_dgl


def dgl_class(name: str) -> Any:
    """A class of `dgl.data`."""
    import_dgl()
    return getattr(importlib.import_module("dgl.data"), name)


def located(loader: Any, root: Path, **options: Any) -> Any:
    """An instance of a `dgl.data` class with its URL and its paths below `root`, and nothing loaded."""
    inert = type(loader.__name__, (loader,), {"_load": lambda self: None})
    return inert(raw_dir=str(root), **options)


@contextlib.contextmanager
def reading_with_dgl(place: Path) -> Iterator[None]:
    """`reading`, with DGL's own cache of the graphs written atomically.

    DGL reads its cache without a check: a half-written file of an interrupted process would crash every later one.
    """
    import_dgl()
    graph_serialize = importlib.import_module("dgl.data.graph_serialize")
    save = graph_serialize.save_heterographs

    def save_whole(filename: str, *arguments: Any) -> None:
        with replacing(Path(filename)) as unfinished:
            save(str(unfinished), *arguments)

    graph_serialize.save_heterographs = save_whole
    try:
        with reading(place):
            yield
    finally:
        graph_serialize.save_heterographs = save


@dataclass(frozen=True)
class DglGraph(OfficialSource):
    """A single graph.

    Attributes:
        class_name: a class of `dgl.data`.
        options: its arguments besides raw_dir and verbose.
        file: name of the published file in DGL's folder; "" if a zip archive is published.
    """

    class_name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""

    def files(self, root: Path) -> Sequence[Remote]:
        layout = located(dgl_class(self.class_name), root, **self.options)
        return [Remote(layout.url, Path(layout.raw_path, self.file))]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        (remote,) = self.files(root)
        with reading_with_dgl(remote.target):
            graph = dgl_class(self.class_name)(raw_dir=str(root), verbose=False, **self.options)[0]
        raw = from_dgl(graph, remote.url)
        return replace(raw, splits=split_of_masks(raw.ndata))


def split_of_masks(ndata: Mapping[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """The split that DGL keeps as masks [N], or [N, K] for K splits: then the first. None without masks."""
    masks = [ndata.get(name) for name in ("train_mask", "val_mask", "test_mask")]
    if any(mask is None for mask in masks):
        return None
    return {part: np.flatnonzero(mask.reshape(len(mask), -1)[:, 0]) for part, mask in zip(PARTS, masks, strict=True)}
