"""Training on samples of one graph: a step takes some training nodes with a sample of their neighbourhood, the same for
all layers, as PyG's NeighborLoader gives it. Evaluation takes the whole graph."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from itertools import islice

import numpy as np
import torch
from torch import Tensor

from data import LoadedGraph
from data.batches import BatchSize, GraphBatch, rounded_size, to_device
from data.neighbours import NeighbourSampler, Sample
from data.prefetch import made_ahead
from fused3s.runtime.cuda_graph import capture
from models.graph_inputs import pattern_of
from models.metrics import UNKNOWN
from models.padded_batches import Room
from models.training.tasks import Assemble, Batch, Forward, LazyBatch, Load, MakeRoom, NodesTask

THREADS, MADE_AHEAD = 4, 8  # that draw samples; samples that are drawn while others are used
TRIED, ROOM = 8, 1.1  # samples that are drawn to choose the padded size, and its ratio to the largest of them


class SampledNodesTask(NodesTask):
    """`NodesTask` in batches of `batch_size` training nodes, in a new random order each epoch.

    Args:
        fan_out: as of `NeighbourSampler`.
        loaded, others: as of `NodesTask`.
    """

    static = graphs = None

    def __init__(self, batch_size: int, fan_out: Sequence[int], loaded: LoadedGraph, *others: object) -> None:
        super().__init__(loaded, *others)
        self.batch_size, self.train = batch_size, loaded.splits["train"].numpy()
        self.steps = -(-len(self.train) // batch_size)
        self.sampler = NeighbourSampler(loaded.row_pointers.numpy(), loaded.columns.numpy(), fan_out)
        self.limits = loaded.meta.num_nodes, loaded.meta.num_edges

    def batches(self, seed: list[int]) -> Iterator[LazyBatch]:
        with ThreadPoolExecutor(THREADS) as pool:
            draws = (pool.submit(draw) for draw in self.draws(seed))
            with made_ahead(draws, MADE_AHEAD) as ahead:
                for drawn in ahead:
                    sample = drawn.result()
                    made = cache(partial(self._eager, sample))
                    yield LazyBatch(sample, lambda made=made: made().inputs, lambda made=made: made().labels)

    def draws(self, seed: list[int]) -> Iterator[Callable[[], Sample]]:
        """Functions that draw the samples of an epoch, in any order or at once."""
        nodes = np.random.default_rng(seed).permutation(self.train)
        for first in range(0, len(nodes), self.batch_size):
            rng = np.random.default_rng([*seed, 1 + first])  # NumPy takes [*seed, 0] for `seed`
            yield partial(self.sampler.sample, nodes[first : first + self.batch_size], rng)

    def likely_size(self) -> BatchSize:
        """Room for nearly all samples."""
        tried = [size_of(draw()) for draw in islice(self.draws([0]), TRIED)]
        largest = max(size.rows for size in tried), max(size.edges for size in tried)
        room = (min(int(ROOM * most), limit) for most, limit in zip(largest, self.limits, strict=True))
        return rounded_size(self.batch_size, *room)

    def slot(self, size: BatchSize, room: Room) -> tuple[Load, Assemble]:
        def fits(sample: Sample) -> bool:
            return len(sample.nodes) <= size.rows and len(sample.col) <= size.edges

        fitting = next(sample for draw in self.draws([0]) if fits(sample := draw()))
        held = to_device(packed(fitting, size), self.labels.device)

        def load(batch: LazyBatch) -> bool:
            if found := fits(batch.key):
                held.copy_(to_device(packed(batch.key, size), held.device))
            return found

        return load, lambda: self.batch(held, size, room)

    def evaluation(self, evaluate: Forward, make_room: MakeRoom) -> Callable[[Batch], Tensor]:
        """Evaluation on the whole graph, one CUDA graph for all batches."""
        captured = capture(lambda: evaluate(self.whole), self.labels.device)
        return lambda batch: captured.replay()

    def _eager(self, sample: Sample) -> Batch:
        size = size_of(sample)
        return self.batch(to_device(packed(sample, size), self.labels.device), size)

    def batch(self, packed: Tensor, size: BatchSize, room: Room | None = None) -> Batch:
        """A packed sample on the device, planned in a room if one is given: a CUDA graph can capture that."""
        (num_nodes, num_seeds), nodes, indptr, col = packed.split([2, size.rows, size.rows + 1, size.edges])
        row = torch.arange(size.rows, device=packed.device)
        is_node = row < num_nodes
        batch = GraphBatch(
            indptr=indptr,
            col=col,
            features=self.whole.inputs.features[nodes].where(is_node[:, None], 0),
            edge_features=None,
            graph_starts=row[:1],
            row_weights=is_node / num_nodes if room else None,
        )
        if room:
            room.fill((indptr, col))
        inputs = self.model.prepare_batch(batch, room.plan if room else self.plan(pattern_of(batch)))
        return Batch(inputs, self.labels[nodes].where(row < num_seeds, UNKNOWN))


def size_of(sample: Sample) -> BatchSize:
    return BatchSize(sample.num_seeds, len(sample.nodes), len(sample.col))


def packed(sample: Sample, size: BatchSize) -> Tensor:
    """[3 + 2 rows + edges] int64: the numbers of nodes and of seeds, nodes, indptr and col, for one copy to the device.
    Rows of padding are node 0 without edges, edges of padding -1."""
    found = np.full(3 + 2 * size.rows + size.edges, -1)
    num_nodes = len(sample.nodes)
    found[:2] = num_nodes, sample.num_seeds
    nodes, indptr, col = np.split(found[2:], [size.rows, 2 * size.rows + 1])
    nodes[:num_nodes], nodes[num_nodes:] = sample.nodes, 0
    indptr[: num_nodes + 1], indptr[num_nodes + 1 :] = sample.indptr, sample.indptr[-1]
    col[: len(sample.col)] = sample.col
    return torch.from_numpy(found)
