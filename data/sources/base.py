"""Base class of the official sources."""

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from data.download import fetch
from data.errors import DatasetMissingError
from data.graph import CsrGraph
from data.selection import Selection


@dataclass(frozen=True)
class Remote:
    """A published file or archive, and its place on disk.

    Attributes:
        url: its address, or the name of the library's class that downloads it.
        target: file or folder that it becomes; an existing one is not downloaded again.
        member: file or folder of the archive that becomes `target`; "" is all of it.
        known_hash: "md5:..." or "sha256:..." where it is known.
    """

    url: str
    target: Path
    member: str = ""
    known_hash: str = ""


class OfficialSource(ABC):
    """A publisher's files and their reader."""

    def files(self, root: Path) -> Sequence[Remote]:
        """The files that `load` reads, in the official layout below `root`; none for a graph that a rule defines."""
        return ()

    @abstractmethod
    def load(self, root: Path, selection: Selection) -> CsrGraph:
        """The graph, or the batch that `selection` chooses (single graphs ignore it).

        Raises:
            ValueError: the files cannot be read, or the batch exceeds the data set.
            MemoryError: the graph would not fit.
        """

    def is_present(self, root: Path) -> bool:
        return all(remote.target.exists() for remote in self.files(root))

    def verify(self, root: Path) -> None:
        """Raise a ValueError if a file has another hash than the published one, as far as that is known."""
        for remote in self.files(root):
            if remote.known_hash and not remote.member:  # else the hash is that of the archive
                kind, _, known = remote.known_hash.partition(":")
                with remote.target.open("rb") as file:
                    found = hashlib.file_digest(file, kind).hexdigest()
                if found != known:
                    raise ValueError(
                        f"{remote.target}: its {kind} is {found}, and that of the published file {known}: damaged, or "
                        "another version; move it away and load again to download it"
                    )

    def fetch(self, root: Path) -> None:
        """Download the missing files.

        Raises:
            DatasetMissingError, OSError: as `data.download.fetch`.
        """
        for remote in self.files(root):
            if not remote.url and not remote.target.exists():
                raise DatasetMissingError(
                    f"{remote.target}: made by a script of the publisher, not by a download; data/README.md names it"
                )
            fetch(remote.url, remote.target, remote.member, remote.known_hash)
