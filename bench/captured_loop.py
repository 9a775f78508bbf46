"""`fused3s.CapturedLoop` for the batches of `bench.layers`: a batch as tensors by name, and back inside the step."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

import fused3s
from bench.baselines import REGISTRY
from bench.layer_batches import Block, LayerBatch
from bench.layer_model import TrainingStep


def captured_loop(step: TrainingStep, batches: Sequence[LayerBatch]) -> Callable[[LayerBatch], Tensor]:
    """A function that runs the step on a batch; it gives the output for the rows of the batch.

    Args:
        step: of layers that take a plan, also with edge features.
        batches: their sizes decide the room.

    Raises:
        BackendUnavailableError: fused3s cannot run on the device.
        CaptureError: the step waits for the GPU.
    """
    if reason := REGISTRY["fused3s"].unavailable(step.device):
        raise fused3s.BackendUnavailableError(f"captured loop: {reason}")
    count, plan_layer = len(batches[0].distinct_blocks), step.model.layers[0].plan
    places = [batches[0].distinct_blocks.index(block) for block in batches[0].blocks]

    def run(tensors: dict[str, Tensor]) -> Tensor:
        sources, blocks = len(tensors["x"]), []
        for nth in range(count):
            targets = len(tensors[f"targets{nth}"])
            with torch.autocast(step.device.type, torch.bfloat16, enabled=step.types.autocast):
                plan = plan_layer(tensors[f"edge_index{nth}"], (sources, targets), backward=True)
            blocks.append(Block(plan, sources, targets, tensors.get(f"edge_attr{nth}")))
            sources = targets
        return step(LayerBatch(tensors["x"], tuple(blocks[place] for place in places), tensors["y"]))

    padding = {f"edge_index{nth}": f"targets{nth}" for nth in range(count)}  # targets are the first of the sources
    loop = fused3s.CapturedLoop(run, step.model, step.optimiser, samples=map(_named, batches), padding=padding)
    return lambda batch: loop(_named(batch))


def _named(batch: LayerBatch) -> dict[str, Tensor]:
    """The tensors of a batch; `targets0` and so on have no columns, and as many rows as a block has targets."""
    found = {"x": batch.x, "y": batch.labels}
    for nth, block in enumerate(batch.distinct_blocks):
        found |= {f"edge_index{nth}": block.edge_index, f"targets{nth}": batch.x[: block.num_targets, :0]}
        if block.edge_attr is not None:
            found[f"edge_attr{nth}"] = block.edge_attr
    return found
