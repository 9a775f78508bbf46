"""ZINC-12k as DGL publishes it: its own binary files, one for each split, without a checksum.

DGL ends the process on many a damaged file. A process of its own therefore converts each file, once: the graphs are
kept beside it as arrays.
"""

import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from data.graph import RawGraph
from data.kept import fingerprint, keep, kept_path, read_kept
from data.packed import consecutive, join_graphs, rows_of
from data.selection import Selection, Split, renumbered
from data.sources.base import OfficialSource, Remote, batch_of, from_dgl, reading
from data.sources.dgl_graphs import KEPT, dgl_class, located
from fused3s_dgl import import_dgl

PUBLISHED_SPLIT: Split = "train"
KEPT_VERSION = 1  # incremented when kept files hold other arrays
CONVERTING_S = 600
ROOT = Path(__file__).resolve().parents[2]
# Arrays of a split, packed: nodes and edges of each graph, query and key of each edge (local ids), codes, targets.
NEEDED = ("sizes", "edge_counts", "ends", "feat", "target")


@dataclass(frozen=True)
class Zinc(OfficialSource):
    """ZINC-12k.

    Attributes:
        splits: those taken, one after the other, where the selection names none.
    """

    splits: tuple[Split, ...] = (PUBLISHED_SPLIT,)

    def files(self, root: Path) -> Sequence[Remote]:
        layout = located(dgl_class("ZINCDataset"), root)
        return [Remote(layout.url, Path(layout.raw_path))]

    def load(self, root: Path, selection: Selection) -> RawGraph:
        (remote,) = self.files(root)
        # All graphs of a set that consists of two splits are those two.
        splits = (selection.split,) if selection.split else self.splits
        if selection.batch_size is None and self.splits == (PUBLISHED_SPLIT,):
            splits = selection.split_or(self.splits)
        modes = [{"val": "valid"}.get(split, split) for split in splits]
        parts = _read([remote.target / f"ZincDGL_{mode}.bin" for mode in modes])
        names = set.intersection(*(set(part) for part in parts))
        whole = {name: np.concatenate([part[name] for part in parts]) for name in names & {*NEEDED, "edge_feat"}}
        sizes, edge_counts = whole["sizes"], whole["edge_counts"]
        picked = selection.pick(sizes.size, f"{remote.target}, {' and '.join(splits)}")
        nodes, edges = rows_of(picked, sizes), rows_of(picked, edge_counts)
        with reading(remote.target):
            batch = join_graphs(
                sizes[picked],
                edge_counts[picked],
                whole["ends"][edges],
                whole["feat"][nodes],
                whole["edge_feat"][edges] if "edge_feat" in whole else None,
                selection.described(remote.url),
                both_directions=False,  # the files list both
            )
        counts = {split: part["sizes"].size for split, part in zip(splits, parts, strict=True)}
        return replace(
            batch,
            graph_labels=whole["target"][picked],
            splits=renumbered(consecutive(counts), picked, sizes.size),
            graph_ids=picked,
            collection_size=sizes.size,
        )


def _read(files: Sequence[Path]) -> list[Mapping[str, np.ndarray]]:
    """The arrays of each split, from the kept files where there are any."""
    folder = files[0].parent
    with reading(folder):
        recipes = {file: f"{KEPT_VERSION} {fingerprint([file])}" for file in files}
    places = {file: kept_path(folder, f"{KEPT}-{file.stem}", recipe) for file, recipe in recipes.items()}
    found = {file: read_kept(places[file], recipes[file], _check) for file in files}
    if missing := [file for file, arrays in found.items() if arrays is None]:
        with reading(folder):
            for file, arrays in zip(missing, convert_apart(missing), strict=True):
                _check(arrays)
                found[file] = arrays
                keep(places[file], {**arrays, "recipe": np.array(recipes[file])})
    return [found[file] for file in files]


def _check(arrays: Mapping[str, np.ndarray]) -> None:
    rows = arrays["sizes"].sum(), arrays["edge_counts"].sum(), arrays["sizes"].size
    if rows != tuple(len(arrays[name]) for name in ("feat", "ends", "target")):
        raise ValueError("its arrays do not fit together")


def convert_apart(files: Sequence[Path]) -> list[dict[str, np.ndarray]]:
    """The arrays that `convert` writes of each file, in another process.

    Raises:
        ValueError: that process failed.
    """
    script = "import sys; sys.path.insert(0, sys.argv[1]); import data.sources.zinc as z; z.convert(*sys.argv[2:])"
    names = " or ".join(file.name for file in files)
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", script, str(ROOT), folder, *map(str, files)]
        try:
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=CONVERTING_S)
        except subprocess.TimeoutExpired as error:
            raise ValueError(f"{names}: DGL does not come to an end with it") from error
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or ["no word"])[-1]
            ended = f"was ended by signal {-done.returncode}" if done.returncode < 0 else "failed"
            raise ValueError(f"{names}: DGL {ended} while it read the file ({reason})")
        converted = []
        for number in range(len(files)):
            with np.load(Path(folder, f"{number}.npz")) as archive:
                converted.append(dict(archive))
        return converted


def convert(folder: str, *files: str) -> None:
    """Write the graphs of DGL's binary files as arrays, into 0.npz, 1.npz and so on in `folder`."""
    for number, file in enumerate(files):
        graphs, labels = import_dgl().load_graphs(file)
        raw = from_dgl(batch_of(graphs), file, batched=True)
        edge_counts = np.array([graph.num_edges() for graph in graphs])
        first = np.repeat(np.cumsum(raw.graph_sizes) - raw.graph_sizes, edge_counts)
        np.savez(
            Path(folder, f"{number}.npz"),
            sizes=raw.graph_sizes,
            edge_counts=edge_counts,
            ends=np.stack([raw.row - first, raw.col - first], 1),
            feat=raw.ndata["feat"],
            target=labels["g_label"].numpy().astype(np.float32).reshape(len(graphs), 1),
            **{f"edge_{name}": values for name, values in raw.edata.items()},
        )
