"""Published files that ship with this repository, in data/embedded."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.graph import RawGraph
from data.selection import Selection
from data.sources.base import OfficialSource, Remote
from data.sources.planetoid import read_planetoid

SHIPPED = Path(__file__).resolve().parents[1] / "embedded"


@dataclass(frozen=True)
class EmbeddedGraph(OfficialSource):
    """A citation graph of Planetoid in data/embedded.

    Attributes:
        folder: name of the folder in data/embedded.
        file_name: NAME of its files `ind.NAME.*`.
        publisher: repository in which the files are published.
    """

    folder: str
    file_name: str
    publisher: str

    @property
    def shipped(self) -> Path:
        return SHIPPED / self.folder

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(self.publisher, self.shipped)]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        origin = f"{self.publisher}, as shipped in data/embedded/{self.folder}"
        return read_planetoid(self.shipped, self.file_name, origin)
