"""Data sets as sources of partitions, and a part as a loaded data set."""

import hashlib
import importlib.util
import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

import data
from configs.schema import DataConfig
from data import GraphMeta, LoadedGraph
from data.sources.base import reading
from data.sources.igb import Igb, map_floats
from data.sources.ogb_graphs import read_splits
from data.sources.papers100m import Papers100M, map_npz_array
from parallel.assignment import METHODS
from parallel.builder import partition_graph
from parallel.collectives import gather_rows
from parallel.errors import CollectionError
from parallel.group import Group, on_first_rank, share
from parallel.part import DESCRIPTION, Part, Partition, load_part
from parallel.source import GraphSource, source_from_csr, source_from_edges


def partition_folder(settings: DataConfig, seed: int, method: str, num_parts: int) -> Path:
    """Folder of a data set's partition, below `data.root`. Another source, file or seed gives another folder."""
    file = Path(settings.path or Path(settings.root, f"{settings.name}.npz"))
    found = file.stat() if file.is_file() else None
    version = None if found is None else [found.st_size, found.st_mtime_ns]
    asked = json.dumps([settings.source, settings.path, seed, version])
    digest = hashlib.sha256(asked.encode()).hexdigest()[:8]
    return Path(settings.root, "parts", f"{settings.name}-{method}-{num_parts}-{digest}")


def open_part(settings: DataConfig, seed: int, group: Group, say: Callable[[str], None]) -> Part | None:
    """This rank's part of a data set; None for a collection of graphs. Rank 0 makes the partition where there is none,
    by METIS if it is installed.

    Raises:
        PartitionError: this machine has no files of the part.
        ValueError, OSError, MemoryError: as `dataset_source` and `partition_graph`.
    """
    folder = share(group, on_first_rank(group, lambda: _partitioned(settings, seed, group.size, say)))
    return None if folder is None else load_part(folder, group)


def _partitioned(settings: DataConfig, seed: int, num_parts: int, say: Callable[[str], None]) -> Path | None:
    folders = {method: partition_folder(settings, seed, method, num_parts) for method in METHODS}
    for folder in folders.values():
        if (folder / DESCRIPTION).is_file():
            return folder
    method = "metis" if importlib.util.find_spec("pymetis") else "contiguous"
    say(f"partitioning {settings.name} into {num_parts} parts, once")
    try:
        source = dataset_source(**settings.model_dump(include={"name", "root", "source", "path"}), seed=seed)
    except CollectionError:
        return None
    partition_graph(source, folders[method], num_parts, method, say=say)
    return folders[method]


def dataset_source(name: str, *, root: str, source: str, path: str | None, seed: int) -> GraphSource:
    """The single graph that `data.load` would give, as a source. Papers100M and IGB are read from their official files
    without holding the edges in memory.

    Raises:
        CollectionError: the data set is a collection of graphs.
        DatasetMissingError, ValueError, MemoryError: as `data.load`.
    """
    if path is None and source in ("auto", "official") and name in data.names():
        official = data.info(name).official
        mapped = {Papers100M: _papers100m, Igb: _igb}.get(type(official))
        if mapped and (found := mapped(official, Path(root))):
            return _mapped_source(name, *found)
    reads_file = path is not None or source == "file"
    if not reads_file and name in data.names() and data.info(name).num_graphs is not None:
        raise CollectionError(name)
    loaded = data.load(name, root=root, source=source, path=path, batch_size=None, seed=seed)
    if loaded.meta.num_graphs > 1:
        raise CollectionError(name)
    indptr, col, _ = loaded.graph.adj_tensors("csc")
    return source_from_csr(
        indptr.numpy(),
        col.numpy(),
        fingerprint=f"{loaded.meta.sha256} {loaded.meta.source} {loaded.meta.features} {seed}",
        node_data={key: values.numpy() for key, values in loaded.graph.ndata.items()},
        row_ids={} if loaded.splits is None else {part: ids.numpy() for part, ids in loaded.splits.items()},
        about={"meta": asdict(loaded.meta), "metric": loaded.metric},
    )


def meta_of(partition: Partition) -> GraphMeta:
    """The description of the graph that was partitioned."""
    stored = dict(partition.about["meta"])
    for key in ("feature_cardinalities", "edge_feature_cardinalities"):
        stored[key] = None if stored[key] is None else tuple(stored[key])
    return replace(GraphMeta(**stored), num_edges=partition.num_edges)


def loaded_part(part: Part) -> LoadedGraph:
    """Labels and splits of this part's rows as `data.load` returns those of a graph; `graph` is None."""
    label = part.node_data.get("label")
    splits = {name: torch.from_numpy(np.array(ids, np.int64)) for name, ids in part.row_ids.items()}
    return LoadedGraph(
        None,
        meta_of(part.partition),
        labels=None if label is None else torch.from_numpy(np.array(label)),
        splits=splits or None,
        metric=part.partition.about["metric"],
    )


def gather_labels(part: Part, group: Group) -> LoadedGraph | None:
    """Labels and splits of all rows in the order of the graph, on rank 0; None on the other ranks."""
    own = loaded_part(part)
    labels: list[torch.Tensor] = []
    if own.labels is not None:
        gather_rows(part, own.labels.to(group.device), group, lambda rows: labels.append(rows.cpu()))
    splits = {}
    for name, ids in (own.splits or {}).items():
        is_member = torch.zeros(part.num_rows, dtype=torch.uint8)
        is_member[ids] = 1
        found: list[torch.Tensor] = []
        gather_rows(part, is_member.to(group.device), group, lambda rows, found=found: found.append(rows.cpu()))
        splits[name] = torch.cat(found).nonzero().flatten() if found else None
    if not group.is_first:
        return None
    return replace(own, labels=torch.cat(labels) if labels else None, splits=splits or None)


Mapped = tuple[np.ndarray, np.ndarray, dict[str, np.ndarray], dict[str, np.ndarray], str]


def _papers100m(official: Papers100M, root: Path) -> Mapped | None:
    """(row, column, node data, splits, origin), mapped; None where the files are not below `root`."""
    folder = official.folder(root)
    archive = folder / "raw" / "data.npz"
    if not archive.is_file():
        return None
    with reading(archive):
        edges, features = (map_npz_array(archive, name) for name in ("edge_index", "node_feat"))
    node_data, splits = {"feat": features}, {}
    labels = folder / "raw" / "node-label.npz"
    if labels.is_file():
        with reading(labels), np.load(labels, allow_pickle=False) as arrays:
            label = arrays["node_label"].reshape(-1)
        node_data["label"] = np.where(np.isnan(label), -1, label).astype(np.int64)
        with reading(folder):
            splits = read_splits(folder / "split" / "time")
    return edges[0], edges[1], node_data, splits, str(archive)


def _igb(official: Igb, root: Path) -> Mapped | None:
    folder = root / official.size / "processed"
    path = folder / "paper__cites__paper" / "edge_index.npy"
    if not path.is_file():
        return None
    with reading(folder):
        edges = np.load(path, mmap_mode="r")
        label = map_floats(folder / "paper" / "node_label_19.npy").reshape(-1)
        label = np.where(np.isnan(label), -1, label).astype(np.int64)
        features = map_floats(folder / "paper" / "node_feat.npy", rows=label.size)
    ends = int(label.size * 0.6), int(label.size * 0.6) + int(label.size * 0.2)
    splits = dict(zip(("train", "valid", "test"), np.split(np.arange(label.size), ends), strict=True))
    return edges[:, 0], edges[:, 1], {"feat": features, "label": label}, splits, str(path)


def _mapped_source(
    name: str,
    row: np.ndarray,
    col: np.ndarray,
    node_data: dict[str, np.ndarray],
    splits: dict[str, np.ndarray],
    origin: str,
) -> GraphSource:
    entry, features = data.info(name), node_data["feat"]
    file = Path(origin).stat()
    # Hashing the edges would read them once more.
    fingerprint = f"{name} {row.shape[0]} edges, {file.st_size} bytes of {file.st_mtime_ns}"
    meta = GraphMeta(
        name=name,
        source="official",
        origin=origin,
        task="node",
        num_nodes=features.shape[0],
        num_edges=row.shape[0],
        num_graphs=1,
        feature_kind="float",
        feature_dim=features.shape[1],
        feature_cardinalities=None,
        features="original",
        num_classes=entry.num_classes,
        licence=entry.licence,
        citation=entry.citation,
        sha256=fingerprint,
    )
    about: dict[str, Any] = {"meta": asdict(meta), "metric": entry.metric}
    options = {"fingerprint": fingerprint, "node_data": node_data, "row_ids": splits, "about": about}
    return source_from_edges(row, col, features.shape[0], **options)
