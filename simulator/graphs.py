"""Graphs of a configuration, partitioned, as sizes."""

from collections.abc import Callable, Iterator
from pathlib import Path

import data
from bench.records import NONE
from configs.scaling_schema import ScalingConfig
from data import GraphMeta
from parallel import partition_graph, source_from_csr
from simulator.sizes import RANDOM, GraphSize, PartSize, count_parts, count_whole, random_parts, scale_parts

# A part sorts so many edges at once, 40 bytes each.
EDGES_PER_BLOCK = 1 << 25


def graph_sizes(settings: ScalingConfig, say: Callable[[str], None]) -> Iterator[GraphSize]:
    """Sizes of every graph for every partition and number of ranks, one rank first.

    Args:
        say: told of each step.

    Raises:
        DatasetMissingError, ValueError, MemoryError: as `data.load` and `parallel.partition_graph`.
    """
    for name in settings.data.names:
        say(f"loading {name}")
        loaded = settings.data.load(name)
        meta = loaded.meta
        if meta.num_graphs > 1:
            raise ValueError(f"data.names: {name} is a collection of small graphs; a single graph is needed")
        if settings.scale.to is not None and meta.source == "synthetic":
            raise ValueError(
                f"data.names: {name} is synthetic here and has no locality to scale to {settings.scale.to}; fetch it "
                f"with scripts/datasets.py fetch {name}, or name a graph of your own"
            )
        indptr, col, _ = loaded.graph.adj_tensors("csc")
        indptr, col = indptr.numpy(), col.numpy()
        del loaded
        source, one = source_from_csr(indptr, col, fingerprint=meta.sha256), count_whole(indptr, col)
        for method in settings.partition.methods:
            yield _sized(settings, meta, method, (one,))
            for ranks in settings.partition.ranks:
                folder = Path(settings.data.root, "scaling", f"{name}-{method}-{ranks}")
                say(f"partitioning {name}: {method}, {ranks} ranks")
                partition_graph(source, folder, ranks, method, edges_per_block=EDGES_PER_BLOCK)
                yield _sized(settings, meta, method, count_parts(folder))
    if settings.scale.random:
        entry = data.info(settings.scale.to)
        for ranks in (1, *settings.partition.ranks):
            parts = random_parts(entry.num_nodes, entry.nnz, ranks)
            basis = "expected sizes for random columns"
            yield GraphSize(entry.name, NONE, NONE, entry.num_nodes, entry.nnz, RANDOM, basis, parts)


def _sized(settings: ScalingConfig, meta: GraphMeta, method: str, parts: tuple[PartSize, ...]) -> GraphSize:
    """The graph that was partitioned, or the one of scale.to with its shares."""
    if settings.scale.to is None:
        basis = "sizes counted in the partition"
        return GraphSize(meta.name, meta.sha256, meta.source, meta.num_nodes, meta.num_edges, method, basis, parts)
    entry = data.info(settings.scale.to)
    scaled = scale_parts(parts, entry.num_nodes, entry.nnz)
    basis = f"sizes scaled from the {method} partition of {meta.name} ({meta.num_nodes} nodes, {meta.num_edges} edges)"
    partition = f"{method} of {meta.name}"
    return GraphSize(entry.name, NONE, NONE, entry.num_nodes, entry.nnz, partition, basis, scaled)
