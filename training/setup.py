"""Builds the model, its precision and plans from a configuration."""

from typing import Any

import torch

import fused3s
from configs import Config
from data import GraphMeta
from data.csr_batches import BatchSize
from models import ConvNet, GraphModel, GraphTransformer
from training.padded_batches import Room, make_room


def build_model(config: Config, meta: GraphMeta, seed: int) -> GraphModel:
    """The model for a data set, float32 on the CPU. Weights depend on the seed only, not on device or precision."""
    torch.manual_seed(seed)
    arguments = {
        "in_features": meta.feature_cardinalities or meta.feature_dim,
        "num_classes": meta.num_classes,
        "task": meta.task,
        "edge_in_features": meta.edge_feature_cardinalities or meta.edge_feature_dim,
        **config.model.model_dump(exclude={"checkpoint", "kind", "out_heads"}),
    }
    if config.model.kind == "graph_transformer":
        return GraphTransformer(**arguments)
    return ConvNet(layer=config.model.kind, out_heads=config.model.out_heads, **arguments)


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """Type of the layers in training; "auto": bfloat16 on a GPU (no loss scale needed), else float32."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def plan_for_training(
    graph: Any, config: Config, device: torch.device, precision: torch.dtype
) -> fused3s.AttentionPlan:
    """The plan of a graph, with its backward pass."""
    return fused3s.plan_attention(
        graph,
        backend=config.attention.backend,
        device=device,
        dtype=precision,
        head_dim=config.model.head_dim,
        num_heads=config.model.heads,
        reorder=config.attention.reorder,
        edge_data=config.model.edge_features != "none",
        backward=True,
        check=False,  # the loader did
    )


def room_for_training(
    size: BatchSize, config: Config, device: torch.device, precision: torch.dtype, backward: bool
) -> Room:
    """A refillable plan for padded batches."""
    model = config.model
    return make_room(
        size, device=device, dtype=precision, head_dim=model.head_dim, num_heads=model.heads, backward=backward
    )
