"""Data sets through their classes in `torch_geometric.datasets` and `ogb`, in the layout of these classes.

The classes read the published files once and keep tensors in a folder `processed`, which are mapped into memory: only
the chosen graphs are read.
"""

import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
from filelock import FileLock

from data.atomic import made_once
from data.canonical import checked_graph
from data.download import download
from data.errors import reading
from data.features import as_integers
from data.graph import PARTS, CsrGraph
from data.packed import consecutive, join_graphs
from data.selection import Selection, Split
from data.sources import pickles
from data.sources.base import OfficialSource, Remote
from data.sources.ogb_import import import_ogb

MASKS = ("train_mask", "val_mask", "test_mask")
Stored = tuple[Mapping[str, Any], Mapping[str, Any]]  # tensors of all graphs, and where each graph begins in them


@dataclass(frozen=True)
class PygDataset(OfficialSource):
    """Files that a class of `torch_geometric.datasets` downloads and converts.

    Attributes:
        dataset: name of the class.
        name: its argument `name`, if it has one.
        arguments: further ones.
    """

    dataset: str
    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def folder(self, root: Path) -> Path:
        return root / (self.name or self.dataset)

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(f"torch_geometric.datasets.{self.dataset}", self.folder(root))]

    def fetch(self, root: Path) -> None:
        with made_once(self.folder(root)) as unfinished:
            if unfinished is not None:
                self.open(unfinished.parent)

    def open(self, root: Path) -> Any:
        """The dataset, converted but not loaded."""
        loader = getattr(importlib.import_module("torch_geometric.datasets"), self.dataset)
        inert = type(loader.__name__, (loader,), {"load": lambda self, path: None})
        place, name = (root, {"name": self.name}) if self.name else (self.folder(root), {})
        with _one_process(self.folder(root)), _verified_downloads(sys.modules[loader.__module__]):
            return inert(str(place), **name, **self.arguments)


@dataclass(frozen=True)
class PygGraph(PygDataset):
    """A single graph, both directions of each edge.

    Attributes:
        self_loops: whether each node gets a self loop.
        rcm: whether the nodes are renumbered by the reverse Cuthill-McKee order of the graph.
    """

    self_loops: bool = False
    rcm: bool = False

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        with reading(self.folder(root)):
            data, _ = _mapped(self.open(root).processed_paths[0])
            # Masks are [N], or [N, K] for K splits, of which the first is taken.
            masks = (data[name].numpy().reshape(len(data["y"]), -1)[:, 0] for name in MASKS)
            return self._graph(
                root, data, {part: np.flatnonzero(mask) for part, mask in zip(PARTS, masks, strict=True)}
            )

    def _graph(self, root: Path, data: Mapping[str, Any], splits: dict[str, np.ndarray]) -> CsrGraph:
        (row, col), url = data["edge_index"].numpy(), self.files(root)[0].url
        label = as_integers("the label", data["y"].squeeze(-1).nan_to_num(-1).numpy())
        ndata, nodes = {"feat": data["x"].float().numpy(), "label": label}, np.arange(len(label))
        if self.self_loops:
            row, col = (np.concatenate([ends, nodes]) for ends in (row, col))
        if self.rcm:
            from scipy.sparse import csr_array
            from scipy.sparse.csgraph import reverse_cuthill_mckee

            ones = np.ones(row.size, bool)
            order = reverse_cuthill_mckee(csr_array((ones, (row, col)), (nodes.size, nodes.size)))
            place = np.empty_like(nodes)
            place[order] = nodes
            row, col = place[row], place[col]
            ndata = {name: values[order] for name, values in ndata.items()}
            splits = {part: np.sort(place[ids]) for part, ids in splits.items()}
        return checked_graph(self.folder(root), row, col, nodes.size, origin=url, ndata=ndata, splits=splits)


@dataclass(frozen=True)
class PygCollection(PygDataset):
    """A collection of small graphs, a file for each split.

    Attributes:
        splits: those taken, one after the other, where the selection names none.
        task: "graph", or "node" for a label of each node.
        key_first: whether the first end of an edge is the key, which matters for edge features alone.
    """

    splits: tuple[Split, ...] = ("train",)
    task: str = "graph"
    key_first: bool = False

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        several = len(self.splits) > 1  # all graphs of a set of two splits are those two
        splits = self.splits if several and not selection.split else selection.split_or(self.splits)
        folder = self.folder(root)
        with reading(folder):
            dataset = self.open(root)
            stored = [_mapped(dataset.processed_paths[("train", "val", "test").index(split)]) for split in splits]
            counts = {split: _count(one) for split, one in zip(splits, stored, strict=True)}
        picked, available = selection.pick(sum(counts.values()), f"{folder}, {' and '.join(splits)}")
        return self._batch(root, selection, stored, picked, splits=consecutive(counts), collection_size=available)

    def _batch(
        self, root: Path, selection: Selection, stored: Sequence[Stored], picked: np.ndarray, **about: Any
    ) -> CsrGraph:
        """The picked graphs. `about` has the splits by graph, and further fields of the graph."""
        with reading(self.folder(root)):
            ends, counts, label = _rows(stored, "edge_index"), _counts(stored, "edge_index"), _rows(stored, "y")
            sizes = stored[0][0].get("sizes")  # where the nodes have no features
            sizes = _counts(stored, "x") if sizes is None else np.array(sizes, np.int64)
            ndata = {} if (feat := _rows(stored, "x")) is None else {"feat": feat}
            if self.task == "node":
                ndata["label"] = as_integers("the label", label)
            elif label is not None:
                about["graph_labels"] = label.reshape(sizes.size, -1)
            if selection.edge_features and (edge_feat := _rows(stored, "edge_attr")) is not None:
                about["edata"] = {"feat": edge_feat.reshape(len(ends), -1)}
            ends = ends[:, ::-1] if self.key_first else ends
            origin = selection.described(self.files(root)[0].url)
            return join_graphs(picked, sizes, counts, ends, origin, ndata=ndata, both_directions=False, **about)


class _Ogb(PygDataset):
    """A set of ogb, whose archive is fetched here, since ogb asks before it downloads more than 1 GB."""

    kind: str  # nodeproppred or graphproppred
    loader: str

    def folder(self, root: Path) -> Path:
        """The folder in which ogb looks for the set."""
        folder = root / self.dataset.replace("-", "_")
        alternative = folder.with_name(f"{folder.name}_pyg")
        return alternative if alternative.is_dir() else folder

    def files(self, root: Path) -> Sequence[Remote]:
        about = ogb_table(self.kind, self.dataset)
        return [Remote(about["url"], self.folder(root), about["download_name"])]

    fetch = OfficialSource.fetch

    def open(self, root: Path) -> Any:
        from torch.utils.serialization import config

        folder = self.folder(root)
        release = f"RELEASE_v{ogb_table(self.kind, self.dataset)['version']}.txt"
        if not (folder / release).is_file():  # ogb would ask at the terminal
            raise ValueError(f"no {release} in {folder}: incomplete, or of another version")
        loader = getattr(import_ogb(self.kind), self.loader)
        with _one_process(folder), _pyg_classes(), config.patch("load.mmap", True):
            return loader(self.dataset, root=str(root))


class OgbNodes(_Ogb, PygGraph):
    """An ogbn set: one graph with features, labels and the official split. The first end of an edge is the query."""

    kind, loader = "nodeproppred", "PygNodePropPredDataset"

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        with reading(self.folder(root)):
            dataset = self.open(root)
            splits = {part: ids.numpy() for part, ids in dataset.get_idx_split().items()}
            return self._graph(root, dataset._data, splits)


class OgbGraphs(_Ogb, PygCollection):
    """An ogbg set. The published run took its graphs from the whole set. The first end of an edge is the query: a node
    of a syntax tree attends to its children; in the other direction a window of 16 rows with one parent each would fill
    at most 2 blocks, where the published run of ogbg-code2 had 2.36."""

    kind, loader = "graphproppred", "PygGraphPropPredDataset"

    def load(self, root: Path, selection: Selection) -> CsrGraph:
        folder = self.folder(root)
        with reading(folder):
            dataset = self.open(root)
            sizes = vars(dataset._data._store).get("_num_nodes")  # where the nodes have no features
            stored = {**dataset._data.to_dict(), "sizes": sizes}, dataset.slices
            splits = {part: ids.numpy() for part, ids in dataset.get_idx_split().items()}
        picked, available = selection.pick(_count(stored), str(folder), splits)
        return self._batch(root, selection, [stored], picked, splits=splits, collection_size=available)


def _rows(stored: Sequence[Stored], key: str) -> np.ndarray | None:
    """The rows of all graphs, one graph after the other; of `edge_index` its columns. None without numbers."""
    import torch

    values = [data.get(key) for data, _ in stored]
    if not isinstance(values[0], torch.Tensor):
        return None
    values = [ends.T for ends in values] if key == "edge_index" else values
    return (values[0] if len(values) == 1 else torch.cat(values)).numpy()  # of one file: still mapped


def _counts(stored: Sequence[Stored], key: str) -> np.ndarray:
    """[G] int64, rows (of `edge_index` columns) of each graph."""
    return np.concatenate([np.diff(slices[key].numpy()) for _, slices in stored])


def _one_process(folder: Path) -> AbstractContextManager:
    """The classes convert in place: one process at a time. Where nothing can be written, it was done before."""
    writable = os.access(folder.parent, os.W_OK)
    return FileLock(folder.with_name(f".{folder.name}.converting.lock")) if writable else nullcontext()


def _count(stored: Stored) -> int:
    """Number of stored graphs."""
    return len(stored[1]["edge_index"]) - 1


def _mapped(path: str) -> Stored:
    import torch

    with _pyg_classes():
        data, slices, *_ = torch.load(path, mmap=True, weights_only=True)
    return data, slices


def _pyg_classes() -> AbstractContextManager:
    """Lets torch read the classes of PyG that its stored graphs consist of, and nothing else."""
    import torch
    from torch_geometric.data.data import Data, DataEdgeAttr, DataTensorAttr
    from torch_geometric.data.storage import GlobalStorage

    return torch.serialization.safe_globals([Data, DataEdgeAttr, DataTensorAttr, GlobalStorage])


def ogb_table(kind: str, name: str) -> Mapping[str, str]:
    """The row of a data set in ogb's table: its URL, version and so on."""
    import pandas as pd

    place = Path(import_ogb(kind).__file__).parent / "master.csv"
    return pd.read_csv(place, index_col=0, keep_default_na=False)[name].to_dict()


@contextmanager
def _verified_downloads(module: Any) -> Iterator[None]:
    """PyG downloads without a look at certificates and without a limit of time: download in its place. Its pickles
    could run code: they are read by `data.sources.pickles`, and torch does not fall back to running it."""

    def download_url(url: str, folder: str, log: bool = True, filename: str | None = None) -> str:
        target = Path(folder, filename or url.rpartition("/")[2].partition("?")[0])
        target.parent.mkdir(parents=True, exist_ok=True)
        return str(download(url, target))

    def download_google_url(id: str, folder: str, filename: str, log: bool = True) -> str:
        return download_url(f"https://drive.usercontent.google.com/download?id={id}&confirm=t", folder, log, filename)

    ours = {"download_url": download_url, "download_google_url": download_google_url, "pickle": pickles}
    ours = {name: made for name, made in ours.items() if hasattr(module, name)}
    with patch.multiple(module, **ours), patch.dict(os.environ, TORCH_FORCE_WEIGHTS_ONLY_LOAD="1"):
        yield
