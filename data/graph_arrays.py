"""Graphs in .npz files of arrays: one graph, or a collection of small ones. `data.files` describes the arrays."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from data.collection_checks import as_floats, as_integers, both_directions
from data.graph import MAX_CODES, MAX_NODES, PARTS, CsrGraph, RawGraph
from data.graph_checks import check_size, checked_graph
from data.mapped_collections import loading_bytes, mapped_csr
from data.memory import available_bytes, fits
from data.npz import Npz
from data.packed import rows_of
from data.selection import Selection, renumbered

_SPLIT = tuple(f"{part}_ids" for part in PARTS)
# Names of the arrays: needed and optional ones.
GRAPH, WITH_GRAPH = ("src_li", "dst_li", "num_nodes"), ("feat", "label", "edge_feat", *_SPLIT)
COLLECTION, WITH_COLLECTION = ("node_counts", "edge_counts", "u", "v"), ("feat", "graph_label", *_SPLIT)


def read_one_graph(archive: Npz) -> RawGraph:
    """The graph of an archive with the arrays GRAPH.

    Raises:
        ValueError: an array does not fit the others; the text names it.
        MemoryError: the graph would not fit.
    """
    path = archive.path
    num_nodes = _one_integer(archive, "num_nodes")
    for name in ("src_li", "dst_li", *(name for name in ("label", *_SPLIT) if name in archive)):
        _check_integers(archive, name)
    edges = archive["src_li"].size
    if edges != archive["dst_li"].size:
        raise ValueError(f"{path}: src_li has {edges} entries and dst_li {archive['dst_li'].size}; they must agree")
    check_size(path, "num_nodes", num_nodes, edges)
    if "label" in archive and archive["label"].size != num_nodes:
        raise ValueError(
            f"{path}: label has {archive['label'].size} entries; one for each of {num_nodes} nodes is needed"
        )
    _check_features(archive, "feat", num_nodes)
    _check_features(archive, "edge_feat", edges, codes=True)

    row, col = (_integers(archive, name) for name in ("src_li", "dst_li"))
    ndata, edata = {}, {}
    if "feat" in archive:
        ndata["feat"] = _features(archive, "feat")
    if "label" in archive:
        ndata["label"] = label = _integers(archive, "label")
        if label.size and not -1 <= label.min() <= label.max() < MAX_CODES:
            wrong = label[(label < -1) | (label >= MAX_CODES)][0]
            raise ValueError(
                f"{path}: label holds {wrong}; classes from 0 to {MAX_CODES - 1}, and -1 for unknown, are allowed: "
                "number the classes from 0 on"
            )
    if "edge_feat" in archive:
        edata["feat"] = _features(archive, "edge_feat")
    raw = checked_graph(path, row, col, num_nodes, ndata, edata)
    return replace(raw, splits=_split(archive, num_nodes))


def read_collection(archive: Npz, selection: Selection, mapped: Path | None = None) -> RawGraph | CsrGraph:
    """The chosen graphs of an archive with the arrays COLLECTION; errors as `read_one_graph`.

    Args:
        mapped: folder for the arrays of a collection with `feat` that does not fit into memory (see
            `data.mapped_collections`); None refuses such a collection.
    """
    path = archive.path
    for name in (*COLLECTION, *(name for name in _SPLIT if name in archive)):
        _check_integers(archive, name)
    count, edges = archive["node_counts"].size, archive["u"].size
    if count != archive["edge_counts"].size:
        raise ValueError(
            f"{path}: node_counts has {count} entries and edge_counts {archive['edge_counts'].size}; they must agree"
        )
    if count == 0:
        raise ValueError(f"{path}: node_counts is empty; a collection has one graph or more")
    _check_labels(archive, count)
    sizes = _counts(archive, "node_counts", 1, MAX_NODES)
    edge_counts = _counts(archive, "edge_counts", 0, edges)
    if not edge_counts.sum() == edges == archive["v"].size:
        raise ValueError(
            f"{path}: edge_counts sum to {edge_counts.sum()}, u has {edges} entries and v {archive['v'].size}; they "
            "must agree"
        )
    _check_features(archive, "feat", int(sizes.sum()))
    picked = selection.pick(count, str(path))
    num_nodes = int(sizes[picked].sum())
    num_edges = int(edge_counts[picked].sum())
    labels = _graph_labels(archive)[picked] if "graph_label" in archive else None
    splits = _split(archive, count)
    splits = splits and renumbered(splits, picked, count)
    origin = selection.described(str(path))
    loading = loading_bytes(archive, num_nodes, num_edges)
    if mapped and "feat" in archive and num_nodes <= MAX_NODES and not fits(loading):
        if selection.order != "dataset":
            raise MemoryError(
                f"{path}: about {loading / 2**30:.1f} GiB needed, {available_bytes() / 2**30:.1f} GiB available; a "
                f"collection that does not fit is read with order='dataset' only, and got {selection.order!r}"
            )
        csr = mapped_csr(archive, origin, sizes[picked], edge_counts[picked], mapped)
        return replace(csr, graph_labels=labels, splits=splits, graph_ids=picked, collection_size=count)
    check_size(path, "the sum of node_counts of the chosen graphs", num_nodes, 2 * num_edges)
    ndata = {"feat": _features(archive, "feat")[rows_of(picked, sizes)]} if "feat" in archive else {}
    at = rows_of(picked, edge_counts)  # the edges of the picked graphs, one graph after the other
    u, v = (_integers(archive, name)[at] for name in ("u", "v"))
    sizes, edge_counts = sizes[picked], edge_counts[picked]
    row, col = both_directions(path, u, v, sizes, edge_counts, at)
    return RawGraph(
        row,
        col,
        num_nodes,
        origin,
        graph_sizes=sizes,
        ndata=ndata,
        graph_labels=labels,
        splits=splits,
        graph_ids=picked,
        collection_size=count,
    )


def _counts(archive: Npz, name: str, least: int, most: int) -> np.ndarray:
    """Nodes or edges of each graph, within bounds that leave no sum beyond int64."""
    counts = _integers(archive, name)
    outside = np.flatnonzero((counts < least) | (counts > most))
    if outside.size:
        raise ValueError(
            f"{archive.path}: {name} of graph {outside[0]} is {counts[outside[0]]}; {least} to {most} are allowed"
        )
    return counts


def _check_labels(archive: Npz, count: int) -> None:
    if "graph_label" not in archive:
        return
    header = archive["graph_label"]
    if header.ndim != 2 or header.shape[0] != count or header.shape[1] == 0 or header.dtype.kind not in "fiu":
        raise ValueError(
            f"{archive.path}: graph_label has shape {header.shape}, dtype {header.dtype}; numbers of shape "
            f"[{count}, tasks] are needed"
        )


def _graph_labels(archive: Npz) -> np.ndarray:
    (labels,) = archive.read("graph_label")
    with np.errstate(over="ignore"):
        labels = labels.astype(np.float32)
    if np.isinf(labels).any():
        raise ValueError(
            f"{archive.path}: graph_label holds infinity, or numbers beyond float32; finite ones, and NaN for a "
            "missing label, are allowed"
        )
    return labels


def _split(archive: Npz, count: int) -> dict[str, np.ndarray] | None:
    """The ids of each part, in ascending order; None without them."""
    path, given = archive.path, [name for name in _SPLIT if name in archive]
    if not given:
        return None
    if missing := sorted(set(_SPLIT) - set(given)):
        raise ValueError(
            f"{path}: a split needs train_ids, valid_ids and test_ids (which may be empty); {missing[0]} is missing"
        )
    parts = {part: np.sort(_integers(archive, name)) for part, name in zip(PARTS, _SPLIT, strict=True)}
    together = np.sort(np.concatenate(list(parts.values())))
    outside = together[(together < 0) | (together >= count)]
    if outside.size:
        raise ValueError(f"{path}: train_ids, valid_ids or test_ids hold {outside[0]}; allowed are 0 to {count - 1}")
    repeated = together[1:][together[1:] == together[:-1]]
    if repeated.size:
        raise ValueError(
            f"{path}: train_ids, valid_ids and test_ids hold {repeated[0]} twice; each id may be in one part"
        )
    return parts


def _one_integer(archive: Npz, name: str) -> int:
    header = archive[name]
    if header.size != 1 or header.dtype.kind not in "iu":
        raise ValueError(
            f"{archive.path}: {name} has shape {header.shape}, dtype {header.dtype}; one integer is needed"
        )
    return int(archive.read(name)[0].item())


def _check_integers(archive: Npz, name: str) -> None:
    header = archive[name]
    if header.ndim != 1 or header.dtype.kind not in "iu":
        raise ValueError(
            f"{archive.path}: {name} has shape {header.shape}, dtype {header.dtype}; 1-D integers are needed"
        )


def _integers(archive: Npz, name: str) -> np.ndarray:
    (values,) = archive.read(name)
    return as_integers(archive.path, name, values)


def _check_features(archive: Npz, name: str, rows: int, codes: bool = False) -> None:
    if name not in archive:
        return
    header = archive[name]
    kinds = "fiu" if codes else "f"
    if header.ndim != 2 or header.shape[0] != rows or header.shape[1] == 0 or header.dtype.kind not in kinds:
        raise ValueError(
            f"{archive.path}: {name} has shape {header.shape}, dtype {header.dtype}; floats{' or integers' * codes} of "
            f"shape [{rows}, F] are needed"
        )


def _features(archive: Npz, name: str) -> np.ndarray:
    """Floats as float32, codes as int64."""
    path = archive.path
    if archive[name].dtype.kind != "f":
        (values,) = archive.read(name)
        if values.size and not 0 <= values.min() <= values.max() < MAX_CODES:
            wrong = values[(values < 0) | (values >= MAX_CODES)][0]
            raise ValueError(f"{path}: {name} holds {wrong}; codes from 0 to {MAX_CODES - 1} are allowed")
        return values.astype(np.int64)
    (values,) = archive.read(name)
    return as_floats(path, name, values)
