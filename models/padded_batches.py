"""Padded batches of a collection of graphs, so that one CUDA graph serves all batches.

batches = PaddedBatches(collection, collection.likely_size(ids, 512), model, room)
graph = capture(lambda: model(batches.inputs()), device)
batches.load(ids)                                     # the only input of the CUDA graph
logits = graph.replay()[: len(ids)]                   # further rows are padding
"""

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

import fused3s
from configs import Config
from data.batches import BatchSize, GraphSet, to_device
from fused3s.runtime.cuda_graph import CaptureError
from models.build import heads_of
from models.graph_inputs import Attention, GraphInputs
from models.graph_model import GraphModel


class Room(Protocol):
    """A plan in arrays of fixed size and address: `fused3s.PlanRoom`."""

    plan: Attention

    def fill(self, edges: tuple[Tensor, Tensor]) -> None:
        """Plan (indptr [num_rows + 1], indices [num_edges]) in place; entries from indptr[-1] on are -1, no edges."""


class PaddedBatches:
    """Assembles and plans batches without waiting for the device.

    Args:
        graphs: the collection, kept on the model's device.
        size: of each batch.
        room: for `size.rows` rows and columns and `size.edges` edges.

    Attributes:
        ids: [size.graphs] int64, graphs of the batch; the number of graphs of the collection means no graph.
        node_ids: [size.rows] int64, nodes of the collection in the last `inputs`; its number of nodes means padding.
    """

    def __init__(self, graphs: GraphSet, size: BatchSize, model: GraphModel, room: Room) -> None:
        self.graphs, self.size, self.model, self.room = graphs, size, model, room
        self.ids = torch.full((size.graphs,), len(graphs), device=model.device)

    def load(self, ids: np.ndarray) -> bool:
        """Queue the copy of `ids` to the device; returns False, without a change, if the graphs do not fit."""
        if not self.graphs.fits(ids, self.size):
            return False
        padded = np.full(self.size.graphs, len(self.graphs))
        padded[: len(ids)] = ids
        self.ids.copy_(to_device(torch.from_numpy(padded), self.ids.device))
        return True

    def inputs(self) -> GraphInputs:
        """Inputs of the model for the graphs of the last `load`. A CUDA graph can capture it: replays read `ids`."""
        batch = self.graphs.padded(self.ids, self.size)
        self.node_ids = batch.node_ids
        self.room.fill((batch.indptr, batch.col))
        return self.model.prepare_batch(batch, self.room.plan)


def padding_refused(model: GraphModel, backend: str, reorder: str, graphs: GraphSet | None) -> str | None:
    """Why batches of this collection, or samples of one graph, cannot be padded to one size on the device; None if they
    can."""
    if backend != "fused3s":
        return f"the attention backend is {backend}, and fused3s alone plans a graph without waiting for the GPU"
    if reorder != "none":
        return f"attention.reorder = {reorder!r}: an order of rows is searched for on the host"
    if model.pos_enc:
        return "the model has Laplacian eigenvectors, which are computed on the host"
    if model.edge_features == "stream":
        return "the model has a stream of edges, whose layers would run on the padding"
    if graphs is not None and graphs.kept_on.type != model.device.type:
        return f"the collection is too large for the memory of {model.device}, and batches come from the host"
    return None


def make_room(size: BatchSize, config: Config, *, device: torch.device, dtype: torch.dtype, backward: bool) -> Room:
    """A plan of the model with room for batches of a size.

    Raises:
        CaptureError: no refillable plan supports these inputs.
    """
    options = {"device": device, "dtype": dtype, "backward": backward, **heads_of(config)}
    try:
        return fused3s.PlanRoom((size.rows, size.rows), size.edges, **options)
    except ValueError as error:
        raise CaptureError(str(error)) from error
