"""Official data sets, through the loader classes of `dgl.data` and `ogb` on files that we fetch ourselves.

Both libraries would download on their own, but without time-outs, trusting half-written folders, and ogb with questions
at the terminal. So the files are put in place first, and the classes only read them.
"""

import contextlib
import io
import logging
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from data.download import Fetch
from data.graph import RawGraph

logger = logging.getLogger(__name__)


def planetoid(class_name: str, root: Path, batch_size: int, fetch: Fetch) -> RawGraph:
    """Cora, Citeseer or Pubmed through `dgl.data.<class_name>`, in the layout that DGL keeps below `root`.

    Args:
        class_name: a subclass of `dgl.data.CitationGraphDataset`.
        root: DGL's `raw_dir`.
        batch_size: unused; these are single graphs.
        fetch: called when DGL's folder is not below `root`.

    Raises:
        DatasetMissingError: from `fetch`.
        ValueError: the folder is there but cannot be read.
    """
    from kernels.dgl_compat import import_dgl

    import_dgl()
    import dgl.data

    loader = getattr(dgl.data, class_name)

    class Located(loader):
        """Knows DGL's URL and folder for the data set, and loads nothing."""

        def _load(self) -> None: ...

    located = Located(raw_dir=str(root))
    folder = Path(located.raw_path)
    if not folder.is_dir():
        fetch(located.url, folder)
    with _reading(folder):
        graph = loader(raw_dir=str(root), verbose=False)[0]
    return _from_dgl(graph, located.url)


def ogb_graphs(name: str, root: Path, batch_size: int, fetch: Fetch) -> RawGraph:
    """The first `batch_size` graphs of an OGB set, in data set order, as one batch without edge features.

    Args:
        name: ogb's name, such as "ogbg-molhiv".
        root: ogb's `root`.
        batch_size: how many graphs.
        fetch: called when ogb's folder is not below `root`.

    Raises:
        DatasetMissingError: from `fetch`.
        ValueError: the folder is there but cannot be read, or batch_size exceeds the data set.
    """
    import pandas as pd

    from kernels.dgl_compat import import_dgl

    dgl = import_dgl()
    graphproppred = _import_ogb_graphproppred()
    about = pd.read_csv(Path(graphproppred.__file__).with_name("master.csv"), index_col=0, keep_default_na=False)[name]

    folder = root / name.replace("-", "_")
    if (alternative := folder.with_name(f"{folder.name}_dgl")).is_dir():
        folder = alternative
    if not folder.is_dir():
        fetch(about["url"], folder, member=about["download_name"])
    # Without these files ogb would ask at the terminal, or download over what is there.
    release = folder / f"RELEASE_v{about['version']}.txt"
    contents = [folder / "raw" / "edge.csv.gz", folder / "processed" / "dgl_data_processed"]
    if not release.is_file() or not any(file.is_file() for file in contents):
        raise ValueError(
            f"{folder}: incomplete, or of another version; {release.name} and {contents[0].relative_to(folder)} "
            "must be there. Move the folder away and load again to fetch it anew"
        )
    with _reading(folder):
        dataset = graphproppred.DglGraphPropPredDataset(name=name, root=str(root))
    if batch_size > len(dataset):
        raise ValueError(f"batch_size: got {batch_size}; {name} in {folder} has {len(dataset)} graphs")
    return _from_dgl(dgl.batch(dataset.graphs[:batch_size]), about["url"], batched=True)


def _from_dgl(graph: Any, origin: str, *, batched: bool = False) -> RawGraph:
    key, query = graph.edges(order="eid")  # DGL's source is the key: nodes attend along their in-edges
    return RawGraph(
        row=query.numpy(),
        col=key.numpy(),
        num_nodes=graph.num_nodes(),
        origin=origin,
        graph_sizes=graph.batch_num_nodes().numpy().astype(np.int64) if batched else None,
        ndata={name: values.numpy() for name, values in graph.ndata.items()},
    )


@contextlib.contextmanager
def _reading(folder: Path) -> Iterator[None]:
    """Send a library's prints to the debug log, and turn whatever a damaged file makes it raise into a ValueError.

    Its warnings are about its own code (arrays of pandas that are read-only, for one) and are dropped.
    """
    prints = io.StringIO()
    try:
        with contextlib.redirect_stdout(prints), warnings.catch_warnings(action="ignore"):
            yield
    except Exception as error:
        raise ValueError(
            f"{folder}: the official files are there but cannot be read ({type(error).__name__}: {error}). "
            "Move the folder away and load again to fetch it anew"
        ) from error
    finally:
        logger.debug("%s: %s", folder, prints.getvalue())


def _import_ogb_graphproppred() -> Any:
    """`ogb.graphproppred`, without the thread in which `import ogb` asks PyPI for its newest version."""
    hidden = "outdated" not in sys.modules
    if hidden:
        sys.modules["outdated"] = None  # makes ogb's `import outdated` an ImportError, which ogb expects
    try:
        import ogb.graphproppred
    finally:
        if hidden:
            del sys.modules["outdated"]
    return ogb.graphproppred
