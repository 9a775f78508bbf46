"""Objects that a configuration describes: the model, precision, layers, and plans."""

from typing import Any

import torch

import kernels
from configs import Config
from data import GraphMeta
from models import GraphTransformer
from models.graph_transformer import DenseBlock, finish_and_project, finish_last


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


def dense_blocks(model: GraphTransformer, config: Config, one_shape: bool) -> list[DenseBlock]:
    """The layers between two attentions as runtime.dense names them; "auto" is plain, since compiling takes a minute.

    Args:
        one_shape: whether all batches have the same number of rows.
    """
    if config.runtime.dense != "compiled":
        return model.dense_blocks()
    dynamic = not one_shape
    parts = (finish_and_project, finish_last)
    return model.dense_blocks(*(torch.compile(part, fullgraph=True, dynamic=dynamic) for part in parts))
