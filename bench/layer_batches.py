"""Inputs of a step of `bench.layers`: a whole graph, a batch of small graphs, or sampled bipartite blocks.

Features, edge features and labels are random. Edges are PyG's edge_index, sources (keys) over targets (queries), sorted
by target as its loaders give them. Samples are without repetition; rows recorded up to 26 November 2026 drew neighbours
with repetition and dropped repeated edges, which made their samples smaller.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from configs.bench import Workload
from data import GraphSet, LoadedGraph
from data.neighbours import NeighbourSampler

IGNORED = -100  # label of a row without one, as in torch's cross_entropy


@dataclass(frozen=True, eq=False)
class Block:
    """Edges of a layer.

    Attributes:
        edge_index: [2, E] int64.
        num_sources, num_targets: rows of the layer's input and output; the targets are the first of the sources.
        edge_attr: [E, edge_dim], or None.
    """

    edge_index: Tensor
    num_sources: int
    num_targets: int
    edge_attr: Tensor | None = None


@dataclass(frozen=True, eq=False)
class LayerBatch:
    """Inputs of a step.

    Attributes:
        x: [rows, columns].
        blocks: one for each layer, the first layer's first; the same object for all layers unless they are samples.
        labels: [targets of the last block] int64.
    """

    x: Tensor
    blocks: tuple[Block, ...]
    labels: Tensor

    @cached_property
    def distinct_blocks(self) -> list[Block]:
        return list({id(block): block for block in self.blocks}.values())

    @property
    def num_edges(self) -> int:
        """Over all different blocks."""
        return sum(block.edge_index.shape[1] for block in self.distinct_blocks)

    @property
    def nbytes(self) -> int:
        edges = [tensor for block in self.distinct_blocks for tensor in (block.edge_index, block.edge_attr)]
        return sum(tensor.nbytes for tensor in (self.x, self.labels, *edges) if tensor is not None)

    def with_new_edges(self) -> "LayerBatch":
        """The same with every edge_index in a tensor of its own, as a data loader makes it: nobody has seen it yet."""
        new = {id(block): replace(block, edge_index=block.edge_index.clone()) for block in self.distinct_blocks}
        return replace(self, blocks=tuple(new[id(block)] for block in self.blocks))

    def to(self, device: torch.device, dtype: torch.dtype) -> "LayerBatch":
        """On a device, with features of a type."""
        new = {}
        for block in self.distinct_blocks:
            attr = None if block.edge_attr is None else block.edge_attr.to(device, dtype)
            new[id(block)] = replace(block, edge_index=block.edge_index.to(device), edge_attr=attr)
        blocks = tuple(new[id(block)] for block in self.blocks)
        return LayerBatch(self.x.to(device, dtype), blocks, self.labels.to(device))


def draw_batches(
    loaded: LoadedGraph, workload: Workload, *, layers: int, columns: int, count: int, seed: int
) -> list[LayerBatch]:
    """Inputs of `count` steps on the CPU in float32; of one step for a whole graph.

    Args:
        layers: of the model; sampled blocks must be as many.
        columns: of x, and classes of the labels.
    """
    rng = np.random.default_rng(seed)
    if workload.seeds:
        indptr, col, _ = (array.numpy() for array in loaded.graph.adj_tensors("csc"))
        draws = [_sampled(indptr, col, workload, rng) for _ in range(count)]
    elif workload.batch:
        graphs = GraphSet(loaded)
        ids = (rng.permutation(len(graphs))[: workload.batch] for _ in range(count))
        draws = [[_whole(graphs.batch(picked).graph)] * layers for picked in ids]
    else:
        draws = [[_whole(loaded.graph)] * layers]
    generator = torch.Generator().manual_seed(seed)
    return [_with_features(blocks, workload.edge_dim, columns, generator) for blocks in draws]


def _whole(graph: object) -> Block:
    indptr, col, _ = graph.adj_tensors("csc")
    target = torch.repeat_interleave(torch.arange(len(indptr) - 1), indptr.diff())
    return Block(torch.stack([col.long(), target]), len(indptr) - 1, len(indptr) - 1)


def _sampled(indptr: np.ndarray, col: np.ndarray, workload: Workload, rng: np.random.Generator) -> list[Block]:
    """Blocks from the outermost neighbours to the seeds; each hop samples neighbours of all nodes so far."""
    if workload.seeds > len(indptr) - 1:
        raise ValueError(f"seeds = {workload.seeds}: {workload.graph} has {len(indptr) - 1} nodes; at most that many")
    nodes = rng.permutation(len(indptr) - 1)[: workload.seeds]
    blocks = []
    for fan_out in workload.fan_out:
        targets = len(nodes)
        sample = NeighbourSampler(indptr, col, [fan_out]).sample(nodes, rng)
        nodes = sample.nodes
        target = np.repeat(np.arange(targets), np.diff(sample.indptr[: targets + 1]))
        blocks.append(Block(torch.from_numpy(np.stack([sample.col.astype(np.int64), target])), len(nodes), targets))
    return blocks[::-1]


def _with_features(
    blocks: Sequence[Block], edge_dim: int | None, columns: int, generator: torch.Generator
) -> LayerBatch:
    if edge_dim:
        new = {
            id(block): replace(block, edge_attr=torch.randn(block.edge_index.shape[1], edge_dim, generator=generator))
            for block in blocks
        }
        blocks = [new[id(block)] for block in blocks]
    x = torch.randn(blocks[0].num_sources, columns, generator=generator)
    labels = torch.randint(columns, (blocks[-1].num_targets,), generator=generator)
    return LayerBatch(x, tuple(blocks), labels)
