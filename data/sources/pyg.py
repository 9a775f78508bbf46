"""Data sets through their classes in `torch_geometric.datasets` and `ogb`, in the layout of these classes.

The classes read the published files once and keep tensors in a folder `processed`, which are mapped into memory: only
the chosen graphs are read.
"""

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from data.atomic import made_once
from data.canonical import canonical_edges
from data.download import download, fetch
from data.files import checked_graph
from data.graph import PARTS, RawGraph
from data.packed import consecutive, join_graphs, rows_of
from data.selection import Selection, Split, renumbered
from data.sources.base import OfficialSource, Remote, reading
from data.sources.ogb_import import import_ogb

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

    def open(self, root: Path, **arguments: Any) -> Any:
        """The dataset, converted but not loaded."""
        module = importlib.import_module("torch_geometric.datasets")
        loader = getattr(module, self.dataset)
        inert = type(loader.__name__, (loader,), {"load": lambda self, path, **_: None, **self._overrides()})
        place = root if self.name else self.folder(root)
        named = {"name": self.name} if self.name else {}
        with _verified_downloads(sys.modules[loader.__module__]):
            return inert(str(place), **named, **self.arguments, **arguments)

    def _overrides(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class PygGraph(PygDataset):
    """A single graph, both directions of each edge. Its nodes and edges are put into their final order once.

    Attributes:
        self_loops: whether each node gets a self loop.
        rcm: whether the nodes are renumbered by the reverse Cuthill-McKee order of the graph.
    """

    self_loops: bool = False
    rcm: bool = False

    def _overrides(self) -> dict[str, Any]:
        # A folder of its own, since one that the plain class has made holds other edges.
        own = property(lambda dataset: str(Path(dataset.raw_dir).parent / "processed-canonical"))
        return {"processed_dir": own}

    def load(self, root: Path, selection: Selection) -> RawGraph:
        with reading(self.folder(root)):
            dataset = self.open(root, pre_transform=self.prepared)
            data, _ = _mapped(dataset.processed_paths[0])
            return self._raw(root, data, _split_of_masks(data))

    def fetch(self, root: Path) -> None:
        with made_once(self.folder(root)) as unfinished:
            if unfinished is not None:
                self.open(unfinished.parent, pre_transform=self.prepared)

    def prepared(self, data: Any) -> Any:
        """The data with canonical edges; a `pre_transform` of PyG."""
        import torch

        row, col, num_nodes = *data.edge_index.numpy(), data.num_nodes
        if self.self_loops:
            row, col = (np.concatenate([ends, np.arange(num_nodes)]) for ends in (row, col))
        if self.rcm:
            from scipy.sparse import csr_array
            from scipy.sparse.csgraph import reverse_cuthill_mckee

            order = reverse_cuthill_mckee(csr_array((np.ones(row.size, bool), (row, col)), (num_nodes, num_nodes)))
            place = np.empty(num_nodes, np.int64)
            place[order] = np.arange(num_nodes)
            row, col = place[row], place[col]
            for key in ("x", "y", "train_mask", "val_mask", "test_mask"):
                data[key] = data[key][torch.from_numpy(order.astype(np.int64))]
        row, col, _ = canonical_edges(row.astype(np.int64), col.astype(np.int64), num_nodes)
        data.edge_index = torch.from_numpy(np.stack([row, col]))
        return data

    def _raw(self, root: Path, data: Mapping[str, Any], splits: dict[str, np.ndarray] | None) -> RawGraph:
        row, col = data["edge_index"].numpy()
        label = data["y"].squeeze(-1).nan_to_num(-1).long().numpy()
        ndata = {"feat": data["x"].float().numpy(), "label": label}
        url = self.files(root)[0].url
        return checked_graph(self.folder(root), row, col, len(label), origin=url, ndata=ndata, splits=splits)


@dataclass(frozen=True)
class PygCollection(PygDataset):
    """A collection of small graphs, a file for each split.

    Attributes:
        splits: those taken, one after the other, where the selection names none.
        task: "graph", or "node" for a label of each node.
        both_directions: whether A gets both directions of each listed edge: no, where the files list both.
        key_first: whether the first end of an edge is the key, which matters for edge features alone.
        labelled: whether the labels are numbers; others are not read.
        num_features: columns of the node features; 0 without any.
    """

    splits: tuple[Split, ...] = ("train",)
    task: str = "graph"
    key_first: bool = False
    labelled: bool = True

    def load(self, root: Path, selection: Selection) -> RawGraph:
        several = len(self.splits) > 1  # all graphs of a set of two splits are those two
        splits = self.splits if several and not selection.split else selection.split_or(self.splits)
        folder = self.folder(root)
        with reading(folder):
            dataset = self.open(root)
            stored = [_mapped(dataset.processed_paths[("train", "val", "test").index(split)]) for split in splits]
            counts = {split: _count(one) for split, one in zip(splits, stored, strict=True)}
        total = sum(counts.values())
        picked = selection.pick(total, f"{folder}, {' and '.join(splits)}")
        parts = renumbered(consecutive(counts), picked, total)
        return self._batch(root, selection, stored, picked, parts, total)

    def _batch(
        self,
        root: Path,
        selection: Selection,
        stored: Sequence[Stored],
        picked: np.ndarray,
        splits: dict[str, np.ndarray],
        collection_size: int,
    ) -> RawGraph:
        with reading(self.folder(root)):
            graphs = _Picked(stored, picked)
            ends = graphs.rows("edge_index").astype(np.int64)
            edge_feat = graphs.rows("edge_attr") if "edge_attr" in graphs.keys else None
            if edge_feat is not None:
                edge_feat = edge_feat.reshape(len(ends), -1)
            labels = graphs.rows("y") if self.labelled else None
            is_node_task = self.task == "node"
            batch = join_graphs(
                graphs.sizes,
                graphs.counts("edge_index"),
                ends[:, ::-1] if self.key_first else ends,
                graphs.rows("x") if "x" in graphs.keys else None,
                edge_feat,
                selection.described(self.files(root)[0].url),
                both_directions=False,
                graph_labels=None if is_node_task or labels is None else labels.reshape(picked.size, -1).astype("f4"),
                splits={part: np.sort(rows_of(ids, graphs.sizes)) for part, ids in splits.items()}
                if is_node_task
                else splits,
                graph_ids=picked,
                collection_size=collection_size,
            )
            if is_node_task:
                batch.ndata["label"] = labels.astype(np.int64)
        return batch


class _Ogb(PygDataset):
    """A set of ogb, whose archive is fetched here, since ogb asks before it downloads more than 1 GB."""

    kind: str  # nodeproppred or graphproppred
    loader: str

    def folder(self, root: Path) -> Path:
        """The folder in which ogb looks for the set."""
        folder = root / self.dataset.replace("-", "_")
        alternative = folder.with_name(f"{folder.name}_pyg")
        return alternative if alternative.is_dir() else folder

    @cached_property
    def about(self) -> Mapping[str, str]:
        """ogb's own table."""
        return ogb_table(self.kind, self.dataset)

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(self.about["url"], self.folder(root), self.about["download_name"])]

    def fetch(self, root: Path) -> None:
        (remote,) = self.files(root)
        fetch(remote.url, remote.target, remote.member)

    def open(self, root: Path, **arguments: Any) -> Any:
        from torch.utils.serialization import config

        folder = self.folder(root)
        if not (folder / f"RELEASE_v{self.about['version']}.txt").is_file():  # ogb would ask on the terminal
            raise ValueError(f"no RELEASE_v{self.about['version']}.txt in {folder}: incomplete, or of another version")
        loader = getattr(import_ogb(self.kind), self.loader)
        inert = type(loader.__name__, (loader,), self._overrides())
        with _pyg_classes(), config.patch("load.mmap", True):
            return inert(self.dataset, root=str(root), **arguments)


class OgbNodes(_Ogb, PygGraph):
    """An ogbn set: one graph with features, labels and the official split. The first end of an edge is the query."""

    kind, loader = "nodeproppred", "PygNodePropPredDataset"
    fetch = _Ogb.fetch

    def load(self, root: Path, selection: Selection) -> RawGraph:
        with reading(self.folder(root)):
            dataset = self.open(root, pre_transform=self.prepared)
            splits = {part: ids.numpy() for part, ids in dataset.get_idx_split().items()}
            return self._raw(root, dataset._data, splits)


class OgbGraphs(_Ogb, PygCollection):
    """An ogbg set. The published run took its graphs from the whole set. The first end of an edge is the query: a node
    of a syntax tree attends to its children; in the other direction a window of 16 rows with one parent each would fill
    at most 2 blocks, where the published run of ogbg-code2 had 2.36."""

    kind, loader = "graphproppred", "PygGraphPropPredDataset"

    def load(self, root: Path, selection: Selection) -> RawGraph:
        folder = self.folder(root)
        with reading(folder):
            dataset = self.open(root)
            sizes = vars(dataset._data._store).get("_num_nodes")  # where the nodes have no features
            stored = {**dataset._data.to_dict(), "sizes": sizes}, dataset.slices
            splits = {part: ids.numpy() for part, ids in dataset.get_idx_split().items()}
        graphs, place = np.arange(_count(stored)), str(folder)
        if selection.split:
            graphs, place = (
                splits[{"val": "valid"}.get(selection.split, selection.split)],
                f"{folder}, {selection.split}",
            )
        picked = graphs[selection.pick(graphs.size, place)]
        parts = renumbered(splits, picked, _count(stored))
        return self._batch(root, selection, [stored], picked, parts, graphs.size)


class _Picked:
    """Chosen graphs of stored ones.

    Attributes:
        keys: names of their tensors.
        sizes: [B] int64, nodes of each graph.
    """

    def __init__(self, stored: Sequence[Stored], picked: np.ndarray) -> None:
        counts = np.array([_count(one) for one in stored])
        self._stored = stored
        self._part = np.searchsorted(counts.cumsum(), picked, side="right")
        self._graph = picked - (counts.cumsum() - counts)[self._part]
        self.keys = set(stored[0][1])
        if "x" in self.keys:
            self.sizes = self.counts("x")
        else:
            self.sizes = np.array(stored[0][0]["sizes"], np.int64)[picked]

    def counts(self, key: str) -> np.ndarray:
        """[B] int64, rows (of `edge_index` columns) of each graph."""
        first, last = self._bounds(key)
        return last - first

    def rows(self, key: str) -> np.ndarray:
        """The rows of all graphs, one graph after the other; of `edge_index` its columns."""
        import torch

        values = [torch.as_tensor(data[key]) for data, _ in self._stored]
        if key == "edge_index":
            values = [ends.T for ends in values]
        parts = zip(self._part.tolist(), *(ends.tolist() for ends in self._bounds(key)), strict=True)
        return torch.cat([values[part][first:last] for part, first, last in parts]).numpy()

    def _bounds(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        bounds = [slices[key].numpy() for _, slices in self._stored]
        places = list(zip(self._part, self._graph, strict=True))
        return tuple(np.array([bounds[part][graph + end] for part, graph in places], np.int64) for end in (0, 1))


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


def _split_of_masks(data: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """The split that PyG keeps as masks [N], or [N, K] for K splits: then the first."""
    masks = (data[name].numpy() for name in ("train_mask", "val_mask", "test_mask"))
    return {part: np.flatnonzero(mask.reshape(len(mask), -1)[:, 0]) for part, mask in zip(PARTS, masks, strict=True)}


def ogb_table(kind: str, name: str) -> Mapping[str, str]:
    """What ogb's table says about a set: its URL, version and so on."""
    import pandas as pd

    place = Path(import_ogb(kind).__file__).parent / "master.csv"
    return pd.read_csv(place, index_col=0, keep_default_na=False)[name].to_dict()


@contextmanager
def _verified_downloads(module: Any) -> Iterator[None]:
    """PyG downloads without a look at certificates and without a limit of time: download in its place."""

    def download_url(url: str, folder: str, log: bool = True, filename: str | None = None) -> str:
        target = Path(folder, filename or url.rpartition("/")[2].partition("?")[0])
        target.parent.mkdir(parents=True, exist_ok=True)
        return str(download(url, target))

    def download_google_url(id: str, folder: str, filename: str, log: bool = True) -> str:
        return download_url(f"https://drive.usercontent.google.com/download?id={id}&confirm=t", folder, log, filename)

    theirs = {made.__name__: getattr(module, made.__name__, None) for made in (download_url, download_google_url)}
    for made in (download_url, download_google_url):
        if theirs[made.__name__]:
            setattr(module, made.__name__, made)
    try:
        yield
    finally:
        for name, function in theirs.items():
            if function:
                setattr(module, name, function)
