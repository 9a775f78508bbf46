"""Surrogates: seeded synthetic graphs in place of a data set; see data/README.md for their model."""

import hashlib
import logging
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data.atomic import replacing
from data.errors import DatasetMissingError
from data.graph import CsrGraph
from data.memory import require_memory
from data.synthetic.huge import HugeGraph
from data.synthetic.random import random_bits

if TYPE_CHECKING:
    from data.registry import Dataset, Generator

logger = logging.getLogger(__name__)

GENERATOR_VERSION = 2  # incremented when a seed gives another graph
LAYOUT_VERSION = 2  # incremented when kept files hold other arrays
CACHED_FROM_EDGES = 1_000_000  # smaller surrogates are generated faster than a file is worth keeping
# Peak memory of generating, for each edge and node: 33 (yelp) to 49 (ppa) bytes were measured on the CPU. On the GPU up
# to 56 are in use at a time (A not symmetric), and CuPy's pool holds more than is in use.
CPU_BYTES_PER_ITEM = 56
GPU_BYTES_PER_ITEM = 96


def surrogate(spec: "Dataset", root: Path, batch_size: int, seed: int) -> CsrGraph:
    """The surrogate of a data set. Large ones are kept below `root`/synthetic and read from there the next time; those
    of `HugeGraph` are not, since a file of 7 GB is not worth the time that it saves.

    Raises:
        DatasetMissingError: the data set has none.
        MemoryError: the graph would not fit.
    """
    if (generator := spec.synthetic) is None:
        raise DatasetMissingError(f"{spec.name}: has no surrogate, since {spec.no_surrogate}")
    stream = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    graph_seed = int(stream.integers(2**63))
    edges, nodes = expected_size(spec, batch_size)
    if edges < CACHED_FROM_EDGES:
        return generator.generate(spec, batch_size, graph_seed)
    is_huge = isinstance(generator, HugeGraph)
    # All inputs that determine the contents of a kept file.
    version = f"{GENERATOR_VERSION}.{LAYOUT_VERSION}"
    recipe = f"{version} {spec.name} {generator} {spec.num_nodes} {spec.nnz} {batch_size} {seed}"
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    path = root / "synthetic" / f"{spec.name}-seed{seed}-{digest}.npz"
    if not is_huge and path.exists():
        return _read_kept(path, recipe)
    items = edges + nodes
    needed = generator.host_bytes(spec) if is_huge else items * CPU_BYTES_PER_ITEM
    require_memory(f"the surrogate of {spec.name}, {edges:,} edges", needed)
    logger.info("%s: generating the surrogate of %s edges", spec.name, f"{edges:,}")
    xp = np  # of collections
    if not spec.num_graphs:
        xp = _array_module(generator.chunk_bytes(spec) if is_huge else items * GPU_BYTES_PER_ITEM)
    graph = _timed(generator, spec, batch_size, graph_seed, xp, "not kept" if is_huge else f"to be kept in {path}")
    if not is_huge:
        _keep(path, recipe, graph)
    return graph


def _read_kept(path: Path, recipe: str) -> CsrGraph:
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if str(arrays["recipe"]) != recipe:
                raise ValueError(f"made of other inputs: {arrays['recipe']}")
            origin = str(arrays["origin"])
            return CsrGraph(arrays["indptr"], arrays["col"], origin, graph_sizes=arrays.get("graph_sizes"))
    except Exception as error:  # whatever zipfile and NumPy raise
        raise ValueError(f"{path}: cannot be used ({error}); delete it, and it is made again") from error


def _keep(path: Path, recipe: str, graph: CsrGraph) -> None:
    """Write the graph; a disk that is full or read-only costs a warning."""
    arrays = {"recipe": recipe, **{key: getattr(graph, key) for key in ("indptr", "col", "origin")}}
    if graph.graph_sizes is not None:
        arrays["graph_sizes"] = graph.graph_sizes
    try:
        with replacing(path) as unfinished:
            np.savez(unfinished, **arrays)
    except OSError as error:
        logger.warning("%s: not kept (%s): the next run makes it again", path, error)


def _timed(generator: "Generator", spec: "Dataset", batch_size: int, seed: int, xp: Any, place: str) -> CsrGraph:
    """Generate on the device of `xp`, give its memory back, and log the time and the graph's place."""
    start = time.perf_counter()
    graph = generator.generate(spec, batch_size, seed, xp)
    if xp is not np:
        xp.get_default_memory_pool().free_all_blocks()  # memory in CuPy's pool is lost to torch
    seconds, device = time.perf_counter() - start, "CPU" if xp is np else "GPU"
    logger.info("%s: generated in %.0f s on the %s; %s", spec.name, seconds, device, place)
    return graph


def expected_size(spec: "Dataset", batch_size: int) -> tuple[int, int]:
    """Edges and nodes of the surrogate; of a collection, of `batch_size` graphs."""
    share = batch_size / spec.num_graphs if spec.num_graphs else 1
    return round(spec.nnz * share), round(spec.num_nodes * share)


def _array_module(needed_bytes: int) -> Any:
    """CuPy if a GPU has so much free memory, else NumPy; both give the same graph."""
    try:
        from fused3s.runtime.kernel_cache import import_cupy  # on use: the package imports torch

        cupy = import_cupy()
        free, _ = cupy.cuda.runtime.memGetInfo()
        random_bits(cupy, 0, 0, 1)  # compiles a kernel
    except Exception:  # CuPy, driver, device or compiler missing: the CPU can do it in any case
        return np
    return cupy if free > needed_bytes else np
