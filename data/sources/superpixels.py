"""PascalVOC-SP and COCO-SP of the Long Range Graph Benchmark: one pickle for each split.

Each is a list of tuples, as LRGB's own script writes them: features [n, 14] and edge features [e, 2] in half or single
precision, `edge_index` [2, e], and a label for each node. COCO's labels are the category numbers of its annotations.
An edge's first end is the source, which is the key (see `data`). The published run's split is `train`.
"""

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.graph import RawGraph
from data.memory import require_memory
from data.packed import consecutive, rows_of
from data.selection import Selection, renumbered
from data.sources.base import OfficialSource, Remote, check_ids, reading
from data.sources.tensor_pickle import Span, Tensor, index_tensors, values

logger = logging.getLogger(__name__)

PUBLISHED_SPLIT = "train"
BYTES_PER_BYTE_OF_INDEX = 4  # of a file for a byte in memory: the index takes 15 KB a graph, a graph 60 KB and more
BYTES_PER_BYTE_OF_TENSOR = 4  # half precision becomes single, and arrays are joined
# 0 for the background, and the numbers of COCO's 80 categories: the class is the place in this row.
COCO_CATEGORIES = (
    *(*range(12), *range(13, 26), 27, 28, *range(31, 45), *range(46, 66), 67, 70),
    *(*range(72, 83), *range(84, 91)),
)


@dataclass(frozen=True)
class Superpixels(OfficialSource):
    """One of the two sets, with LRGB's choices: SLIC compactness 30 and edges between touching regions.

    Attributes:
        url: address of the archive.
        folder: the folder in the archive.
        place: folder below the root, where `dgl.data.lrgb` looks for it.
        categories: numbers of the classes in the files, ascending; empty if they are the classes.
    """

    url: str
    folder: str
    place: str
    categories: tuple[int, ...] = ()

    def files(self, root: Path) -> Sequence[Remote]:
        return [Remote(self.url, root / self.place, member=self.folder)]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        folder = root / self.place
        splits = selection.split_or((PUBLISHED_SPLIT,))
        pictures: list[tuple[Path, Any]] = []
        sizes = {}
        with reading(folder):
            for split in splits:
                file = folder / f"{split}.pickle"
                require_memory(f"{file}: the places of its tensors", file.stat().st_size // BYTES_PER_BYTE_OF_INDEX)
                logger.info("%s: looking for its graphs in %.1f GiB", file, file.stat().st_size / 2**30)
                listed = index_tensors(file)
                if not isinstance(listed, list) or not all(isinstance(one, tuple) and len(one) == 4 for one in listed):
                    raise ValueError(f"{file.name}: a list of (features, edge features, edge_index, labels) is needed")
                pictures += [(file, picture) for picture in listed]
                sizes[split] = len(listed)
        picked = selection.pick(len(pictures), f"{folder}, {' and '.join(splits)}")
        needed = sum(_bytes_of(pictures[i][1]) for i in picked)
        require_memory(f"{folder}: {picked.size:,} of its graphs", BYTES_PER_BYTE_OF_TENSOR * needed)
        return self._batch([pictures[i] for i in picked], picked, sizes, selection.described(self.url), folder)

    def _batch(
        self, chosen: list[tuple[Path, Any]], picked: np.ndarray, sizes: dict[str, int], origin: str, folder: Path
    ) -> RawGraph:
        parts: dict[str, list[np.ndarray]] = {name: [] for name in ("feat", "edge_feat", "ends", "label")}
        nodes, first = [], 0
        with reading(folder), ExitStack() as stack:
            opened = {path: stack.enter_context(path.open("rb")) for path in {path for path, _ in chosen}}
            for path, picture in chosen:
                feat, edge_feat, ends, label = (values(opened[path], part) for part in picture)
                _check(feat, edge_feat, ends, label)
                arrays = feat.astype(np.float32), edge_feat.astype(np.float32), ends + first, self._classes(label)
                for name, array in zip(parts, arrays, strict=True):
                    parts[name].append(array)
                nodes.append(len(feat))
                first += len(feat)
        graph_sizes = np.array(nodes, np.int64)
        ids = renumbered(consecutive(sizes), picked, sum(sizes.values()))
        key, query = np.concatenate(parts["ends"], axis=1).astype(np.int64)
        return RawGraph(
            query,
            key,
            first,
            origin,
            graph_sizes=graph_sizes,
            ndata={"feat": np.concatenate(parts["feat"]), "label": np.concatenate(parts["label"])},
            edata={"feat": np.concatenate(parts["edge_feat"])},
            splits={part: np.sort(rows_of(graphs, graph_sizes)) for part, graphs in ids.items()},
            graph_ids=picked,
            collection_size=sum(sizes.values()),
        )

    def _classes(self, label: np.ndarray) -> np.ndarray:
        if not self.categories:
            return label.astype(np.int64)
        known = np.array(self.categories)
        classes = np.minimum(np.searchsorted(known, label), known.size - 1)
        wrong = label[known[classes] != label]
        if wrong.size:
            raise ValueError(f"a label of {wrong[0]}, which is none of the {known.size} categories")
        return classes


def _check(feat: np.ndarray, edge_feat: np.ndarray, ends: np.ndarray, label: np.ndarray) -> None:
    shapes = feat.shape, edge_feat.shape, ends.shape, label.shape
    if [len(shape) for shape in shapes] != [2, 2, 2, 1] or ends.shape != (2, len(edge_feat)):
        raise ValueError(f"a graph of shapes {shapes}; [n, F], [e, F], [2, e] and [n] are needed")
    if len(feat) != len(label) or len(feat) == 0:
        raise ValueError(f"a graph of {len(feat)} nodes with {len(label)} labels")
    check_ids(ends[0], ends[1], len(feat))


def _bytes_of(picture: tuple[Any, ...]) -> int:
    """Bytes of the tensors that the file holds."""
    contents = (part.storage.content for part in picture if isinstance(part, Tensor))
    return sum(content.length for content in contents if isinstance(content, Span))
