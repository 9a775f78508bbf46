"""What every official source is, and what the families share."""

import contextlib
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
from data.graph import RawGraph
from data.selection import Selection

logger = logging.getLogger(__name__)

# Two int64 arrays from a source, the sort key, and DGL's sorted two: what the edges of a large graph need at the peak.
LOADING_BYTES_PER_EDGE = 48


@dataclass(frozen=True)
class Remote:
    """A published file or archive and where it belongs.

    Attributes:
        url: where it is published.
        target: file or folder that it becomes; when it is there, nothing is downloaded.
        member: file or folder of the archive that becomes `target`; "" is all of it.
        known_hash: "md5:..." where the publisher states one.
    """

    url: str
    target: Path
    member: str = ""
    known_hash: str = ""


class OfficialSource(ABC):
    """A publisher's files and how to read them; calling it does both."""

    @abstractmethod
    def files(self, root: Path) -> Sequence[Remote]:
        """What `load` reads, in the official layout below `root`."""

    @abstractmethod
    def load(self, root: Path, selection: Selection) -> RawGraph:
        """The graph, or the batch that `selection` names; a single graph has no use for it.

        Raises:
            ValueError: the files are there but cannot be read, or the batch exceeds the data set.
            MemoryError: they would not fit.
        """

    def fetch(self, root: Path, fetch: Fetch) -> None:
        """Put in place what is not there yet.

        Raises:
            DatasetMissingError: from `fetch`.
        """
        for remote in self.files(root):
            if not remote.target.exists():
                fetch(remote.url, remote.target, member=remote.member, known_hash=remote.known_hash)

    def __call__(self, root: Path, selection: Selection, fetch: Fetch) -> RawGraph:
        self.fetch(root, fetch)
        return self.load(root, selection)


def from_dgl(graph: Any, origin: str, *, batched: bool = False) -> RawGraph:
    """Edges and node data of a DGLGraph; a `feat` of one number a node gets its second dimension."""
    key, query = graph.edges(order="eid")  # DGL's source is the key: nodes attend along their in-edges
    ndata = {name: values.numpy() for name, values in graph.ndata.items()}
    if "feat" in ndata and ndata["feat"].ndim == 1:
        ndata["feat"] = ndata["feat"][:, None]
    return RawGraph(
        row=query.numpy(),
        col=key.numpy(),
        num_nodes=graph.num_nodes(),
        origin=origin,
        graph_sizes=graph.batch_num_nodes().numpy().astype(np.int64) if batched else None,
        ndata=ndata,
    )


def batch_of(graphs: Sequence[Any], selection: Selection, what: str) -> Any:
    """The selected DGLGraphs of a split as one batch, without edge features.

    Raises:
        ValueError: there are fewer.
    """
    from fused3s_dgl import import_dgl

    picked = selection.pick(len(graphs), what)
    return import_dgl().batch([graphs[i] for i in picked.tolist()], edata=None)


def check_ids(row: np.ndarray, col: np.ndarray, num_nodes: int) -> None:
    """Raise a ValueError if an end of an edge is no node."""
    if row.size and (min(row.min(), col.min()) < 0 or max(row.max(), col.max()) >= num_nodes):
        raise ValueError(f"edge_index names papers outside 0 .. {num_nodes - 1}")


@contextlib.contextmanager
def reading(place: Path) -> Iterator[None]:
    """Send a library's prints to the debug log, and turn whatever a damaged file makes it raise into a ValueError.

    Its warnings are about its own code (arrays of pandas that are read-only, for one) and are dropped.
    """
    prints = io.StringIO()
    try:
        with contextlib.redirect_stdout(prints), warnings.catch_warnings(action="ignore"):
            yield
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(
            f"{place}: the official files are there but cannot be read ({type(error).__name__}: {error}). "
            f"Move {'the folder' if place.is_dir() else 'it'} away and load again to fetch it anew"
        ) from error
    finally:
        logger.debug("%s: %s", place, prints.getvalue())
