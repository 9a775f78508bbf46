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

from data.canonical import to_csr
from data.errors import DatasetMissingError
from data.graph import CsrGraph, RawGraph
from data.memory import require_memory
from data.synthetic.random import random_bits

if TYPE_CHECKING:
    from data.registry.entry import Dataset

logger = logging.getLogger(__name__)

GENERATOR_VERSION = 1  # counts up when the same seed gives another graph
LAYOUT_VERSION = 2  # counts up when kept files hold other arrays
CACHED_FROM_EDGES = 1_000_000  # smaller stand-ins are made in less time than a file is worth
# What making one takes, for each edge and node, at its peak: 33 (yelp) to 49 (ppa) were measured on the CPU. On the GPU
# 56 are in use at a time, where A is not symmetric, and CuPy's pool holds more than is in use.
CPU_BYTES_PER_ITEM = 56
GPU_BYTES_PER_ITEM = 96


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


def stand_in(entry: "Dataset", root: Path, batch_size: int, seed: int) -> RawGraph | CsrGraph:
    """The stand-in of an entry; large ones are kept below `root`/synthetic and read from there the next time.

    Raises:
        DatasetMissingError: there is none for this entry.
        ValueError: the kept file is damaged, or of another version.
        MemoryError: it would not fit.
    """
    stream = np.random.default_rng([seed, zlib.crc32(entry.name.encode())])
    graph_seed = int(stream.integers(2**63))
    path = kept_file(entry, root, batch_size, seed)
    if path is None:
        return entry.synthetic.generate(entry, batch_size, graph_seed)
    recipe = _recipe(entry, batch_size, seed)
    if path.exists():
        return _read(path, recipe)
    edges, nodes = (round(size) for size in _expected_size(entry, batch_size))
    require_memory(f"the stand-in of {entry.name}, {edges:,} edges", (edges + nodes) * CPU_BYTES_PER_ITEM)
    logger.info("%s: making the synthetic stand-in of %s edges, once", entry.name, f"{edges:,}")
    if others := sorted(path.parent.glob(f"{entry.name}-seed{seed}-*.npz")):
        text = ", ".join(map(str, others))
        logger.info("%s: of another version or batch size, not used and left as they are: %s", entry.name, text)
    path.parent.mkdir(parents=True, exist_ok=True)  # what cannot be comes to light before the work
    start = time.perf_counter()
    xp = np if entry.num_graphs else _array_module(edges + nodes)
    graph = to_csr(entry.synthetic.generate(entry, batch_size, graph_seed, xp))
    if xp is not np:
        xp.get_default_memory_pool().free_all_blocks()  # torch could not have what CuPy holds
    seconds, device = time.perf_counter() - start, "CPU" if xp is np else "GPU"
    logger.info("%s: made in %.0f s on the %s; keeping it in %s", entry.name, seconds, device, path)
    _write(path, graph, recipe)
    return graph


def kept_file(entry: "Dataset", root: Path, batch_size: int, seed: int) -> Path | None:
    """Where the stand-in is kept, whether it is there or not; None if it is made each time, or cannot be made."""
    edges, _ = _expected_size(entry, batch_size)
    if edges < CACHED_FROM_EDGES or isinstance(entry.synthetic, NoStandIn):
        return None
    key = hashlib.sha256(_recipe(entry, batch_size, seed).encode()).hexdigest()[:12]
    return root / "synthetic" / f"{entry.name}-seed{seed}-{key}.npz"


def _recipe(entry: "Dataset", batch_size: int, seed: int) -> str:
    """All that decides what a kept file holds."""
    version = f"{GENERATOR_VERSION}.{LAYOUT_VERSION}"
    return f"{version} {entry.name} {entry.synthetic} {entry.num_nodes} {entry.nnz} {batch_size} {seed}"


def _expected_size(entry: "Dataset", batch_size: int) -> tuple[float, float]:
    """Edges and nodes."""
    share = batch_size / entry.num_graphs if entry.num_graphs else 1
    return entry.nnz * share, entry.num_nodes * share


def _array_module(items: int) -> Any:
    """CuPy where there is a GPU with the memory for so many edges and nodes, else NumPy; the graph is the same."""
    try:
        import cupy

        free, _ = cupy.cuda.runtime.memGetInfo()
        random_bits(cupy, 0, 0, 1)  # compiles a kernel
    except Exception:  # not installed, no driver, device or compiler: whatever the reason, the CPU can do it
        return np
    return cupy if free > items * GPU_BYTES_PER_ITEM else np


def _write(path: Path, graph: CsrGraph, recipe: str) -> None:
    """Keep a graph, whole or not at all."""
    arrays = {"indptr": graph.indptr, "col": graph.col}
    texts = {"sha256": graph.sha256, "origin": graph.origin, "recipe": recipe}
    arrays |= {key: np.array(text) for key, text in texts.items()}
    if graph.graph_sizes is not None:
        arrays["graph_sizes"] = graph.graph_sizes
    with tempfile.NamedTemporaryFile(dir=path.parent, prefix=".writing-", delete=False) as file:
        try:
            np.savez(file, **arrays)
            file.close()
            os.chmod(file.name, 0o644)  # temporary files are private, a data set is not
            os.replace(file.name, path)
        except BaseException:
            Path(file.name).unlink(missing_ok=True)
            raise


def _read(path: Path, recipe: str) -> CsrGraph:
    """A kept graph. Its bytes are those that were written, as zip's checksums say, so edges and hash are not checked.

    Raises:
        ValueError: it is damaged, or of another recipe.
    """
    try:
        if not zipfile.is_zipfile(path):
            raise ValueError("it is no .npz archive, or truncated")
        with np.load(path, allow_pickle=False) as archive:
            found = str(archive["recipe"]) if "recipe" in archive.files else "of an older version"
            if found != recipe:
                raise ValueError(f"it is another stand-in: {found!r}, and not {recipe!r}")
            arrays = {name: archive[name] for name in archive.files}
        indptr, col, sha256, origin = (arrays[name] for name in ("indptr", "col", "sha256", "origin"))
        if indptr.dtype != col.dtype or indptr[0] != 0 or indptr[-1] != col.size or np.any(indptr[1:] < indptr[:-1]):
            raise ValueError(f"indptr must rise from 0 to the {col.size} entries of col")
        if col.size and (col.min() < 0 or col.max() >= indptr.size - 1):
            raise ValueError(f"col must be within 0 .. {indptr.size - 2}")
    except (OSError, EOFError, ValueError, KeyError, IndexError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(
            f"{path}: the kept stand-in is damaged, or not the one that is wanted ({error}); "
            "delete it, and it is made anew"
        ) from error
    return CsrGraph(indptr, col, str(sha256), str(origin), graph_sizes=arrays.get("graph_sizes"))


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
