"""Surrogates: seeded synthetic graphs in place of a data set; see data/README.md for their model."""

import hashlib
import logging
import time
import zlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from data.atomic import replacing
from data.errors import DatasetMissingError, reading
from data.graph import CsrGraph
from data.memory import require_memory
from data.synthetic.huge import CHUNK_BYTES, HOST_BYTES_PER_ITEM, huge
from data.synthetic.random import random_bits

if TYPE_CHECKING:
    from data.registry import Dataset

logger = logging.getLogger(__name__)

GENERATOR_VERSION = 3  # incremented when a seed gives another graph, or kept files hold other arrays
CACHED_FROM_EDGES = 1_000_000  # smaller surrogates are generated faster than a file is worth keeping
# Peak memory of generating, for each edge and node: 33 (yelp) to 49 (ppa) bytes were measured on the CPU. On the GPU up
# to 56 are in use at a time (A not symmetric), and CuPy's pool holds more than is in use.
CPU_BYTES_PER_ITEM = 56
GPU_BYTES_PER_ITEM = 96


def surrogate(spec: "Dataset", root: Path, batch_size: int, seed: int) -> CsrGraph:
    """The surrogate of a data set. Large ones are kept below `root`/synthetic and read from there the next time; those
    of `huge` are not, since a file of 7 GB is not worth the time that it saves.

    Raises:
        DatasetMissingError: the data set has none.
        MemoryError: the graph would not fit.
    """
    if spec.surrogate is None:
        raise DatasetMissingError(f"{spec.name}: has no surrogate, since {spec.no_surrogate}")
    stream = np.random.default_rng([seed, zlib.crc32(spec.name.encode())])
    graph_seed = int(stream.integers(2**63))
    share = batch_size / spec.num_graphs if spec.num_graphs else 1
    edges, nodes = round(spec.nnz * share), round(spec.num_nodes * share)
    if edges < CACHED_FROM_EDGES:
        return spec.synthetic(spec, batch_size, graph_seed)
    # All inputs that determine the contents of a kept file.
    recipe = f"{GENERATOR_VERSION} {spec.name} {spec.surrogate} {spec.num_nodes} {spec.nnz} {batch_size} {seed}"
    digest = hashlib.sha256(recipe.encode()).hexdigest()[:12]
    path, is_huge = root / "synthetic" / f"{spec.name}-seed{seed}-{digest}.npz", spec.synthetic.func is huge
    if path.exists():
        return _read_kept(path)
    items = edges + nodes
    needed = items * (HOST_BYTES_PER_ITEM if is_huge else CPU_BYTES_PER_ITEM)
    require_memory(f"the surrogate of {spec.name}, {edges:,} edges", needed)
    logger.info("%s: generating the surrogate of %s edges", spec.name, f"{edges:,}")
    xp = np if spec.num_graphs else _array_module(CHUNK_BYTES if is_huge else items * GPU_BYTES_PER_ITEM)
    start = time.perf_counter()
    graph = spec.synthetic(spec, batch_size, graph_seed, xp)
    if xp is not np:
        xp.get_default_memory_pool().free_all_blocks()  # memory in CuPy's pool is lost to torch
    seconds, device = time.perf_counter() - start, "CPU" if xp is np else "GPU"
    place = "not kept" if is_huge else f"to be kept in {path}"
    logger.info("%s: generated in %.0f s on the %s; %s", spec.name, seconds, device, place)
    if not is_huge:
        _keep(path, graph)
    return graph


def _read_kept(path: Path) -> CsrGraph:
    with reading(path), np.load(path, allow_pickle=False) as arrays:
        sizes = arrays.get("graph_sizes")
        return CsrGraph(arrays["indptr"], arrays["col"], str(arrays["origin"]), graph_sizes=sizes)


def _keep(path: Path, graph: CsrGraph) -> None:
    """Write the graph; a disk that is full or read-only costs a warning."""
    arrays = {key: getattr(graph, key) for key in ("indptr", "col", "origin", "graph_sizes")}
    try:
        with replacing(path) as unfinished:
            np.savez(unfinished, **{key: values for key, values in arrays.items() if values is not None})
    except OSError as error:
        logger.warning("%s: not kept (%s): the next run makes it again", path, error)


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
