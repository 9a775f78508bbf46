"""Collections of small graphs: each rank takes some of the batches, and nothing is exchanged."""

from dataclasses import fields, replace

import numpy as np
import torch

from data import GraphSet, LoadedGraph
from data.graph import CsrTensors
from parallel.group import Group


def share_of_batches(loaded: LoadedGraph, batch_size: int, group: Group) -> LoadedGraph:
    """This rank's graphs of a collection: consecutive whole batches, as many as any other rank has, but for one.

    Raises:
        ValueError: there are fewer batches than ranks.
    """
    num_graphs = loaded.meta.num_graphs
    num_batches = -(-num_graphs // batch_size)
    if num_batches < group.size:
        raise ValueError(
            f"data.batches: {num_graphs} graphs in batches of data.batch_size = {batch_size} are {num_batches}, and "
            f"{group.size} ranks run; take more batches (data.batches: all), a smaller data.batch_size or fewer ranks"
        )
    first, last = (
        min(rank * num_batches // group.size * batch_size, num_graphs) for rank in (group.rank, group.rank + 1)
    )
    batch = GraphSet(loaded).batch(np.arange(first, last))
    arrays = {each.name: getattr(batch, each.name) for each in fields(CsrTensors)}
    num_nodes, num_edges = len(batch.row_pointers) - 1, len(batch.columns)
    meta = replace(loaded.meta, num_graphs=last - first, num_nodes=num_nodes, num_edges=num_edges)
    ids = torch.arange(first, last) if loaded.graph_ids is None else loaded.graph_ids[first:last]
    return replace(loaded, **arrays, meta=meta, labels=batch.labels, splits=None, graph_ids=ids)
