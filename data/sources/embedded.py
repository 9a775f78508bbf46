"""Published files that ship with this repository, in data/embedded."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from data.atomic import replacing
from data.download import Fetch
from data.graph import RawGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote
from data.sources.dgl_graphs import DglGraph

SHIPPED = Path(__file__).resolve().parents[1] / "embedded"


@dataclass(frozen=True)
class EmbeddedGraph(OfficialSource):
    """A single graph that a class of `dgl.data` reads from files in data/embedded.

    The files are copied to `root`/embedded first, because DGL writes its own beside those that it reads.

    Attributes:
        folder: name of the folder in data/embedded. Its files `ind.*` have the names that DGL expects.
        reader: reads the copies.
        publisher: repository in which the files are published.
    """

    folder: str
    reader: DglGraph
    publisher: str

    @property
    def shipped(self) -> Path:
        return SHIPPED / self.folder

    def files(self, root: Path) -> Sequence[Remote]:
        return self.reader.files(root / "embedded")

    def fetch(self, root: Path, fetch: Fetch) -> None:
        """Copy the missing files. Each is copied whole, so that an interrupted copy is completed by the next call."""
        (remote,) = self.files(root)
        for file in sorted(self.shipped.glob("ind.*")):
            copy = remote.target / file.name
            if not copy.exists():
                with replacing(copy) as unfinished:
                    shutil.copyfile(file, unfinished)

    def load(self, root: Path, selection: Selection) -> RawGraph:
        origin = f"{self.publisher}, as shipped in data/embedded/{self.folder}"
        return replace(self.reader.load(root / "embedded", selection), origin=origin)
