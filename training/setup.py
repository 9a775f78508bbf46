"""Objects that a configuration describes: the model, precision, layers, and plans."""

from typing import Any

import torch

import kernels
from configs import Config
from data import GraphMeta
from models import GraphTransformer
from models.dense_training import (
    fused_training_blocks,
    fused_training_embed,
    fused_training_readout,
    fused_training_unavailable,
)
from models.graph_transformer import finish_and_project, finish_last


def build_model(config: Config, meta: GraphMeta, seed: int) -> GraphTransformer:
    """The model for a data set, float32 on the CPU. Weights depend on the seed only, not on device or precision."""
    torch.manual_seed(seed)
    return GraphTransformer(
        in_features=meta.feature_cardinalities or meta.feature_dim,
        num_classes=meta.num_classes,
        task=meta.task,
        edge_in_features=meta.edge_feature_cardinalities or meta.edge_feature_dim,
        **config.model.model_dump(exclude={"checkpoint"}),
    )


def resolve_precision(name: str, device: torch.device) -> torch.dtype:
    """Type of the layers in training; "auto" is bfloat16 on a GPU, whose range needs no loss scale, else float32."""
    if name == "auto":
        name = "bfloat16" if device.type == "cuda" else "float32"
    return getattr(torch, name)


def plan_for_training(
    graph: Any, config: Config, device: torch.device, precision: torch.dtype
) -> kernels.AttentionPlan:
    """Attention over a graph with its backward pass."""
    return kernels.plan_attention(
        graph,
        backend=config.attention.backend,
        device=device,
        dtype=precision,
        head_dim=config.model.head_dim,
        num_heads=config.model.heads,
        reorder=config.attention.reorder,
        edge_data=config.model.edge_features != "none",
        backward=True,
    )


def model_parts(model: GraphTransformer, config: Config, one_shape: bool) -> dict[str, Any]:
    """The layers around attention as runtime.dense names them, as arguments of `GraphTransformer.forward`.

    "auto" is the layers of `models.dense_training` where they can run, else plain, since compiling takes a minute.

    Args:
        one_shape: whether all batches have the same number of rows.
    """
    if config.runtime.dense == "compiled":
        return compiled_parts(model, dynamic=not one_shape)
    if config.runtime.dense == "auto" and fused_training_unavailable(model) is None:
        return fused_parts(model)
    return {}


def compiled_parts(model: GraphTransformer, dynamic: bool) -> dict[str, Any]:
    parts = (finish_and_project, finish_last)
    return {"dense": model.dense_blocks(*(torch.compile(part, fullgraph=True, dynamic=dynamic) for part in parts))}


def fused_parts(model: GraphTransformer) -> dict[str, Any]:
    return {
        "dense": fused_training_blocks(model),
        "embed": fused_training_embed(model),
        "readout": fused_training_readout(model.readout),
    }
