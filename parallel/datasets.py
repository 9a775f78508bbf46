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
from data.graph import RawGraph
from data.sources.large import LargeGraph
from parallel.assignment import METHODS
from parallel.builder import partition_graph
from parallel.collectives import gather_rows
from parallel.errors import CollectionError
from parallel.group import Group, shared_from_first_rank
from parallel.part import DESCRIPTION, VERSION, Part, Partition, load_part
from parallel.source import GraphSource, source_from_csr, source_from_edges


def partition_folder(settings: DataConfig, seed: int, method: str, num_parts: int) -> Path:
    """Folder of a data set's partition, below `data.root`. Another source, file or seed gives another folder."""
    file = Path(settings.path or Path(settings.root, f"{settings.name}.npz"))
    found = file.stat() if file.is_file() else None
    version = None if found is None else [found.st_size, found.st_mtime_ns]
    asked = json.dumps([VERSION, settings.source, settings.path, seed, version])
    digest = hashlib.sha256(asked.encode()).hexdigest()[:8]
    return Path(settings.root, "parts", f"{settings.name}-{method}-{num_parts}-{digest}")


def open_part(settings: DataConfig, seed: int, group: Group, say: Callable[[str], None]) -> Part | None:
    """This rank's part of a data set; None for a collection of graphs. Rank 0 makes the partition where there is none,
    by METIS if it is installed.

    Raises:
        PartitionError: this machine has no files of the part.
        ValueError, OSError, MemoryError: as `dataset_source` and `partition_graph`.
    """
    folder = shared_from_first_rank(group, lambda: _partitioned(settings, seed, group.size, say))
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
        if isinstance(official, LargeGraph) and official.place(Path(root)).is_file():
            return _mapped_source(name, official.mapped(Path(root)))
    reads_file = path is not None or source == "file"
    if not reads_file and name in data.names() and data.info(name).num_graphs is not None:
        raise CollectionError(name)
    loaded = data.load(name, root=root, source=source, path=path, batch_size=None, seed=seed)
    if loaded.meta.num_graphs > 1:
        raise CollectionError(name)
    return source_from_csr(
        loaded.row_pointers.numpy(),
        loaded.columns.numpy(),
        fingerprint=f"{loaded.meta.sha256} {loaded.meta.source} {loaded.meta.features} {seed}",
        node_data={key: values.numpy() for key, values in loaded.node_data.items()},
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
    """Labels, ids and splits of this part's rows as `data.load` returns those of a graph, without its edges."""
    label, own = part.node_data.get("label"), part.node_data.get("id")
    splits = {name: torch.from_numpy(np.array(ids, np.int64)) for name, ids in part.row_ids.items()}
    return LoadedGraph(
        meta=meta_of(part.partition),
        node_data={} if own is None else {"id": torch.from_numpy(np.array(own))},
        labels=None if label is None else torch.from_numpy(np.array(label)),
        splits=splits or None,
        metric=part.partition.about["metric"],
    )


def gather_labels(part: Part, group: Group) -> LoadedGraph | None:
    """Labels, ids and splits of all rows in the order of the graph, on rank 0; None on the other ranks."""
    own = loaded_part(part)

    def gathered(rows: torch.Tensor) -> torch.Tensor | None:
        found: list[torch.Tensor] = []
        gather_rows(part, rows.to(group.device), group, lambda block: found.append(block.cpu()))
        return torch.cat(found) if found else None

    labels = None if own.labels is None else gathered(own.labels)
    node_data = {name: gathered(rows) for name, rows in own.node_data.items()}
    splits = {}
    for name, ids in (own.splits or {}).items():
        is_member = torch.zeros(part.num_rows, dtype=torch.uint8)
        is_member[ids] = 1
        members = gathered(is_member)
        splits[name] = None if members is None else members.nonzero().flatten()
    if not group.is_first:
        return None
    return replace(own, labels=labels, node_data=node_data, splits=splits or None)


def _mapped_source(name: str, raw: RawGraph) -> GraphSource:
    """The source of a graph whose edges are mapped from files; `raw.origin` is the file of its edges."""
    entry, features = data.info(name), raw.ndata["feat"]
    file = Path(raw.origin).stat()
    # Hashing the edges would read them once more.
    fingerprint = f"{name} {raw.row.size} edges, {file.st_size} bytes of {file.st_mtime_ns}"
    meta = GraphMeta(
        name=name,
        source="official",
        origin=raw.origin,
        task="node",
        num_nodes=features.shape[0],
        num_edges=raw.row.size,
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
    options = {"fingerprint": fingerprint, "node_data": dict(raw.ndata), "row_ids": raw.splits or {}, "about": about}
    return source_from_edges(raw.row, raw.col, features.shape[0], **options)
