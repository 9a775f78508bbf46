"""Inputs of the Graph Transformer for one part of a graph: the model itself needs no change."""

import torch
from torch import Tensor

from configs import Config, TrainConfig
from data.batches import GraphBatch
from models.graph_inputs import Attention, GraphInputs
from models.graph_model import GraphModel
from parallel.attention import PartAttention, plan_part_attention
from parallel.group import Group
from parallel.partition import Part


def refuse_settings(config: Config) -> None:
    """Raise a ValueError that names the keys that a divided graph does not support."""
    model, problems = config.model, []
    if config.attention.reorder != "none":
        problems.append(f"attention.reorder = {config.attention.reorder!r}: a part has an order of its own; use none")
    if model.kind != "graph_transformer":
        problems.append(f"model.kind = {model.kind!r}: its plan is of the whole graph; use graph_transformer")
    if model.edge_features != "none":
        problems.append(f"model.edge_features = {model.edge_features!r}: parts hold no edge data; use none")
    for key in ("pos_enc", "random_walk"):
        if value := getattr(model, key):
            problems.append(f"model.{key} = {value}: it needs the graph on one rank; use 0")
    if isinstance(config, TrainConfig):
        if model.norm == "batch":
            problems.append("model.norm = 'batch': its statistics would be of one part's rows; train with layer")
        if config.training.sampler != "none":
            problems.append(f"training.sampler = {config.training.sampler!r}: use none, or train on one process")
    if problems:
        raise ValueError("one graph on several ranks cannot run with " + "; ".join(problems))


def plan_model_attention(
    part: Part, group: Group, config: Config, dtype: torch.dtype, *, backward: bool = False
) -> PartAttention:
    """Attention of the model's head shape over a part."""
    shape = {"head_dim": config.model.head_dim, "num_heads": config.model.heads}
    return plan_part_attention(part, group, backend=config.attention.backend, dtype=dtype, **shape, backward=backward)


def prepare_part(model: GraphModel, features: Tensor, attention: Attention) -> GraphInputs:
    """Inputs of this rank's rows, on the model's device and in its dtype: `GraphModel.prepare` for a part.

    Args:
        features: of the part's rows, float [n, F] or integers [n, C].
        attention: result of `plan_part_attention`.

    Raises:
        ValueError: the features do not match the model.
    """
    features = features.to(model.device)
    model.embedding.check(features)
    starts = torch.zeros(1, dtype=torch.int64, device=model.device)
    arrays = {"indptr": None, "col": None, "edge_features": None}  # `refuse_settings`: the model reads no edges
    return model.prepare_batch(GraphBatch(features=features, graph_starts=starts, **arrays), attention)
