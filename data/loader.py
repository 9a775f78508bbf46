"""`load`: every data set from every source."""

import logging
import os
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import numpy as np

from data.canonical import with_self_loops
from data.errors import DatasetMissingError, DownloadError
from data.features import (
    as_features,
    check_classes,
    check_splits,
    check_targets,
)
from data.files import read_graph
from data.graph import PARTS, CsrGraph, GraphMeta, LoadedGraph, Source, to_tensor
from data.memory import fits, require_memory
from data.registry import Dataset, info, names
from data.selection import Order, Selection, Split, refuse

logger = logging.getLogger(__name__)

CLONE = Path(__file__).resolve().parents[1]
SOURCES = ("auto", *get_args(Source))
# Of a file without features or labels under a name that is not registered.
DEFAULT_FEATURE_DIM = 64
DEFAULT_NUM_CLASSES = 2


def load(
    name: str,
    *,
    root: str | os.PathLike[str] = "datasets",
    source: str = "auto",
    path: str | os.PathLike[str] | None = None,
    batch_size: int | None = 1024,
    order: Order = "dataset",
    split: Split | None = None,
    seed: int = 0,
    features: bool = True,
    edge_features: bool = False,
    self_loops: bool = False,
    random_walk: int = 0,
) -> LoadedGraph:
    """Load a graph, or a batch of small graphs, with node features.

    Sources:
        official: the publisher's files, below `root`, or shipped with this repository (cora), or downloaded to `root`.
        file: the file `path`, else `<root>/<name>.npz`; formats in `data.files`. Under a registered name the task, the
            number of classes and (if the file has no features) the kind of features are the registry's.
        synthetic: a seeded surrogate; large ones are kept below `root`/synthetic.
        auto: `path` if given; else the first of official files below `root`, `<root>/<name>.npz`, the files shipped
            with this repository, the official download, and the surrogate, with one warning for the last. There is no
            surrogate for a publisher who is slow or busy or a download that breaks off, for a choice of graphs, and for
            igb-large and ogbn-papers100m, whose surrogates take minutes: only "synthetic" gives them.

    Args:
        name: a registered name (`data.names()`), or any label of a file.
        root: folder of the data sets; created when something is downloaded.
        source: "auto", "official", "file" or "synthetic".
        path: a graph file.
        batch_size: number of graphs of a collection: the first ones in `order`; None for all of them (of `split`, or of
            the whole set). A surrogate has no whole.
        order: "dataset", or "random" (by `seed`): order of the graphs of a collection.
        split: "train", "val" or "test" of an official collection; None for the choice of the published run: the whole
            set for ogbg sets, train for the others. A surrogate has neither an order nor splits.
        seed: seed of the surrogate, of a random order and of random features.
        features: False leaves out random node features. For a large graph they take longer to generate than the edges
            to load.
        edge_features: True adds `edge_data["feat"]`, float32 [nnz, F] or int64 [nnz, C] (bonds): the original ones of
            official files and of a file with `edge_feat`, else random ones of the registered kind.
        self_loops: True adds an edge from each node to itself where it is missing; not with edge features.
        random_walk: steps k of the random-walk encoding, `node_data["random_walk"]`, float32 [N, k], of graphs of up to
            4,096 nodes (`data.random_walk`); 0: none.

    Returns:
        The graph as CSR tensors on the CPU, each edge once, int32 ids (int64 from 2^31 edges on), and as a DGLGraph
        where `graph` is asked for. `node_data["feat"]` is float32 [N, F] or int64 [N, C], `node_data["label"]` int64
        [N] where known, [N, C] if a node has several. Features of IGB and papers100M are mapped from files.

    Raises:
        DatasetMissingError: the graph is missing and cannot be downloaded; a `DownloadError` if that may work later.
        ValueError: an argument or a file is wrong, or `edge_features` are asked of a graph that has none; the text
            names it and the allowed values.
        TypeError: batch_size or seed is no integer, root or path no path.
        MemoryError: the graph would not fit.
    """
    chosen = {"batch_size": batch_size, "order": order, "split": split, "seed": seed, "edge_features": edge_features}
    found_in, graph = find_graph(name, root=root, source=source, path=path, **chosen)
    if self_loops:
        if edge_features:
            raise ValueError("self_loops: got True with edge_features=True; self-loops have no features")
        graph = with_self_loops(graph)
    return _finish(_described(name, graph), found_in, graph, seed, features, edge_features, random_walk)


def find_graph(
    name: str,
    *,
    root: str | os.PathLike[str] = "datasets",
    source: str = "auto",
    path: str | os.PathLike[str] | None = None,
    **choice: Any,
) -> tuple[Source, CsrGraph]:
    """First step of `load`: the source that has the graph, and its edges.

    Arguments and errors are those of `load`; `choice` are the fields of `Selection`.
    """
    if not isinstance(name, str):
        raise TypeError(f"name: got {name!r}; a text such as 'cora' is needed")
    if source not in SOURCES:
        raise ValueError(f"source: got {source!r}; allowed are {', '.join(SOURCES)}")
    if path is not None and source not in ("auto", "file"):
        raise ValueError(f"path: got {str(path)!r} with source={source!r}; a path goes with source 'file' or 'auto'")
    selection = Selection(**choice, name=name)
    root, path = Path(root), None if path is None else Path(path)
    local = root / f"{name}.npz"
    if path is not None and name in names() and path.name.partition(".")[0] != name:
        text = "%s: read under the name of a registered data set, %s, which results carry; give it a name of its own "
        logger.warning(text + "(name, data.name in a configuration)", path, name)
    if path is not None or source == "file":
        return "file", read_graph(path or local, selection)
    if source == "auto" and name not in names() and local.is_file():
        return "file", read_graph(local, selection)
    entry = info(name)
    if entry.num_graphs is None:
        refuse(selection, f"{name} is a single graph")
    if source == "synthetic":
        refuse(selection, "a surrogate has neither an order nor splits")
        if selection.batch_size is None and entry.num_graphs is not None:
            raise ValueError(f"batch_size: got None (all graphs); the surrogate of {name} needs a number")
        return "synthetic", _surrogate(entry, root, selection)
    if entry.official.is_present(root):
        entry.official.verify(root)
        return "official", entry.official.load(root, selection)
    if source == "auto" and local.is_file():
        return "file", read_graph(local, selection)
    if entry.embedded is not None:
        graph = entry.official.load(CLONE / entry.embedded, selection)
        return "official", replace(graph, origin=f"{graph.origin}, as shipped in {entry.embedded}")
    try:
        entry.official.fetch(root)
    except DatasetMissingError as missing:
        # There is a surrogate for "auto", but for a publisher who may answer later, a choice of graphs, and a graph
        # whose surrogate takes minutes.
        is_large = entry.surrogate is None or entry.surrogate["generator"] == "huge.huge"
        is_choice = entry.num_graphs is not None and not selection.is_default
        if source == "official" or isinstance(missing, DownloadError) or is_large or is_choice:
            raise type(missing)(_with_remedy(entry, root, selection, missing)) from missing
        text = "%s: not under %s; using a synthetic surrogate (source=synthetic): %s"
        logger.warning(text, name, root, missing)
        return "synthetic", _surrogate(entry, root, selection)
    return "official", entry.official.load(root, selection)


def _surrogate(entry: Dataset, root: Path, selection: Selection) -> CsrGraph:
    from data.synthetic.generate import surrogate  # on use: most runs are of real graphs

    return surrogate(entry, root, selection.batch_size or 1, selection.seed)


def _with_remedy(entry: Dataset, root: Path, selection: Selection, missing: DatasetMissingError) -> str:
    alternative = "source='synthetic' gives a surrogate; "
    if entry.surrogate is None:
        alternative = ""
    elif entry.num_graphs is not None and not selection.is_default:
        alternative = "source='synthetic' gives a surrogate, but only with a batch_size, order 'dataset' and no split; "
    return (
        f"{entry.name}: not under {root}; {missing}; {alternative}your own graph file can be "
        f"{root / entry.name}.npz or any path= (the publisher: {entry.homepage})"
    )


def _described(name: str, csr: CsrGraph) -> Dataset:
    """The registered data set, or one with what a file under another name holds."""
    if name in names():
        return info(name)
    if csr.graph_labels is not None:
        metric, num_classes = csr.target
    else:
        metric, num_classes = None, int(csr.ndata["label"].max()) + 1 if "label" in csr.ndata else 0
    return Dataset(
        name=name,
        task="node" if csr.graph_sizes is None else "graph",
        num_nodes=csr.num_nodes,
        nnz=csr.col.size,
        num_classes=num_classes or DEFAULT_NUM_CLASSES,  # no labels, or all of them unknown
        feature_dim=DEFAULT_FEATURE_DIM,
        metric=metric,
    )


def _finish(
    entry: Dataset,
    source: Source,
    csr: CsrGraph,
    seed: int,
    features: bool,
    edge_features: bool,
    random_walk: int,
) -> LoadedGraph:
    """Check the contents, add features if the source has none, and describe the graph."""
    name, owner = entry.name, f"{entry.name} ({csr.origin})"
    if csr.target and csr.target[0] == "accuracy" and entry.metric in ("rocauc", "ap"):  # integers [B] are answers here
        csr = replace(csr, graph_labels=np.where(csr.graph_labels == -1, np.nan, csr.graph_labels))
    _check_labels(entry, owner, csr)
    if csr.removed:
        listed = csr.col.size + csr.removed
        logger.info("%s: %d edges are listed, %d of them different: each counts once", name, listed, csr.col.size)
    original, cardinalities = csr.ndata.get("feat"), entry.feature_cardinalities
    ndata, feature_dim = dict(csr.ndata), entry.feature_dim
    if original is not None:
        is_left = isinstance(original, np.memmap) and not (features and fits(original.nbytes))  # a check reads all
        kinds = "iu" if source == "official" and cardinalities else "f"
        if not is_left:
            ndata["feat"] = as_features(owner, "node features", original, kinds, cardinalities)
        feature_dim, cardinalities = original.shape[1], cardinalities if kinds == "iu" else None
    elif features:
        ndata["feat"] = _random(entry, csr.origin, csr.num_nodes, feature_dim, cardinalities, "features", seed)
    if source == "official":
        found = {"feature columns": (feature_dim, entry.feature_dim)}
        if entry.num_graphs is None:
            found["nodes"] = csr.num_nodes, entry.num_nodes
        for what, (here, published) in found.items():
            if here != published:
                text = "%s: %s holds %s %s, and %s are published: another version, or incomplete"
                logger.warning(text, name, csr.origin, f"{here:,}", what, f"{published:,}")
    sizes = np.array([csr.num_nodes]) if csr.graph_sizes is None else csr.graph_sizes
    if random_walk:
        from data.random_walk import random_walk_encoding

        ndata["random_walk"] = random_walk_encoding(csr.indptr, csr.col, sizes, random_walk)
    node_data = {key: to_tensor(values) for key, values in ndata.items()}
    edge_data, about_edges = _edge_features(entry, owner, source, csr, seed) if edge_features else ({}, {})
    labels = node_data.get("label") if entry.task == "node" else to_tensor(csr.graph_labels)
    meta = GraphMeta(
        name=name,
        source=source,
        origin=csr.origin,
        task=entry.task,
        num_nodes=csr.num_nodes,
        num_edges=csr.col.size,
        num_graphs=sizes.size,
        feature_kind="categorical" if cardinalities else "float",
        feature_dim=feature_dim,
        feature_cardinalities=cardinalities,
        features="random" if original is None else "original",
        num_classes=entry.num_classes,
        sha256=csr.sha256,
        collection_size=csr.collection_size,
        unit=entry.unit,
        **about_edges,
    )
    return LoadedGraph(
        row_pointers=to_tensor(csr.indptr),
        columns=to_tensor(csr.col),
        graph_sizes=to_tensor(sizes.astype(np.int64)),
        node_data=node_data,
        edge_data=edge_data,
        meta=meta,
        labels=labels,
        splits=csr.splits and {part: to_tensor(csr.splits[part].astype(np.int64)) for part in PARTS},
        metric=None if labels is None else entry.metric,
        graph_ids=to_tensor(csr.graph_ids),
    )


def _check_labels(entry: Dataset, owner: str, csr: CsrGraph) -> None:
    """Raise a ValueError unless labels, and the split of a single graph, are of the data set's kind."""
    if "label" in csr.ndata and csr.ndata["label"].ndim == 1:
        check_classes(owner, csr.ndata["label"], entry.num_classes)
    if csr.graph_labels is not None and entry.task == "graph":
        if entry.metric is None:
            raise ValueError(
                f"{owner}: graph_label holds neither answers, integers of 1, 0, and -1 for unknown, nor targets, "
                "floats that are not all 0 or 1"
            )
        check_targets(owner, csr.graph_labels, entry.num_classes, entry.metric)
    if csr.splits is not None and csr.graph_sizes is None:  # `Selection.pick` checks those of collections
        check_splits(owner, csr.splits, csr.num_nodes)


def _edge_features(
    entry: Dataset, owner: str, source: Source, csr: CsrGraph, seed: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """`edge_data`: [nnz, F] float32 or [nnz, C] int64, and the fields of `GraphMeta`."""
    values, cardinalities = csr.edata.get("feat"), entry.edge_feature_cardinalities
    kind = "random" if values is None else "original"
    if values is not None:
        kinds = "fiu" if source == "file" else "iu" if cardinalities else "f"
        values = as_features(owner, "edge features", values, kinds, cardinalities)
        if values.dtype.kind == "f":
            cardinalities = None
        elif not cardinalities:
            cardinalities = tuple((values.max(axis=0, initial=0) + 1).tolist())
    elif not entry.edge_feature_dim:
        having = ", ".join(one for one in names() if info(one).edge_feature_dim)
        raise ValueError(
            f"{entry.name}: has no edge features (asked for by edge_features=True, in a configuration by "
            f"model.edge_features); these have: {having}, and .npz files with edge_feat"
        )
    else:
        size = csr.col.size, entry.edge_feature_dim
        values = _random(entry, csr.origin, *size, cardinalities, "edge features", seed)
    about = {"edge_features": kind, "edge_feature_dim": values.shape[1], "edge_feature_cardinalities": cardinalities}
    return {"feat": to_tensor(values)}, about


def _random(
    entry: Dataset, owner: str, rows: int, dim: int, cardinalities: tuple[int, ...] | None, purpose: str, seed: int
) -> np.ndarray:
    """Float32 [rows, dim] from N(0, 1); with cardinalities int64, each column uniform over its codes. One stream per
    name and purpose: they do not depend on the source of the edges."""
    require_memory(f"{owner}: random features of {rows:,} rows by {dim}", rows * dim * (8 if cardinalities else 4))
    rng = np.random.default_rng([seed, zlib.crc32(f"{entry.name}/{purpose}".encode())])
    if cardinalities:
        return rng.integers(0, cardinalities, size=(rows, len(cardinalities)))
    return rng.standard_normal((rows, dim), dtype=np.float32)
