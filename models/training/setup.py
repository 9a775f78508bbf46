"""Builds the task of a configuration."""

import torch

from configs import TrainConfig
from data import LoadedGraph
from models import GraphModel
from models.metrics import labels_of
from models.training.tasks import PARTS, GraphsTask, NodesOfGraphsTask, NodesTask, Plan, Task


def checked_labels(loaded: LoadedGraph) -> tuple[torch.Tensor, str]:
    """`labels_of` a data set that has known ones in all splits.

    Raises:
        ValueError: labels or splits are missing.
    """
    labels, metric = labels_of(loaded)
    meta = loaded.meta
    if loaded.splits is None:
        raise ValueError(
            f"{meta.name}: has no training, validation and test split ({meta.source}: {meta.origin}); an .npz file of "
            "your own needs train_ids, valid_ids and test_ids"
        )
    for part in PARTS:
        if not len(loaded.splits[part]):
            raise ValueError(f"{meta.name}: the {part} split is empty; each split needs at least one row")
        chosen = labels[loaded.splits[part]]
        if not (~chosen.isnan() if chosen.is_floating_point() else chosen >= 0).any():
            raise ValueError(f"{meta.name}: no label of the {part} split is known; each split needs at least one")
    return labels, metric


def make_task(loaded: LoadedGraph, model: GraphModel, plan: Plan, config: TrainConfig) -> Task:
    """The task of a data set; `plan` makes the attention of a graph.

    Raises:
        ValueError: labels or splits are missing, or the task is not implemented.
    """
    meta, batch_size, training = loaded.meta, config.data.batch_size, config.training
    labels, metric = checked_labels(loaded)
    if training.sampler == "neighbor":
        if meta.task == "graph" or meta.num_graphs > 1:
            raise ValueError(
                f"training.sampler = 'neighbor' and {meta.name}: a collection of graphs, whose batches are whole "
                "graphs; use none"
            )
        from models.training.samples import SampledNodesTask  # on use

        return SampledNodesTask(batch_size, training.fan_out, loaded, labels, metric, model, plan)
    if meta.task == "graph":
        return GraphsTask(loaded, labels, metric, model, plan, batch_size)
    if meta.num_graphs > 1:
        return NodesOfGraphsTask(loaded, labels, metric, model, plan, batch_size)
    return NodesTask(loaded, labels, metric, model, plan)
