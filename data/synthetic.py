"""Seeded stand-ins for data sets that cannot be had, and random features. `data/README.md` says what they model."""

import hashlib
import logging
import os
import tempfile
import time
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from data.errors import DatasetMissingError
from data.graph import RawGraph
from data.memory import require_memory

if TYPE_CHECKING:
    from data.entry import Dataset

logger = logging.getLogger(__name__)

GENERATOR_VERSION = 1  # counts up when the same seed gives another graph
CACHED_FROM_EDGES = 1_000_000  # smaller stand-ins are made in less time than a file is worth
GPU_BYTES_PER_EDGE = 64


class Generator(Protocol):
    """Makes a stand-in for an entry of the registry, the same for the same seed on NumPy and on CuPy (`xp`)."""

    def generate(self, entry: "Dataset", batch_size: int, seed: int, xp: Any = np) -> RawGraph: ...


@dataclass(frozen=True)
class NoStandIn:
    """Refuses, for graphs whose stand-in would not fit a usual machine."""

    def generate(self, entry: "Dataset", batch_size: int, seed: int, xp: Any = np) -> RawGraph:
        raise DatasetMissingError(
            f"{entry.name}: no stand-in is made for it, as its {entry.nnz:,} edges alone need "
            f"{entry.nnz * 48 / 2**30:,.0f} GiB of memory while they are made; it needs the official files"
        )


def stand_in(entry: "Dataset", root: Path, batch_size: int, seed: int) -> RawGraph:
    """The stand-in of an entry; large ones are kept below `root`/synthetic and read from there the next time.

    Raises:
        DatasetMissingError: there is none for this entry.
        ValueError: the kept file is damaged.
    """
    edges = entry.nnz * (batch_size / entry.num_graphs if entry.num_graphs else 1)
    stream = np.random.default_rng([seed, zlib.crc32(entry.name.encode())])
    graph_seed = int(stream.integers(2**63))
    if edges < CACHED_FROM_EDGES or isinstance(entry.synthetic, NoStandIn):
        return entry.synthetic.generate(entry, batch_size, graph_seed)

    recipe = f"{GENERATOR_VERSION} {entry.synthetic} {entry.num_nodes} {entry.nnz} {batch_size} {seed}"
    key = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    path = root / "synthetic" / f"{entry.name}-seed{seed}-{key}.npz"
    if path.exists():
        return _read(path)
    logger.info("%s: making the synthetic stand-in of %s edges, once", entry.name, f"{entry.nnz:,}")
    start = time.perf_counter()
    raw = entry.synthetic.generate(entry, batch_size, graph_seed, _array_module(edges))
    logger.info("%s: made in %.0f s; keeping it in %s", entry.name, time.perf_counter() - start, path)
    _write(path, raw)
    return raw


def _array_module(edges: float) -> Any:
    """CuPy where there is a GPU with the memory, else NumPy; the graph is the same."""
    try:
        import cupy

        free, _ = cupy.cuda.runtime.memGetInfo()
    except Exception:  # not installed, no driver, no device: whatever the reason, the CPU can do it
        return np
    return cupy if free > edges * GPU_BYTES_PER_EDGE else np


def _write(path: Path, raw: RawGraph) -> None:
    """Keep the edges as row ends and int32 columns, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    order = None if np.all(raw.row[1:] >= raw.row[:-1]) else np.lexsort((raw.col, raw.row))
    arrays = {
        "row_counts": np.bincount(raw.row, minlength=raw.num_nodes).astype(np.int32),
        "col": (raw.col if order is None else raw.col[order]).astype(np.int32),
        "origin": np.array(raw.origin),
    }
    if raw.graph_sizes is not None:
        arrays["graph_sizes"] = raw.graph_sizes
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False) as file:
        try:
            np.savez(file, **arrays)
            file.close()
            os.chmod(file.name, 0o644)  # temporary files are private, a data set is not
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _read(path: Path) -> RawGraph:
    try:
        with np.load(path, allow_pickle=False) as archive:
            arrays = {name: archive[name] for name in archive.files}
        counts, col = arrays["row_counts"], arrays["col"]
        if counts.sum(dtype=np.int64) != col.size:
            raise ValueError(f"row_counts sum to {counts.sum(dtype=np.int64)}, col has {col.size} entries")
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{path}: the kept stand-in is damaged ({error}); delete it, and it is made anew") from error
    return RawGraph(
        row=np.repeat(np.arange(counts.size), counts),
        col=col.astype(np.int64),
        num_nodes=counts.size,
        origin=str(arrays["origin"]),
        graph_sizes=arrays.get("graph_sizes"),
    )


def random_features(
    num_nodes: int, dim: int, cardinalities: tuple[int, ...] | None, rng: np.random.Generator
) -> np.ndarray:
    """Float32 [N, dim] from N(0, 1); with cardinalities int64 [N, C], column c uniform in 0 .. cardinalities[c] - 1.

    Raises:
        MemoryError: they would not fit.
    """
    if cardinalities is None:
        require_memory(f"random features of {num_nodes:,} nodes by {dim}", num_nodes * dim * 4)
        return rng.standard_normal((num_nodes, dim), dtype=np.float32)
    return rng.integers(0, cardinalities, size=(num_nodes, len(cardinalities)))
