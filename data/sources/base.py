"""Base class of the official sources, and helpers that the families share."""

import contextlib
import errno
import io
import logging
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.download import Fetch
from data.graph import CsrGraph, RawGraph
from data.selection import Selection
from fused3s_dgl import import_dgl

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Remote:
    """A published file or archive, and its place on disk.

    Attributes:
        url: its address; "" if the publisher offers only a script.
        target: file or folder that it becomes; an existing one is not downloaded again.
        member: file or folder of the archive that becomes `target`; "" is all of it.
        known_hash: "md5:..." where the publisher states one.
    """

    url: str
    target: Path
    member: str = ""
    known_hash: str = ""


class OfficialSource(ABC):
    """A publisher's files and their reader. Calling it fetches and loads."""

    @abstractmethod
    def files(self, root: Path) -> Sequence[Remote]:
        """The files that `load` reads, in the official layout below `root`."""

    @abstractmethod
    def load(self, root: Path, selection: Selection) -> RawGraph | CsrGraph:
        """The graph, or the batch that `selection` chooses (single graphs ignore it).

        Raises:
            ValueError: the files exist but cannot be read, or the batch exceeds the data set.
            MemoryError: the graph would not fit.
        """

    def fetch(self, root: Path, fetch: Fetch) -> None:
        """Download the missing files.

        Raises:
            DatasetMissingError: from `fetch`.
        """
        for remote in self.files(root):
            if not remote.target.exists():
                fetch(remote.url, remote.target, member=remote.member, known_hash=remote.known_hash)

    def __call__(self, root: Path, selection: Selection, fetch: Fetch) -> RawGraph | CsrGraph:
        self.fetch(root, fetch)
        return self.load(root, selection)


def from_dgl(graph: Any, origin: str, *, batched: bool = False) -> RawGraph:
    """Edges, node data and edge features of a DGLGraph; a one-dimensional `feat` gets a second dimension.

    Raises:
        ValueError: an edge has an end that the graph does not have: DGL trusts its binary files.
    """
    key, query = graph.edges(order="eid")  # DGL's source is the key: nodes attend along their in-edges
    check_ids(query.numpy(), key.numpy(), graph.num_nodes())
    ndata = {name: values.numpy() for name, values in graph.ndata.items()}
    edata = {"feat": graph.edata["feat"].numpy()} if "feat" in graph.edata else {}
    for arrays in (ndata, edata):
        if "feat" in arrays and arrays["feat"].ndim == 1:
            arrays["feat"] = arrays["feat"][:, None]
    return RawGraph(
        row=query.numpy(),
        col=key.numpy(),
        num_nodes=graph.num_nodes(),
        origin=origin,
        graph_sizes=graph.batch_num_nodes().numpy().astype(np.int64) if batched else None,
        ndata=ndata,
        edata=edata,
    )


def batch_of(graphs: Sequence[Any]) -> Any:
    """The DGLGraphs as one batch, with the edge data "feat" where all of them have it."""
    edata = ["feat"] if all("feat" in graph.edata for graph in graphs) else None
    return import_dgl().batch(graphs, edata=edata)


def check_ids(row: np.ndarray, col: np.ndarray, num_nodes: int) -> None:
    """Raise a ValueError if an edge has an end outside 0 .. num_nodes - 1."""
    if row.size and (min(row.min(), col.min()) < 0 or max(row.max(), col.max()) >= num_nodes):
        raise ValueError(f"edge_index holds ids outside 0 .. {num_nodes - 1}")


@contextlib.contextmanager
def reading(place: Path) -> Iterator[None]:
    """Turn any error of a library that reads a damaged file into a ValueError, and its prints into debug messages.

    Warnings are dropped: they concern the library's own code, such as read-only arrays of pandas.
    """
    prints = io.StringIO()
    try:
        with contextlib.redirect_stdout(prints), warnings.catch_warnings(action="ignore"):
            yield
    except MemoryError:
        raise
    except OSError as error:
        if error.errno in (None, errno.ENOENT, errno.ENOTDIR):  # damage, or a missing file
            raise _damaged(place, error) from error
        raise ValueError(
            f"{place}: the official files cannot be read ({error}); they may be fine: check permissions and the disk"
        ) from error
    except Exception as error:
        raise _damaged(place, error) from error
    finally:
        logger.debug("%s: %s", place, prints.getvalue())


def _damaged(place: Path, error: Exception) -> ValueError:
    return ValueError(
        f"{place}: the official files exist but cannot be read ({type(error).__name__}: {error}). "
        f"Move {'the folder' if place.is_dir() else 'the file'} away and load again to download it again"
    )
