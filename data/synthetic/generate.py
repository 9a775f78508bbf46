"""Surrogates: seeded synthetic graphs in place of a data set; see data/README.md for their model."""

import logging
import time
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.canonical import to_csr
from data.errors import DatasetMissingError
from data.graph import CsrGraph, RawGraph
from data.kept import kept_graph, kept_path
from data.memory import require_memory
from data.spec import Generator, GraphSpec
from data.synthetic.huge import HugeGraph
from data.synthetic.random import random_bits

logger = logging.getLogger(__name__)

GENERATOR_VERSION = 2  # incremented when a seed gives another graph
LAYOUT_VERSION = 2  # incremented when kept files hold other arrays
CACHED_FROM_EDGES = 1_000_000  # smaller surrogates are generated faster than a file is worth keeping
# Peak memory of generating, for each edge and node: 33 (yelp) to 49 (ppa) bytes were measured on the CPU. On the GPU up
# to 56 are in use at a time (A not symmetric), and CuPy's pool holds more than is in use.
CPU_BYTES_PER_ITEM = 56
GPU_BYTES_PER_ITEM = 96


@dataclass(frozen=True)
class NoSurrogate:
    """Generator of graphs without a surrogate: always an error.

    Attributes:
        reason: why there is none.
    """

    reason: str

    def generate(self, spec: GraphSpec, batch_size: int, seed: int, xp: Any = np) -> RawGraph:
        raise DatasetMissingError(f"{spec.name}: has no surrogate, since {self.reason}")


def surrogate(spec: GraphSpec, generator: Generator, root: Path, batch_size: int, seed: int) -> RawGraph | CsrGraph:
    """The surrogate of a data set. Large ones are kept below `root`/synthetic and read from there the next time; those
    of `HugeGraph` are not, since a file of 7 GB is not worth the time that it saves.

    Raises:
        DatasetMissingError: the data set has none.
        MemoryError: the graph would not fit.
    """
    stream = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    graph_seed = int(stream.integers(2**63))
    edges, nodes = expected_size(spec, batch_size)
    if edges < CACHED_FROM_EDGES or isinstance(generator, NoSurrogate):
        return generator.generate(spec, batch_size, graph_seed)
    if isinstance(generator, HugeGraph):
        require_memory(f"the surrogate of {spec.name}, {edges:,} edges", generator.host_bytes(spec))
        logger.info("%s: generating the surrogate of %s edges", spec.name, f"{edges:,}")
        xp = _array_module(generator.chunk_bytes(spec))
        return _timed(generator, spec, batch_size, graph_seed, xp, "not kept")
    # All inputs that determine the contents of a kept file.
    version = f"{GENERATOR_VERSION}.{LAYOUT_VERSION}"
    recipe = f"{version} {spec.name} {generator} {spec.num_nodes} {spec.nnz} {batch_size} {seed}"
    path = kept_path(root / "synthetic", f"{spec.name}-seed{seed}", recipe)

    def make() -> CsrGraph:
        require_memory(f"the surrogate of {spec.name}, {edges:,} edges", (edges + nodes) * CPU_BYTES_PER_ITEM)
        logger.info("%s: generating the surrogate of %s edges, once", spec.name, f"{edges:,}")
        if others := sorted({*path.parent.glob(f"{spec.name}-seed{seed}-*.npz")} - {path}):
            text = ", ".join(map(str, others))
            logger.info("%s: files of another version or batch size are ignored and kept: %s", spec.name, text)
        xp = np if spec.num_graphs else _array_module((edges + nodes) * GPU_BYTES_PER_ITEM)
        return _timed(generator, spec, batch_size, graph_seed, xp, f"to be kept in {path}")

    return kept_graph(path, recipe, make)


def _timed(generator: Generator, spec: GraphSpec, batch_size: int, seed: int, xp: Any, place: str) -> CsrGraph:
    """Generate on the device of `xp`, give its memory back, and log the time and the graph's place."""
    start = time.perf_counter()
    graph = to_csr(generator.generate(spec, batch_size, seed, xp))
    if xp is not np:
        xp.get_default_memory_pool().free_all_blocks()  # memory in CuPy's pool is lost to torch
    seconds, device = time.perf_counter() - start, "CPU" if xp is np else "GPU"
    logger.info("%s: generated in %.0f s on the %s; %s", spec.name, seconds, device, place)
    return graph


def expected_size(spec: GraphSpec, batch_size: int) -> tuple[int, int]:
    """Edges and nodes of the surrogate; of a collection, of `batch_size` graphs."""
    share = batch_size / spec.num_graphs if spec.num_graphs else 1
    return round(spec.nnz * share), round(spec.num_nodes * share)


def _array_module(needed_bytes: int) -> Any:
    """CuPy if a GPU has so much free memory, else NumPy; both give the same graph."""
    try:
        import cupy

        free, _ = cupy.cuda.runtime.memGetInfo()
        random_bits(cupy, 0, 0, 1)  # compiles a kernel
    except Exception:  # CuPy, driver, device or compiler missing: the CPU can do it in any case
        return np
    return cupy if free > needed_bytes else np
