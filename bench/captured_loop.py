"""A training loop over batches of different graphs as one CUDA graph: how a user captures a loop of their own.

    room = PlanRoom((rows, rows), most_edges, device="cuda", dtype=q.dtype, head_dim=16, num_heads=8, backward=True)

    def step():                             # reads tensors that stay where they are
        room.fill(edge_index)               # queues the planning kernels; columns of -1 are padding
        loss = cross_entropy(model(x, room.plan), labels, ignore_index=-100)
        ...                                 # backward pass, optimiser with capturable=True

    graph = capture(step, device)           # fused3s.runtime.cuda_graph
    for batch in loader:
        ...                                 # copy the batch into x, edge_index and labels
        graph.replay()

`CapturedLoop` is this for the batches of `bench.layers`. Rows of padding have no edges and no labels, so that they
change neither the loss nor a gradient.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

import fused3s
from bench.layer_batches import IGNORED, Block, LayerBatch
from configs.bench import Shape
from fused3s.runtime.cuda_graph import capture

NO_EDGE = -1  # id of a column of padding


class CapturedLoop:
    """A step that is captured once and replayed for every batch.

    The calls that warm the capture up are steps, too: weights and optimiser change.

    Args:
        step: takes a batch whose blocks have plans in place of edge_index, and only queues work on the GPU.
        batches: on the GPU; the largest decide the room.
        shape: heads and columns of a head.
        dtype: of q, k and v.

    Raises:
        BackendUnavailableError: fused3s cannot run on the device.
        CaptureError: the step waits for the GPU.
    """

    def __init__(
        self, step: Callable[[LayerBatch], Tensor], batches: Sequence[LayerBatch], shape: Shape, dtype: torch.dtype
    ) -> None:
        device = batches[0].x.device
        self._room = _padded(batches)
        self._load(batches[0])
        blocks = self._room.distinct_blocks
        rooms = {id(block): _plan_room(block, shape, dtype) for block in blocks}
        planned = {id(block): replace(block, edge_index=rooms[id(block)].plan) for block in blocks}
        batch = replace(self._room, blocks=tuple(planned[id(block)] for block in self._room.blocks))

        def run() -> Tensor:
            for block in blocks:
                rooms[id(block)].fill(block.edge_index)
            return step(batch)

        self._graph = capture(run, device)

    def __call__(self, batch: LayerBatch) -> Tensor:
        """The step's result for the rows of the batch; the next call overwrites it."""
        self._load(batch)
        return self._graph.replay()[: len(batch.labels)]

    def _load(self, batch: LayerBatch) -> None:
        """Queue copies of a batch into the tensors that the graph reads."""
        room = self._room
        _fill(room.x, batch.x)
        _fill(room.labels, batch.labels, IGNORED)
        for there, block in zip(room.distinct_blocks, batch.distinct_blocks, strict=True):
            _fill(there.edge_index.T, block.edge_index.T, NO_EDGE)
            if block.edge_attr is not None:
                _fill(there.edge_attr, block.edge_attr)


def _fill(room: Tensor, values: Tensor, padding: int | None = None) -> None:
    """Put rows into the first ones of `room`. Without `padding` the others keep older, finite numbers: nothing reads
    them."""
    if len(values) > len(room):
        raise ValueError(f"batch: got {len(values)} rows or edges; the loop was captured for {len(room)} at most")
    room[: len(values)].copy_(values)
    if padding is not None:
        room[len(values) :].fill_(padding)


def _padded(batches: Sequence[LayerBatch]) -> LayerBatch:
    """Tensors for the largest of each block."""
    first = batches[0]
    blocks = {}
    for nth, block in enumerate(first.distinct_blocks):
        found = [batch.distinct_blocks[nth] for batch in batches]
        edges = max(one.edge_index.shape[1] for one in found)
        attr = block.edge_attr
        blocks[id(block)] = Block(
            block.edge_index.new_full((2, edges), NO_EDGE),
            max(one.num_sources for one in found),
            max(one.num_targets for one in found),
            None if attr is None else attr.new_zeros((edges, attr.shape[1])),
        )
    x = first.x.new_zeros((max(len(batch.x) for batch in batches), first.x.shape[1]))
    labels = first.labels.new_full((max(len(batch.labels) for batch in batches),), IGNORED)
    return LayerBatch(x, tuple(blocks[id(block)] for block in first.blocks), labels)


def _plan_room(block: Block, shape: Shape, dtype: torch.dtype) -> fused3s.PlanRoom:
    return fused3s.PlanRoom(
        (block.num_targets, block.num_sources),
        block.edge_index.shape[1],
        device=block.edge_index.device,
        dtype=dtype,
        head_dim=shape.dim,
        num_heads=shape.heads,
        edge_data=block.edge_attr is not None,
        backward=True,
    )
