"""Single graphs through their classes in `dgl.data`, in the layout that DGL keeps below its `raw_dir`."""

import contextlib
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from data.graph import RawGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote, from_dgl, reading


def dgl_class(name: str) -> Any:
    """The class of that name in `dgl.data`."""
    from fused3s_dgl import import_dgl

    import_dgl()
    import dgl.data

    return getattr(dgl.data, name)


def located(loader: Any, root: Path, **options: Any) -> Any:
    """An instance of a `dgl.data` class that knows its URL and its paths below `root`, and has loaded nothing."""
    inert = type(loader.__name__, (loader,), {"_load": lambda self: None})
    return inert(raw_dir=str(root), **options)


@contextlib.contextmanager
def reading_with_dgl(place: Path) -> Iterator[None]:
    """`reading`, in which the graphs that DGL writes for the next time are put in place whole.

    DGL reads them without a check: half a file, as an interrupted process leaves it, would end every later process.
    """
    from fused3s_dgl import import_dgl

    import_dgl()
    from dgl.data import graph_serialize

    save = graph_serialize.save_heterographs

    def save_whole(filename: str, *arguments: Any) -> None:
        unfinished = Path(f"{filename}.{os.getpid()}.writing")
        try:
            save(str(unfinished), *arguments)
            os.replace(unfinished, filename)
        finally:
            unfinished.unlink(missing_ok=True)

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
        file: name of the one file in DGL's folder, where the URL is that file's; "" where it is a zip archive.
    """

    class_name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    file: str = ""

    def files(self, root: Path) -> Sequence[Remote]:
        there = located(dgl_class(self.class_name), root, **self.options)
        return [Remote(there.url, Path(there.raw_path, self.file))]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        (remote,) = self.files(root)
        with reading_with_dgl(remote.target):
            graph = dgl_class(self.class_name)(raw_dir=str(root), verbose=False, **self.options)[0]
        return from_dgl(graph, remote.url)
